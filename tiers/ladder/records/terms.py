"""Terms that requests give blocks beside their priority, and times at which blocks expire."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from math import inf
from typing import NamedTuple

from kvladder.keys import unseen
from kvladder.tiers.context import Clock
from kvladder.tiers.label import Facts

ANYWHERE = -1
"""All levels, as a bit mask of levels: 1 for host, 2 for the first below it."""
HOST = 1
ALIKE_MAX = 1024
"""Number of different terms that are remembered, so that equal ones share an object."""
PAGE = 12
"""Logarithm of the number of places that are kept together."""
_HERE, _HOST_TOO, _ENDS = 1, 2, 4


class Terms(NamedTuple):
    """Terms of a block, which travel with it beside its priority."""

    levels: int = ANYWHERE
    """Levels that may store it."""
    expires_s: float = inf
    """Loop time at which every level forgets it."""
    salt: bytes = b""
    """Digest of its request's cache salt, 8 bytes; empty without one."""
    kind: str = ""
    """Kind of its layers, where a codec of the stack may not work on all; empty if unknown."""

    def last(self, clock: Clock) -> bool:
        """Return whether the block need not be forgotten yet."""
        return self.expires_s == inf or self.expires_s > clock.now()

    def merged(self, other: Terms) -> Terms:
        """Return the terms of a block that two requests offer: all that one of them allows."""
        return Terms(
            self.levels | other.levels,
            max(self.expires_s, other.expires_s),
            self.salt or other.salt,
            self.kind or other.kind,
        )

    def packed(self) -> int:
        """Return ``Facts.terms``: what outlives the process, without the numbers of levels."""
        bits = _ENDS if self.expires_s != inf else 0
        if self.levels != ANYWHERE:
            bits |= _HERE | (_HOST_TOO if self.levels & HOST else 0)
        return bits

    @classmethod
    def unpacked(cls, facts: Facts, here: int, behind_s: float) -> Terms:
        """Return the terms of a block that the level with the bit ``here`` recovered.

        If its terms restrict it to some levels, only this one and host are left of them.
        ``behind_s`` is loop time minus wall time.
        """
        levels, expires_s = ANYWHERE, inf
        if facts.terms & _HERE:
            levels = here | (HOST if facts.terms & _HOST_TOO else 0)
        if facts.terms & _ENDS and facts.expires_wall_s is not None:
            expires_s = facts.expires_wall_s + behind_s
        return cls(levels, expires_s, facts.salt)


NO_TERMS = Terms()


