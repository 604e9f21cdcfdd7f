"""Faults found by simulated runs, each as its shortest sequence of steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import Fail, FakeStore, FakeTier, Full, Hang, Hold
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.calling.breaker import BreakerSettings, CallSettings
from kvladder.tiers.ladder.definition import LevelSettings

COMMIT = OffloadRule(when="commit")
QUICK = LevelSettings(
    calls=CallSettings(timeout_s=1.0, breaker=BreakerSettings(failures=1, retry_s=5.0))
)


@asynccontextmanager
async def cache_of(*levels: LevelSpec, **options: Any) -> AsyncIterator[SimCache]:
    cache = await SimCache.open(*levels, **options)
    yield cache
    cache.manager.check()
    await cache.aclose()
    for level in levels:
        assert isinstance(level.tier, FakeTier)
        assert level.tier.violations == []


async def test_an_abandoned_removal_never_overlaps_a_write_of_its_block() -> None:
    """The block may be stored again by then, and a late removal would remove the new one."""
    hang = Hang(on="remove", stubborn=True)
    tier = FakeTier([hang])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        keys = cache.keys(1)
        cache.save(keys)
        await cache.settle()
        cache.manager.remove(keys)
        cache.save(keys)  # while the removal is in progress
        await asyncio.sleep(10.0)
        cache.manager.remove(keys)
        cache.save(keys)  # while it is abandoned
        await asyncio.sleep(10.0)
        assert tier.batches("put") == [1]
        hang.let_go()
        await asyncio.sleep(10.0)
        cache.manager.remove(keys)
        cache.save(keys)
        await cache.settle()
        assert tier.batches("put") == [1, 1]


async def test_an_abandoned_removal_is_repeated_once_it_has_ended() -> None:
    hang = Hang(on="remove", stubborn=True)
    tier = FakeTier([hang])
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        keys = cache.keys(1)
        cache.save(keys)
        await cache.settle()
        cache.manager.remove(keys)
        await asyncio.sleep(10.0)
        hang.let_go()
        await asyncio.sleep(10.0)
        assert tier.stored(keys[0]) is None
        assert not cache.stack.pending


async def test_a_small_level_below_a_reserve_is_not_rewritten_for_ever() -> None:
    """Two blocks that host wants clean and a level with room for one took turns in it."""
    tier = FakeTier(batch_max=1)
    async with cache_of(LevelSpec(tier, capacity_blocks=1), slots=2, reserve_blocks=2) as cache:
        cache.save(cache.keys(1, 2))
        await asyncio.sleep(100.0)
        assert tier.batches("put") == [1, 1]


async def test_victims_with_room_below_are_not_rewritten_for_ever() -> None:
    first, second = FakeTier(batch_max=1), FakeTier()
    levels = LevelSpec(first, capacity_blocks=1), LevelSpec(second)
    async with cache_of(*levels, slots=8, reserve_blocks=6) as cache:
        cache.save(cache.keys(1, 2, 3, 4, 5, 6))
        await asyncio.sleep(100.0)
        assert len(first.batches("put")) <= 6
        assert len(second.batches("put")) <= 6


async def test_waiting_blocks_are_written_once_a_tier_recovers() -> None:
    tier = FakeTier([Fail(on="put")])
    settings = LevelSettings(calls=QUICK.calls, queue_blocks=1)
    async with cache_of(LevelSpec(tier, COMMIT, settings=settings)) as cache:
        cache.save(cache.keys(1, 2, 3))
        await asyncio.sleep(10.0)
        assert not cache.stack.pending
        assert sum(tier.batches("put")) == 3


async def test_waiting_blocks_are_written_once_a_tier_recovers_from_a_failed_read() -> None:
    keys = SimCache.keys(1)
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True), COMMIT)) as cache:
        cache.save(keys)
    tier = FakeTier([Fail(on="get")], store=store, durable=True)
    settings = LevelSettings(calls=QUICK.calls, queue_blocks=1)
    async with cache_of(LevelSpec(tier, COMMIT, settings=settings)) as cache:
        assert await cache.load(keys) == []
        cache.save(cache.keys(2, 3, 4))
        await asyncio.sleep(10.0)
        assert not cache.stack.pending
        assert sum(tier.batches("put")) == 3


async def test_waiting_blocks_are_written_once_a_removal_succeeds() -> None:
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True))) as cache:
        cache.save(cache.keys(1))
    hold = Hold(on="remove")
    tier = FakeTier([Fail(on="get"), hold], store=store, durable=True)
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        assert await cache.load(cache.keys(1)) == []
        await asyncio.sleep(10.0)
        cache.manager.remove(cache.keys(1))
        await hold.reached()
        cache.save(cache.keys(2, 3))
        hold.let_go()
        await asyncio.sleep(10.0)
        assert not cache.stack.pending
        assert cache.manager.stats()["level1"]["blocks"] == 2


async def test_the_writer_waits_during_a_trial_read() -> None:
    """It polled repeatedly for the end of the trial."""
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True))) as cache:
        cache.save(cache.keys(1, 2))
    tier = FakeTier([Fail(on="get"), Hang(on="get")], store=store, durable=True)
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        assert await cache.load(cache.keys(1)) == []
        await asyncio.sleep(5.0)
        load = asyncio.create_task(cache.load(cache.keys(1)))
        await asyncio.sleep(0.5)
        cache.manager.remove(cache.keys(1, 2)[1:])
        assert await load == []
        await asyncio.sleep(20.0)
        assert not cache.stack.pending
        assert await cache.load(cache.keys(1, 2)) == ["level1"]


async def test_a_save_yields_to_a_block_that_was_loaded_meanwhile() -> None:
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True))) as cache:
        cache.save(cache.keys(1, 2))
    hold = Hold(on="get")
    tier = FakeTier([hold], store=store, durable=True)
    async with cache_of(LevelSpec(tier), fetch_blocks_max=1) as cache:
        keys = cache.keys(1, 2)
        load = asyncio.create_task(cache.load(keys))
        await hold.reached()
        save = cache.manager.save(keys)
        assert save.indices == [1], "which still waits for the first to arrive"
        hold.let_go()
        assert await load == ["level1", "level1"]
        save.commit()
        assert await cache.load(keys) == ["host", "host"]


async def test_closing_waits_for_calls_that_end_only_with_the_tier() -> None:
    tier = FakeTier([Hang(on="put", stubborn=True)])
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1))
        await asyncio.sleep(10.0)
        assert tier.held


async def test_a_load_not_begun_before_closing_leaves_no_claim() -> None:
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True))) as cache:
        cache.save(cache.keys(1, 2))
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True))) as cache:
        fetch = cache.manager.fetch(cache.keys(1, 2))
        await cache.stack.loader.aclose()
        assert fetch.done
        assert fetch.blocks == 0
        fetch.release()


async def test_a_flush_waits_for_a_queue_that_is_full() -> None:
    store = FakeStore()
    tier = FakeTier(store=store, durable=True, latency_s=0.1)
    settings = LevelSettings(queue_blocks=1)
    async with cache_of(LevelSpec(tier, COMMIT, settings=settings)) as cache:
        cache.save(cache.keys(1, 2, 3, 4))
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True))) as cache:
        assert cache.manager.lookup(cache.keys(1, 2, 3, 4)).total == 4


async def test_demotion_continues_when_host_holds_every_slot() -> None:
    """Below a small level there was nothing, since no slot was free to read its victims into."""
    first, second = FakeTier(), FakeTier()
    async with cache_of(
        LevelSpec(first, capacity_blocks=2), LevelSpec(second), slots=4, reserve_blocks=2
    ) as cache:
        written, free = list[int](), list[int]()
        for number in range(12):
            cache.save(cache.keys(number))
            await asyncio.sleep(1.0)
            written.append(len(second.records))
            free.append(cache.arena.free)
        was_full = free.index(0)
        assert written[was_full] == 0
        assert written[-1] >= 6
        assert await cache.load(cache.keys(0)) == ["level2"]


async def test_a_writer_that_is_woken_and_cancelled_at_once_ends() -> None:
    tier = FakeTier([Fail(on="put")])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1))
        await asyncio.sleep(1.0)
        (lifecycle,) = cache.stack._lifecycles
        lifecycle.writer.wake()
        await lifecycle.aclose()


async def test_closing_waits_for_a_removal_in_progress() -> None:
    hold, store = Hold(on="remove"), FakeStore()
    tier = FakeTier([hold], store=store, durable=True)
    cache = await SimCache.open(LevelSpec(tier, COMMIT))
    keys = cache.keys(1, 2, 3)
    cache.save(keys)
    await cache.settle()
    cache.manager.remove(keys)
    await hold.reached()
    assert cache.manager.removals == 4, "three blocks, and the sync after them"
    assert not cache.manager.idle()
    closing = asyncio.create_task(cache.aclose())
    await asyncio.sleep(0.5)
    assert not closing.done()
    hold.let_go()
    await closing
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True), COMMIT)) as again:
        assert again.manager.lookup(keys).total == 0


async def test_the_backlog_holds_no_block_that_left_during_an_outage() -> None:
    tier = FakeTier([Fail(on="put", times=1)])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK), slots=8) as cache:
        for n in range(40):
            cache.save(cache.keys(n, 1, 2, 3))
            await asyncio.sleep(0.01)
        assert cache.manager.stats()["level1"]["breaker_open"]
        (waiting,) = cache.stack.host._backlog.values()
        assert 0 < len(waiting) <= 8
        await asyncio.sleep(6.0)
        cache.save(cache.keys(99))
        await cache.settle()
        assert cache.manager.lookup(cache.keys(39, 1, 2, 3)).total == 4
        assert all(tier.stored(key) for key in cache.keys(39, 1, 2, 3))


async def test_refusals_are_remembered_only_for_blocks_in_host() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT, capacity_blocks=2), slots=8) as cache:
        for n in range(20):
            cache.save(cache.keys(n, 1, 2))
            await cache.settle()
        assert cache.stack.host._refused.keys() <= {*cache.stack.host.index}
        (key,) = cache.keys(0)
        assert cache.manager.lookup([key]).total == 0
        cache.save([key])  # it was given up before, and that is forgotten
        await cache.settle()
        assert tier.stored(key)


async def test_a_full_queue_drops_no_block_that_stays_in_host() -> None:
    hold = Hold(on="put")
    spec = LevelSpec(FakeTier([hold], batch_max=1), settings=LevelSettings(queue_blocks=1))
    async with cache_of(spec, slots=6, reserve_blocks=6) as cache:
        cache.save(cache.keys(1, 2, 3, 4))
        await hold.reached()
        for _ in range(9):
            await cache.load(cache.keys(1))
            cache.stack._tidy()
        assert cache.manager.stats()["level1"]["dropped"] == {}
        hold.let_go()


async def test_a_removal_that_finds_no_room_is_not_tried_again_at_once() -> None:
    tier = FakeTier([Full(on="remove", times=100)])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()
        cache.manager.remove(cache.keys(1, 2))
        await asyncio.sleep(12.0)
        assert 1 < len(tier.batches("remove")) <= 3
        tier.heal()
        await asyncio.sleep(12.0)
        assert cache.manager.removals == 0
