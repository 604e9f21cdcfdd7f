"""What requests said of blocks beside their priority, and when blocks expire."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from math import inf
from typing import NamedTuple

from kvladder.keys import unseen
from kvladder.tiers.context import Clock
from kvladder.tiers.label import Facts

ANYWHERE = -1
"""A set of levels as a bit mask, 1 for host, 2 for the first below it: all of them."""
HOST = 1
ALIKE_MAX = 1024
"""How many different terms are remembered, so that those to come share them."""
PAGE = 12
"""The logarithm of how many places are kept together."""
_HERE, _HOST_TOO, _ENDS = 1, 2, 4


class Terms(NamedTuple):
    """Travels with a block, beside its priority."""

    levels: int = ANYWHERE
    """Where it may be stored."""
    expires_s: float = inf
    """Loop time at which every level forgets it."""
    salt: bytes = b""
    """Digest of its request's cache salt, 8 bytes; empty without one."""
    kind: str = ""
    """What its layers keep, where a codec of the stack may not work on all; empty if unknown."""

    def last(self, clock: Clock) -> bool:
        """Whether the block need not be forgotten yet."""
        return self.expires_s == inf or self.expires_s > clock.now()

    def merged(self, other: Terms) -> Terms:
        """What a block may that two requests offer: all that one of them allows."""
        return Terms(
            self.levels | other.levels,
            max(self.expires_s, other.expires_s),
            self.salt or other.salt,
            self.kind or other.kind,
        )

    def packed(self) -> int:
        """``Facts.terms``: what of it outlives the process. Which level is which may change."""
        bits = _ENDS if self.expires_s != inf else 0
        if self.levels != ANYWHERE:
            bits |= _HERE | (_HOST_TOO if self.levels & HOST else 0)
        return bits

    @classmethod
    def unpacked(cls, facts: Facts, here: int, behind_s: float) -> Terms:
        """The terms of a block that the level with the bit ``here`` recovered.

        Of several levels that it might be stored in, this one and host are left. ``behind_s`` is
        loop time minus wall time.
        """
        levels, expires_s = ANYWHERE, inf
        if facts.terms & _HERE:
            levels = here | (HOST if facts.terms & _HOST_TOO else 0)
        if facts.terms & _ENDS and facts.expires_wall_s is not None:
            expires_s = facts.expires_wall_s + behind_s
        return cls(levels, expires_s, facts.salt)


NO_TERMS = Terms()


class Deadlines:
    """By place, the loop time at which something happens to its block, for those that have one."""

    def __init__(self) -> None:
        self.of: dict[int, dict[int, float]] = {}
        """By ``place >> PAGE``, so that none is long to copy; empty if there are none at all."""
        self._count = 0
        self._heap: list[tuple[float, int]] = unseen([])
        self._before: list[tuple[float, int]] = unseen([])
        """A heap that was mostly of blocks that are gone: the others leave it for the new one."""

    def get(self, place: int) -> float:
        """When it happens to the block at a place; inf if never, or if ``due`` has told it."""
        page = self.of.get(place >> PAGE)
        return inf if page is None else page.get(place, inf)

    def put(self, place: int, at_s: float) -> None:
        """It happens at ``at_s``, and not when it was to happen before; inf for never."""
        self.drop(place)
        if at_s == inf:
            return
        self.of.setdefault(place >> PAGE, {})[place] = at_s
        self._count += 1
        heapq.heappush(self._heap, (at_s, place))
        for _ in range(min(4, len(self._before))):
            entry = heapq.heappop(self._before)
            if self.get(entry[1]) == entry[0] and entry not in self._before[:1]:
                heapq.heappush(self._heap, entry)
        if not self._before and len(self._heap) > 64 + 2 * self._count:
            self._heap, self._before = self._before, self._heap

    def drop(self, place: int) -> None:
        """There is no block at ``place`` any more."""
        page = self.of.get(place >> PAGE)
        if page is not None and page.pop(place, None) is not None:
            self._count -= 1
            if not page:
                del self.of[place >> PAGE]

    @property
    def _next(self) -> list[tuple[float, int]]:
        """The heap whose first entry is the first of all."""
        heap, before = self._heap, self._before
        return before if before and not (heap and heap[0] < before[0]) else heap

    @property
    def next_s(self) -> float:
        """Loop time at which ``due`` may have something; inf if never."""
        heap = self._next
        return heap[0][0] if heap else inf

    def due(self, now_s: float, count_max: float = inf) -> list[int]:
        """Places to whose blocks it happens by now, at most so many; told once."""
        found: list[int] = []
        looked = 0
        while self.next_s <= now_s and looked < count_max:
            looked += 1
            at_s, place = heapq.heappop(self._next)
            if self.get(place) == at_s:
                self.drop(place)
                found.append(place)
        return found

    def check(self, places: Collection[int]) -> None:
        """Assert that these are of blocks that are held, and that none is missed; for tests."""
        of = {place: at_s for page in self.of.values() for place, at_s in page.items()}
        assert all(self.of.values())
        assert len(of) == self._count
        assert all(place in places for place in of)
        assert {(at_s, place) for place, at_s in of.items()} <= {*self._heap, *self._before}
        assert len(self._heap) + len(self._before) <= 2 * (64 + 2 * len(of) + len(places))


class TermsByPlace:
    """The terms of a level's blocks."""

    def __init__(self) -> None:
        self.of: list[Terms] = unseen([])
        """By place, and where there is no block ``NO_TERMS``; whoever has the places extends it."""
        self.count = 0
        """Of how many blocks their requests said anything."""
        self.ends = Deadlines()
        """When those expire that do."""
        self._alike: dict[Terms, Terms] = {}
        """Equal terms are one object."""

    def put(self, place: int, terms: Terms) -> None:
        """The block at ``place`` has these from now on."""
        if len(self._alike) >= ALIKE_MAX:
            self._alike.clear()
        self.count += (terms != NO_TERMS) - (self.of[place] != NO_TERMS)
        self.of[place] = self._alike.setdefault(terms, terms)
        self.ends.put(place, terms.expires_s)

    def drop(self, place: int) -> None:
        """There is no block at ``place`` any more."""
        if self.of[place] != NO_TERMS:
            self.count -= 1
            self.of[place] = NO_TERMS
            self.ends.drop(place)

    def check(self, places: Collection[int]) -> None:
        """Assert that these are of blocks that are held; for tests."""
        special = [place for place, terms in enumerate(self.of) if terms != NO_TERMS]
        assert len(special) == self.count
        assert all(place in places for place in special)
        self.ends.check(places)


EVERYTHING = b"everything"
"""Stands for all salts, which are 8 bytes long, where all blocks are being removed."""
