"""Counters: queries and hits by level, shared loads, deadlines, drops, queues, ages."""

from __future__ import annotations

import asyncio
import json

from kvladder.metrics import DURATIONS_S
from kvladder.testing.fakes import Delay, FakeTier, Hang, Hold
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.definition import LevelSettings
from kvladder.tiers.ladder.records.meta import BlockMeta
from tests.stack.caches import COMMIT, QUICK, cache_of, flushed


def asked(cache: SimCache) -> dict[str, tuple[int, int]]:
    """Queries and hits by level."""
    stats = cache.manager.stats()
    names = ["host", *(level.name for level in cache.levels)]
    return {name: (stats[name]["queries"], stats[name]["hits"]) for name in names}


async def test_a_level_is_asked_only_for_blocks_missing_above_it() -> None:
    first = LevelSpec(FakeTier(store=await flushed((1, 2)), durable=True))
    second = LevelSpec(FakeTier(store=await flushed((1, 2, 3, 4)), durable=True))
    async with cache_of(first, second) as cache:
        await cache.load(cache.keys(1))
        assert await cache.load(cache.keys(1, 2, 3, 9)) == ["host", "level1", "level2"]
        assert asked(cache) == {"host": (5, 1), "level1": (4, 2), "level2": (2, 1)}


async def test_a_level_with_an_open_breaker_is_not_asked() -> None:
    tier = FakeTier([Hang(on="get", times=2)], store=await flushed((1,)), durable=True)
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        for _ in range(2):
            assert await cache.load(cache.keys(1)) == []
        stats = cache.manager.stats()["level1"]
        assert (stats["breaker"], stats["timeouts"], stats["breaker_opened"]) == (2, 2, 1)
        await cache.load(cache.keys(1))
        assert asked(cache) == {"host": (3, 0), "level1": (2, 0)}


async def test_a_block_in_flight_is_joined_and_read_once() -> None:
    hold = Hold(on="get")
    tier = FakeTier([hold], store=await flushed((1, 2)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        fetches = [cache.manager.fetch(cache.keys(1, 2)) for _ in range(3)]
        await hold.reached()
        hold.let_go()
        await asyncio.sleep(1)
        assert [fetch.done for fetch in fetches] == [True] * 3
        for fetch in fetches:
            fetch.release()
        assert asked(cache) == {"host": (6, 0), "level1": (2, 2)}
        assert cache.manager.stats()["host"]["joined"] == 4


async def test_blocks_that_miss_their_deadline_are_late_and_counted_once() -> None:
    hold = Hold(on="get")
    tier = FakeTier([hold], store=await flushed((1, 2, 3)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        fetch = cache.manager.fetch(cache.keys(1, 2, 3), deadline_s=1.0)
        await asyncio.sleep(2)
        assert (fetch.done, fetch.done, fetch.blocks) == (True, True, 0)
        fetch.release()
        given_up = cache.manager.fetch(cache.keys(1, 2, 3), deadline_s=9.0)
        given_up.release()
        hold.let_go()
        await asyncio.sleep(1)
        assert cache.manager.stats()["level1"]["late"] == 3


async def test_drops_are_counted_by_reason_and_priority() -> None:
    hold = Hold(on="put")
    spec = LevelSpec(FakeTier([hold], batch_max=1), COMMIT, settings=LevelSettings(queue_blocks=1))
    async with cache_of(spec, slots=4) as cache:
        cache.save(cache.keys(1), priorities=[35])
        await hold.reached()
        level = cache.levels[0]
        for number, priority in ((2, 35), (3, 70), (4, 40)):
            (key,) = cache.keys(number)
            save = cache.manager.save([key], priorities=[priority])
            level.offer([key], save.slots, [BlockMeta(priority, priority)])
            save.abort()
        stats = cache.manager.stats()["level1"]
        assert stats["dropped"] == {"queue": {"30": 1, "40": 1}}
        hold.let_go()
        await cache.settle()
    async with cache_of(slots=2) as cache:
        held = cache.manager.save(cache.keys(1, 2))
        assert cache.save(cache.keys(5, 6), priorities=[90, 85]) == 0
        assert cache.manager.stats()["host"]["dropped"] == {"room": {"80": 1, "90": 1}}
        held.abort()


async def test_the_age_of_a_queue_is_that_of_its_oldest_block() -> None:
    tier = FakeTier([Delay(3.0, on="put", times=None)], batch_max=1)
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        assert cache.manager.stats()["level1"]["queue_age_s"] == 0
        cache.save(cache.keys(1))
        await asyncio.sleep(1)
        cache.save(cache.keys(2))
        await asyncio.sleep(1)
        assert 1.9 < cache.manager.stats()["level1"]["queue_age_s"] < 2.1
        await asyncio.sleep(2)
        assert 2.9 < cache.manager.stats()["level1"]["queue_age_s"] < 3.1
        await cache.settle()
        assert cache.manager.stats()["level1"]["queue_age_s"] == 0


async def test_ages_and_reuse_distances_are_counted_by_level() -> None:
    tier = FakeTier(batch_max=1)
    spec = LevelSpec(tier, COMMIT, capacity_blocks=2)
    async with cache_of(spec, slots=2, reserve_blocks=0) as cache:
        for number in range(4):
            cache.save(cache.keys(number))
            await cache.settle()
            await asyncio.sleep(10)
        await cache.load(cache.keys(2))
        stats = cache.manager.stats()
        for name in ("host", "level1"):
            ages = stats[name]["eviction_age_s"]
            assert sum(ages["counts"]) == stats[name]["evicted"] == 2
            assert 40 < ages["sum"] < 41  # each was used last 20 s before
        assert stats["host"]["reuse_distance"]["counts"][0] == 1
        assert stats["host"]["reuse_distance"]["sum"] == 2  # one stored after it, and itself


async def test_statistics_are_plain_data() -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT)) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()
        stats = cache.manager.stats()
        assert json.loads(json.dumps(stats)) == stats


async def test_calls_are_counted_by_their_duration_and_a_timeout_with_its_limit() -> None:
    script = [Delay(0.02, on="put"), Hang(on="get")]
    tier = FakeTier(script, store=await flushed((1,)), durable=True)
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(2, 3))
        await cache.settle()
        assert await cache.load(cache.keys(1)) == []
        stats = cache.manager.stats()["level1"]
    bounds = [*DURATIONS_S, float("inf")]
    for name, took_s in (("stored", 0.02), ("loaded", QUICK.calls.timeout_s)):
        calls = stats[f"{name}_call_s"]
        met = [bound for bound, n in zip(bounds, calls["counts"], strict=True) if n]
        assert met == [next(bound for bound in bounds if took_s <= bound)], name
        assert stats[f"{name}_s"] == calls["sum"] >= took_s
