"""An operator's view of the pools on a device: metrics, advice, a profiler's ranges."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvladder.device import preempt
from kvladder.gpu.copy import ranges
from kvladder.publishing.exposition import METRICS, samples
from tests.gpu.device import FULL, Model
from tests.gpu.engine import Engine
from tests.gpu.test_pool_groups import NEAR

STACK = {"arena": {"size": 64 * 4096}, "tiers": [{"type": "host"}]}


def told(engine: Model) -> dict[tuple[str, tuple[str, ...]], Any]:
    return {(s.metric.name, s.labels): s.value for s in samples(engine.cache.stats())}


def test_every_statistic_of_the_pools_is_exposed_once() -> None:
    engine = Model(STACK, FULL, NEAR)
    for section, name in (("pool", "gpu.all"), ("pool", "gpu.near"), ("preemption", "preemption")):
        known = {key for metric in METRICS if metric.section == section for key in metric.fields}
        assert engine.cache.stats()[name].keys() == known
    assert {labels[0] for name, labels in told(engine) if "_pool_" in name} == {"all", "near"}
    assert not [name for name, labels in told(engine) if "_tier_" in name and labels[0] != "host"]
    engine.close()


def test_pool_metrics_count_the_outcomes_of_prompts_and_requests() -> None:
    engine = Model(STACK, FULL, blocks=6)
    engine.run(range(8))
    engine.run([*range(8), 50])
    engine.evict()
    engine.run([*range(8), 60])
    running = engine.begin([*range(8), 70])
    found = told(engine)
    assert found["kvladder_pool_prompt_blocks_total", ("all", "hit")] == 6
    assert found["kvladder_pool_prompt_blocks_total", ("all", "miss")] == 5
    assert found["kvladder_pool_transferred_blocks_total", ("all", "offload")] == 3
    assert found["kvladder_pool_transferred_blocks_total", ("all", "onboard")] == 2
    assert found["kvladder_pool_capacity_blocks", ("all",)] == 6
    assert found["kvladder_pool_used_blocks", ("all",)] == 3
    assert found["kvladder_pool_free_blocks", ("all",)] == 3
    assert found["kvladder_pool_cached_blocks", ("all",)] == 3
    engine.compute(running)
    suspended = engine.cache.preemption.suspend(running, "recompute")
    assert told(engine)["kvladder_preemptions_total", ("recompute",)] == 1
    assert told(engine)["kvladder_suspended_requests", ()] == 1
    again = engine.cache.resume(suspended)
    found = told(engine)
    assert found["kvladder_resumptions_total", ("recompute",)] == 1
    assert found["kvladder_preemptions_total", ("tiers",)] == 0
    assert found["kvladder_suspended_requests", ()] == 0
    engine.requests.release(again)
    engine.close()


def test_ages_and_distances_run_from_release_to_the_next_use() -> None:
    engine = Engine(32)
    engine.run(range(8))  # two blocks, idle from 0 s on
    engine.clock.now_s = 100.0
    engine.pool.mark()
    engine.run(range(100, 180))  # twenty more
    engine.clock.now_s = 400.0
    engine.run([*range(8), 9])  # after 400 s, and 20 blocks
    engine.clock.now_s = 500.0
    engine.pool.evict(32)  # some for 100 s, the others for 400 s
    engine.clock.now_s = 600.0
    engine.pool.mark()
    counts = engine.pool.counts()
    ages, distances = counts["reuse_age_s"], counts["reuse_distance"]
    assert dict(zip(ages["le"], ages["counts"], strict=False))[900] == sum(ages["counts"]) == 2
    assert ages["sum"] == pytest.approx(800, abs=1)
    assert distances["counts"][1] == sum(distances["counts"]) == 2
    assert distances["sum"] == 21 + 22  # the last of a prefix becomes idle first
    gone = counts["eviction_age_s"]
    by_bound = dict(zip(gone["le"], gone["counts"], strict=False))
    assert sum(gone["counts"]) == counts["evicted"]
    assert by_bound[300] == 20 or by_bound[900] == 20
    engine.check()


def test_uses_are_counted_at_once_where_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvladder.gpu.pool import stats

    monkeypatch.setattr(stats, "UNCOUNTED_MAX", 2)
    engine = Engine(32)
    for _ in range(8):
        engine.run(range(13))  # three whole blocks
    engine.pool.evict(32)
    counts = engine.pool.counts()  # no time passed: there was no mark
    assert counts["reused"] == 7 * 3
    assert sum(counts["reuse_age_s"]["counts"]) == sum(counts["reuse_distance"]["counts"]) >= 21
    assert sum(counts["eviction_age_s"]["counts"]) == counts["evicted"] >= 3


def test_marks_are_bounded_and_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvladder.gpu.pool import stats

    monkeypatch.setattr(stats, "MARKS_MAX", 8)
    engine = Engine(64)
    for turn in range(40):
        engine.clock.now_s = float(turn)
        engine.run(range(1000 * turn, 1000 * turn + 4))
    uses = engine.pool._ledger.uses
    assert len(uses._stamps) <= 9
    assert uses._stamps == sorted(uses._stamps)
    assert len(uses._times_s) == len(uses._stamps)


def test_sustained_preemption_is_answered_with_advice_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Model(STACK, FULL)
    now_s = [1000.0]
    monkeypatch.setattr(engine.cache.preemption, "_clock", SimpleNamespace(now=lambda: now_s[0]))
    monkeypatch.setattr(engine.cache.preemption._notices, "_now", lambda: now_s[0])

    def make_way(times: int, every_s: float) -> int:
        caplog.clear()
        for _ in range(times):
            now_s[0] += every_s
            request = engine.begin(range(8))
            engine.compute(request)
            engine.cache.preemption.discard(engine.cache.preemption.suspend(request, "recompute"))
        return len(caplog.messages)

    with caplog.at_level(logging.WARNING, "kvladder"):
        assert make_way(50, 7.0) == 0, "now and then"
        assert make_way(preempt.SUSTAINED, 1.0) == 1
        for word in ("fewer requests", "shorten their", "gpu.memory", "fp8", "out-of-memory.md"):
            assert word in caplog.messages[0]
        assert make_way(100, 1.0) == 0, "it was said"
        now_s[0] += preempt.ADVICE_EVERY_S
        assert make_way(preempt.SUSTAINED, 1.0) == 1
    engine.close()


def test_a_profiler_sees_named_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    open_ranges: list[str] = []

    def push(name: str) -> None:
        open_ranges.append(name)
        seen.append(name)

    fake = SimpleNamespace(range_push=push, range_pop=open_ranges.pop)
    monkeypatch.setattr(ranges, "_nvtx", lambda: fake)
    engine = Model(STACK, FULL)
    engine.run(range(8))
    engine.evict()
    engine.run(range(9))
    with pytest.raises(ZeroDivisionError), ranges.ranged("wrong"):
        raise ZeroDivisionError
    engine.close()
    assert not open_ranges, "all are closed"
    whole = {"poll", "offload 2", "onboard 2", "wrong"}
    assert {f"kvladder {what}" for what in whole} <= {*seen}


def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ranges.PROFILERS:
        monkeypatch.delenv(name, raising=False)
    ranges._nvtx.cache_clear()
    assert ranges.ranged("poll") is ranges.ranged("onboard", 3)
    monkeypatch.setenv(ranges.PROFILERS[0], "/somewhere.so")
    ranges._nvtx.cache_clear()
    ranges.ranged("poll")  # without a device there is no profiler either
    ranges._nvtx.cache_clear()
