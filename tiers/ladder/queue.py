"""Queues of a level's tier: blocks to be written, and blocks to be removed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from math import inf
from typing import NamedTuple

from kvladder.arena import Arena, Slot
from kvladder.keys import BlockKey, Book, by_key, unseen
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.tiers.context import Clock
from kvladder.tiers.label import Facts, Ref
from kvladder.tiers.ladder.records.index import BlockMeta, runs
from kvladder.tiers.ladder.records.terms import NO_TERMS


class QueuedWrite(NamedTuple):
    """Facts about blocks on their way into a level: one object for all that are alike."""

    meta: BlockMeta
    since_s: float
    """Loop time at which it was offered."""

    def facts(self, *, ttl_s: float | None, clock: Clock) -> Facts:
        """Return what a level with this TTL stores with the block.

        A priority that ends is not stored: after a restart it has ended.
        """
        meta = self.meta
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


def ranks(blocks: Iterable[QueuedWrite]) -> dict[bytes, list[int]]:
    """Return the priorities of blocks by salt, the highest first."""
    found: dict[bytes, list[int]] = {}
    for one in blocks:
        found.setdefault(one.meta.terms.salt, []).append(one.meta.priority)
    return {salt: sorted(said, reverse=True) for salt, said in found.items()}


class WriteQueue:
    """Queues writes, first in, first out, at most ``blocks_max`` blocks.

    The stack's lock is held around every call.
    """

    def __init__(self, arena: Arena, *, blocks_max: int) -> None:
        self._arena = arena
        self._max = blocks_max
        self._blocks: dict[BlockKey, QueuedWrite] = {}
        self._slots: dict[BlockKey, Slot] = {}
        self._by_priority: dict[int, dict[BlockKey, QueuedWrite]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def loser(self, priority: int) -> BlockKey | None:
        """Return the block that gives way to one of this ``priority``: the youngest of the lowest.

        None if there is room, or if every queued block has this priority or more; see ``full``.
        """
        if not self.full or min(self._by_priority) >= priority:
            return None
        return next(reversed(self._by_priority[min(self._by_priority)]))

    @property
    def full(self) -> bool:
        """True if nothing more fits."""
        return len(self._blocks) >= self._max

    def __getitem__(self, key: BlockKey) -> QueuedWrite:
        return self._blocks[key]

    def get(self, key: BlockKey) -> QueuedWrite | None:
        """Return the block if it is queued, else None."""
        return self._blocks.get(key)

    def oldest(self, count: int) -> Iterable[tuple[BlockKey, QueuedWrite]]:
        """Return the oldest blocks, at most ``count``; do not change the queue meanwhile."""
        return islice(self._blocks.items(), count)

    @property
    def room(self) -> int:
        """Number of blocks that still fit."""
        return self._max - len(self._blocks)

    def fits(self, keys: Sequence[BlockKey]) -> bool:
        """Return whether there is room for all of ``keys`` and none of them is queued."""
        return len(self._blocks) + len(keys) <= self._max and self._blocks.keys().isdisjoint(keys)

    def add(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot],
        metas: Sequence[BlockMeta],
        now_s: float,
    ) -> None:
        """Queue blocks, in that order, and take a claim on their slots; there must be room."""
        assert len(keys) + len(self._blocks) <= self._max
        self._arena.share(slots)
        self._slots.update(zip(keys, slots, strict=True))
        for meta, run in runs(metas):
            same = dict.fromkeys(keys[run], QueuedWrite(meta, now_s))
            self._blocks.update(same)
            self._by_priority.setdefault(meta.priority, {}).update(same)

    def among(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return those of ``keys`` that are queued."""
        return [*filter(self._blocks.__contains__, keys)]

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Drop blocks from the queue and release their slots."""
        _, slots = self.take(keys)
        self._arena.release([*slots.values()])

    def above(self, keys: Sequence[BlockKey], spare: Mapping[bytes, float]) -> list[BlockKey]:
        """Return those of ``keys`` that exceed what their salts have to spare.

        ``spare`` says how many blocks more of each salt there may be; a salt not in it has none.
        """
        left = dict(spare)
        over: list[BlockKey] = []
        for key in keys:
            salt = self._blocks[key].meta.terms.salt
            left[salt] = left.get(salt, 0.0) - 1
            if left[salt] < 0:
                over.append(key)
        return over

    def ranks(self, keys: Iterable[BlockKey]) -> dict[bytes, list[int]]:
        """Return the priorities of ``keys`` by salt, the highest first."""
        return ranks(map(self._blocks.__getitem__, keys))

    def ranked(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return those of ``keys`` that are queued, the highest priority first; ties keep their
        order.
        """
        return sorted(self.among(keys), key=lambda key: -self._blocks[key].meta.priority)

    def take(
        self, keys: Iterable[BlockKey]
    ) -> tuple[dict[BlockKey, QueuedWrite], dict[BlockKey, Slot]]:
        """Take these blocks and their slots out, the highest priority first.

        The claims on the slots go to the caller.
        """
        taken = {key: self._blocks.pop(key) for key in keys}
        slots = {key: self._slots.pop(key) for key in taken}
        if len(self._by_priority) > 1:
            taken = dict(sorted(taken.items(), key=lambda one: -one[1].meta.priority))
        if not self._blocks:
            self._by_priority.clear()
        for priority, same in list(self._by_priority.items()):
            for key in filter(same.__contains__, taken):
                del same[key]
            if not same:
                del self._by_priority[priority]
        return taken, slots

    def __iter__(self) -> Iterator[BlockKey]:
        """Iterate over all keys, oldest first; do not change the queue meanwhile."""
        return iter(self._blocks)

    def check(self) -> None:
        """Assert bounds and claims; for tests."""
        assert len(self._blocks) <= self._max
        assert self._slots.keys() == self._blocks.keys()
        ranked = {k: n for n, keys in self._by_priority.items() for k in keys}
        assert ranked == {key: pending.meta.priority for key, pending in self._blocks.items()}
        assert all(self._by_priority.values())
        assert all(self._arena.claims(slot) > 0 for slot in self._slots.values())


