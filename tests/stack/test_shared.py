"""Levels on shared tiers: blocks of others are found, and blocks removed by others are misses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import Delay, Fail, FakeStore, FakeTier, Full, Hang, Hold
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.definition import LevelSettings
from kvladder.tiers.ladder.loading.probe import Asked, Question
from tests.stack.caches import COMMIT, QUICK, cache_of, flushed


def put_by_others(tier, *path):
    """Another engine has stored this prefix; its keys."""
    keys = SimCache.keys(*path)
    tier.others_put({key: SimCache.payload(key) for key in keys})
    return keys


async def test_blocks_of_other_engines_are_found() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier)) as cache:
        keys = put_by_others(tier, 1, 2, 3)
        asked = cache.keys(1, 2, 3, 4, 5)
        assert cache.manager.lookup(asked) == (0, 0)
        assert cache.manager.reach(asked) == 5
        assert await cache.load(asked) == ["level1"] * 3
        assert cache.manager.lookup(asked) == (3, 3)
        assert tier.batches("contains") == [5]
        assert tier.batches("get") == [3]
        stats = cache.manager.stats()["level1"]
        assert (stats["probed"], stats["found"], stats["hits"]) == (5, 3, 3)
        assert cache.save(keys) == 0


async def test_a_prefix_continues_in_the_tier_where_the_index_ends() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        put_by_others(tier, 1, 2, 3, 4)
        cache.save(cache.keys(1, 2))
        await cache.settle()
        assert await cache.load(cache.keys(1, 2, 3, 4)) == ["host", "host", "level1", "level1"]
        assert tier.calls[-2].keys == tuple(cache.keys(1, 2, 3, 4)[2:])


async def test_a_shared_tier_fills_a_hole_of_another_level() -> None:
    files = FakeTier(store=await flushed((1, 2, 3)), durable=True)
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(files), LevelSpec(tier)) as cache:
        keys = cache.keys(1, 2, 3)
        put_by_others(tier, 1, 2, 3)
        cache.levels[0].remove(keys[1:2])
        assert await cache.load(keys) == ["level1", "level2", "level1"]
        assert tier.batches("contains") == [1], "what is known is not asked for"


async def read_from(cache: SimCache, keys: list[BlockKey], *levels: str) -> list[str]:
    fetch = cache.manager.fetch(keys, deadline_s=60.0, levels=levels)
    await asyncio.sleep(0.1)
    assert fetch.done
    sources = fetch.sources
    fetch.release()
    return sources


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_fetch_of_one_level_finds_its_block_though_a_hotter_one_has_it(
    *, is_known: bool
) -> None:
    hotter, colder = SharedFakeTier(), SharedFakeTier()
    async with cache_of(LevelSpec(hotter), LevelSpec(colder)) as cache:
        keys = put_by_others(hotter, 1, 2)
        put_by_others(colder, 1, 2)
        if is_known:
            assert await read_from(cache, keys, "level1") == ["level1"] * 2
            cache.stack.host.remove(keys)
        assert await read_from(cache, keys, "level2") == ["level2"] * 2
        assert not hotter.batches("contains")[is_known:], "it was not to be asked"


async def test_a_block_absent_from_one_level_is_looked_for_in_the_others() -> None:
    hotter, colder = SharedFakeTier(), SharedFakeTier()
    async with cache_of(LevelSpec(hotter), LevelSpec(colder)) as cache:
        keys = put_by_others(colder, 1, 2)
        assert await read_from(cache, keys, "level1") == []
        assert await read_from(cache, keys, "level1") == []
        assert hotter.batches("contains") == [2], "its answer is remembered"
        assert await cache.load(keys) == ["level2"] * 2
        assert await cache.load(cache.keys(3)) == []
        asked = len(hotter.calls)
        assert await read_from(cache, cache.keys(3), "level1") == []
        assert len(hotter.calls) == asked, "none had it"


async def test_an_absent_block_is_not_asked_for_again_at_once() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier)) as cache:
        asked = cache.keys(1, 2)
        for _ in range(3):
            assert await cache.load(asked) == []
        assert tier.batches("contains") == [2]
        assert cache.manager.reach(asked) == 0
        put_by_others(tier, 1, 2)
        await asyncio.sleep(tier.probe_cache_s)
        assert await cache.load(asked) == ["level1"] * 2


async def test_a_block_that_was_absent_is_asked_for_once_it_was_stored() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        keys = cache.keys(1, 2)
        assert await cache.load(keys) == []
        cache.save(keys)
        await cache.settle()
        assert cache.manager.commands.drop(keys, b"").done == 2
        assert await cache.load(keys) == ["level1"] * 2


async def test_requests_with_one_prefix_ask_once() -> None:
    tier = SharedFakeTier([Delay(0.5, on="contains")])
    async with cache_of(LevelSpec(tier)) as cache:
        put_by_others(tier, 1, 2, 3, 4)
        fetches = [cache.manager.fetch(cache.keys(1, 2, 3, n)) for n in (4, 4, 5)]
        await asyncio.sleep(1)
        assert [fetch.done for fetch in fetches] == [True] * 3
        assert [fetch.blocks for fetch in fetches] == [4, 4, 3]
        assert tier.batches("contains") == [4, 1], "the last one asks how its own prefix goes on"
        assert tier.batches("get") == [4]
        for fetch in fetches:
            fetch.release()


async def test_a_block_removed_by_another_engine_shortens_the_prefix() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT), slots=4) as cache:
        keys = cache.keys(1, 2, 3)
        cache.save(keys)
        await cache.settle()
        cache.stack.host.remove(keys[:2])
        tier.others_remove(keys[1:2])
        assert await cache.load(keys) == ["level1"]
        assert cache.manager.stats()["level1"]["misses"] == 1
        assert cache.manager.lookup(keys).total == 1
        assert cache.save(keys) == 1


@pytest.mark.parametrize("trouble", [Hang(on="contains"), Fail(on="contains")])
async def test_a_fetch_ends_by_its_deadline_whatever_the_tier_does(trouble) -> None:
    tier = SharedFakeTier([trouble])
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        keys = put_by_others(tier, 1, 2)
        began = asyncio.get_running_loop().time()
        assert await cache.load(keys, deadline_s=0.2) == []
        assert asyncio.get_running_loop().time() - began < 0.3
        assert cache.manager.stats()["level1"]["hits"] == 0
        await asyncio.sleep(5)
        assert await cache.load(keys) == ["level1"] * 2


async def test_a_probe_has_a_deadline_of_its_own() -> None:
    tier = SharedFakeTier([Hang(on="contains")])
    tier.probe_timeout_s = 0.1
    async with cache_of(LevelSpec(tier)) as cache:
        began = asyncio.get_running_loop().time()
        assert await cache.load(put_by_others(tier, 1)) == []
        assert asyncio.get_running_loop().time() - began < 0.2
        assert cache.manager.stats()["level1"]["timeouts"] == 1


async def test_a_tier_with_an_open_breaker_is_not_asked() -> None:
    tier = SharedFakeTier([Fail(on="contains", times=2)])
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        for n in (1, 2):
            assert await cache.load(cache.keys(n)) == []
        keys = put_by_others(tier, 3)
        assert cache.manager.reach(keys) == 0
        assert await cache.load(keys) == []
        assert len(tier.batches("contains")) == 2


@pytest.mark.parametrize("settled", [False, True])
async def test_a_block_removed_during_a_probe_does_not_come_back(settled) -> None:
    asking = Hold(on="contains", after=True)
    tier = SharedFakeTier([asking])
    async with cache_of(LevelSpec(tier)) as cache:
        keys = put_by_others(tier, 1, 2)
        tier.removable = {keys[0]}.__contains__
        fetch = cache.manager.fetch(keys)
        await asking.reached()
        cache.manager.remove(keys[:1])
        if settled:
            await cache.settle()
        asking.let_go()
        await asyncio.sleep(1)
        assert fetch.done
        assert fetch.blocks == 0
        fetch.release()
        assert tier.stored(keys[0]) is None, "it is removed for others too"
        assert tier.stored(keys[1]) is not None
        assert cache.manager.stats()["level1"]["found"] == 0


async def test_a_block_awaiting_removal_during_a_probe_is_not_indexed() -> None:
    removing, asking = Hold(on="remove"), Hold(on="contains", after=True)
    tier = SharedFakeTier([removing, asking])
    async with cache_of(LevelSpec(tier)) as cache:
        keys = put_by_others(tier, 1, 2)
        tier.removable = {*keys}.__contains__
        cache.manager.remove(keys)
        await removing.reached()
        fetch = cache.manager.fetch(keys)
        await asking.reached()
        removing.let_go()
        await cache.settle()
        asking.let_go()
        await asyncio.sleep(1)
        assert (fetch.done, fetch.blocks) == (True, 0)
        fetch.release()
        assert cache.manager.stats()["level1"]["found"] == 0


@pytest.mark.parametrize("how", ["clear", "purge"])
async def test_the_answer_of_a_probe_from_before_a_clear_or_purge_is_discarded(how) -> None:
    asking = Hold(on="contains", after=True)
    tier = SharedFakeTier([asking])
    async with cache_of(LevelSpec(tier)) as cache:
        fetch = cache.manager.fetch(put_by_others(tier, 1, 2), salt="tenant")
        await asking.reached()
        cache.manager.clear() if how == "clear" else list(cache.manager.purge("tenant"))
        await cache.settle()
        assert cache.levels[0].answers
        asking.let_go()
        await asyncio.sleep(1)
        assert (fetch.done, fetch.blocks) == (True, 0)
        fetch.release()
        assert cache.manager.stats()["level1"]["found"] == 0


async def test_an_answer_that_cannot_be_indexed_is_dropped_and_the_next_one_works() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier)) as cache:
        level, faults = cache.levels[0], [1]
        adopt = level.adopt

        def fragile(*given: Any) -> None:
            if faults:
                raise ZeroDivisionError(faults.pop())
            adopt(*given)

        level.adopt = fragile  # type: ignore[method-assign, assignment]
        keys = put_by_others(tier, 1, 2)
        assert await cache.load(keys, deadline_s=1.0) == []
        assert cache.stack.loader.prober.pace.ahead == 0
        assert await cache.load(keys, deadline_s=1.0) == ["level1"] * 2
        assert cache.manager.stats()["host"]["task_failures"] == 1


async def test_those_who_wait_for_the_answer_to_anothers_question_learn_that_it_failed() -> None:
    tier = SharedFakeTier([Delay(0.5, on="contains")])
    async with cache_of(LevelSpec(tier)) as cache:

        def broken(*_: Any) -> None:
            raise ZeroDivisionError

        cache.levels[0].adopt = broken  # type: ignore[method-assign, assignment]
        keys = put_by_others(tier, 1, 2)
        fetches = [cache.manager.fetch(keys, deadline_s=60.0) for _ in range(2)]
        await asyncio.sleep(2)
        assert [fetch.done for fetch in fetches] == [True, True]
        for fetch in fetches:
            fetch.release()


async def test_probes_begin_and_end_with_the_lock_held() -> None:
    """The engine's thread looks through them when it removes blocks."""

    class Guarded(dict[Asked, Question]):
        def __setitem__(self, asked: Asked, question: Question) -> None:
            assert cache.stack.lock.held()
            super().__setitem__(asked, question)

        def __delitem__(self, asked: Asked) -> None:
            assert cache.stack.lock.held()
            super().__delitem__(asked)

    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier)) as cache:
        cache.stack.loader.prober._questions = Guarded()
        assert await cache.load(put_by_others(tier, 1, 2)) == ["level1"] * 2
        assert not cache.stack.loader.prober._questions


