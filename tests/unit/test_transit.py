"""The states of blocks being written into a level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvladder.arena import Arena
from kvladder.keys import BlockKey
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.states import reachable
from kvladder.tiers.ladder.records.terms import Terms
from kvladder.tiers.ladder.writing.queue import WriteQueue
from kvladder.tiers.ladder.writing.transit import (
    NEXT,
    PendingWrite,
    WritesInFlight,
    WriteState,
)

A, B, C = (BlockKey(name * 32) for name in (b"a", b"b", b"c"))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(8, 4096)
    yield arena
    arena.check()
    assert arena.free == 8, "a claim is left"
    arena.close()


def begun(arena: Arena) -> tuple[WritesInFlight, dict[BlockKey, PendingWrite]]:
    """A write of three blocks of two salts."""
    queue, in_flight = WriteQueue(arena, blocks_max=8), WritesInFlight(arena)
    metas = [BlockMeta(terms=Terms(salt=salt)) for salt in (b"one", b"two", b"one")]
    slots = arena.lease(3) or []
    queue.add([A, B, C], slots, metas, 0.0)
    arena.release(slots)
    blocks = queue.take([A, B, C])
    in_flight.check(blocks)
    in_flight.begin({**blocks})
    return in_flight, blocks


def test_a_block_goes_from_state_to_state(arena: Arena) -> None:
    in_flight, blocks = begun(arena)
    assert not in_flight.recall(A, b"two")
    assert in_flight.recall(A, b"one")
    in_flight.check({})
    assert in_flight.tombstones == 1
    in_flight.abandon([A, B])
    assert in_flight.end() == [], "what is abandoned is not over"
    assert [one.state.value for one in blocks.values()] == [
        "abandoned tombstone",
        "abandoned",
        "settled",
    ]
    in_flight.check({})
    in_flight.purge(b"two")
    in_flight.check({})
    assert [in_flight.come_back(key) for key in (A, B, C)] == [True, True, False]
    in_flight.check({})
    assert len(in_flight) == 0
    assert {one.state for one in blocks.values()} == {WriteState.SETTLED}


def test_blocks_removed_and_not_stored_are_returned_at_the_end(arena: Arena) -> None:
    in_flight, _ = begun(arena)
    in_flight.purge(None)
    assert in_flight.settle(A), "it was stored, and is removed from there"
    assert in_flight.end() == [B, C]
    in_flight.check({})


@pytest.mark.parametrize("state", WriteState)
def test_a_check_finds_an_impossible_state(arena: Arena, state: WriteState) -> None:
    in_flight, blocks = begun(arena)
    in_flight.recall(A)
    in_flight.check({})
    blocks[A].state = state
    if state is WriteState.TOMBSTONE:
        in_flight.check({})
    else:
        with pytest.raises(AssertionError):
            in_flight.check({})
    blocks[A].state = WriteState.TOMBSTONE
    in_flight.end()


def test_a_check_finds_a_block_lost_in_flight(arena: Arena) -> None:
    in_flight, blocks = begun(arena)
    in_flight.check({})
    del in_flight.writing[A]
    with pytest.raises(AssertionError):
        in_flight.check({})
    in_flight.writing = blocks
    in_flight.end()


def test_every_state_leads_to_the_end_and_none_comes_twice() -> None:
    assert NEXT.keys() == {*WriteState}
    for state in WriteState:
        assert WriteState.SETTLED in reachable(state, NEXT)
        assert all(state not in reachable(after, NEXT) for after in NEXT[state])
