"""``kvladder serve`` and exporting engines as processes, with caches that reach them over NIXL."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import pytest
import yaml

import kvladder
from kvladder.control.sockets import ask
from kvladder.errors import ConfigError
from kvladder.keys import START, KeyScheme
from kvladder.manager import CacheManager
from kvladder.testing import TierTests
from kvladder.tiers.isolated.tier import IsolatedTier
from tests.kit.served import COMMAND, Server
from tests.patience import PATIENCE_S, until

pytest.importorskip("nixl", reason="the extra nixl is not installed")
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier

pytestmark = [pytest.mark.slow, pytest.mark.crash]

LAYOUT = kvladder.Layout(block_tokens=1, block_bytes=60_000, fields={"model": "served"})
TESTS = itertools.count()
BLOCKS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("served"), block="64 KiB", arena="128 MiB") as server:
        yield server


class Engine:
    """A cache with a shared level; the bytes of its blocks follow from their keys."""

    def __init__(
        self, *levels: dict[str, Any], salt: str = "", blocks: int = BLOCKS, **more: Any
    ) -> None:
        stack = {"arena": {"size": "2 MiB"}, "fetch": {"deadline": "1 m"}, **more}
        stack["tiers"] = [{"type": "host"}, *levels]
        self.cache: CacheManager = kvladder.open_cache(stack, layout=LAYOUT)
        self._salt = salt
        self._blocks = blocks

    def keys(self, first: int = 0) -> list[Any]:
        scheme = KeyScheme(self.cache.namespace, block_tokens=1)
        parent = scheme.root(salt=self._salt)
        return scheme.chain(range(first, first + self._blocks), parent=parent)

    def payload(self, key: bytes) -> bytes:
        return (hashlib.sha512(key).digest() * 1000)[: LAYOUT.block_bytes]

    def save(self, first: int = 0, **told: Any) -> None:
        keys = self.keys(first)
        saving = self.cache.save(keys, salt=self._salt, **told)
        for index, slot in zip(saving.indices, saving.slots, strict=True):
            self.cache.arena.view(slot)[: LAYOUT.block_bytes] = self.payload(keys[index])
        saving.commit()
        until(self.cache.idle)

    def load(self, first: int = 0) -> list[str]:
        """Return the source of each block of a prefix, after a comparison with the saved bytes."""
        keys = self.keys(first)
        fetch = self.cache.fetch(keys, salt=self._salt)
        fetch.wait()
        for key, slot in zip(keys, fetch.slots, strict=False):
            assert self.cache.arena.view(slot)[: LAYOUT.block_bytes] == self.payload(key)
        fetch.release()
        return fetch.sources

    def forget(self) -> None:
        """Empty host, so that the next load comes from below."""
        self.cache.reset()
        until(lambda: not self.cache.resetting)

    def stats(self, level: str = "far") -> dict[str, Any]:
        return self.cache.stats()[level]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()


def all_come(engine: Engine) -> bool:
    """Return whether each block comes from the far end, after host was emptied."""
    engine.forget()
    return engine.load() == ["far"] * BLOCKS


class TestServed(TierTests):
    """The whole chain: a tier in its process, NIXL, the exporter's process, the server."""

    real = True

    @pytest.fixture
    def namespace(self, layout):
        """One per test: they share a server."""
        return layout.namespace(salt=f"served {next(TESTS)}")

    @pytest.fixture
    def make(self, server):
        keys = str(server.keys / "client.keys")
        return lambda: IsolatedTier(NixlTier, NixlOptions(servers=(server.address,), keys=keys))


def test_engines_share_through_a_server_that_is_killed_and_restarted(tmp_path: Path) -> None:
    with Server(tmp_path) as server, Engine(server.level()) as one:
        one.save()
        assert one.stats()["stored"] == BLOCKS
        assert server.stats()["export"]["taken"] == BLOCKS
        told = run("stats", str(server.file)).stdout
        (export,) = [line for line in told.splitlines() if line.startswith("export: sessions 1, ")]
        assert f", sent 0, taken {BLOCKS}" in export
        with Engine(server.level()) as two:
            assert two.load() == ["far"] * BLOCKS
            assert server.stats()["export"]["sessions"] == 2
            server.kill()
            assert two.load() == ["host"] * BLOCKS
            two.forget()
            assert two.load() == [], "a miss, and no error"
            server.again()
            until(lambda: two.stats()["far_ends_connected"])
            fresh = itertools.count(100, 100)

            def is_shared(first: int) -> bool:
                one.save(first)
                return two.load(first) == ["far"] * BLOCKS

            until(lambda: is_shared(next(fresh)))
        assert server.stop() == 0