async def test_no_fetch_waits_for_a_block_removed_while_it_loads() -> None:
    reading = Hold(on="get", after=True)
    tier = FakeTier([reading], store=await flushed((1, 2)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        first = cache.manager.fetch(cache.keys(1, 2))
        await reading.reached()
        cache.manager.remove(cache.keys(1, 2))
        second = cache.manager.fetch(cache.keys(1, 2))
        assert (second.done, second.blocks) == (True, 0)
        reading.let_go()
        await asyncio.sleep(1)
        assert (first.done, first.blocks) == (True, 0)
        first.release()
        second.release()


async def test_a_clear_removes_blocks_of_other_engines_too() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        keys = put_by_others(tier, 1, 2)
        tier.removable = lambda _key: True
        cache.save(cache.keys(7))
        asked = cache.manager.fetch(keys)
        cache.manager.clear()
        assert cache.manager.reach(keys) == 0, "not before it is gone"
        await cache.settle()
        assert not tier.records
        assert asked.done
        assert asked.blocks == 0
        asked.release()
        assert await cache.load(keys) == []


async def test_a_purge_of_a_salt_reaches_blocks_of_other_engines() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        tier.removable = {*cache.keys(1)}.__contains__
        cache.save(cache.keys(1), salt="tenant")
        cache.save(cache.keys(2))
        await cache.settle()
        (record,) = [one for one in tier.records.values() if one.facts.salt]
        (theirs,) = put_by_others(tier, 3)
        tier.records[theirs] = record._replace(key=theirs)
        list(cache.manager.purge("tenant"))
        assert not cache.levels[0].answers
        await cache.settle()
        assert [one.facts.salt for one in tier.records.values()] == [b""]
        assert cache.levels[0].answers


async def test_a_clear_that_fails_is_repeated() -> None:
    tier = SharedFakeTier([Fail(on="purge")])
    async with cache_of(LevelSpec(tier)) as cache:
        put_by_others(tier, 1, 2)
        tier.removable = lambda _key: True
        cache.manager.clear()
        await cache.settle()
        assert not tier.records


async def test_the_capacity_bounds_the_index_and_not_the_tier() -> None:
    tier = SharedFakeTier(batch_max=2)
    async with cache_of(LevelSpec(tier, COMMIT, capacity_blocks=3), slots=16) as cache:
        cache.save(cache.keys(1, 2, 3))
        await cache.settle()
        assert len(tier.records) == 3
        keys = put_by_others(tier, 7, 8)
        assert await cache.load(keys) == ["level1"] * 2
        await cache.settle()
        assert len(cache.levels[0].index) == 3
        assert len(tier.records) == 5, "what is not known here any more stays for others"
        longer = put_by_others(tier, 4, 5, 6, 7, 8)
        found = await cache.load(longer)  # more than three, where some were read in the meantime
        assert found == ["level1"] * len(found)
        assert 3 <= len(found) <= 5
        assert len(cache.levels[0].index) == 3
        assert cache.manager.stats()["level1"]["evicted"] == 2 + len(found)
        cache.save(cache.keys(30, 31))
        await cache.settle()
        assert len(cache.levels[0].index) == 3
        cache.stack.host.remove(cache.keys(1))
        assert await cache.load(cache.keys(1)) == ["level1"], "it is asked for, and found again"


async def test_found_blocks_do_not_evict_blocks_of_higher_priority() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT, capacity_blocks=8), slots=16) as cache:
        cache.save(cache.keys(*range(8)), priorities=[80] * 8)
        await cache.settle()
        assert await cache.load(put_by_others(tier, 50, 51)) == []
        assert cache.manager.stats()["level1"]["evicted"] == 0


