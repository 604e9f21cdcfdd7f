"""From a configuration to a running cache: the settings that reach the parts."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from importlib.metadata import version

import pytest

import kvladder
from kvladder.config.settings import ExportConfig
from kvladder.errors import ConfigError
from tests.patience import PATIENCE_S

LAYOUT = kvladder.Layout(block_tokens=4, block_bytes=4096, fields={"model": "m"})


def stack(*below, **sections):
    return {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, *below], **sections}


def namespace(**sections):
    with kvladder.open_cache(stack(**sections), layout=LAYOUT) as cache:
        return cache.namespace


def test_dir_lists_the_names_that_the_package_imports_lazily():
    assert {"open_cache", "Layout", "Retention", "CacheManager"} <= {*dir(kvladder)}
    assert all(getattr(kvladder, name) is not None for name in dir(kvladder))
    assert kvladder.__version__ == version("kvladder")


def test_salt_and_fingerprint_separate_namespaces():
    spaces = {
        namespace(),
        namespace(block={"salt": "a"}),
        namespace(model={"fingerprint": "a"}),
        namespace(model={"fingerprint": "b"}),
    }
    assert len(spaces) == 4
    assert namespace(model={"fingerprint": "auto"}) in spaces


def test_a_cache_has_the_configured_levels_and_describes_them():
    cold = {"name": "cold", "type": "memory", "capacity": "2 MiB", "min_priority": 50}
    with kvladder.open_cache(stack(cold), layout=LAYOUT) as cache:
        stats = cache.stats()
        assert list(stats) == ["host", "cold", "misses", "arena", "loop"]
        assert (stats["host"]["capacity"], stats["cold"]["capacity"]) == (256, 512)
        assert "512 blocks, 2048 tokens" in cache.describe()


def test_several_engines_divide_a_capacity(tmp_path):
    files = {"type": "files", "path": str(tmp_path), "capacity": "32 MiB", "engines": 4}
    with kvladder.open_cache(stack(files), layout=LAYOUT) as cache:
        assert cache.stats()["files"]["capacity"] == 1024, "a place has a page for its header"
        assert "for each of 4 engines" in cache.describe()


def test_an_impossible_path_is_refused_and_nothing_stays_open(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    files = {"type": "files", "path": str(tmp_path / "file"), "capacity": "10 MiB"}
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="is a file") as got:
        kvladder.open_cache(stack(files), layout=LAYOUT)
    assert got.value.path.startswith("tiers[1]")
    for thread in set(threading.enumerate()) - before:  # it may be just about to end
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_capacity_too_small_for_blocks_is_refused_before_opening():
    cold = {"type": "memory", "capacity": "8 KiB"}
    with pytest.raises(ConfigError, match="less than one batch") as got:
        kvladder.open_cache(stack(cold), layout=LAYOUT)
    assert got.value.path == "tiers[1].capacity"


def test_the_loop_yields_the_lock_to_the_engine():
    order: list[str] = []
    asked = threading.Event()
    with kvladder.open_cache(stack(), layout=LAYOUT) as cache:
        lock = cache.ladder.lock

        def take(who: str) -> None:
            asked.set()
            with lock:
                order.append(who)

        engine = threading.Thread(target=take, args=["engine"])
        with lock:
            cache._portal.post(take, "loop")
            asked.wait()
            engine.start()
            while not lock.wanted:
                time.sleep(0.001)
        engine.join()
    assert order == ["engine", "loop"]


def test_importing_the_package_imports_nothing_else():
    """Every process of an engine imports it, for a plug-in that most of them do not use."""
    code = "import sys, kvladder; print([m for m in sys.modules if m.startswith('kvladder.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'Cache'"):
        _ = kvladder.Cache


@pytest.mark.parametrize(
    ("listen", "instance", "own"),
    [
        ("0.0.0.0:7470", 0, "0.0.0.0:7470"),
        ("0.0.0.0:7470", 3, "0.0.0.0:7473"),
        ("[::1]:7470", 1, "[::1]:7471"),
        ("here:0", 1, "here:0"),  # any port stays any
        ("here:65534", 1, "here:65535"),
        (None, 1, None),
    ],
)
def test_engines_of_one_configuration_listen_at_ports_of_their_own(listen, instance, own):
    export = ExportConfig(listen=listen, keys="server.keys") if listen else ExportConfig()
    assert export.of(instance).listen == own


def test_engines_of_one_configuration_announce_themselves_by_names_of_their_own():
    roster = {"roster": "redis://here", "name": "a"}
    export = ExportConfig(listen="here:7470", keys="server.keys", **roster)
    assert [export.of(instance).name for instance in (0, 2)] == ["a", "a-dp2"]


def test_an_engine_without_a_port_is_refused():
    with pytest.raises(ConfigError, match="engine 2 would listen at 65536") as refused:
        ExportConfig(listen="here:65534", keys="server.keys").of(2)
    assert refused.value.path == "export.listen"
    assert refused.value.hint == "expected a port of at most 65533"
