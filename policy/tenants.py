"""Shares of a level: how much of it the blocks of one cache salt, and raised ones, may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Final, NamedTuple

from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX, PrioritizedLRU

TOLD_MAX: Final = 10
"""Salts that statistics name, of those that hold most."""
LOOKED_AT_MAX: Final = 1000
"""Salts among which they are looked for."""


class Shares(NamedTuple):
    """The limits of one level, in blocks; None stands for no limit."""

    tenant: int | None = None
    """For all blocks of one cache salt; blocks without a salt have no such limit."""
    raised: int | None = None
    """For all blocks above the default priority, together."""
    raised_tenant: int | None = None
    """For those of one cache salt."""


NO_SHARES: Final = Shares()


class Limits(NamedTuple):
    """What a request may ask for its blocks."""

    priority: int = PRIORITY_MAX
    """The highest priority."""
    pin_s: float = inf
    """The longest time for which a priority above the default lasts."""

    def clipped(
        self, priorities: Sequence[int], durations_s: Sequence[float | None] | None
    ) -> tuple[list[int], list[float | None], int]:
        """Priorities and durations within the limits, and how many of the blocks asked for more."""
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
    """Places by cache salt, those of each salt in the order in which they go."""

    def __init__(self) -> None:
        self.of: dict[bytes, PrioritizedLRU] = {}
        self._all = PrioritizedLRU()  # has the memory for all of them

    def __contains__(self, place: int) -> bool:
        return place in self._all

    def count(self, salt: bytes) -> int:
        """How many places of a salt there are."""
        order = self.of.get(salt)
        return 0 if order is None else len(order)

    def push(self, salt: bytes, place: int, priority: int) -> None:
        """Add a place as the most recently used of its priority."""
        order = self.of.get(salt)
        if order is None:
            order = self.of[salt] = PrioritizedLRU(self._all)
        order.push(place, priority)

    def remove(self, salt: bytes, place: int) -> None:
        """Forget a place."""
        order = self.of[salt]
        order.remove(place)
        if not len(order):
            del self.of[salt]


class Tenants:
    """Who holds what of a level, as far as there are limits to it.

    Pure and synchronous, as eviction policies are. Places of pinned blocks are counted, too.
    ``least`` is the level's threshold: blocks at it, or at the default priority, are not raised.
    """

    def __init__(self, shares: Shares, least: int) -> None:
        self.shares = shares
        self.base = max(PRIORITY_DEFAULT, least)
        """The priority that blocks have that are lowered."""
        self._held = _Orders()
        self._raised = _Orders()
        self._raised_total = 0
        self._ranks = shares.raised is not None or shares.raised_tenant is not None
        self.above: dict[bytes, None] = {}
        """Salts that hold more than they may."""

    @property
    def empty(self) -> bool:
        """Whether nothing is known of any block."""
        return not (self._held.of or self._raised.of)

    def matters(self, salt: bytes, priority: int) -> bool:
        """Whether blocks of a salt and priority have to be told of."""
        return bool(salt and self.shares.tenant is not None) or self.raises(priority)

    def raises(self, priority: int) -> bool:
        """Whether there is a limit to how many blocks of a priority there may be."""
        return self._ranks and priority > self.base

    def spare(self, salt: bytes) -> float:
        """How many blocks more a salt may hold, negative if it holds too many."""
        if self.shares.tenant is None or not salt:
            return inf
        return self.shares.tenant - self._held.count(salt)

    def hold(self, salt: bytes, place: int, priority: int) -> int | None:
        """Note a block that is new at a place.

        Returns the place of a block of the same salt that has to be lowered, if one has.
        """
        if salt and self.shares.tenant is not None:
            self._held.push(salt, place, priority)
            self._judge(salt)
        return self._rank(salt, place, priority) if self.raises(priority) else None

    def drop(self, salt: bytes, place: int) -> None:
        """Note that there is no block at a place any more."""
        if place in self._held:
            self._held.remove(salt, place)
            self._judge(salt)
        self._lower(salt, place)

    def used(self, salt: bytes, place: int, priority: int) -> None:
        """Note that a block was used: it is the last of its priority to go."""
        if place in self._held:
            self._held.remove(salt, place)
            self._held.push(salt, place, priority)

    def ranked(self, salt: bytes, place: int, priority: int) -> int | None:
        """Note another priority of a block; see ``hold`` for what is returned."""
        self.used(salt, place, priority)
        self._lower(salt, place)
        return self._rank(salt, place, priority) if self.raises(priority) else None

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
        """The places of a salt, in the order in which it gives them up."""
        return iter(self._held.of.get(salt, ()))

    def as_dict(self) -> dict[str, int]:
        """How many blocks those salts hold that hold most, by the salts' digests."""
        some = islice(self._held.of.items(), LOOKED_AT_MAX)
        most = sorted(((len(order), salt) for salt, order in some), reverse=True)[:TOLD_MAX]
        return {salt.hex(): count for count, salt in most}

    def check(self, held: dict[int, bytes], raised: dict[int, bytes]) -> None:
        """Assert that these places, with these salts, are what is known; O(n), for tests."""
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
    """Choose which places make room for newcomers of these priorities, the highest first.

    ``places`` come in the order in which they go. None is worth more than its newcomer.
    """
    chosen: list[int] = []
    for place in places:
        if len(chosen) == len(newcomers) or priority(place) > newcomers[len(chosen)]:
            break
        chosen.append(place)
    return chosen