def test_batches_larger_than_the_arena_of_a_server_go_through_it_in_pieces(tmp_path: Path) -> None:
    room: dict[str, Any] = {
        "arena": {"size": "16 MiB"}, "blocks": 60, "fetch": {"deadline": "10 m"}
    }  # fmt: skip
    with Server(tmp_path, arena="1 MiB") as server:
        assert server.slots == 15
        level = server.level(timeout="10 m")
        with Engine(level, **room) as one, Engine(level, **room) as two:
            one.save()
            one.save(500)
            assert one.stats()["stored"] == 120
            until(lambda: server.stats()["files"]["stored"] >= 105)
            with ThreadPoolExecutor(2) as threads:
                assert [*threads.map(two.load, (0, 500))] == [["far"] * 60] * 2
            assert server.stats()["export"]["pinned"] == 0
        assert server.stop() == 0


def test_blocks_outlive_an_orderly_server_shutdown(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        with Engine(server.level()) as engine:
            engine.save()
        assert server.stop(by=signal.SIGINT) == 0
        server.again()
        with Engine(server.level()) as engine:
            assert engine.load() == ["far"] * BLOCKS
        assert server.stats()["files"]["hits"] == BLOCKS
        assert server.stop() == 0


def test_a_killed_export_process_frees_its_slots(tmp_path: Path) -> None:
    with Server(tmp_path) as server, Engine(server.level()) as engine:
        engine.save()
        pid = server.stats()["export"]["process"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.stats()["export"]["process"] not in {0, pid})
        until(lambda: engine.stats()["far_ends_connected"])
        engine.forget()
        with Engine(server.level()) as other:
            until(lambda: all_come(other))
        until(lambda: server.stats()["export"]["pinned"] == 0)
        assert server.stats()["export"]["process_ends"] == 1
        free = server.stats()["arena"]["free"]
        assert free == server.slots - BLOCKS
        assert server.stop() == 0


def test_a_tenant_is_purged_from_a_server_by_any_engine(tmp_path: Path) -> None:
    with (
        Server(tmp_path) as server,
        Engine(server.level(), salt="red") as red,
        Engine(server.level(), salt="blue") as blue,
    ):
        red.save()
        blue.save()
        with Engine(server.level()) as other:
            for _ in other.cache.purge("red"):
                pass
            until(lambda: not other.cache.removals)
        with Engine(server.level(), salt="red") as again:
            assert again.load() == []
        with Engine(server.level(), salt="blue") as again:
            assert again.load() == ["far"] * BLOCKS


def test_a_prefix_is_purged_from_servers_where_only_they_know_its_blocks(tmp_path: Path) -> None:
    """Restarted, an engine does not know what it put there; a server that is away owes it."""
    settings: dict[str, Any] = {
        "control": str(tmp_path / "kv.sock"),
        "forget": {"path": str(tmp_path / "purges"), "key": "a key of these tests"},
    }

    def asked(command: str, **told: Any) -> Any:
        sent = {"command": command, **told}
        return ask(tmp_path / "kv.sock", sent, timeout_s=PATIENCE_S)

    with Server(tmp_path / "one") as one, Server(tmp_path / "two", keys=one.keys) as two:
        level = one.level(servers=[one.address, two.address])
        with Engine(level, **settings) as engine:
            engine.save(parent=START)
            engine.save(100, parent=START)
            prefix = [key.hex() for key in engine.keys()[:3]]
            until(lambda: engine.stats()["stored"] == 2 * BLOCKS)
        assert two.stats()["export"]["taken"] > 0, "both have some"
        assert two.stop() == 0
        two.again()
        with Engine(level, **settings) as engine:
            until(lambda: len(engine.load(100)) == BLOCKS)  # once it is connected to both
            engine.forget()
            one.stop()  # its blocks are in its files then
            receipt = asked("purge", keys=prefix, wait_s=0.2)["receipt"]
            _, far = receipt["levels"]
            assert (far["state"], receipt["complete"]) == ("owed", False)
            one.again()
            path = tmp_path / "purges" / f"{receipt['id']}.json"
            until(lambda: json.loads(path.read_text())["complete"])
            receipt = json.loads(path.read_text())
            _, far = receipt["levels"]
            assert (far["state"], far["unknown"]) == ("done", 0)
            assert 0 < far["blocks"] <= BLOCKS
            assert not any("repeat the purge" in one for one in receipt["beyond"])
            engine.forget()
            assert engine.load() == []
            assert engine.load(100), "it begins with another block"
            found = asked("receipt", receipt=receipt)
            assert [level["finding"] for level in found["levels"]] == ["clean", "clean"]
        assert one.stop() == 0


def test_an_engine_lets_others_read_its_blocks_and_write_none(tmp_path: Path) -> None:
    with Server(tmp_path) as keys:
        export = {"listen": "127.0.0.1:0", "keys": str(keys.keys / "server.keys")}
        files = {"type": "files", "path": str(tmp_path / "own"), "capacity": "64 MiB"}
        with Engine(files, export=export) as exporter:
            exporter.save()
            address = f"127.0.0.1:{exporter.stats('export')['port']}"
            level = keys.level(servers=[], peers=[address], when="never")
            with Engine(level) as reader:
                assert reader.load() == ["far"] * BLOCKS
                reader.save(50)
                assert exporter.stats("export")["sent"] == BLOCKS
                assert exporter.stats("export")["taken"] == 0
                pid = exporter.stats("export")["process"]
                exporter.cache.close()
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)
                reader.forget()
                assert reader.load() == []


