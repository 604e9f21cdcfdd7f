"""An operator's checks and evictions, with tiers that damage, lose, fail and hang."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvladder.testing.fakes import Fail, FakeTier, Hang, Hold
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.upkeep.blocks import Evicted
from kvladder.tiers.ladder.upkeep.verify import Verified
from tests.stack.caches import COMMIT, QUICK, cache_of

ALL = (1, 2, 3, 4, 5)


async def filled(cache: SimCache, *path: int) -> None:
    cache.save(cache.keys(*path))
    await cache.settle()


async def verified(cache: SimCache, blocks: int = 16) -> Verified:
    """Verify the first level below host to its end, and return the sum."""
    total = Verified()
    at: int | None = 0
    while at is not None:
        found = await cache.manager.upkeep.verify(cache.stack.levels[0].name, at, blocks)
        total = Verified(*(a + b for a, b in zip(total[:5], found[:5], strict=True)))
        at = found.next
    return total


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 16])
async def test_damaged_and_lost_blocks_leave_their_level(*, shared: bool, blocks: int) -> None:
    tier = SharedFakeTier() if shared else FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT), slots=32) as cache:
        await filled(cache, *ALL)
        before = cache.manager.stats()
        keys = cache.keys(*ALL)
        assert (await verified(cache, blocks))[:5] == (5, 5 * cache.arena.slot_bytes, 0, 0, 0)
        tier.corrupt(keys[1])
        tier.forget(keys[3])
        found = await verified(cache, blocks)
        assert (found.checked, found.damaged, found.lost) == (5, 1, 1)
        level = cache.stack.levels[0]
        assert [key in level.index for key in keys] == [True, False, True, False, True]
        after = cache.manager.stats()
        assert after["host"] == before["host"]
        assert after[level.name]["hits"] == 0
        assert after[level.name]["corrupt"] == 1
        await cache.settle()
        assert (await verified(cache, blocks)).checked == 3


async def test_blocks_that_a_failing_or_hanging_tier_does_not_read_stay() -> None:
    for step in (Fail(on="get"), Hang(on="get")):
        tier = FakeTier()
        async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
            await filled(cache, 1, 2)
            free = cache.arena.free
            tier.script.append(step)
            found = await verified(cache)
            assert (found.checked, found.unread) == (0, 2)
            assert len(cache.stack.levels[0].index) == 2
            tier.heal()
            await asyncio.sleep(10)
            assert cache.arena.free == free
            assert (await verified(cache)).checked == 2


async def test_without_a_free_slot_a_check_takes_those_of_blocks_that_lie_below_too() -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT), slots=4) as cache:
        await filled(cache, 1, 2, 3, 4)
        assert cache.arena.free == 0
        fetch = cache.manager.fetch(cache.keys(1, 2, 3, 4))
        assert fetch.done
        found = await cache.manager.upkeep.verify(cache.stack.levels[0].name, 0, 4)
        assert (found.unread, found.next, found.checked) == (4, 0, 0)
        fetch.release()
        assert (await verified(cache, 2)).checked == 4
        assert cache.manager.lookup(cache.keys(1, 2, 3, 4)).total == 4


async def test_a_block_that_is_removed_while_it_is_checked_stays_away() -> None:
    tier, reading = FakeTier(), Hold(on="get", after=True)
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        await filled(cache, 1, 2)
        tier.script.append(reading)
        checking = asyncio.create_task(verified(cache))
        await reading.reached()
        keys = cache.keys(1, 2)
        copies = cache.manager.upkeep.inspect(keys[0])
        assert [(one.level, one.holds) for one in copies] == [
            ("host", 0),
            (cache.stack.levels[0].name, 1),
        ]
        assert cache.manager.upkeep.evict(cache.stack.levels[0].name, keys) == Evicted(held=2)
        cache.save(cache.keys(8, 9))
        await asyncio.sleep(0.1)
        next_ones = cache.manager.upkeep.evict_next(cache.stack.levels[0].name, 9)
        assert next_ones == Evicted(evicted=2, held=2)
        cache.manager.remove(keys[:1])
        reading.let_go()
        found = await checking
        assert (found.checked, found.damaged, found.lost) == (2, 0, 0)
        await cache.settle()
        assert cache.manager.lookup(keys) == (0, 0)
        assert [*map(tier.stored, keys)].count(None) == 1


async def test_a_check_that_is_cancelled_gives_its_slots_back() -> None:
    tier, reading = FakeTier(), Hold(on="get", after=True)
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        await filled(cache, 1, 2)
        free = cache.arena.free
        tier.script.append(reading)
        checking = asyncio.create_task(verified(cache))
        await reading.reached()
        checking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await checking
        reading.let_go()
        await asyncio.sleep(1)
        assert cache.arena.free == free
        assert (await verified(cache)).checked == 2


async def test_moves_of_a_block_are_shown() -> None:
    tier, writing = FakeTier(), Hold(on="put")
    tier.script.append(writing)
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        key = cache.keys(1)[0]
        cache.save([key])
        await writing.reached()
        look = cache.manager.upkeep.inspect
        name = cache.stack.levels[0].name
        assert [(one.level, one.state) for one in look(key)] == [
            ("host", "held"),
            (name, "writing"),
        ]
        writing.let_go()
        await cache.settle()
        assert [one.state for one in look(key)] == ["held", "held"]
        assert cache.manager.upkeep.evict_next("host", 9) == Evicted(evicted=1)
        reading = Hold(on="get")
        tier.script.append(reading)
        fetch = cache.manager.fetch([key])
        await reading.reached()
        assert [(one.level, one.state) for one in look(key)] == [
            ("host", "arriving"),
            (name, "held"),
        ]
        reading.let_go()
        await asyncio.sleep(1)
        assert fetch.done
        fetch.release()


async def test_host_waits_for_room_in_the_queue_below_before_it_evicts() -> None:
    tier, writing = FakeTier(batch_max=1), Hold(on="put")
    tier.script.append(writing)
    spec = LevelSpec(tier, settings=replace(QUICK, queue_blocks=1))
    async with cache_of(spec, slots=8) as cache:
        cache.save(cache.keys(*ALL))
        first = cache.manager.upkeep.evict_next("host", 5)
        assert (first.evicted + first.waiting, first.waiting > 0) == (5, True)
        writing.let_go()
        evicted = first.evicted
        for _ in range(100):
            evicted += cache.manager.upkeep.evict_next("host", 5 - evicted).evicted
            await asyncio.sleep(0.1)
        assert evicted == 5
        await cache.settle()
        assert len(cache.stack.host.index) == 0
        assert cache.manager.lookup(cache.keys(*ALL)).total == 5
