"""Ranks blocks of a level: another priority for those of a salt, many at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvladder.keys import BlockKey
from kvladder.policy.eviction import BULK_MIN
from kvladder.tiers.ladder.records.changes import IndexChanges
from kvladder.tiers.ladder.records.tenancy import P as P


class Ranking(NamedTuple):
    """Asks to give blocks of a salt a priority until a loop time; inf for good."""

    keys: Sequence[BlockKey]
    salt: bytes
    priority: int
    until_s: float
    is_prefix: bool
    """True if all ancestors of a block are among them: then a raised block counts with all its
    ancestors raised, too. Other blocks keep the floor that they have, or get a lower one."""

    @property
    def in_order(self) -> Iterable[BlockKey]:
        """Its different keys in the order of use: the head of a prefix is the newest."""
        if len(self.keys) < 2:
            return self.keys
        unique = dict.fromkeys(self.keys)
        return reversed(unique) if self.is_prefix else unique


class RankedIndex(IndexChanges[P]):
    """The part of an index that ranks blocks."""

    _pins: array[int]

    def touch(self, places: Sequence[int]) -> None:
        """Make these the most recently used; the last of ``places`` ends up the most recent."""

    def rank(self, rankings: Iterable[Ranking]) -> list[tuple[int, list[BlockKey], int]]:
        """Rank blocks as uses of them. None of them expires, or leaves the level by it.

        Returns for each ranking the number of blocks held as blocks of its salt, its other keys,
        and how many of the blocks a limit to raised ones has lowered again.
        """
        get, terms, floors, priorities = (
            self._place.get, self._terms.of, self._floor, self._priority,
        )  # fmt: skip
        put, pins, touch = self._until.put, self._pins, self.policy.touch
        used, used_s, uses, now_s = self._used, self._used_s, self._uses, self._now()
        now_s -= self._began_s
        tenants = self.tenants
        found: list[tuple[int, list[BlockKey], int]] = []
        for ranking in rankings:
            keys, salt, priority, until_s, is_prefix = ranking
            is_bulk = len(keys) >= BULK_MIN
            missing: list[BlockKey] = []
            own: list[P] = []
            for key in keys if len(keys) == 1 else ranking.in_order:
                place = get(key)
                if place is None or terms[place].salt != salt:
                    missing.append(key)
                    continue
                own.append(place)
                if is_prefix or floors[place] > priority:
                    floors[place] = priority
                put(place, until_s)
                if priorities[place] != priority:
                    self._reprioritize(place, priority)
                if not is_bulk:
                    used[place] = uses
                    used_s[place] = now_s
                    if not pins[place]:
                        touch(place)
            if is_bulk:
                self.touch(own)
            lowered = 0
            if tenants is not None and own:
                lowered = self._ranked(own, salt, priority, is_noted=is_bulk)
            if is_prefix:
                missing.reverse()
            found.append((len(own), missing, lowered))
        return found

    def _ranked(self, places: Sequence[P], salt: bytes, priority: int, *, is_noted: bool) -> int:
        """Report ranked blocks of a salt to its limits; return how many are lowered again."""
        tenants = self.tenants
        assert tenants is not None
        if tenants.shares.tenant is not None and not is_noted:
            self._note_used(places)
        if not tenants.raises(priority):
            return 0
        priorities, lowered = self._priority, 0
        for place in places:
            lowered += priorities[place] != priority
        if not lowered:  # otherwise some have just been raised
            tenants.raised_again(salt, places)
        return lowered
