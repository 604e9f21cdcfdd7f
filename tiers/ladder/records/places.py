"""The places of a level: which numbers below its capacity are taken."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from kvladder.keys import unseen

FULL_QUIET_S = 3600.0
"""Time since a level was last full after which it is reported again."""
FULL_RETRY_S = 60.0
"""Time that a level keeps to its places after a full disk, before it tries for more."""


class PlaceAllocator:
    """Gives out places ``0 <= place < capacity``, lowest first, neighbours where possible.

    A place is free, or taken: by a block of the index, by one that is being written or given up, or
    by a read that has not ended. Only free ones are given out.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.limited = False
        """True if the medium was found full: only places that were used before are given out."""
        self.taken = 0
        self._full_until_s = -inf
        self._next = 0
        self._free: deque[int] = unseen(deque())  # a deque grows without being copied
        self._withheld: deque[int] = unseen(deque())
        self._reads: Counter[int] = Counter()
        self._retired: set[int] = set()
        self.above = 0
        """Number of taken places at or above the capacity; they are not given out again."""
        self._on_quiet: Callable[[], object] | None = None

    @property
    def free(self) -> int:
        """Number of places that can be taken now."""
        return len(self._free) + (0 if self.limited else self.capacity - self._next)

    @property
    def untaken(self) -> int:
        """Number of places that are not taken, whether or not the medium had room for more."""
        return len(self._free) + len(self._withheld) + self.capacity - self._next

    def take(self, count: int) -> list[int]:
        """Take at most ``count`` places for new blocks."""
        taken = _popped(self._free, count)
        taken += [] if self.limited else self._fresh(count - len(taken))
        self.taken += len(taken)
        return sorted(taken)

    def take_held(self, count: int) -> list[int]:
        """Take at most ``count`` places for blocks that the medium has already.

        Those for which it has room now come last: new blocks may need them.
        """
        taken = _popped(self._withheld, count)
        taken += self._fresh(count - len(taken))
        taken += _popped(self._free, count - len(taken))
        self.taken += len(taken)
        return sorted(taken)

    def _fresh(self, count: int) -> range:
        """Return at most ``count`` places that were not used before."""
        first = self._next
        self._next = min(self.capacity, first + count)
        return range(first, self._next)

    def give(self, places: Sequence[int]) -> None:
        """Free these places, as soon as no read of them is left."""
        for place in places:
            if place in self._reads:
                self._retired.add(place)
                continue
            self.taken -= 1
            if place < self.capacity:
                self._free.append(place)
            else:
                self.above -= 1

    def begin_reads(self, places: Sequence[int]) -> None:
        """Keep ``places`` from being free until the reads have ended."""
        self._reads.update(places)

    def end_reads(self, places: Sequence[int]) -> None:
        """Undo ``begin_reads``."""
        reads, retired = self._reads, self._retired
        for place in places:
            left = reads.pop(place) - 1
            if left:
                reads[place] = left
            elif place in retired:
                retired.remove(place)
                self.give([place])
        if not reads and self._on_quiet is not None:
            self._on_quiet()

    def listen(self, on_quiet: Callable[[], object] | None) -> None:
        """Have ``on_quiet`` called when no read is left, at once if none is; None ends that."""
        self._on_quiet = on_quiet
        if on_quiet is not None and not self._reads:
            on_quiet()

    def being_read(self, place: int) -> bool:
        """Return whether a read of ``place`` has not ended."""
        return place in self._reads

    def full(self, places: Sequence[int], now_s: float, *, all_free: bool) -> bool:
        """Note that the medium had no room at these places: use no new ones until ``retry``.

        With ``all_free`` not even places that were used before are free, only those given from now
        on. Returns whether it had not been full for ``FULL_QUIET_S``.
        """
        self.withhold(places)
        if all_free:
            self.withhold_free()
        was_quiet = now_s > self._full_until_s + FULL_QUIET_S
        self._full_until_s = now_s + FULL_RETRY_S
        return was_quiet

    def retry(self, now_s: float) -> None:
        """Try new places again, if the medium was found full long enough ago."""
        if self.limited and now_s >= self._full_until_s:
            self.unlimit()

    def withhold(self, places: Sequence[int]) -> None:
        """Set these places aside, as the medium had no room there; use no new ones until
        ``unlimit``.
        """
        there = [place for place in places if place < self.capacity]
        self._withheld.extend(there)
        self.above -= len(places) - len(there)
        self.taken -= len(places)
        self.limited = True

    def withhold_free(self) -> None:
        """Set aside the free places too: only those given from now on are free."""
        self._withheld.extend(self._free)
        self._free.clear()

    def unlimit(self) -> None:
        """Try new places again."""
        self.limited = False
        self._free.extend(self._withheld)
        self._withheld.clear()

    def occupy(self, places: Sequence[int]) -> None:
        """Mark places as taken that an earlier process filled; called once, before ``take``."""
        assert self._next == 0
        filled = bytearray(max(places, default=-1) + 1)
        for place in places:
            filled[place] = 1
        self._next = len(filled)
        self._free += [place for place, taken in enumerate(filled) if not taken]
        self._free.reverse()
        self.taken = len(places)

    def resize(self, capacity: int) -> None:
        """Give out only places below another capacity from now on.

        Taken places at or above it stay taken until they are given back; ``above`` counts them.
        """
        if capacity > self.capacity:
            assert not self.above, "an earlier resize has not ended"
            self.capacity = capacity
            return
        before = len(self._free) + len(self._withheld)
        self._free = _below(self._free, capacity)
        self._withheld = _below(self._withheld, capacity)
        idle = before - len(self._free) - len(self._withheld)
        self.above += max(0, self._next - capacity) - idle
        self.capacity, self._next = capacity, min(self._next, capacity)

    def check(self) -> None:
        """Assert that every place is in exactly one state."""
        idle = [*self._free, *self._withheld]
        assert len(set(idle)) == len(idle)
        assert all(0 <= place < self._next for place in idle)
        assert self.taken - self.above + len(idle) == self._next <= self.capacity
        assert 0 <= self.above <= self.taken
        assert self._retired <= self._reads.keys()
        assert not self._reads.keys() & set(idle)


def _popped(places: deque[int], count: int) -> list[int]:
    """Take at most ``count`` places from the end."""
    return [places.pop() for _ in range(min(count, len(places)))]


def _below(places: deque[int], capacity: int) -> deque[int]:
    """Return those of some places that are below ``capacity``, in their order."""
    column = np.fromiter(places, np.int64, len(places))
    return unseen(deque(column[column < capacity].tolist()))
