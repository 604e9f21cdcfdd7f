"""A set of blocks: its available blocks are found and loaded, whichever are missing."""

from __future__ import annotations

import asyncio

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.manager import SetFetch
from kvladder.testing.fakes import FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.testing.steps import Fail, Hold
from tests.stack.caches import QUICK, cache_of, flushed

SAVED = SimCache.keys(0, 0, 0, 0)
OTHERS = SimCache.keys(9, 9, 9, 9)
HOLED = [OTHERS[0], SAVED[3], OTHERS[1], SAVED[0], SAVED[2], OTHERS[2]]


def is_whole(cache: SimCache, found: dict[BlockKey, Slot]) -> bool:
    """Return whether each slot has the bytes of its block."""
    return all(
        bytes(cache.arena.view(slot)[:64]) == cache.payload(key) for key, slot in found.items()
    )


async def loaded(fetch: SetFetch) -> set[BlockKey]:
    """Return the loaded keys of a fetch, and release it."""
    await fetch.settle()
    found = set(fetch.found)
    fetch.release()
    return found


async def test_a_set_in_host_is_found_and_pinned_around_its_holes() -> None:
    async with cache_of() as cache:
        cache.save(SAVED)
        assert cache.manager.holding(HOLED) == [False, True, False, True, True, False]
        fetch = cache.manager.fetch_set(HOLED)
        assert fetch.done
        assert set(fetch.found) == {SAVED[0], SAVED[2], SAVED[3]}
        assert is_whole(cache, fetch.found)
        assert [cache.arena.claims(slot) for slot in fetch.found.values()] == [2, 2, 2]
        fetch.release()
        fetch.release()
        assert cache.manager.lookup(SAVED).host == 4


async def test_a_set_is_loaded_from_below_in_one_batch() -> None:
    store = await flushed((0, 0, 0, 0))
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        assert cache.manager.holding(HOLED) == [False, True, False, True, True, False]
        fetch = cache.manager.fetch_set(HOLED)
        await fetch.settle()
        assert set(fetch.found) == {SAVED[0], SAVED[2], SAVED[3]}
        assert is_whole(cache, fetch.found)
        fetch.release()
        assert tier.batches("get") == [3]


async def test_a_damaged_block_costs_only_itself() -> None:
    store = await flushed((0, 0, 0, 0))
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        tier.corrupt(SAVED[2])
        assert await loaded(cache.manager.fetch_set(HOLED)) == {SAVED[0], SAVED[3]}
        assert cache.manager.holding(SAVED) == [True, True, False, True]


async def test_at_the_deadline_a_set_has_the_blocks_that_arrived() -> None:
    store = await flushed((0, 0, 0, 0))
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        cache.save(OTHERS)
        held = Hold(on="get")
        tier.script.append(held)
        fetch = cache.manager.fetch_set([*SAVED, *OTHERS], deadline_s=0.2)
        assert not fetch.done
        assert not fetch.found
        began_s = asyncio.get_running_loop().time()
        assert await loaded(fetch) == set(OTHERS)
        assert 0.19 < asyncio.get_running_loop().time() - began_s < 0.3
        held.let_go()


async def test_a_failing_level_ends_only_the_wait_for_its_own_blocks() -> None:
    store = await flushed((0, 0, 0, 0))
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        cache.save(OTHERS[:2])
        tier.script.append(Fail(on="get"))
        assert await loaded(cache.manager.fetch_set([*SAVED, *OTHERS])) == set(OTHERS[:2])


async def test_a_block_removed_while_it_loads_is_missing() -> None:
    store = await flushed((0, 0, 0, 0))
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        fetch = cache.manager.fetch_set(HOLED)
        cache.manager.remove(SAVED[3:])
        assert await loaded(fetch) <= {SAVED[0], SAVED[2], SAVED[3]}
        again = cache.manager.fetch_set(HOLED)
        assert await loaded(again) == {SAVED[0], SAVED[2]}


async def test_forgetting_a_set_removes_only_the_blocks_that_arrived() -> None:
    store = await flushed((0, 0, 0, 0))
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        tier.script.append(Fail(on="get"))
        cache.save(OTHERS[:1])
        fetch = cache.manager.fetch_set([*SAVED, *OTHERS[:1]])
        await fetch.settle()
        assert set(fetch.found) == set(OTHERS[:1])
        fetch.forget()
        assert cache.manager.holding([*SAVED, *OTHERS[:1]]) == [True, True, True, True, False]
        assert await loaded(cache.manager.fetch_set(SAVED)) == set(SAVED)


async def test_a_set_expires_block_by_block() -> None:
    async with cache_of() as cache:
        cache.save(SAVED[:2], ttl_s=1.0)
        cache.save(SAVED, only=[2, 3])
        await asyncio.sleep(2.0)
        fetch = cache.manager.fetch_set(SAVED)
        assert set(fetch.found) == set() or fetch.done
        assert await loaded(fetch) == set(SAVED[2:])


async def test_a_set_is_read_from_host_and_the_levels_that_are_named() -> None:
    store = await flushed((0, 0, 0, 0))
    mine, theirs = FakeTier(store=store, durable=True), SharedFakeTier()
    async with cache_of(LevelSpec(mine), LevelSpec(theirs)) as cache:
        theirs.others_put({key: cache.payload(key) for key in OTHERS})
        assert await loaded(cache.manager.fetch_set(OTHERS)) == set(), "nobody is asked"
        assert await cache.load(OTHERS) == ["level2"] * 4
        cache.save(SimCache.keys(1, 1, 1, 1, 1, 1, 1, 1))  # which takes all of host
        await cache.settle()
        assert cache.manager.holding(SAVED + OTHERS) == [True] * 8
        assert cache.manager.holding(SAVED + OTHERS, levels=["level1"])[:4] == [True] * 4
        named = await loaded(cache.manager.fetch_set(SAVED, levels=["level2"]))
        assert named <= set(SAVED) - set(SAVED[1:])
        assert await loaded(cache.manager.fetch_set(SAVED, levels=["level1"])) == set(SAVED)


async def test_an_empty_set_and_repeated_keys_are_accepted() -> None:
    async with cache_of() as cache:
        cache.save(SAVED)
        assert cache.manager.holding([]) == []
        assert await loaded(cache.manager.fetch_set([])) == set()
        assert await loaded(cache.manager.fetch_set(OTHERS)) == set()
        assert await loaded(cache.manager.fetch_set([*SAVED, *SAVED])) == set(SAVED)
