"""Saving, eviction, demotion and promotion over scripted tiers."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from kvladder.events import Removed
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import Delay, FakeStore, FakeTier, Hold
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.definition import LevelSettings
from kvladder.tiers.ladder.records import index
from tests.stack.caches import COMMIT, cache_of, flushed


async def test_a_committed_block_is_a_host_hit() -> None:
    async with cache_of() as cache:
        keys = cache.keys(1, 2, 3)
        save = cache.manager.save(keys)
        assert cache.manager.lookup(keys) == (0, 0), "not before it is committed"
        assert await cache.load(keys) == []
        for key, slot in zip(keys, save.slots, strict=True):
            cache.arena.view(slot)[:64] = cache.payload(key)
        save.commit()
        assert cache.manager.lookup(keys) == (3, 3)
        assert await cache.load(cache.keys(1, 2, 9)) == ["host"] * 2
        assert cache.save(keys) == 0, "nothing is stored twice"


@pytest.mark.parametrize("reserve", [None, 35])
async def test_a_long_prompt_saved_at_once_equals_one_saved_block_by_block(
    reserve: int | None,
) -> None:
    tier = FakeTier()
    options = {} if reserve is None else {"priorities": [reserve] * 100}
    async with cache_of(LevelSpec(tier, COMMIT, capacity_blocks=200), slots=220) as cache:
        keys = cache.keys(*range(100))
        assert cache.save(keys, **options) == 100
        assert cache.save(keys, **options) == 0
        one, other = cache.manager.save(cache.keys(*range(50), 7)), cache.keys(*range(40, 90))
        assert len(one.slots) == 1
        late = cache.manager.save(other)
        cache.manager.remove(other[:1])
        late.commit()  # its first block was removed in between
        one.abort()
        cache.manager.check()
        await cache.settle()
        assert sum(tier.batches("put")) == 149
        assert await cache.load(keys) == ["host"] * 100
        assert await cache.load(other) == []
        assert cache.manager.lookup(other[1:]).host == 49
        assert cache.arena.free == 220 - 149


async def test_an_aborted_save_leaves_nothing() -> None:
    async with cache_of() as cache:
        save = cache.manager.save(cache.keys(1, 2))
        save.abort()
        save.abort()
        assert cache.arena.free == cache.arena.slots
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)


async def test_a_prefix_is_written_through_in_order_in_one_batch() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        keys = cache.keys(1, 2, 3)
        cache.save(keys)
        await cache.settle()
        assert tier.batches("put") == [3]
        assert [call.keys for call in tier.calls if call.operation == "put"] == [tuple(keys)]
        assert all(tier.stored(key) == cache.payload(key) for key in keys)


async def test_a_burst_larger_than_the_queue_is_written_through_in_the_end() -> None:
    tier = FakeTier([Delay(0.1, times=None)], batch_max=2)
    spec = LevelSpec(tier, COMMIT, settings=LevelSettings(queue_blocks=2))
    async with cache_of(spec, slots=16) as cache:
        keys = cache.keys(*range(12))
        assert cache.save(keys) == 12
        await cache.settle()
        assert [key for key in keys if tier.stored(key)] == keys
        assert cache.manager.stats()["level1"].get("dropped_queue", 0) == 0


async def test_a_block_is_written_back_only_when_it_leaves_the_level_above() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier), slots=4, reserve_blocks=2) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()
        assert tier.batches("put") == [], "there is room"
        cache.save(cache.keys(3, 4))
        await cache.settle()
        assert tier.batches("put") == [2], "two victims were cleaned ahead"
        assert cache.save(cache.keys(5, 6)) == 2, "so that this finds room at once"
        assert await cache.load(cache.keys(1, 2)) == ["level1"] * 2


async def test_a_victim_stays_readable_until_it_is_stored_below() -> None:
    hold = Hold(on="put")
    tier = FakeTier([hold])
    async with cache_of(LevelSpec(tier), slots=2, reserve_blocks=2) as cache:
        cache.save(cache.keys(1, 2))
        await hold.reached()
        assert cache.save(cache.keys(8, 9)) == 0, "a dirty block is not given up for a newcomer"
        assert cache.manager.stats()["host"]["dropped_room"] == 2
        assert await cache.load(cache.keys(1, 2)) == ["host"] * 2
        hold.let_go()
        await cache.settle()
        assert cache.save(cache.keys(8, 9)) == 2
        assert await cache.load(cache.keys(8)) == ["host"]


async def test_e_12_a_threshold_is_inclusive_and_ends_the_prefix() -> None:
    low, high = FakeTier(), FakeTier()
    levels = (
        LevelSpec(low, OffloadRule(min_priority=35, when="commit")),
        LevelSpec(high, OffloadRule(min_priority=70, when="commit")),
    )
    async with cache_of(*levels) as cache:
        keys = cache.keys(1, 2, 3, 4)
        cache.save(keys, priorities=[70, 69, 80, 34])
        await cache.settle()
        assert [key for key in keys if low.stored(key)] == keys[:3]
        assert [key for key in keys if high.stored(key)] == keys[:1], "80 lies behind a 69"
        save = cache.manager.save(cache.keys(7), parent_floor=34, priorities=[90])
        assert save.floor == 34
        save.abort()


async def test_unsaved_blocks_count_for_the_floor_of_later_ones() -> None:
    draw = Random(1)
    async with cache_of(slots=16, host=OffloadRule(min_priority=0)) as cache:
        for _ in range(100):
            count = draw.randrange(1, 12)
            said = [draw.choice([10, 35, 80]) for _ in range(count)]
            only = sorted(draw.sample(range(count), draw.randrange(count + 1)))
            before = draw.choice([5, 35, 100])
            keys = cache.keys(*range(count))
            save = cache.manager.save(keys, only=only, parent_floor=before, priorities=said)
            assert (save.indices, save.floor) == (only, min(before, *said))
            save.commit()
            index = cache.stack.host.index
            places = {at: index.place(key) for at, key in enumerate(keys)}
            found = {at: index.meta(p).floor for at, p in places.items() if p is not None}
            assert found == {at: min([before, *said[: at + 1]]) for at in only}
            again = cache.manager.save(keys, only=range(count), priorities=said)
            assert again.indices == [at for at in range(count) if at not in only]
            again.abort()
            cache.manager.clear()


async def test_a_save_needs_one_priority_and_duration_per_block() -> None:
    async with cache_of() as cache:
        for name in ("priorities", "durations_s"):
            for said in ([], [1], [1, 1, 1]):
                wrong: dict[str, Any] = {name: said}
                with pytest.raises(ValueError, match=f"{name}: .* 2 keys, found {len(said)}"):
                    cache.manager.save(cache.keys(1, 2), **wrong)
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)
        assert cache.save(cache.keys(1, 2)) == 2


async def test_e_5_a_block_that_no_level_takes_is_not_saved() -> None:
    async with cache_of(host=OffloadRule(min_priority=35)) as cache:
        assert cache.save(cache.keys(1, 2, 3), priorities=[35, 5, 35]) == 1


async def test_a_block_refused_by_host_goes_straight_below() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier), host=OffloadRule(min_priority=50)) as cache:
        keys = cache.keys(1, 2)
        assert cache.save(keys) == 2
        await cache.settle()
        assert cache.manager.lookup(keys) == (0, 2)
        assert cache.arena.free == cache.arena.slots
        assert await cache.load(keys) == ["level1"] * 2
        assert cache.arena.free == cache.arena.slots, "nor does it stay there when it comes up"


async def test_eviction_is_exact_and_goes_down_the_stack() -> None:
    first, second = FakeTier(), FakeTier()
    levels = (LevelSpec(first, COMMIT, capacity_blocks=3), LevelSpec(second))
    async with cache_of(*levels, slots=16) as cache:
        for number in range(5):
            cache.save(cache.keys(number))
            await cache.settle()
        stats = cache.manager.stats()
        assert stats["level1"]["blocks"] == 3
        assert stats["level1"]["evicted"] == 2
        assert stats["level2"]["blocks"] == 2
        assert all(second.stored(cache.keys(number)[0]) for number in (0, 1))
        assert len(first.records) == 3, "the tier was told what to forget"


async def test_the_lowest_priority_is_evicted_first() -> None:
    async with cache_of(slots=3) as cache:
        for number, priority in ((1, 80), (2, 5), (3, 35)):
            cache.save(cache.keys(number), priorities=[priority])
        assert cache.save(cache.keys(4), priorities=[50]) == 1
        assert cache.save(cache.keys(5), priorities=[50]) == 1
        held = [n for n in range(1, 6) if cache.manager.lookup(cache.keys(n)).host]
        assert held == [1, 4, 5]
        assert cache.save(cache.keys(6), priorities=[20]) == 0, "nothing here is worth less"


async def test_a_level_below_evicts_nothing_for_a_block_of_lower_priority() -> None:
    tier = FakeTier()
    every = OffloadRule(when="commit", min_priority=0)
    spec = LevelSpec(tier, every, capacity_blocks=2)
    async with cache_of(spec, slots=8, host=OffloadRule(min_priority=0)) as cache:
        (high, low), newcomers = cache.keys(1, 2), cache.keys(3, 4, 5)
        cache.save([high], priorities=[80])
        cache.save([low], priorities=[20], parent_floor=80)
        await cache.settle()
        cache.save(newcomers, priorities=[10, 60, 40])
        await cache.settle()
        assert [key for key in (high, low, *newcomers) if tier.stored(key)] == [high, newcomers[1]]
        stats = cache.manager.stats()["level1"]
        assert (stats["evicted"], stats["dropped_outranked"]) == (1, 2)


async def test_a_prefix_outlives_its_followers() -> None:
    async with cache_of(slots=4) as cache:
        keys = cache.keys(1, 2, 3, 4)
        cache.save(keys[:2])
        cache.save(keys[2:])
        cache.manager.touch(keys)
        await asyncio.sleep(0.01)
        cache.save(cache.keys(9, 9))
        assert cache.manager.lookup(keys) == (2, 2)


async def test_promotion_hands_the_slot_over() -> None:
    store = FakeStore()
    keys = SimCache.keys(1, 2, 3)
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True))) as cache:
        cache.save(keys)
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        assert cache.manager.lookup(keys) == (0, 3)
        assert await cache.load(keys) == ["level1"] * 3
        assert tier.batches("get") == [3], "one batch"
        assert await cache.load(keys) == ["host"] * 3
        assert cache.arena.slots - cache.arena.free == 3


async def test_fetches_of_a_block_in_flight_share_its_load() -> None:
    hold = Hold(on="get")
    tier = FakeTier([hold], store=await flushed((1, 2, 3)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        loads = [asyncio.create_task(cache.load(cache.keys(1, 2, n))) for n in (3, 3, 9)]
        await hold.reached()
        hold.let_go()
        assert [len(await load) for load in loads] == [3, 3, 2]
        assert sum(tier.batches("get")) == 3, "each block is read once"


async def test_a_block_loaded_during_a_clear_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvladder.tiers.ladder.records.queries.STEP", 1)
    reading = Hold(on="get", after=True)
    tier = FakeTier([reading], store=await flushed((1,), (2,)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        steps = cache.stack.clear()
        next(steps)
        (left,) = [
            key for key in cache.keys(1) + cache.keys(2) if cache.manager.lookup([key]).total
        ]
        fetch = cache.manager.fetch([left])
        await reading.reached()
        list(steps)
        reading.let_go()
        await cache.settle()
        assert (fetch.done, fetch.blocks) == (True, 0)
        fetch.release()
        assert cache.manager.lookup([left]) == (0, 0)


async def test_a_clear_runs_in_steps_during_which_nothing_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvladder.tiers.ladder.records.queries.STEP", 2)
    async with cache_of(LevelSpec(FakeTier(), COMMIT), slots=8) as cache:
        old = cache.keys(1, 2, 3, 4, 5)
        cache.save(old)
        await cache.settle()
        cache.manager.take_events()
        steps = cache.stack.clear()
        next(steps)
        assert cache.save(cache.keys(7, 8)) == 0, "it might be where nobody looks again"
        await cache.settle()
        list(steps)
        await cache.settle()
        assert cache.manager.lookup(old).total == 0
        assert cache.manager.removals == 0
        assert cache.save(cache.keys(7, 8)) == 2
        gone = [one for one in cache.manager.take_events() if isinstance(one, Removed)]
        for level in ("host", "level1"):
            parts = [one.keys for one in gone if one.level == level]
            assert sorted(key for keys in parts for key in keys) == sorted(old)
            assert max(map(len, parts)) == 2, "one event a step and level, not one a block"


async def test_any_slot_of_a_block_that_host_refuses_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index, "RESERVED_MAX", 0)  # as of an arena that is very large
    below = LevelSpec(FakeTier(store=await flushed((1, 2, 3)), durable=True))
    async with cache_of(below, slots=8, host=OffloadRule(min_priority=50)) as cache:
        fetch = cache.manager.fetch(cache.keys(1, 2, 3))
        await cache.settle()
        assert fetch.done
        assert fetch.blocks == 3
        fetch.release()
        assert cache.arena.free == 8
