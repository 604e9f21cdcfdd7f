"""Batches larger than the arena: they are processed in pieces, in turn with others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from kvladder.keys import BlockKey
from kvladder.manager import BatchedFetch, BatchedSave, Save
from kvladder.notices import Notices
from kvladder.testing.fakes import FakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.testing.steps import Fail, Hold
from kvladder.tiers.ladder.batched import ROOM_S, SILENT_S, SlotAdmission
from kvladder.tiers.ladder.loading.unreleased import Unreleased
from tests.stack.caches import cache_of

LONG = SimCache.keys(*range(30))
OTHER = SimCache.keys(*range(100, 130))


class Still:
    """A clock that stands still."""

    def now(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 0.0


def level(tier: FakeTier | None = None) -> LevelSpec:
    return LevelSpec(tier or FakeTier(durable=True, latency_s=0.01), capacity_blocks=100)


async def saved(cache: SimCache, paced: BatchedSave[Save], keys: Sequence[BlockKey]) -> list[int]:
    """Fill each piece; how many blocks each had."""
    pieces: list[int] = []
    while True:
        await paced.settle()
        if paced.over:
            return pieces
        assert paced.piece is not None
        for index, slot in zip(paced.piece.indices, paced.piece.slots, strict=True):
            cache.arena.view(slot)[:64] = cache.payload(keys[index])
        paced.piece.commit()
        pieces.append(len(paced.piece.slots))
        paced.advance()


async def fetched(cache: SimCache, paced: BatchedFetch, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Read each piece; return the keys with the right bytes."""
    came: list[BlockKey] = []
    while True:
        await paced.settle()
        if paced.over:
            assert paced.held == 0
            return came
        assert paced.fetch is not None
        asked = keys[paced.first : paced.first + paced.count]
        pairs = zip(paced.fetch.keys, paced.fetch.slots, strict=False)
        for key, slot in pairs:
            if key in asked and slot >= 0:
                assert bytes(cache.arena.view(slot)[:64]) == cache.payload(key)
                came.append(key)
        paced.advance()


async def test_a_prompt_larger_than_the_arena_is_saved_and_fetched_whole() -> None:
    async with cache_of(level(), slots=8) as cache:
        manager = cache.manager
        pieces = await saved(cache, manager.save_paced(LONG), LONG)
        assert sum(pieces) == 30
        assert pieces[0] == 8
        assert "dropped_room" not in manager.stats()["host"]
        assert await fetched(cache, manager.fetch_paced(LONG), LONG) == LONG
        assert await saved(cache, manager.save_paced(LONG[-4:]), LONG) == [0], "it is there"


async def test_a_missing_block_ends_a_prefix_but_not_a_set() -> None:
    holed = [*LONG[:10], OTHER[0], *LONG[10:]]
    async with cache_of(level(), slots=8) as cache:
        manager = cache.manager
        await saved(cache, manager.save_paced(LONG), LONG)
        assert await fetched(cache, manager.fetch_paced(holed), holed) == LONG[:10]
        found = await fetched(cache, manager.fetch_paced(holed, whole_set=True), holed)
        assert found == LONG


async def test_the_first_in_the_queue_gets_the_next_slots() -> None:
    async with cache_of(level(), slots=8) as cache:
        manager = cache.manager
        both = (
            saved(cache, manager.save_paced(LONG), LONG),
            saved(cache, manager.save_paced(OTHER), OTHER),
        )
        assert [sum(pieces) for pieces in await asyncio.gather(*both)] == [30, 30]
        readers = [
            fetched(cache, manager.fetch_paced(keys, whole_set=is_set), keys)
            for keys in (LONG, OTHER)
            for is_set in (True, False)
        ]
        assert await asyncio.gather(*readers) == [LONG, LONG, OTHER, OTHER]


