"""Blocks being saved are forgotten once published, and removed ones are not published."""

from __future__ import annotations

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.saving import Saving

META = BlockMeta(35, 35, 0)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32))


def reserved(saving: Saving, *steps: range) -> None:
    for step in steps:
        saving.put([key(n) for n in step], [Slot(n) for n in step], [META] * len(step))


def whole(saving: Saving, step: range) -> bool:
    """Return whether a step may be published as one."""
    return saving.metas([key(n) for n in step], [Slot(n) for n in step]) is not None


def test_blocks_of_other_saves_stay() -> None:
    saving = Saving()
    reserved(saving, range(3), range(3, 6), range(6, 9))
    for step in (range(3, 6), range(3)):
        assert whole(saving, step)
        saving.done([key(n) for n in step])
        assert not whole(saving, step), "it is not published again"
    assert list(saving) == [key(6), key(7), key(8)]
    assert saving.slots() == [Slot(6), Slot(7), Slot(8)]
    assert saving.disjoint([key(0), key(5)])
    assert not saving.disjoint([key(0), key(6)])


def test_a_block_removed_and_saved_again_makes_its_save_go_block_by_block() -> None:
    saving = Saving()
    reserved(saving, range(3))
    saving.discard([key(1)])
    assert not whole(saving, range(3))
    saving.put([key(1)], [Slot(7)], [META])
    assert not whole(saving, range(3))
    assert saving.pop(key(1), Slot(1)) is None, "that one was removed"
    assert [saving.pop(key(n), Slot(n)) for n in (0, 2)] == [META, META]
    assert saving.pop(key(1), Slot(7)) == META
    assert len(saving) == 0


def test_a_step_that_names_a_block_twice_is_not_whole() -> None:
    saving = Saving()
    saving.put([key(0), key(0)], [Slot(0), Slot(1)], [META, META])
    assert saving.metas([key(0), key(0)], [Slot(0), Slot(1)]) is None