class Deadlines:
    """Loop times of an event, by place, for the blocks that have one."""

    def __init__(self) -> None:
        self.of: dict[int, dict[int, float]] = {}
        """Times by ``place >> PAGE``, so that no dict is long to copy; empty if there are none."""
        self._entries: dict[int, dict[int, float]] = {}
        """Where a time was put off, that of the place's live entry in a heap, which is earlier."""
        self._count = 0
        self._heap: list[tuple[float, int]] = unseen([])
        self._before: list[tuple[float, int]] = unseen([])
        """An old heap, mostly of blocks that are gone; its live entries move to the new heap."""

    def get(self, place: int) -> float:
        """Return the time for a place; inf if there is none, or if ``due`` has returned it."""
        page = self.of.get(place >> PAGE)
        return inf if page is None else page.get(place, inf)

    def _is_live(self, entry: tuple[float, int]) -> bool:
        """Return whether an entry of a heap is the one of its place."""
        at_s, place = entry
        entries = self._entries.get(place >> PAGE)
        if entries is not None and place in entries:
            return entries[place] == at_s
        return self.get(place) == at_s

    def put(self, place: int, at_s: float) -> None:
        """Set the time for a place instead of any earlier one; inf for never."""
        if at_s == inf:
            self.drop(place)
            return
        number = place >> PAGE
        page = self.of.get(number)
        if page is None:
            page = self.of[number] = {}
        before = page.get(place)
        page[place] = at_s
        if before is None:
            self._count += 1
        elif at_s >= before:  # ``due`` finds the earlier entry first, and makes another one
            if at_s > before:
                entries = self._entries.get(number)
                if entries is None:
                    self._entries[number] = {place: before}
                elif place not in entries:
                    entries[place] = before
            if self._before:
                self._move()
            return
        elif self._entries:
            self._forget_entry(place)
        self._push(at_s, place)

    def _forget_entry(self, place: int) -> None:
        """Let the live entry of a place, if any, be that of its time."""
        entries = self._entries.get(place >> PAGE)
        if entries is not None and entries.pop(place, None) is not None and not entries:
            del self._entries[place >> PAGE]

    def _push(self, at_s: float, place: int) -> None:
        heap = self._heap
        heapq.heappush(heap, (at_s, place))
        if self._before:
            self._move()
        elif len(heap) > 64 + 2 * self._count:
            self._heap, self._before = self._before, heap

    def _move(self) -> None:
        """Move some live entries of the old heap to the new one."""
        for _ in range(min(4, len(self._before))):
            entry = heapq.heappop(self._before)
            if self._is_live(entry) and entry not in self._before[:1]:
                heapq.heappush(self._heap, entry)

    def drop(self, place: int) -> None:
        """Remove the time of a place, which is empty now."""
        page = self.of.get(place >> PAGE)
        if page is not None and page.pop(place, None) is not None:
            self._count -= 1
            if not page:
                del self.of[place >> PAGE]
            if self._entries:
                self._forget_entry(place)

    @property
    def _next(self) -> list[tuple[float, int]]:
        """The heap that has the first entry of both."""
        heap, before = self._heap, self._before
        return before if before and not (heap and heap[0] < before[0]) else heap

    @property
    def next_s(self) -> float:
        """Loop time at which ``due`` may have a place; inf if never."""
        heap = self._next
        return heap[0][0] if heap else inf

    def due(self, now_s: float, count_max: float = inf) -> list[int]:
        """Return places for which the time has come, each once.

        Looks at ``count_max`` entries at most.
        """
        found: list[int] = []
        looked = 0
        while self.next_s <= now_s and looked < count_max:
            looked += 1
            entry = heapq.heappop(self._next)
            if not self._is_live(entry):
                continue
            place = entry[1]
            at_s = self.get(place)
            if at_s > now_s:  # it was put off
                self._forget_entry(place)
                self._push(at_s, place)
                continue
            self.drop(place)
            found.append(place)
        return found

    def check(self, places: Collection[int]) -> None:
        """Assert that all places hold blocks, and that no time is missed; for tests."""
        if not (self.of or self._entries or self._heap or self._before):
            assert not self._count
            return
        of = {place: at_s for page in self.of.values() for place, at_s in page.items()}
        put_off = {place: at_s for page in self._entries.values() for place, at_s in page.items()}
        assert all(self.of.values())
        assert all(self._entries.values())
        assert len(of) == self._count
        assert all(place in places for place in of)
        assert all(at_s < of[place] for place, at_s in put_off.items())
        entries = {(at_s, place) for place, at_s in (of | put_off).items()}
        assert entries <= {*self._heap, *self._before}
        assert len(self._heap) + len(self._before) <= 2 * (64 + 2 * len(of) + len(places))


class TermsByPlace:
    """The terms of a level's blocks."""

    def __init__(self) -> None:
        self.of: list[Terms] = unseen([])
        """Terms by place, ``NO_TERMS`` where there is no block; the index extends it."""
        self.count = 0
        """Number of blocks that have terms."""
        self.ends = Deadlines()
        """Expiry times of the blocks that expire."""
        self._alike: dict[Terms, Terms] = {}
        """One object for equal terms."""

    def put(self, place: int, terms: Terms) -> None:
        """Set the terms of the block at ``place``."""
        if len(self._alike) >= ALIKE_MAX:
            self._alike.clear()
        self.count += (terms != NO_TERMS) - (self.of[place] != NO_TERMS)
        self.of[place] = self._alike.setdefault(terms, terms)
        self.ends.put(place, terms.expires_s)

    def drop(self, place: int) -> None:
        """Remove the terms of a place, which is empty now."""
        if self.of[place] != NO_TERMS:
            self.count -= 1
            self.of[place] = NO_TERMS
            self.ends.drop(place)

    def check(self, places: Collection[int]) -> None:
        """Assert that all terms are of blocks that are held; for tests."""
        assert len(self.of) - self.of.count(NO_TERMS) == self.count
        if self.count:
            special = (place for place, terms in enumerate(self.of) if terms != NO_TERMS)
            assert all(place in places for place in special)
        self.ends.check(places)


EVERYTHING = b"everything"
"""Stands for all salts, which are 8 bytes long, where all blocks are being removed."""
