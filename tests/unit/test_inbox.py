"""The write queue holds claims on the slots of its blocks, and drops its least valuable block."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest

from kvladder.arena import Arena, Slot
from kvladder.keys import BlockKey
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import Terms
from kvladder.tiers.ladder.writing.queue import WriteQueue


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(8, 4096)
    yield arena
    arena.check()
    arena.close()


def add(inbox: WriteQueue, arena: Arena, name: str, priority: int) -> Slot:
    leased = arena.lease(1)
    assert leased is not None
    inbox.add([BlockKey(name.encode())], leased, [BlockMeta(priority, priority)], 0.0)
    arena.release(leased)
    return leased[0]


def test_the_write_queue_is_first_in_first_out_and_passes_claims_on(arena: Arena) -> None:
    inbox = WriteQueue(arena, blocks_max=4)
    slots = [add(inbox, arena, name, 35) for name in "abc"]
    assert arena.free == 5
    taken = inbox.take([BlockKey(b"a"), BlockKey(b"b")])
    assert list(taken) == [b"a", b"b"]
    assert [one.slot for one in taken.values()] == slots[:2]
    inbox.check()
    arena.release(slots[:2])
    inbox.remove([BlockKey(b"c")])
    assert len(inbox) == 0
    assert arena.free == 8


def test_the_youngest_block_of_the_lowest_priority_is_dropped_first(arena: Arena) -> None:
    inbox = WriteQueue(arena, blocks_max=3)
    for name, priority in (("a", 35), ("b", 20), ("c", 20)):
        assert inbox.loser(100) is None, "there is room"
        add(inbox, arena, name, priority)
    assert inbox.full
    assert inbox.loser(20) is None, "nothing is worth less"
    assert inbox.loser(21) == b"c"
    inbox.remove([BlockKey(b"c")])
    inbox.remove([BlockKey(b"b")])
    add(inbox, arena, "d", 50)
    add(inbox, arena, "e", 50)
    assert inbox.loser(36) == b"a"
    assert BlockKey(b"a") in inbox
    assert list(inbox) == [b"a", b"d", b"e"]
    for name in "ade":
        inbox.remove([BlockKey(name.encode())])


def test_blocks_above_the_spare_room_of_their_salt_are_found(arena: Arena) -> None:
    inbox = WriteQueue(arena, blocks_max=8)
    for number, salt in enumerate(("a", "b", "a", "", "a", "b")):
        slots = arena.lease(1) or []
        meta = BlockMeta(35, 35, terms=Terms(salt=salt.encode()))
        inbox.add([BlockKey(b"%d" % number)], slots, [meta], 0.0)
        arena.release(slots)
    spare = {b"": inf, b"a": 1, b"b": 0}
    keys = list(inbox)
    assert inbox.above(keys, spare) == [b"1", b"2", b"4", b"5"]
    assert inbox.above(keys[:2], spare) == [b"1"]
    assert inbox.above(keys[:2], {b"a": 1}) == [b"1"], "nobody said that there may be one"
    for key in list(inbox):
        inbox.remove([key])