class RemovalQueue:
    """Queues removals, first in, first out, and keeps the blocks of abandoned calls.

    A block is in it until its removal, or the abandoned call, has ended. The stack's lock is held
    around every call. A level of ``blocks_max`` blocks may lose them all at once.
    """

    def __init__(self, blocks_max: int = 0) -> None:
        self.removing = 0
        """Number of removals that have not ended, whether or not they have begun."""
        self._keys: deque[BlockKey] = unseen(deque())
        self._places: deque[int] = unseen(deque())
        """Places of the queued blocks, in the order of ``_keys``."""
        self._removals: Book[int] = by_key(blocks_max)
        self.behind: dict[BlockKey, bytes] = {}
        """Blocks of abandoned writes and removals that have not ended, and their salts."""
        self._unwanted: set[BlockKey] = set()
        """Blocks among these that a user removed or purged meanwhile."""

    def __len__(self) -> int:
        return self.removing + len(self.behind)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._removals or key in self.behind

    def among(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return those of ``keys`` that are being removed."""
        return [key for key in keys if key in self._removals] if self.removing else []

    def add(self, blocks: Sequence[Ref]) -> None:
        """Queue the removal of these blocks."""
        self.begin(blocks)
        for key, place in blocks:
            self._keys.append(key)
            self._places.append(place)

    def begin(self, blocks: Sequence[Ref]) -> None:
        """Count removals that begin at once, without waiting in the queue."""
        removals = self._removals  # ``update`` takes longer for a few
        for key, _ in blocks:
            removals[key] = removals.get(key, 0) + 1
        self.removing += len(blocks)

    def take(self, count: int) -> list[Ref]:
        """Begin the oldest removals, at most ``count``, no block twice."""
        taken: dict[BlockKey, Ref] = {}
        while self._keys and len(taken) < count and self._keys[0] not in taken:
            key = self._keys.popleft()
            taken[key] = Ref(key, self._places.popleft())
        return list(taken.values())

    def ended(self, blocks: Sequence[Ref]) -> None:
        """Count removals of these as ended: done, failed or abandoned."""
        self.removing -= len(blocks)
        for key, _ in blocks:
            if self._removals[key] == 1:
                del self._removals[key]
            else:
                self._removals[key] -= 1

    def leave_behind(
        self, salts: Mapping[BlockKey, bytes], unwanted: AbstractSet[BlockKey] = frozenset()
    ) -> None:
        """Keep the blocks of an abandoned call, with their salts; some are unwanted by now."""
        self.behind.update(salts)
        self._unwanted |= unwanted & self.behind.keys()

    def recall(self, key: BlockKey) -> bool:
        """Mark the block as unwanted, and return whether an abandoned call may still store it."""
        if key in self.behind:
            self._unwanted.add(key)
        return key in self.behind

    def purge(self, salt: bytes | None) -> None:
        """``recall`` all blocks of a salt, or all blocks for None."""
        self._unwanted.update(key for key, its in self.behind.items() if salt in {None, its})

    def come_back(self, keys: AbstractSet[BlockKey]) -> AbstractSet[BlockKey]:
        """Forget the blocks of an abandoned call that has ended, and return which are unwanted."""
        for key in keys:
            self.behind.pop(key, None)
        unwanted = self._unwanted & keys
        self._unwanted -= keys
        return unwanted

    def check(self) -> None:
        """Assert that counts agree; for tests."""
        assert self._unwanted <= self.behind.keys()
        assert sum(self._removals.values()) == self.removing >= len(self._keys)
        assert len(self._keys) == len(self._places)