def test_an_engine_of_another_model_is_refused_by_an_engine_and_served_by_a_server(
    tmp_path: Path,
) -> None:
    with Server(tmp_path) as server:
        export = {"listen": "127.0.0.1:0", "keys": str(server.keys / "server.keys")}
        model = {"fingerprint": "another"}
        with Engine(export=export) as exporter, Engine(server.level(), model=model) as other:
            other.save()
            assert server.stats()["export"]["taken"] == BLOCKS
            address = f"127.0.0.1:{exporter.stats('export')['port']}"
            level = server.level(servers=[], peers=[address], when="never")
            with pytest.raises(ConfigError, match="another model or layout: namespace"):
                Engine(level, model=model)
            assert exporter.stats("export")["refused"] == 1


# ---- the command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"block": None},
            "block: missing (expected the size of the largest block that clients store",
        ),
        ({"export": None}, "export.listen: missing (expected host:port"),
        ({"export": {"listen": "7470", "keys": "k"}}, "export.listen: '7470'"),
        ({"export": {"listen": "127.0.0.1:1"}}, "export.keys: missing"),
        ({"export": {"keys": "k"}}, "export.listen: missing"),
        ({"export": {"listen": "127.0.0.1:0", "keys": "/nowhere"}}, "export.keys: /nowhere"),
        ({"export": {"listen": "192.0.2.1:7", "keys": True}}, "export.listen: 192.0.2.1:7: "),
        ({"block": "many"}, "block.size: 'many'"),
        ({"blok": 1}, "blok: unknown key"),
    ],
)
def test_an_error_in_a_server_file_says_where_and_what_is_expected(
    tmp_path: Path, server: Server, change: dict[str, Any], told: str
) -> None:
    stack = {**server.stack, "tiers": [{"type": "host"}], **change}
    del stack["control"]
    if stack["export"] and stack["export"].get("keys") is True:
        stack["export"] = {**stack["export"], "keys": str(server.keys / "server.keys")}
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in stack.items() if value}))
    ended = run("serve", str(file))
    assert ended.returncode == 2
    assert told in ended.stderr
    assert str(file) in ended.stderr
    assert not ended.stdout


def test_keys_are_created_once_and_readable_only_by_their_owner(tmp_path: Path) -> None:
    made = run("serve", "--new-keys", str(tmp_path))
    assert made.returncode == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["client.keys", "server.keys"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    again = run("serve", "--new-keys", str(tmp_path))
    assert again.returncode == 2
    assert "File exists" in again.stderr
    assert run("serve").returncode == 2


def test_settings_of_a_server_are_refused_in_an_engines_stack(server: Server) -> None:
    with pytest.raises(ConfigError, match=r"block\.size: has no effect here"):
        kvladder.open_cache({**server.stack, "control": {}}, layout=LAYOUT)


def test_a_server_answers_over_http(server: Server) -> None:
    told = {}
    for path in ("readyz", "metrics", "status"):
        with urlopen(f"http://{server.stack['http']}/{path}", timeout=PATIENCE_S) as answer:
            told[path] = answer.read().decode()
    assert told["readyz"] == "ok\nhost: open\nfiles: open\n"
    assert "\nkvladder_export_clients " in told["metrics"]
    assert json.loads(told["status"])["stats"]["export"]["port"]


def test_check_reports_on_a_servers_file(server: Server, tmp_path: Path) -> None:
    found = run("check", str(server.file))
    assert found.returncode == 0
    assert "nixl 1." in found.stdout
    assert "1 block = 64.57 KiB (66120 bytes), in a slot of 68 KiB" in found.stdout
    assert "tokens  " not in found.stdout.partition("level 0")[2]
    bad = tmp_path / "bad.yaml"
    bad.write_text(server.file.read_text().replace("server.keys", "other.keys"))
    found = run("check", str(bad))
    assert found.returncode == 2
    assert "export.keys" in found.stderr
