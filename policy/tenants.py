"""Shares of a level: limits on the blocks of one cache salt, and on raised blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Final, NamedTuple

from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX, PrioritizedLRU

TOLD_MAX: Final = 10
"""Largest number of salts in statistics: those that hold the most blocks."""
LOOKED_AT_MAX: Final = 1000
"""Largest number of salts among which these are searched for."""


class Shares(NamedTuple):
    """The limits of one level, in blocks; None stands for no limit."""

    tenant: int | None = None
    """Limit for all blocks of one cache salt. Blocks without a salt have no such limit."""
    raised: int | None = None
    """Limit for all blocks above the default priority, together."""
    raised_tenant: int | None = None
    """Limit for the blocks of one cache salt above the default priority."""


NO_SHARES: Final = Shares()


class Limits(NamedTuple):
    """Limits on the priorities that a request may ask for."""

    priority: int = PRIORITY_MAX
    """The highest priority."""
    pin_s: float = inf
    """Longest time for which a priority above the default lasts."""

    def clipped(
        self, priorities: Sequence[int], durations_s: Sequence[float | None] | None
    ) -> tuple[list[int], list[float | None], int]:
        """Return priorities and durations within the limits, and how many blocks asked for more."""
        wanted: Sequence[float | None] = [None] * len(priorities)
        if durations_s is not None:
            wanted = durations_s
        said, lasting, count = list[int](), list[float | None](), 0
        for priority, asked_s in zip(priorities, wanted, strict=True):
            lower, within_s = min(priority, self.priority), asked_s
            if lower > PRIORITY_DEFAULT and (inf if asked_s is None else asked_s) > self.pin_s:
                within_s = self.pin_s
            count += lower != priority or within_s != asked_s
            said.append(lower)
            lasting.append(within_s)
        return said, lasting, count


NO_LIMITS: Final = Limits()


class _Orders:
    """Places by cache salt; those of each salt are in order of eviction."""

    def __init__(self) -> None:
        self.of: dict[bytes, PrioritizedLRU] = {}
        self._all = PrioritizedLRU()  # its arrays are shared by all

    def __contains__(self, place: int) -> bool:
        return place in self._all

    def count(self, salt: bytes) -> int:
        """Return the number of places of a salt."""
        order = self.of.get(salt)
        return 0 if order is None else len(order)

    def push(self, salt: bytes, place: int, priority: int) -> None:
        """Add a place as the most recently used of its priority."""
        order = self.of.get(salt)
        if order is None:
            order = self.of[salt] = PrioritizedLRU(self._all)
        order.push(place, priority)

    def remove(self, salt: bytes, place: int) -> None:
        """Remove a place."""
        order = self.of[salt]
        order.remove(place)
        if not len(order):
            del self.of[salt]


class Tenants:
    """Counts the blocks of each salt in a level, as far as there are limits.

    Pure and synchronous, like eviction policies. Places of pinned blocks are counted, too.
    ``least`` is the level's threshold: blocks at it, or at the default priority, are not raised.
    """

    def __init__(self, shares: Shares, least: int) -> None:
        self.shares = shares
        self.base = max(PRIORITY_DEFAULT, least)
        """Priority to which blocks are lowered."""
        self._held = _Orders()
        self._raised = _Orders()
        self._raised_total = 0
        self._ranks = shares.raised is not None or shares.raised_tenant is not None
        self.above: dict[bytes, None] = {}
        """Salts that hold more blocks than they may."""

    @property
    def empty(self) -> bool:
        """True if no block is recorded."""
        return not (self._held.of or self._raised.of)

    def knows(self, place: int) -> bool:
        """Return whether the block at a place is recorded."""
        return place in self._held or place in self._raised

    def matters(self, salt: bytes, priority: int) -> bool:
        """Return whether blocks of this salt and priority must be recorded."""
        return bool(salt and self.shares.tenant is not None) or self.raises(priority)

    def raises(self, priority: int) -> bool:
        """Return whether blocks of this priority are raised and their number is limited."""
        return self._ranks and priority > self.base

    def spare(self, salt: bytes) -> float:
        """Return how many more blocks a salt may hold; negative if it holds too many."""
        if self.shares.tenant is None or not salt:
            return inf
        return self.shares.tenant - self._held.count(salt)

    def hold(self, salt: bytes, place: int, priority: int) -> int | None:
        """Record a new block at a place.

        Returns the place of a block of the same salt that has to be lowered, if one has.
        """
        if salt and self.shares.tenant is not None:
            self._held.push(salt, place, priority)
            self._judge(salt)
        return self._rank(salt, place, priority) if self.raises(priority) else None

    def drop(self, salt: bytes, place: int) -> None:
        """Record that a place holds no block any more."""
        if place in self._held:
            self._held.remove(salt, place)
            self._judge(salt)
        self._lower(salt, place)

    def used(self, salt: bytes, place: int, priority: int) -> None:
        """Record that a block was used: it is now the last of its priority to go."""
        if place in self._held:
            self._held.remove(salt, place)
            self._held.push(salt, place, priority)

    def ranked(self, salt: bytes, place: int, priority: int) -> int | None:
        """Record another priority of a block; returns the same as ``hold``."""
        self.used(salt, place, priority)
        self._lower(salt, place)
        return self._rank(salt, place, priority) if self.raises(priority) else None

    def raised_again(self, salt: bytes, places: Sequence[int]) -> None:
        """Record that raised blocks of a salt were raised anew: they are now the last to go."""
        touch = self._raised.of[salt].touch
        for place in places:
            touch(place)

    def _rank(self, salt: bytes, place: int, priority: int) -> int | None:
        shares, raised = self.shares, self._raised
        raised.push(salt, place, priority)
        self._raised_total += 1
        too_many = shares.raised is not None and self._raised_total > shares.raised
        if salt and shares.raised_tenant is not None:
            too_many = too_many or raised.count(salt) > shares.raised_tenant
        return next(iter(raised.of[salt])) if too_many else None

    def _lower(self, salt: bytes, place: int) -> None:
        if place in self._raised:
            self._raised.remove(salt, place)
            self._raised_total -= 1

    def _judge(self, salt: bytes) -> None:
        if self.spare(salt) < 0:
            self.above[salt] = None
        else:
            self.above.pop(salt, None)

    def victims(self, salt: bytes) -> Iterator[int]:
        """Return the places of a salt in order of eviction."""
        return iter(self._held.of.get(salt, ()))

    def as_dict(self) -> dict[str, int]:
        """Return how many blocks the largest salts hold, by the digests of the salts."""
        some = islice(self._held.of.items(), LOOKED_AT_MAX)
        most = sorted(((len(order), salt) for salt, order in some), reverse=True)[:TOLD_MAX]
        return {salt.hex(): count for count, salt in most}

    def check(self, held: dict[int, bytes], raised: dict[int, bytes]) -> None:
        """Assert that exactly these places are recorded, with these salts; O(n), for tests."""
        for orders, expected in ((self._held, held), (self._raised, raised)):
            found = {place: salt for salt, order in orders.of.items() for place in order}
            assert found == expected
            for order in orders.of.values():
                order.check()
        assert self._raised_total == len(raised)
        if self.shares.raised is not None:
            assert len(raised) <= self.shares.raised
        most = self.shares.raised_tenant
        for salt in self._raised.of:
            assert not salt or most is None or self._raised.count(salt) <= most
        over = {salt for salt in self._held.of if self.spare(salt) < 0}
        assert over == self.above.keys()


def give_way(
    newcomers: Sequence[int], places: Iterable[int], priority: Callable[[int], int]
) -> list[int]:
    """Return the places to evict for newcomers of these priorities, the highest first.

    ``places`` come in order of eviction. No evicted block is worth more than its newcomer.
    """
    chosen: list[int] = []
    for place in places:
        if len(chosen) == len(newcomers) or priority(place) > newcomers[len(chosen)]:
            break
        chosen.append(place)
    return chosen