async def test_found_blocks_count_as_admitted() -> None:
    tier = SharedFakeTier()
    rule = OffloadRule(min_priority=70)
    async with cache_of(LevelSpec(tier, rule)) as cache:
        keys = put_by_others(tier, 1)
        assert await cache.load(keys) == ["level1"]
        place = cache.levels[0].index.place(keys[0])
        assert place is not None
        assert cache.levels[0].index.meta(place).floor == 70


async def test_a_long_prefix_is_asked_for_in_batches_up_to_the_first_hole() -> None:
    tier = SharedFakeTier(batch_max=4)
    settings = LevelSettings()
    async with cache_of(LevelSpec(tier, settings=settings), slots=32) as cache:
        put_by_others(tier, *range(6))
        assert await cache.load(cache.keys(*range(20))) == ["level1"] * 6
        assert tier.batches("contains") == [4, 4]


async def test_a_full_medium_is_used_within_the_blocks_that_it_accepted() -> None:
    tier = SharedFakeTier(batch_max=2)
    async with cache_of(LevelSpec(tier, COMMIT), slots=32) as cache:
        cache.save(cache.keys(1, 2, 3, 4))
        await cache.settle()
        tier.removable = {*cache.keys(1, 2, 3, 4)[3:]}.__contains__
        cache.manager.remove(cache.keys(1, 2, 3, 4)[3:])
        await cache.settle()
        tier.script.append(Full())
        cache.save(cache.keys(7))
        await cache.settle()
        assert cache.manager.stats()["level1"]["dropped_full"] == 1
        cache.save(cache.keys(8))
        await cache.settle()
        assert len(tier.records) == 3, "one of the old ones has given way"
        assert cache.manager.stats()["level1"]["evicted"] == 1


