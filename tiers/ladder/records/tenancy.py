"""The part of a level's index that keeps the shares of cache salts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Generic, TypeVar, cast

from kvladder.keys import BlockKey
from kvladder.policy.tenants import Tenants, give_way
from kvladder.tiers.ladder.records.terms import Deadlines, TermsByPlace

P = TypeVar("P", bound=int)
"""A place in a level: a small non-negative int; in host, a slot."""


class Tenanted(ABC, Generic[P]):
    """The part of an index that reports changes to ``Tenants``, where there are limits.

    Without limits ``tenants`` is None, and every call here ends at once.
    """

    tenants: Tenants | None
    clipped: int
    """Number of blocks that lost a raised priority, since there were too many raised ones."""
    recounting: bool
    """True while blocks are being counted under other limits, so that some are not yet known."""
    lent: dict[P, bytes]
    """Salts of places that are leased for blocks of a salt with a limit, and hold none yet."""
    _key: list[BlockKey | None]
    _priority: bytearray
    _pins: array[int]
    _until: Deadlines
    _terms: TermsByPlace

    @abstractmethod
    def _reprioritize(self, place: int, priority: int) -> None:
        """Give the block at ``place`` another priority."""

    def _note_held(self, places: Sequence[P], salt: bytes, priority: int) -> None:
        """Report new blocks at ``places``, if there are limits for their salt or priority."""
        tenants = self.tenants
        if tenants is None or not tenants.matters(salt, priority):
            return
        for place in places:
            self.lent.pop(place, None)
            self._lower(tenants.hold(salt, place, priority))

    def _lower(self, place: int | None) -> None:
        """Give the block at a place the default priority of the level."""
        if place is not None and self.tenants is not None:
            self.clipped += 1
            self._until.put(place, inf)
            self._reprioritize(place, self.tenants.base)

    def lend(self, places: Sequence[P], salt: bytes) -> None:
        """Note that places are leased for blocks of a salt; an empty one has no limit."""
        if salt:
            self.lent.update(dict.fromkeys(places, salt))
        else:
            for place in places:
                self.lent.pop(place, None)

    def coming(self, salt: bytes) -> int:
        """Return how many places are leased for blocks of a salt and hold none yet."""
        return sum(its == salt for its in self.lent.values())

    def regain(self, claims: Callable[[P], int]) -> None:
        """Forget leased places that were given back: those without ``claims``."""
        self.lent = {place: salt for place, salt in self.lent.items() if claims(place)}

    def spare(self, salt: bytes) -> float:
        """Return how many more blocks of a salt there may be; negative if there are too many."""
        return inf if self.tenants is None else self.tenants.spare(salt)

    def own_victims(self, salt: bytes) -> Iterator[P]:
        """Iterate over unpinned places of a salt, in the order in which it gives them up."""
        places = () if self.tenants is None else self.tenants.victims(salt)
        return (cast("P", place) for place in places if not self._pins[place])

    def give_way(
        self, salt: bytes, newcomers: Sequence[int], stays: Callable[[int], bool]
    ) -> tuple[list[P], int]:
        """Choose blocks of a salt that make room for its newcomers, so that it keeps its share.

        ``newcomers`` are their priorities, the highest first. Returns exactly as many places as are
        needed. None of them ``stays`` or is worth more than its newcomer. Also returns the number
        of newcomers that there is room for.
        """
        spare = self.spare(salt)
        if spare >= len(newcomers):
            return [], len(newcomers)
        room = max(0, int(spare))
        places = (place for place in self.own_victims(salt) if not stays(place))
        chosen = give_way(newcomers[room:], places, self._priority.__getitem__)
        return cast("list[P]", chosen), room + len(chosen)

    @property
    def above(self) -> Collection[bytes]:
        """Salts that hold more than they may."""
        return () if self.tenants is None else self.tenants.above.keys()

    @property
    def has_quota(self) -> bool:
        """True if there is a limit to the blocks of one salt."""
        return self.tenants is not None and self.tenants.shares.tenant is not None

    def excess(self, count: int, stays: Callable[[int], bool]) -> list[BlockKey]:
        """Return up to ``count`` blocks that salts hold beyond their quota and that may go."""
        chosen: list[int] = []
        for salt in self.above:
            over = min(-int(self.spare(salt)), count - len(chosen))
            free = (place for place in self.own_victims(salt) if not stays(place))
            chosen += islice(free, over)
        return [key for place in chosen if (key := self._key[place]) is not None]

    def salt(self, place: int) -> bytes:
        """Return the salt of the block at ``place``; empty if it has none."""
        return self._terms.of[place].salt

    def _note_used(self, places: Sequence[int]) -> None:
        """Report that these blocks were used, if there is a limit to those of one salt."""
        tenants, terms = self.tenants, self._terms.of
        if tenants is not None and tenants.shares.tenant is not None:
            for place in places:
                tenants.used(terms[place].salt, place, self._priority[place])

    def _note_dropped(self, places: Sequence[int]) -> None:
        """Report that these places are empty; their terms are still there."""
        tenants, terms = self.tenants, self._terms.of
        if tenants is not None and not tenants.empty:
            for place in places:
                tenants.drop(terms[place].salt, place)

    def _check_tenants(self, held: Iterable[int]) -> None:
        """Assert that these places are known by their salts; for tests."""
        if self.tenants is not None and not self.recounting:
            salts = {place: self.salt(place) for place in held}
            has_quota = self.tenants.shares.tenant is not None
            self.tenants.check(
                {place: salt for place, salt in salts.items() if salt and has_quota},
                {p: salt for p, salt in salts.items() if self.tenants.raises(self._priority[p])},
            )
