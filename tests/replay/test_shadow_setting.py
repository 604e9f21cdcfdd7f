"""``shadow`` of a stack: how it is written, refused and shown, and that it costs nothing if off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvladder
from kvladder.cli import main
from kvladder.compose import open_manager
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from tests.patience import until
from tests.replay.test_shadow import key_of

LAYOUT = kvladder.Layout(block_tokens=4, block_bytes=4096, fields={"model": "m"})
KEYS = [key_of(number) for number in range(64)]
PRICES = {"memory": 3, "disk": 0.5, "gpu": 36.0}


def stack(**sections: Any) -> dict[str, Any]:
    return {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}], **sections}


def serve(cache: CacheManager, keys: list[BlockKey]) -> int:
    """Serve a prompt as an engine does; return how many of its blocks were there."""
    fetch = cache.fetch(keys)
    fetch.wait()
    found = fetch.blocks
    fetch.release()
    cache.save(keys).commit()
    cache.touch(keys)
    return found


@pytest.fixture
def cache() -> Iterator[CacheManager]:
    with kvladder.open_cache(stack(shadow=True), layout=LAYOUT) as cache:
        yield cache


def test_true_is_short_for_the_section() -> None:
    for short in (True, {"enabled": True}):
        assert load_config(stack(shadow=short), env={}).shadow.enabled
    assert not load_config(stack(), env={}).shadow.enabled
    assert not load_config(stack(shadow=False), env={}).shadow.enabled
    other = load_config(stack(), env={"KVLADDER__SHADOW__ENABLED": "true"})
    assert other.shadow.enabled
    assert load_config(stack(), env={"KVLADDER__SHADOW": "true"}).shadow.enabled
    shown = {row.path: row.value for row in other.rows()}
    assert (shown["shadow.enabled"], shown["shadow.prices.gpu"]) == ("True", "none")
    priced = load_config(stack(shadow={"enabled": True, "prices": PRICES}), env={})
    assert (priced.shadow.prices.memory, priced.shadow.prices.gpu) == (3, 36.0)


@pytest.mark.parametrize(
    ("shadow", "says"),
    [
        ("on", r"shadow\.enabled: 'on'"),
        (7, r"shadow: 7"),
        ({"enabled": "yes"}, r"shadow\.enabled: "),
        ({"prices": PRICES}, r"shadow\.enabled: false \(set shadow\.enabled: true"),
        ({"enabled": False, "prefill": 20}, r"shadow\.enabled: false \(set shadow\.enabled: true"),
        ({"enabled": True, "prices": {"gpu": -1}}, r"shadow\.prices\.gpu: -1.*0 or more"),
        ({"enabled": True, "prices": {"gpu": "much"}}, r"shadow\.prices\.gpu: 'much'"),
        ({"enabled": True, "prices": {"ram": 1}}, r"shadow\.prices\.ram: unknown key.*memory"),
        ({"enabled": True, "prices": {"gpu": float("nan")}}, r"shadow\.prices\.gpu: nan"),
        ({"enabled": True, "prefill": 0}, r"shadow\.prefill: 0"),
        ({"enable": True}, r"shadow\.enable: unknown key.*enabled"),
    ],
)
def test_wrong_settings_are_refused(shadow: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(stack(shadow=shadow), env={})


def test_servers_and_pools_have_none() -> None:
    config = load_config(stack(shadow=True), env={})
    with pytest.raises(ConfigError, match=r"shadow: has no effect here .*a cache server's clients"):
        open_manager(config, LAYOUT, serves=True)
    with pytest.raises(ConfigError, match=r"shadow: has no effect here .*pools on the device"):
        open_manager(config, LAYOUT, pools=True)


def test_without_it_nothing_listens() -> None:
    with kvladder.open_cache(stack(), layout=LAYOUT) as plain:
        assert plain._stack.shared.listener is None
        assert "shadow" not in plain.stats()


def test_stats_have_what_requests_used(cache: CacheManager) -> None:
    assert [serve(cache, KEYS) for _ in range(4)] == [0, 64, 64, 64]
    figures = cache.stats()["shadow"]
    assert figures["hit_ratio"]["host"] == dict.fromkeys(("0.5", "1", "2", "4"), 0.75)
    assert figures["sampled_ratio"] == {"host": 1.0}
    assert figures["dropped"] == 0
    assert "shadow: host 0.5x 0.750 1x 0.750" in cache.describe()
    assert "follows 1 of 1 keys" in cache.describe()


def test_a_fetch_that_is_repeated_or_a_prefetch_is_no_use(cache: CacheManager) -> None:
    serve(cache, KEYS)
    first = cache.fetch(KEYS)
    cache.fetch(KEYS).release()
    first.release()
    cache.fetch(KEYS, is_use=False).release()
    assert cache.stats()["shadow"]["hit_ratio"]["host"]["1"] == 0.5


def test_the_speed_of_computing_is_what_the_engine_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVLADDER__FETCH__WHEN")
    shadow = {"enabled": True, "prices": PRICES}
    with kvladder.open_cache(stack(shadow=shadow), layout=LAYOUT) as cache:
        listener: Any = cache._stack.shared.listener
        now = listener._clocks.now
        object.__setattr__(listener._clocks, "now", lambda: now() + 100.0)
        serve(cache, KEYS)
        serve(cache, KEYS)
        assert "saved_s_an_hour" not in cache.stats()["shadow"]
        cache.prefilled(1000, 10.0)
        figures = cache.stats()["shadow"]
    for name in ("saved_s_an_hour", "value_a_month", "net_a_month"):
        assert figures[name]["host"]["1"] > 0, name
    assert figures["cost_a_month"]["host"]["1"] == pytest.approx(3 / 1024)
    saved = figures["saved_s_an_hour"]["host"]["1"]
    assert saved == pytest.approx(64 * 4 * 0.01 * 36, rel=0.05)


def test_recovered_blocks_are_there_from_the_start(tmp_path: Path) -> None:
    files = {"type": "files", "path": str(tmp_path / "kv"), "capacity": "2 MiB", "when": "commit"}
    source = stack(shadow=True)
    source["tiers"].append({**files, "segment": "256 KiB"})
    with kvladder.open_cache(source, layout=LAYOUT) as cache:
        serve(cache, KEYS)
        until(cache.idle)
    with kvladder.open_cache(source, layout=LAYOUT) as cache:
        serve(cache, KEYS)
        figures = cache.stats()
        assert figures["files"]["recovered"] == len(KEYS)
        assert figures["shadow"]["hit_ratio"]["files"]["1"] == 1.0


def test_the_commands_show_it(tmp_path: Path, capsys: Any) -> None:
    socket = str(tmp_path / "s")
    source = stack(shadow=True, control=socket)
    with kvladder.open_cache(source, layout=LAYOUT) as cache:
        serve(cache, KEYS)
        serve(cache, KEYS)
        assert main(["stats", socket]) == 0
        line = next(text for text in capsys.readouterr().out.splitlines() if "shadow" in text)
        assert line.startswith("shadow: host 0.5x 0.500 1x 0.500 2x 0.500 4x 0.500")
        assert main(["describe", socket]) == 0
        assert "shadow: host 0.5x 0.500" in capsys.readouterr().out