async def test_flushed_blocks_outlive_the_process() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier)) as cache:
        cache.save(cache.keys(1, 2))
    assert len(tier.records) == 2


async def test_a_cache_can_be_closed_during_a_probe() -> None:
    tier = SharedFakeTier([Hang(on="contains")])
    async with cache_of(LevelSpec(tier)) as cache:
        fetch = cache.manager.fetch(put_by_others(tier, 1))
        await asyncio.sleep(0.1)
        assert not fetch.done
        await cache.stack.aclose(flush_timeout_s=10.0)
        assert (fetch.done, fetch.blocks) == (True, 0)


async def test_a_found_block_gets_the_salt_of_its_request_and_is_purged_with_it() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier), slots=16) as cache:
        theirs, others = put_by_others(tier, 1, 2), put_by_others(tier, 3)
        tier.removable = {*theirs}.__contains__
        for keys, salt in ((theirs, "tenant"), (others, "another")):
            fetch = cache.manager.fetch(keys, salt=salt)
            await asyncio.sleep(1)
            assert (fetch.done, fetch.blocks) == (True, len(keys))
            fetch.release()
        *_, counts = cache.manager.purge("tenant")
        assert counts == {"host": 2, "level1": 2}
        await cache.settle()
        assert cache.manager.lookup(theirs) == (0, 0)
        assert [tier.stored(key) for key in theirs] == [None, None]
        assert await cache.load(others) == ["host"]


