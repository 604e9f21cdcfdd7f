"""Wishes of requests in a scripted engine, from their parameters to the levels."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import pytest

from tests.connectors.scripted import Engine
from tests.patience import PATIENCE_S, until

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """Import it once, with whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")


def served(params: object, **options: Any) -> Any:
    source = {
        "arena": {"size": "64 KiB"},
        "tiers": [
            {"type": "host", "min_priority": 0},
            {"name": "nvme", "type": "memory", "capacity": "1 MiB", "when": "commit"},
        ],
    }
    engine = Engine(source, **options)
    one = engine.add(range(32), length=40, kv_transfer_params={"kvladder": params})
    engine.run()
    again = engine.add(one.tokens[:32])
    engine.run()
    del again
    return engine


def test_a_request_that_disables_saving_is_not_saved() -> None:
    engine = served({"save": False})
    assert engine.loaded == 0
    engine.close()


def test_blocks_for_host_alone_are_in_no_other_tier() -> None:
    engine = served({"tiers": {"store": ["host"]}, "priority": 80})
    assert engine.loaded > 0
    index = engine.half.connector.manager._stack.host.index
    metas = [index.meta(index.place(key)) for key in index]
    assert {(meta.priority, meta.floor) for meta in metas if meta.terms.levels == 1} == {(80, 80)}
    assert len(engine.half.connector.manager._stack.levels[0].index) < len(metas)
    engine.close()


@pytest.mark.parametrize(("priority", "takes"), [(34, False), (35, True)])
def test_a_priority_below_a_tiers_threshold_keeps_blocks_off_it(priority: int, takes: bool) -> None:
    engine = served({"priority": priority, "decode_priority": priority})
    stack = engine.half.connector.manager._stack
    until(engine.half.connector.manager.idle)
    assert bool(len(stack.levels[0].index)) == takes
    assert bool(engine.half.stats()["nvme"]["stored_s"]) == takes  # nor is it written and undone
    assert len(stack.host.index) > 0
    engine.close()


def test_later_blocks_have_the_floor_of_earlier_ones() -> None:
    engine = served({"retention": [[0, 4, 10, None]], "priority": 80})
    index = engine.half.connector.manager._stack.host.index
    metas = [index.meta(index.place(key)) for key in index]
    assert {meta.floor for meta in metas if meta.priority == 80} == {10}
    engine.close()


def test_wrong_parameters_do_not_fail_a_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = served({"priority": 1000})
    assert engine.loaded > 0
    assert len([r for r in caplog.records if "kvladder parameters are ignored" in r.message]) == 1
    engine.close()


# ---- sessions


COLD = {"name": "cold", "type": "memory", "capacity": "1 MiB", "when": "commit"}


def turn(engine: Any, tokens: Any, **params: Any) -> int:
    """A whole request; how many blocks were loaded for it."""
    before = engine.loaded
    engine.add(tokens, kv_transfer_params={"kvladder": params})
    engine.run()
    return int(engine.loaded - before)


def written(engine: Any) -> None:
    """Wait until no block is being written below."""
    until(engine.half.connector.manager.idle)


def sizes(engine: Any) -> tuple[int, int]:
    """Blocks in host and in the level below."""
    stack = engine.half.connector.manager._stack
    return len(stack.host.index), len(stack.levels[0].index)


def opened(**host: Any) -> Any:
    fetch = {"deadline": "10 m"}
    tiers = [{"type": "host", **host}, COLD]
    return Engine({"arena": {"size": "256 KiB"}, "fetch": fetch, "tiers": tiers})


def test_blocks_used_only_by_a_session_are_removed_with_it() -> None:
    engine = opened()
    turn(engine, range(32), session="a")
    turn(engine, [*range(16), *range(100, 116)], session="b")
    written(engine)
    held = sizes(engine)
    turn(engine, range(48), session="a", end_session=True)
    assert turn(engine, [*range(16), *range(100, 117)]) == 8, "b has its own, and what it shares"
    after = sizes(engine)
    assert after[0] < held[0]
    assert after[1] < held[1]
    assert turn(engine, [*range(32), 7]) == 4, "what a alone had is gone"
    engine.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_used_without_a_session_outlast_it(when: str) -> None:
    engine = opened()
    others = {"save": False} if when == "after" else {"priority": 100}
    if when == "before":
        turn(engine, range(16), **others)
    turn(engine, range(32), session="a")
    if when == "after":
        turn(engine, [*range(16), 99], **others)
    turn(engine, [*range(32), *range(60, 68)], session="a")
    turn(engine, range(48), session="a", end_session=True)
    manager = engine.half.connector.manager
    until(lambda: not manager.removals)
    assert turn(engine, [*range(32), 7]) == 4, "the others' blocks are there, no more"
    engine.close()