async def test_a_block_that_does_not_arrive_is_abandoned_at_its_deadline() -> None:
    tier = FakeTier(durable=True)
    async with cache_of(level(tier), slots=8) as cache:
        manager, clock = cache.manager, cache.manager.ladder.clock
        await saved(cache, manager.save_paced(LONG), LONG)
        await cache.settle()
        hold = Hold(on="get")
        tier.script.append(hold)
        begun_s = clock.now()
        paced = manager.fetch_paced(LONG[:4], deadline_s=0.5)
        assert await fetched(cache, paced, LONG) == []
        assert clock.now() - begun_s == pytest.approx(0.5, abs=0.1)
        hold.let_go()
        await cache.settle()
        assert await fetched(cache, manager.fetch_paced(LONG), LONG) == LONG


async def test_a_closed_transfer_leaves_the_queue_and_holds_nothing() -> None:
    async with cache_of(level(), slots=8) as cache:
        manager = cache.manager
        await saved(cache, manager.save_paced(LONG), LONG)
        first, second, third = (manager.fetch_paced(LONG) for _ in range(3))
        await first.settle()
        assert (first.count, second.ready, third.ready) == (4, False, False)
        second.close()
        first.close()
        first.close()
        assert second.over
        await third.settle()
        assert third.count == 4
        third.close()


async def test_a_transfer_that_is_never_polled_delays_none_behind_it() -> None:
    async with cache_of(level(), slots=8) as cache:
        manager, clock = cache.manager, cache.manager.ladder.clock
        await saved(cache, manager.save_paced(LONG), LONG)
        first, forgotten, late = (manager.fetch_paced(LONG) for _ in range(3))
        await first.settle()
        assert not forgotten.ready, "it waits, and nobody asks it any more"
        assert not late.ready
        first.close()
        begun_s = clock.now()
        assert not late.ready, "the one before it may still come"
        assert await fetched(cache, late, LONG) == LONG
        assert SILENT_S <= clock.now() - begun_s < 2 * SILENT_S
        assert await fetched(cache, forgotten, LONG) == LONG, "it has kept its place"


async def test_blocks_are_skipped_and_counted_when_no_slot_will_become_free() -> None:
    async with cache_of(slots=4) as cache:
        manager, clock = cache.manager, cache.manager.ladder.clock
        cache.save(LONG[:4], priorities=[90] * 4)
        begun_s = clock.now()
        assert await saved(cache, manager.save_paced(OTHER[:3]), OTHER) == []
        assert clock.now() == begun_s, "nothing is under way"
        assert manager.stats()["host"]["dropped_room"] == 3
        pinned = manager.fetch(LONG[:4])
        assert await saved(cache, manager.save_paced(OTHER[:3]), OTHER) == []
        assert clock.now() - begun_s == pytest.approx(ROOM_S, abs=0.1)
        assert not manager._stack.host._save_blocks, "nobody makes room for who waits no longer"
        pinned.release()


async def test_blocks_that_a_tier_refuses_are_left_out() -> None:
    tier = FakeTier(durable=True)
    async with cache_of(level(tier), slots=4) as cache:
        tier.script.extend([Fail(on="put")] * 50)
        paced = cache.manager.save_paced(LONG)
        pieces = await saved(cache, paced, LONG)
        assert pieces[0] == 4
        tier.heal()


async def test_only_some_of_a_prefix_are_saved() -> None:
    async with cache_of(level(), slots=4) as cache:
        only = [1, 5, *range(10, 20)]
        await saved(cache, cache.manager.save_paced(LONG, only=only, salt="s"), LONG)
        await cache.settle()
        assert cache.manager.holding(LONG) == [at in only for at in range(30)]


def test_turns_are_taken_in_order_by_threads() -> None:
    turns, order = SlotAdmission(3, Still(), Unreleased(Notices(lambda: 0.0))), list[int]()
    assert turns.take(turns, 2) == 2
    assert turns.take(0, 5) == 1
    assert turns.take(1, 1) == turns.take(2, 1) == 0

    def work(number: int) -> None:
        while not (taken := turns.take(number, 1)):
            pass
        order.append(number)
        turns.give(number, taken)

    thread = threading.Thread(target=work, args=(2,))
    thread.start()
    turns.give(0, 1)
    assert not order, "the first one has not come"
    work(1)
    thread.join()
    assert order == [1, 2]
