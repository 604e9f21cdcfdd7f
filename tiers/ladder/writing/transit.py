"""Blocks on their way into a level: one object for each, from its offer until its write has ended.

The counterpart for blocks on their way up is ``loading/pending.py::PendingRead``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from math import inf
from operator import attrgetter

import msgspec

from kvladder.arena import Arena, Slot
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.tiers.context import Clock
from kvladder.tiers.label import Facts
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.states import may_become
from kvladder.tiers.ladder.records.terms import NO_TERMS


class WriteState(Enum):
    """States of a departing block; ``tiers/ladder/README.md`` has a table of them."""

    QUEUED = "queued"
    """The block is in the write queue; its write has not begun."""
    WRITING = "writing"
    """The writer makes room for the block, or the tier is storing it."""
    TOMBSTONE = "tombstone"
    """The same, but a user removed or purged it meanwhile: it leaves as soon as it is stored."""
    ABANDONED = "abandoned"
    """Its write passed its deadline, and may still store it."""
    ABANDONED_TOMBSTONE = "abandoned tombstone"
    """The same, but a user removed or purged it."""
    SETTLED = "settled"
    """Its write has ended, or never began: the object is of no more use."""


# looking a member up in its class takes longer, and there are many blocks
QUEUED, WRITING, TOMBSTONE, ABANDONED, ABANDONED_TOMBSTONE, SETTLED = WriteState

NEXT: Mapping[WriteState, frozenset[WriteState]] = {
    QUEUED: frozenset({WRITING, SETTLED}),
    WRITING: frozenset({TOMBSTONE, ABANDONED, SETTLED}),
    TOMBSTONE: frozenset({ABANDONED_TOMBSTONE, SETTLED}),
    ABANDONED: frozenset({ABANDONED_TOMBSTONE, SETTLED}),
    ABANDONED_TOMBSTONE: frozenset({SETTLED}),
    SETTLED: frozenset(),
}
"""States that may follow each state."""

_REMOVED = {
    WRITING: TOMBSTONE,
    TOMBSTONE: TOMBSTONE,
    ABANDONED: ABANDONED_TOMBSTONE,
    ABANDONED_TOMBSTONE: ABANDONED_TOMBSTONE,
}
"""State of a block after a user removed it; a queued block leaves the queue instead."""
_LEFT = {
    WRITING: ABANDONED,
    TOMBSTONE: ABANDONED_TOMBSTONE,
}
"""State of a block after its write was abandoned."""
_state = attrgetter("state")


class PendingWrite(msgspec.Struct, eq=False, gc=False):
    """A block on its way into a level; at most one per key and level.

    A tier never sees it. When the block has a place, a ``Write`` is made for the tier, whole
    from the beginning.
    """

    key: BlockKey
    slot: Slot
    meta: BlockMeta
    since_s: float
    """Loop time at which it was offered."""
    state: WriteState = QUEUED

    def is_of(self, salt: bytes | None) -> bool:
        """Return whether the block is of this salt; any block is of None."""
        return salt is None or self.meta.terms.salt == salt

    def give_up(self) -> None:
        """Note that the block left the queue and will not be written."""
        self.state = SETTLED


class WritesInFlight:
    """Keeps the blocks of a level's write under way, and those of its abandoned writes.

    A claim on the slot of each block that is being written is the level's; abandoned calls hold
    their own. The stack's lock is held around every call.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.writing: dict[BlockKey, PendingWrite] = {}
        """Blocks of the write under way, the highest priority first."""
        self.abandoned: dict[BlockKey, PendingWrite] = {}
        """Blocks of abandoned writes that have not ended."""
        self._checked: dict[PendingWrite, WriteState] = {}
        """States at the last ``check``."""

    def __len__(self) -> int:
        return len(self.writing) + len(self.abandoned)

    def disjoint(self, keys: Iterable[BlockKey]) -> bool:
        """Return whether none of ``keys`` is here."""
        return self.writing.keys().isdisjoint(keys) and self.abandoned.keys().isdisjoint(keys)

    def begin(self, blocks: dict[BlockKey, PendingWrite]) -> None:
        """Begin to write blocks from the queue, and take over the claims on their slots."""
        self.writing = blocks
        for one in blocks.values():
            one.state = WRITING

    @property
    def tombstones(self) -> int:
        """Number of blocks that a user removed while they are being written."""
        return [*map(_state, self.writing.values())].count(TOMBSTONE)

    def recall(self, key: BlockKey, salt: bytes | None = None) -> bool:
        """Note that a block was removed, if it is here and of ``salt``; return whether it is."""
        one = self.writing.get(key) or self.abandoned.get(key)
        if one is None or not one.is_of(salt):
            return False
        one.state = _REMOVED[one.state]
        return True

    def purge(self, salt: bytes | None) -> None:
        """``recall`` all blocks of a salt, or all blocks for None."""
        for key in (*self.writing, *self.abandoned):
            self.recall(key, salt)

    def abandon(self, keys: Iterable[BlockKey]) -> None:
        """Keep blocks of the write under way beyond its ``end``: a call may still store them."""
        for key in keys:
            one = self.abandoned[key] = self.writing[key]
            one.state = _LEFT[one.state]

    def settle(self, key: BlockKey) -> bool:
        """Settle a block of the write under way, and return whether a user removed it."""
        one = self.writing[key]
        is_removed = one.state is TOMBSTONE
        one.state = SETTLED
        return is_removed

    def come_back(self, key: BlockKey) -> bool:
        """Settle a block of an abandoned write, and return whether a user removed it.

        The block is not here if the level closed before its write was abandoned.
        """
        one = self.abandoned.pop(key, None)
        if one is None:
            return False
        is_removed = one.state is ABANDONED_TOMBSTONE
        one.state = SETTLED
        return is_removed

    def end(self) -> list[BlockKey]:
        """Settle what is left of the write under way, and release its slots.

        Returns the blocks that a user removed meanwhile and that were not stored.
        """
        blocks, self.writing = [*self.writing.values()], {}
        self._arena.release([one.slot for one in blocks])
        left = [one for one in blocks if one.state is WRITING or one.state is TOMBSTONE]
        removed = [one.key for one in left if one.state is TOMBSTONE]
        for one in left:
            one.state = SETTLED
        return removed

    def check(self, queued: Mapping[BlockKey, PendingWrite]) -> None:
        """Assert the states of all blocks, and that each went on as ``NEXT`` says; for tests."""
        found: dict[PendingWrite, WriteState] = {}
        for blocks, states in (
            (queued, {QUEUED}),
            (self.writing, {WRITING, TOMBSTONE}),
            (self.abandoned, {ABANDONED, ABANDONED_TOMBSTONE}),
        ):
            assert all(one.key == key and one.state in states for key, one in blocks.items())
            found.update((one, one.state) for one in blocks.values())
        assert len({one.key for one in found}) == len(found), "a block is here twice"
        for one, before in self._checked.items():
            assert may_become(before, one.state, NEXT), f"{before} became {one.state}"
            assert one in found or one.state is SETTLED
        self._checked = found
        assert all(self._arena.claims(one.slot) for one in self.writing.values())


def ranks(blocks: Iterable[PendingWrite]) -> dict[bytes, list[int]]:
    """Return the priorities of blocks by salt, the highest first."""
    found: dict[bytes, list[int]] = {}
    for one in blocks:
        found.setdefault(one.meta.terms.salt, []).append(one.meta.priority)
    return {salt: sorted(said, reverse=True) for salt, said in found.items()}


def facts_of(meta: BlockMeta, *, ttl_s: float | None, clock: Clock) -> Facts:
    """Return what a level with this TTL stores with a block.

    A priority that ends is not stored: after a restart it has ended.
    """
    if ttl_s is None and meta.until_s == inf and meta.terms == NO_TERMS:
        return Facts(meta.priority, meta.floor)
    left_s = min(inf if ttl_s is None else ttl_s, meta.terms.expires_s - clock.now())
    return Facts(
        meta.priority if meta.until_s == inf else min(meta.priority, PRIORITY_DEFAULT),
        meta.floor,
        None if left_s == inf else clock.wall() + left_s,
        meta.terms.salt,
        meta.terms.packed(),
    )
