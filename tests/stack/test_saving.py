"""What is being saved is forgotten once it is published, a prompt's blocks together."""

from __future__ import annotations

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.tiers.ladder.index import Meta
from kvladder.tiers.ladder.saving import Saving

META = Meta(35, 35, 0)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32))


def reserved(saving: Saving, *steps: range) -> None:
    for step in steps:
        saving.put([key(n) for n in step], [Slot(n) for n in step], [META] * len(step))


def forgotten(saving: Saving) -> int:
    """How many calls it takes."""
    count = 1
    while saving.forget():
        count += 1
    return count


def test_all_that_is_published_goes_at_once_where_nothing_else_is_saved() -> None:
    saving = Saving()
    reserved(saving, range(3), range(3, 6))
    saving.publish(key(3))
    assert saving.slots() == [Slot(0), Slot(1), Slot(2)]
    assert not saving.disjoint([key(5)]), "until the whole prompt is published"
    saving.publish(key(0))
    assert saving.slots() == []
    assert forgotten(saving) == 1
    assert len(saving) == 0


def test_what_others_save_stays() -> None:
    saving = Saving()
    reserved(saving, range(3), range(3, 6), range(6, 9))
    saving.publish(key(0))
    saving.publish(key(3))
    assert forgotten(saving) == 2, "in steps"
    assert list(saving) == [key(6), key(7), key(8)]
    assert saving.slots() == [Slot(6), Slot(7), Slot(8)]


def test_what_was_removed_meanwhile_and_is_saved_anew_stays() -> None:
    saving = Saving()
    reserved(saving, range(3))
    saving.publish(key(0))
    saving.discard([key(1)])
    saving.put([key(1)], [Slot(7)], [META])
    assert forgotten(saving) == 1
    assert saving.pop(key(1), Slot(7)) == META
    assert len(saving) == 0


def test_what_is_published_is_not_published_again() -> None:
    saving = Saving()
    reserved(saving, range(3))
    keys, slots = [key(n) for n in range(3)], [Slot(n) for n in range(3)]
    assert saving.metas(keys, slots) == [META] * 3
    saving.publish(key(0))
    assert saving.metas(keys, slots) is None
