"""Deadlines, lost blocks, hung and failing tiers, removal and closing over scripted tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvladder.events import Removed, Stored
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import Delay, Fail, FakeStore, FakeTier, Full, Hang, Hold, ShortRead
from kvladder.testing.sim import SimLoop, sim_run
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.label import Read
from kvladder.tiers.ladder.definition import LevelSettings
from kvladder.tiers.ladder.loading import waiting
from tests.stack.caches import COMMIT, QUICK, cache_of, flushed


async def test_at_the_deadline_a_fetch_returns_the_arrived_blocks() -> None:
    slow = Hold(on="get")
    tier = FakeTier(store=await flushed((1, 2, 3, 4)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        keys = cache.keys(1, 2, 3, 4)
        await cache.load(keys[:2])
        tier.script.append(slow)
        assert await cache.load(keys, deadline_s=1.0) == ["host"] * 2
        slow.let_go()
        await asyncio.sleep(1)
        assert cache.manager.lookup(keys) == (4, 4), "what came too late is a hit for the next"


async def test_a_hole_ends_the_prefix_and_leaves_the_index() -> None:
    tier = FakeTier(store=await flushed((1, 2, 3, 4)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        keys = cache.keys(1, 2, 3, 4)
        tier.corrupt(keys[2])
        assert await cache.load(keys) == ["level1"] * 2
        stats = cache.manager.stats()["level1"]
        assert (stats["misses"], stats["corrupt"]) == (1, 1)
        assert cache.manager.lookup(keys).total == 2
        assert Removed("level1", (keys[2],), "lost") in cache.manager.take_events()
        await cache.settle()
        assert tier.stored(keys[2]) is None
        assert cache.save(keys) == 1, "it is recomputed and saved again"
        assert len(await cache.load(keys)) == 4


async def test_a_block_lost_by_one_level_is_loaded_from_below() -> None:
    first, second = FakeTier(), FakeTier()
    async with cache_of(LevelSpec(first, COMMIT), LevelSpec(second, COMMIT), slots=4) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys)
        await cache.settle()
        cache.save(cache.keys(3, 4, 5, 6))
        await cache.settle()
        assert cache.manager.lookup(keys).host == 0
        first.forget(keys[1])
        assert await cache.load(keys) == ["level1", "level2"]


async def test_a_short_read_is_a_miss() -> None:
    tier = FakeTier([ShortRead()], store=await flushed((1, 2)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        assert await cache.load(cache.keys(1, 2)) == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("answer_s", [0.5, 6.0])
def test_time_in_which_the_process_stood_still_does_not_count_for_a_timeout(
    seed: int, answer_s: float
) -> None:
    in_time = answer_s < QUICK.calls.timeout_s

    async def reading() -> None:
        slow = Delay(answer_s, on="get")
        tier = FakeTier([slow], store=await flushed((1, 2)), durable=True)
        async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimLoop)
            loop.call_later(0.25, loop.pause, 3.0)
            assert await cache.load(cache.keys(1, 2)) == ["level1"] * 2 * in_time
            stats = cache.manager.stats()["level1"]
            assert (stats["timeouts"], stats["errors"]) == ((0, 0) if in_time else (1, 1))

    sim_run(reading(), seed)


async def test_a_hanging_tier_is_a_miss_and_keeps_its_slots_until_it_ends() -> None:
    hang = Hang(on="get", stubborn=True)
    tier = FakeTier([hang], store=await flushed((1, 2)), durable=True)
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        keys = cache.keys(1, 2)
        assert await cache.load(keys) == []
        assert cache.manager.stats()["level1"]["timeouts"] == 1
        assert cache.arena.free == cache.arena.slots - 2, "quarantined"
        hang.let_go()
        await asyncio.sleep(0.1)
        assert cache.arena.free == cache.arena.slots


async def test_a_failing_tier_is_not_called_until_it_recovers() -> None:
    trial = Hold(on="get")
    tier = FakeTier([Fail(on="get", times=2), trial], store=await flushed((1,)), durable=True)
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        keys = cache.keys(1)

        def told() -> tuple[int, int]:
            level = cache.manager.stats()["level1"]
            return level["breaker_open"], level["breakers"]["get"]

        assert await cache.load(keys) == []
        assert told() == (0, 0)
        assert await cache.load(keys) == []
        assert told() == (1, 2)
        assert cache.manager.lookup(keys) == (0, 0), "it is not even asked"
        assert len(tier.batches("get")) == 2
        await asyncio.sleep(5.0)
        load = asyncio.create_task(cache.load(keys))
        await trial.reached()
        assert told() == (1, 1)
        trial.let_go()
        assert await load == ["level1"]
        assert told() == (0, 0)


async def test_the_host_level_keeps_evicting_when_its_tiers_are_dead() -> None:
    tier = FakeTier([Fail(on="put", times=None)])
    async with cache_of(LevelSpec(tier, settings=QUICK), slots=2, reserve_blocks=2) as cache:
        for number in range(20):
            cache.save(cache.keys(number))
            await asyncio.sleep(0.1)
        assert cache.manager.lookup(cache.keys(19)) == (1, 1)


async def test_a_full_medium_replaces_older_blocks() -> None:
    tier = FakeTier([Delay(0.0, on="put", times=2), Full()])
    async with cache_of(LevelSpec(tier, COMMIT), slots=32) as cache:
        for number in range(5):
            cache.save(cache.keys(number))
            await cache.settle()
        stats = cache.manager.stats()["level1"]
        assert stats["dropped_full"] == 1
        assert stats["blocks"] == 2, "newer blocks took the places of older ones"
        assert tier.stored(cache.keys(4)[0]) is not None
        assert tier.stored(cache.keys(0)[0]) is None
        await asyncio.sleep(61)
        cache.save(cache.keys(7))
        await cache.settle()
        assert cache.manager.stats()["level1"]["blocks"] == 3, "and tries for more after a while"


async def test_a_full_medium_is_reported_once_until_it_has_long_had_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT), slots=32) as cache:
        full = [False, True, True, True, False, True, True]
        said: list[int] = []
        for number, is_full in enumerate(full):
            tier.script.extend([Full(times=1)] if is_full else [])
            cache.save(cache.keys(number))
            await cache.settle()
            said.append(caplog.text.count("its medium is full"))
            await asyncio.sleep(61)
        assert cache.manager.stats()["level1"]["dropped_full"] == sum(full)
        assert said == [0, 1, 1, 1, 1, 1, 1], "room for a minute is no news, nor is its end"
        await asyncio.sleep(2 * 3600)
        tier.script.append(Full(times=1))
        cache.save(cache.keys(len(full)))
        await cache.settle()
        assert caplog.text.count("its medium is full") == 2


async def test_a_removed_block_is_not_brought_back() -> None:
    hold = Hold(on="put")
    reading = Hold(on="get")
    tier = FakeTier([hold, reading])
    async with cache_of(LevelSpec(tier, COMMIT), slots=2) as cache:
        keys = cache.keys(1)
        cache.save(keys)
        await hold.reached()
        cache.manager.remove(keys)
        hold.let_go()
        await cache.settle()
        assert cache.manager.lookup(keys) == (0, 0)
        assert tier.stored(keys[0]) is None
        cache.save(keys)
        await cache.settle()
        cache.save(cache.keys(2, 3))
        load = asyncio.create_task(cache.load(keys))
        await reading.reached()
        cache.manager.remove(keys)
        reading.let_go()
        assert await load == []
        assert cache.manager.lookup(keys) == (0, 0)


async def test_a_save_does_not_publish_a_block_removed_meanwhile() -> None:
    async with cache_of() as cache:
        save = cache.manager.save(cache.keys(1))
        cache.manager.clear()
        save.commit()
        assert cache.manager.lookup(cache.keys(1)) == (0, 0)


async def test_a_slot_that_is_loaded_from_survives_the_removal_of_its_block() -> None:
    async with cache_of(slots=1) as cache:
        keys = cache.keys(1)
        cache.save(keys)
        fetch = cache.manager.fetch(keys)
        assert fetch.done
        cache.manager.remove(keys)
        assert cache.save(cache.keys(2)) == 0, "its slot is not free"
        assert bytes(cache.arena.view(fetch.slots[0])[:64]) == cache.payload(keys[0])
        fetch.release()
        assert cache.save(cache.keys(2)) == 1


async def test_unusable_bytes_are_forgotten_in_every_level() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()
        fetch = cache.manager.fetch(cache.keys(1, 2))
        assert fetch.done
        fetch.forget()
        await cache.settle()
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)
        assert not tier.records


async def test_a_time_to_live_ends_in_every_level() -> None:
    tier = FakeTier()
    level = LevelSpec(tier, OffloadRule(when="commit", ttl_s=60.0))
    async with cache_of(level, host=OffloadRule(ttl_s=10.0)) as cache:
        keys = cache.keys(1)
        cache.save(keys)
        await cache.settle()
        await asyncio.sleep(11)
        assert await cache.load(keys) == ["level1"]
        await asyncio.sleep(50)
        assert await cache.load(keys) == []
        await cache.settle()
        assert not tier.records
        stats = cache.manager.stats()
        assert stats["host"]["expired"] == 2
        assert stats["level1"]["expired"] == 1


async def test_a_level_may_admit_blocks_on_their_second_use() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, OffloadRule(when="commit", min_hits=2))) as cache:
        cache.save(cache.keys(1, 2))
        await cache.load(cache.keys(1, 2))
        await cache.settle()
        assert tier.batches("put") == []
        await cache.load(cache.keys(1))
        await cache.settle()
        assert tier.batches("put") == [1]


async def test_the_fetch_budget_limits_the_blocks_of_a_read() -> None:
    tier = FakeTier(store=await flushed((1, 2, 3, 4)), durable=True)
    async with cache_of(LevelSpec(tier), fetch_blocks_max=3) as cache:
        assert await cache.load(cache.keys(1, 2, 3, 4)) == ["level1"] * 4
        assert tier.batches("get") == [3, 1]


async def test_a_block_with_an_unknown_result_is_a_miss_and_stays_known() -> None:
    class Partly(FakeTier):
        async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
            found = await super().get(reads)
            return found if self.batches("get")[1:] else [*found[:-1], None]

    tier = Partly(store=await flushed((1, 2, 3)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        keys = cache.keys(1, 2, 3)
        assert await cache.load(keys) == ["level1"] * 2
        counts = cache.manager.stats()["level1"]
        assert (counts["errors"], counts["misses"], counts["loaded"]) == (1, 0, 2)
        assert cache.manager.removals == 0
        assert await cache.load(keys) == ["host", "host", "level1"]


async def test_an_unpolled_load_leaves_the_queue_at_its_deadline() -> None:
    store = await flushed((1,), (2,), (3,))
    tier = FakeTier([Delay(3.0, times=None)], store=store, durable=True)
    async with cache_of(LevelSpec(tier), fetch_blocks_max=1) as cache:
        first, second, third = (
            cache.manager.fetch(cache.keys(n), deadline_s=s) for n, s in ((1, 9), (2, 2), (3, 7))
        )
        await asyncio.sleep(6.5)
        assert third.done
        assert third.blocks == 1, "it did not wait for what nobody wants any more"
        assert (first.done, second.done) == (True, True)
        assert (first.blocks, second.blocks) == (1, 0)
        assert tier.batches("get") == [1, 1]
        assert cache.manager.stats()["level1"]["late"] == 1
        for fetch in (first, second, third):
            fetch.release()


async def test_a_load_waits_for_slots_that_are_being_cleaned() -> None:
    tier = FakeTier([Delay(0.1, times=None)], store=await flushed(tuple(range(6))), durable=True)
    async with cache_of(LevelSpec(tier), slots=6) as cache:
        cache.save(cache.keys(9, 8, 7, 6, 5, 4))
        assert await cache.load(cache.keys(*range(6))) == ["level1"] * 6
        assert len(await cache.load(cache.keys(9, 8, 7, 6, 5, 4))) == 6, "which was written back"


async def test_a_load_larger_than_the_arena_does_not_wait_for_the_rest() -> None:
    tier = FakeTier(store=await flushed(tuple(range(12))), durable=True)
    async with cache_of(LevelSpec(tier), slots=4) as cache:
        before = asyncio.get_running_loop().time()
        assert await cache.load(cache.keys(*range(12)), deadline_s=100.0) == ["level1"] * 4
        assert asyncio.get_running_loop().time() - before < 1.0


async def test_no_more_blocks_wait_for_room_than_there_are_slots() -> None:
    one, other, reading = tuple(range(8)), tuple(range(20, 28)), Hold(on="get")
    tier = FakeTier([reading], store=await flushed(one, other), durable=True)
    async with cache_of(LevelSpec(tier), slots=4) as cache:
        fetches = [cache.manager.fetch(cache.keys(*path), deadline_s=9.0) for path in (one, other)]
        await reading.reached()
        assert len(cache.stack.loader._queue) == cache.arena.slots
        reading.let_go()
        await asyncio.sleep(10.0)
        for fetch in fetches:
            fetch.release()


async def test_blocks_that_wait_while_nothing_can_make_room_are_all_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "BATCH", 1)
    held, *wanted = tuple(range(4)), (20, 21), (30, 31)
    tier = FakeTier(store=await flushed(held, *wanted), durable=True)
    async with cache_of(LevelSpec(tier), slots=4) as cache:
        first = cache.manager.fetch(cache.keys(*held), deadline_s=9.0)
        await asyncio.sleep(1.0)
        assert first.done
        assert first.blocks == 4
        before = asyncio.get_running_loop().time()
        others = [cache.manager.fetch(cache.keys(*one), deadline_s=100.0) for one in wanted]
        while not all(one.done for one in others):  # noqa: ASYNC110 - as an engine does
            await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - before < 5.0
        for one in (first, *others):
            one.release()


async def test_back_pressure_drops_the_least_valuable_first() -> None:
    hold = Hold(on="put")
    tier = FakeTier([hold], batch_max=1)
    every = OffloadRule(min_priority=0)
    spec = LevelSpec(tier, every, settings=LevelSettings(queue_blocks=2))
    async with cache_of(spec, slots=8, host=OffloadRule(min_priority=100)) as cache:
        cache.save(cache.keys(0))
        await hold.reached()
        for number, priority in ((1, 50), (2, 20), (3, 35), (4, 10)):
            cache.save(cache.keys(number), priorities=[priority])
        hold.let_go()
        await cache.settle()
        kept = [n for n in range(5) if tier.stored(cache.keys(n)[0])]
        assert kept == [0, 1, 3]
        assert cache.manager.stats()["level1"]["dropped_queue"] == 2


async def test_closing_flushes_blocks_that_only_host_holds() -> None:
    store = await flushed((1, 2, 3))
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        assert cache.manager.stats()["level1"]["recovered"] == 3
        assert len(await cache.load(cache.keys(1, 2, 3))) == 3


async def test_priorities_survive_a_restart_unless_they_have_a_duration() -> None:
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True), COMMIT)) as cache:
        cache.save(cache.keys(1, 2), priorities=[80, 90], durations_s=[None, 60.0])
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        index = cache.levels[0].index
        places = [index.place(key) for key in cache.keys(1, 2)]
        assert [index.meta(place).priority for place in places if place is not None] == [80, 35]


async def test_closing_does_not_wait_for_a_tier_that_hangs() -> None:
    tier = FakeTier([Hang(on="put", times=None)])
    cache = await SimCache.open(LevelSpec(tier, COMMIT, settings=QUICK))
    cache.save(cache.keys(1, 2))
    await asyncio.sleep(0.1)
    await cache.aclose(flush_timeout_s=1.0)


async def test_a_call_cut_short_by_closing_is_no_failure_of_the_tier(caplog) -> None:
    put, get = Hang(on="put"), Hang(on="get", stubborn=True)
    tier = FakeTier([put, get], store=await flushed((1,)), durable=True)
    cache = await SimCache.open(LevelSpec(tier, COMMIT))
    cache.save(cache.keys(2))
    fetch = cache.manager.fetch(cache.keys(1), deadline_s=100.0)
    await asyncio.sleep(0.1)
    await cache.aclose(flush_timeout_s=0.1)
    fetch.release()
    level = cache.manager.stats()["level1"]
    assert (level["errors"], level["timeouts"], level["breaker"]) == (0, 0, 0)
    assert caplog.messages == [
        "closing: blocks that only host held were not all written in 0.1 s: the rest is lost"
    ]


async def test_a_load_that_is_cut_short_by_closing_is_a_miss() -> None:
    tier = FakeTier([Hang(on="get")], store=await flushed((1,)), durable=True)
    cache = await SimCache.open(LevelSpec(tier))
    fetch = cache.manager.fetch(cache.keys(1), deadline_s=100.0)
    await asyncio.sleep(0.1)
    assert not fetch.done
    await cache.aclose()
    assert fetch.done
    assert fetch.blocks == 0
    fetch.release()


async def test_events_report_stores_and_evictions_by_level() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT), slots=2) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys)
        await cache.settle()
        cache.save(cache.keys(3))
        taken = cache.manager.take_events()
        assert taken[0] == Stored("host", tuple(keys))
        assert Stored("level1", tuple(keys)) in taken
        assert Removed("host", (keys[1],), "evicted") in taken
