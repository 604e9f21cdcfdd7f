"""Queues of a level's tier: blocks to be written, and blocks to be removed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat

from kvladder.arena import Arena, Slot
from kvladder.keys import BlockKey, Book, by_key, unseen
from kvladder.tiers.label import Ref
from kvladder.tiers.ladder.records.meta import BlockMeta, runs
from kvladder.tiers.ladder.writing.transit import PendingWrite, ranks


class WriteQueue:
    """Queues writes, first in, first out, at most ``blocks_max`` blocks.

    The stack's lock is held around every call.
    """

    def __init__(self, arena: Arena, *, blocks_max: int) -> None:
        self._arena = arena
        self._max = blocks_max
        self._blocks: dict[BlockKey, PendingWrite] = {}
        self._by_priority: dict[int, dict[BlockKey, PendingWrite]] | None = None
        """The same by priority; None while all have the same one, as they mostly do."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def resize(self, blocks_max: int) -> list[BlockKey]:
        """Have another limit, and return the youngest blocks above it, which the caller drops."""
        self._max = blocks_max
        return [*islice(reversed(self._blocks), max(0, len(self._blocks) - blocks_max))]

    def loser(self, priority: int) -> BlockKey | None:
        """Return the block that gives way to one of this ``priority``: the youngest of the lowest.

        None if there is room, or if every queued block has this priority or more; see ``full``.
        """
        if not self.full:
            return None
        ranked = self._by_priority or {self._priority: self._blocks}
        lowest = min(ranked)
        return None if lowest >= priority else next(reversed(ranked[lowest]))

    @property
    def _priority(self) -> int:
        """Priority of the oldest block."""
        return next(iter(self._blocks.values())).meta.priority

    @property
    def full(self) -> bool:
        """True if nothing more fits."""
        return len(self._blocks) >= self._max

    def __getitem__(self, key: BlockKey) -> PendingWrite:
        return self._blocks[key]

    def get(self, key: BlockKey) -> PendingWrite | None:
        """Return the block if it is queued, else None."""
        return self._blocks.get(key)

    def oldest(self, count: int) -> Iterable[PendingWrite]:
        """Return the oldest blocks, at most ``count``; do not change the queue meanwhile."""
        return islice(self._blocks.values(), count)

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
        new = [*map(PendingWrite, keys, slots, metas, repeat(now_s))]
        if self._by_priority is None and self._differ(metas):
            self._by_priority = {self._priority: self._blocks.copy()} if self._blocks else {}
        self._blocks.update(zip(keys, new, strict=True))
        if (ranked := self._by_priority) is not None:
            for one in new:
                ranked.setdefault(one.meta.priority, {})[one.key] = one

    def _differ(self, metas: Sequence[BlockMeta]) -> bool:
        """Return whether new blocks with these metas make the queued ones differ in priority."""
        found = {meta.priority for meta, _ in runs(metas)}
        return len(found | {self._priority} if self._blocks else found) > 1

    def among(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return those of ``keys`` that are queued."""
        return [*filter(self._blocks.__contains__, keys)]

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Drop blocks from the queue and release their slots."""
        dropped = self.take(keys).values()
        self._arena.release([one.slot for one in dropped])
        for one in dropped:
            one.give_up()

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

    def take(self, keys: Iterable[BlockKey]) -> dict[BlockKey, PendingWrite]:
        """Take these blocks out, the highest priority first.

        The claims on their slots go to the caller.
        """
        taken = {key: self._blocks.pop(key) for key in keys}
        ranked = self._by_priority
        if ranked is not None:
            taken = dict(sorted(taken.items(), key=lambda one: -one[1].meta.priority))
            for key, one in taken.items():
                same = ranked[one.meta.priority]
                del same[key]
                if not same:
                    del ranked[one.meta.priority]
            if len(ranked) <= 1:
                self._by_priority = None
        return taken

    def __iter__(self) -> Iterator[BlockKey]:
        """Iterate over all keys, oldest first; do not change the queue meanwhile."""
        return iter(self._blocks)

    def check(self) -> None:
        """Assert bounds and claims; for tests."""
        assert len(self._blocks) <= self._max
        ranked = self._by_priority
        if ranked is not None:
            found = {key: priority for priority, same in ranked.items() for key in same}
            assert found == {key: one.meta.priority for key, one in self._blocks.items()}
            assert all(ranked.values())
        else:
            assert len({one.meta.priority for one in self._blocks.values()}) <= 1
        assert all(self._arena.claims(one.slot) > 0 for one in self._blocks.values())


class RemovalQueue:
    """Queues removals, first in, first out, and keeps the blocks of abandoned ones.

    A block is in it until its removal, abandoned or not, has ended. The stack's lock is held
    around every call. A level of ``blocks_max`` blocks may lose them all at once.
    """

    def __init__(self, blocks_max: int = 0) -> None:
        self.removing = 0
        """Number of removals that have not ended, whether or not they have begun."""
        self._keys: deque[BlockKey] = unseen(deque())
        self._places: deque[int] = unseen(deque())
        """Places of the queued blocks, in the order of ``_keys``."""
        self._removals: Book[int] = by_key(blocks_max)
        self.abandoned: set[BlockKey] = set()
        """Blocks of abandoned removals that have not ended."""

    def __len__(self) -> int:
        return self.removing + len(self.abandoned)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._removals or key in self.abandoned

    def keys(self) -> set[BlockKey]:
        """Return all of them."""
        return {*self._removals, *self.abandoned}

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

    def check(self) -> None:
        """Assert that counts agree; for tests."""
        assert sum(self._removals.values()) == self.removing >= len(self._keys)
        assert len(self._keys) == len(self._places)