def test_without_a_threshold_blocks_of_an_ended_session_are_evicted_next() -> None:
    engine = opened(min_priority=0)
    turn(engine, range(32), session="a")
    turn(engine, range(100, 132), session="b")
    turn(engine, range(32), session="a", end_session=True)
    index = engine.half.connector.manager._stack.host.index
    by_priority = [index.priority(place) for place in index.victims()]
    assert by_priority[0] == 0
    assert by_priority == sorted(by_priority)
    engine.close()


def test_a_session_that_ended_is_named_once_and_its_request_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = opened()
    turn(engine, range(32), session="a")
    turn(engine, range(32), session="a", end_session=True)
    turn(engine, range(200, 232), session="a", priority=90)
    assert "session 'a' has ended: expected a new name" in caplog.text
    assert "its kvladder parameters are ignored" in caplog.text
    index = engine.half.connector.manager._stack.host.index
    assert 90 not in {index.priority(place) for place in index.victims()}
    engine.close()


def test_an_unknown_session_is_named(caplog: pytest.LogCaptureFixture) -> None:
    engine = opened()
    manager = engine.half.connector.manager
    turn(engine, range(32), session="a")
    saved = manager.stats()["host"]["blocks"]
    turn(engine, range(300, 332), prefetch=["nobody", "a"], save=False)
    named = "kv_transfer_params.kvladder.prefetch[0]: session 'nobody' is not known"
    assert named in caplog.text
    assert caplog.text.rstrip().endswith("this prefetch is ignored")
    assert manager.stats()["host"]["blocks"] == saved, "what else it said holds"
    engine.close()


def test_blocks_of_a_sessions_next_request_are_prefetched() -> None:
    engine = opened()
    manager = engine.half.connector.manager
    turn(engine, range(32), session="a")
    keys = [key for run in manager.sessions.last("a")[0] for key in run]
    written(engine)
    with manager._stack.lock:
        manager._stack.host.forget(keys, "evicted")
    assert manager.lookup(keys).host == 0
    assert manager.lookup(keys).total == len(keys)

    def comes() -> bool:
        turn(engine, range(500, 508), prefetch=["a"])  # other requests run in between
        return bool(manager.lookup(keys).host == len(keys))

    until(comes)
    turn(engine, range(500, 508))
    assert not engine.half.connector.rising, "nothing stays pinned"
    engine.close()


def test_a_pinned_block_outlasts_blocks_that_are_used_more() -> None:
    engine = opened()
    turn(engine, range(32), session="a", pin_s=600)
    index = engine.half.connector.manager._stack.host.index
    assert {index.priority(place) for place in index.victims()} == {100}
    engine.close()


def test_a_report_tells_where_a_prompt_came_from_and_why_the_rest_was_computed() -> None:
    source = {"arena": {"size": "64 KiB"}, "tiers": [{"type": "host"}]}
    engine = Engine(source)
    report = {"kvladder": {"report": True}}
    manager = engine.half.connector.manager

    def asked(tokens: list[int]) -> dict[str, Any]:
        request = engine.add(tokens, kv_transfer_params=report)
        engine.run()
        found = engine.reports[request.request_id]
        assert found is not None
        missed = sum(one["tokens"] for one in found["missed"])
        told = found["engine_tokens"] + found["served_tokens"] + missed
        assert told == found["asked_tokens"] == (len(tokens) - 1) // 4 * 4
        return found

    tokens = [*range(100, 133)]
    unseen = asked(tokens)
    assert unseen["missed"] == [{"reason": "never_seen", "level": None, "tokens": 32}]
    again = asked(tokens)
    assert again["served_from"] == {"host": again["served_tokens"]}
    assert again["served_tokens"] == 32
    assert 0 < again["waited_s"] < PATIENCE_S
    manager.remove([*manager._stack.host.index])
    gone = asked([*tokens, *range(7)])
    assert [one["reason"] for one in gone["missed"]] == ["removed", "never_seen"]
    assert gone["missed"][0] == {"reason": "removed", "level": "host", "tokens": 32}
    counts = manager.stats()["misses"]["blocks"]
    assert counts["host"]["removed"] * 4 == 32
    plain = engine.add(tokens)
    engine.run()
    assert engine.reports[plain.request_id] is None
    engine.close()