async def test_a_found_block_does_not_arrive_after_a_purge_of_its_salt() -> None:
    reading = Hold(on="get", after=True)
    tier = SharedFakeTier([reading])
    async with cache_of(LevelSpec(tier)) as cache:
        keys = put_by_others(tier, 1)
        tier.removable = {*keys}.__contains__
        fetch = cache.manager.fetch(keys, salt="tenant")
        await reading.reached()
        list(cache.manager.purge("tenant"))
        reading.let_go()
        await cache.settle()
        await asyncio.sleep(1)
        assert fetch.done
        assert fetch.blocks == 0
        fetch.release()
        assert len(cache.stack.host.index) == len(cache.levels[0].index) == 0
        assert tier.stored(keys[0]) is None


async def test_a_block_found_during_a_purge_of_its_salt_is_not_indexed() -> None:
    asking = Hold(on="contains", after=True)
    tier = SharedFakeTier([asking])
    async with cache_of(LevelSpec(tier)) as cache:
        fetch = cache.manager.fetch(put_by_others(tier, 1), salt="tenant")
        await asking.reached()
        purging = cache.manager.purge("tenant")
        next(purging)
        await cache.settle()
        asking.let_go()
        await asyncio.sleep(1)
        assert fetch.done
        assert len(cache.levels[0].index) == 0
        list(purging)
        fetch.release()


async def test_a_level_that_is_only_read_is_never_written_to() -> None:
    keys, tier = SimCache.keys(0, 0, 0), SharedFakeTier()
    durable = FakeTier(store=FakeStore(), durable=True)
    levels = LevelSpec(tier, OffloadRule(when="never")), LevelSpec(durable, COMMIT)
    async with cache_of(*levels) as cache:
        tier.others_put({key: cache.payload(key) for key in keys[:2]})
        assert await cache.load(keys) == ["level1"] * 2
        assert cache.manager.ladder.lasting() == {"level2": True}
        cache.save(SimCache.keys(1, 1))
        await cache.settle()
        assert tier.batches("put") == []
        assert sum(durable.batches("put")) == 2, "what is saved goes past it"
