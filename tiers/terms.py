"""What a request may say of its blocks: where they may be, until when, and whose they are."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from math import inf
from typing import NamedTuple

from kvladder.tiers.base import Clock, Item

ANYWHERE = -1
"""A set of levels as a bit mask, 1 for host, 2 for the first below it: all of them."""
HOST = 1

ALIKE_MAX = 1024
"""How many different terms are remembered, so that those to come share them."""

_HERE, _HOST_TOO, _ENDS = 1, 2, 4


class Terms(NamedTuple):
    """Travels with a block, beside its priority."""

    levels: int = ANYWHERE
    """Where it may be stored."""
    expires_s: float = inf
    """Loop time at which every level forgets it."""
    salt: bytes = b""
    """Digest of its request's cache salt, 8 bytes; empty without one."""

    def last(self, clock: Clock) -> bool:
        """Whether the block need not be forgotten yet."""
        return self.expires_s == inf or self.expires_s > clock.now()

    def merged(self, other: Terms) -> Terms:
        """What a block may that two requests offer: all that one of them allows."""
        return Terms(
            self.levels | other.levels,
            max(self.expires_s, other.expires_s),
            self.salt or other.salt,
        )

    def packed(self) -> int:
        """``Item.terms``: what of it outlives the process. Which level is which may change."""
        bits = _ENDS if self.expires_s != inf else 0
        if self.levels != ANYWHERE:
            bits |= _HERE | (_HOST_TOO if self.levels & HOST else 0)
        return bits

    @classmethod
    def unpacked(cls, item: Item, here: int, behind_s: float) -> Terms:
        """The terms of a block that the level with the bit ``here`` recovered.

        Of several levels that it might be stored in, this one and host are left. ``behind_s`` is
        loop time minus wall time.
        """
        levels, expires_s = ANYWHERE, inf
        if item.terms & _HERE:
            levels = here | (HOST if item.terms & _HOST_TOO else 0)
        if item.terms & _ENDS and item.expires_wall_s is not None:
            expires_s = item.expires_wall_s + behind_s
        return cls(levels, expires_s, item.salt)


NO_TERMS = Terms()


class Deadlines:
    """By place, the loop time at which something happens to its block, for those that have one."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self.get = self._of.get
        """When it happens to the block at a place; none if never, or if ``due`` has told it."""

    def put(self, place: int, at_s: float) -> None:
        """It happens at ``at_s``, and not when it was to happen before; inf for never."""
        if at_s == inf:
            self.drop(place)
            return
        self._of[place] = at_s
        heapq.heappush(self._heap, (at_s, place))
        if len(self._heap) > 64 + 2 * len(self._of):  # mostly of blocks that are gone
            self._heap = [(at_s, place) for place, at_s in self._of.items()]
            heapq.heapify(self._heap)

    def drop(self, place: int) -> None:
        """There is no block at ``place`` any more."""
        self._of.pop(place, None)

    def __len__(self) -> int:
        return len(self._of)

    @property
    def next_s(self) -> float:
        """Loop time at which ``due`` may have something; inf if never."""
        return self._heap[0][0] if self._heap else inf

    def due(self, now_s: float, count_max: float = inf) -> list[int]:
        """Places to whose blocks it happens by now, at most so many; told once."""
        found: list[int] = []
        while self.next_s <= now_s and len(found) < count_max:
            at_s, place = heapq.heappop(self._heap)
            if self._of.get(place) == at_s:
                del self._of[place]
                found.append(place)
        return found

    def check(self, places: Collection[int]) -> None:
        """Assert that these are of blocks that are held, and that none is missed; for tests."""
        assert all(place in places for place in self._of)
        assert {(at_s, place) for place, at_s in self._of.items()} <= {*self._heap}
        assert len(self._heap) <= 64 + 2 * len(self._of) + len(places)


class TermsByPlace:
    """The terms of those of a level's blocks whose requests said anything."""

    def __init__(self) -> None:
        self._terms: dict[int, Terms] = {}
        self.ends = Deadlines()
        """When those expire that do."""
        self._alike: dict[Terms, Terms] = {}
        """Equal terms are one object, since the collector of garbage goes through all there are."""
        self.get = self._terms.get
        """The terms of the block at a place; none if nothing was said of it."""

    def __len__(self) -> int:
        return len(self._terms)

    def put(self, place: int, terms: Terms) -> None:
        """The block at ``place`` has these from now on."""
        if len(self._alike) >= ALIKE_MAX:
            self._alike.clear()
        self._terms[place] = self._alike.setdefault(terms, terms)
        self.ends.put(place, terms.expires_s)

    def drop(self, place: int) -> None:
        """There is no block at ``place`` any more."""
        if self._terms.pop(place, None) is not None:
            self.ends.drop(place)

    def check(self, places: Collection[int]) -> None:
        """Assert that these are of blocks that are held; for tests."""
        assert all(place in places for place in self._terms)
        self.ends.check(places)
