"""Blocks that a tier has still to forget."""

from __future__ import annotations

from collections import Counter

from kvladder.keys import BlockKey
from kvladder.tiers.label import Ref
from kvladder.tiers.ladder.writing.queue import RemovalQueue


def refs(*numbers: int) -> list[Ref]:
    return [Ref(BlockKey(bytes([n]) * 32), n) for n in numbers]


def test_a_removal_counts_until_it_has_ended() -> None:
    removals = RemovalQueue()
    one, two, three = refs(1, 2, 3)
    removals.add([one, two, one])
    assert removals.take(8) == [one, two], "no block twice"
    removals.begin([three])
    assert (len(removals), bool(removals)) == (4, True)
    removals.ended([one, two])
    assert one.key in removals, "its second removal waits"
    assert two.key not in removals
    removals.ended(removals.take(8))
    assert len(removals) == 1
    removals.ended([three])
    assert not removals
    assert three.key not in removals


def test_ending_a_removal_does_not_scan_the_others(monkeypatch) -> None:
    removals = RemovalQueue()
    waiting = [Ref(BlockKey(n.to_bytes(32)), n) for n in range(1000)]
    removals.add(waiting)
    looked: list[object] = []

    class Watched(Counter[BlockKey]):
        def __iter__(self):
            looked.append(None)
            return super().__iter__()

        def items(self):
            looked.append(None)
            return super().items()

    monkeypatch.setattr(removals, "_removals", Watched(removals._removals))
    looked.clear()
    for block in removals.take(1000):
        removals.ended([block])
    assert not looked
    assert len(removals) == 0
