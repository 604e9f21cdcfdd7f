"""A shelf: what one level holds, host or any below it. It never waits, and awaits nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Generic, Protocol

from kvladder.arena import Slot
from kvladder.events import Reason
from kvladder.keys import BlockKey
from kvladder.metrics import LevelStats
from kvladder.policy.eviction import EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.tiers.base import Shared
from kvladder.tiers.ladder.index import LevelIndex, Meta, P

if TYPE_CHECKING:
    from kvladder.tiers.ladder.level import Level


class Above(Protocol):
    """What a level needs of the stack; with the lock held."""

    def room(self, count: int, priority: int) -> list[Slot]:
        """Lease slots for up to so many blocks of a priority."""
        ...

    def below(self, level: Level, key: BlockKey, meta: Meta) -> Level | None:
        """The level below this one that should get the block when it leaves there."""
        ...

    def settled(self, level: Level, keys: Sequence[BlockKey], *, stored: bool) -> None:
        """Blocks that were offered to the level are stored, or given up."""
        ...

    def wake(self) -> None:
        """Have the loop thread look after the levels soon."""
        ...


class Shelf(ABC, Generic[P]):
    """What the host level and those below it have in common: rule, index, statistics.

    Every call has the stack's lock held, from any thread. ``bit`` says which of the levels in a
    block's terms it is.
    """

    def __init__(
        self, name: str, rule: OffloadRule, policy: EvictionPolicy, shared: Shared, *, bit: int
    ) -> None:
        self.name = name
        self.rule = rule
        self.bit = bit
        self.shared = shared
        self.stats = LevelStats()
        now = shared.clock.now
        self.index: LevelIndex[P] = LevelIndex(policy, ttl=rule.ttl_s is not None, now=now)

    def admits(self, meta: Meta) -> bool:
        """Whether a block of this meta would be taken now."""
        return (
            self.rule.admits(meta.floor, meta.hits)
            and bool(meta.terms.levels & self.bit)
            and not self.shared.refuses(meta.terms.salt)
            and meta.terms.last(self.shared.clock)
        )

    def find(self, key: BlockKey) -> P | None:
        """The block's place, or None; a block whose time has come is expired instead."""
        place = self.index.place(key)
        if place is None:
            return None
        end_s = self.index.expires_s(place)
        if end_s == inf or end_s > self.shared.clock.now():
            return place
        self.forget([key], "expired")
        return None

    def hold(
        self, keys: Sequence[BlockKey], places: Sequence[P], meta: Meta, *, pins: int = 0
    ) -> None:
        """Hold blocks at these places, all with one ``meta``, in that order."""
        assert meta.floor >= self.rule.min_priority
        assert meta.terms.levels & self.bit
        ttl_s = self.rule.ttl_s
        expires_s = inf if ttl_s is None else self.shared.clock.now() + ttl_s
        self.index.insert(keys, places, meta, expires_s=expires_s, pins=pins)

    def expire(self, now_s: float, count_max: int) -> None:
        """Forget blocks, at most so many, whose request wanted them to expire by now."""
        self.forget(self.index.due(now_s, count_max), "expired")

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Forget the blocks, by a user's wish; how many were here."""
        known = self.index.keys()
        held = [key for key in keys if key in known]
        if held:
            self.forget(held, "removed")
        return len(held)

    def forget(self, keys: Sequence[BlockKey], reason: Reason) -> None:
        """Hold these no longer; who reads one, or has pinned it, goes on with it."""
        if keys:
            if reason != "lost":  # which is counted where it is missed
                setattr(self.stats, reason, getattr(self.stats, reason) + len(keys))
            self._freed(keys, self.index.drop(keys), reason)
            self.shared.events.removed(self.name, keys, reason)

    @abstractmethod
    def _freed(self, keys: Sequence[BlockKey], places: Sequence[P], reason: Reason) -> None:
        """These have just left the index, for this reason, and were at these places."""
