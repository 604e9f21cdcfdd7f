"""A shelf: what one level holds, host or any below it. It never waits, and awaits nothing."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Protocol

from kvladder.arena import Arena, Slot
from kvladder.events import Event, Overflow, Reason, Removed, Stored
from kvladder.keys import SMALL, BlockKey, unseen
from kvladder.lock import BATCH, BULK_STEP, STEP, StackLock
from kvladder.metrics import LevelStats
from kvladder.notices import Notices
from kvladder.policy.eviction import EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_SHARES, Shares, Tenants
from kvladder.tiers.context import Clock
from kvladder.tiers.ladder.loading.unreleased import Unreleased
from kvladder.tiers.ladder.records.index import BlockMeta, LevelIndex, P
from kvladder.tiers.ladder.records.terms import EVERYTHING

if TYPE_CHECKING:
    from kvladder.tiers.ladder.level import Level


class Journal:
    """Blocks that may be in no level any more: one lost them, or they did not get there.

    The stack's lock is held around every call.
    """

    def __init__(self) -> None:
        self._keys: deque[BlockKey] = unseen(deque())

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Something happened to these."""
        self._keys.extend(keys)

    def take(self) -> Collection[BlockKey]:
        """All of them since the last call, some twice; in no time, however many there are."""
        taken, self._keys = self._keys, unseen(deque[BlockKey]())
        return taken


class EventBuffer:
    """At most ``events_max`` events; the oldest give way and are reported by one Overflow.

    With 0 nothing is collected. The stack's lock is held around every call.

    Parameters
    ----------
    post:
        Has another thread, or this one after it has released the lock, call a function soon.
    """

    def __init__(self, events_max: int, *, post: Callable[..., object]) -> None:
        self._max = events_max
        self._events: deque[Event] = deque()
        self._lost = 0
        self._post = post
        self._listeners: tuple[Callable[[], object], ...] = ()
        self._telling = False
        """Whether listeners are about to be called."""
        self._journals: tuple[Journal, ...] = ()

    def listen(self, listener: Callable[[], object]) -> None:
        """Have ``listener`` called soon after events, by ``post``: never under the lock."""
        self._listeners = (*self._listeners, listener)

    def ignore(self, listener: Callable[[], object]) -> None:
        """Undo ``listen``."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    def follow(self) -> Journal:
        """What is lost or given up from now on, until ``unfollow``."""
        journal = Journal()
        self._journals = (*self._journals, journal)
        return journal

    def unfollow(self, journal: Journal) -> None:
        """Undo ``follow``; may be called again."""
        self._journals = tuple(other for other in self._journals if other is not journal)

    def wake(self) -> None:
        """Have listeners called soon."""
        if self._listeners and not self._telling:
            self._telling = True
            self._post(self._tell)

    def tell(self, event: Stored | Removed) -> None:
        """Collect an event of a level above the ladder's, whose blocks no journal follows."""
        self.wake()
        if self._max:
            self._add(event)

    def stored(self, level: str, keys: Sequence[BlockKey]) -> None:
        """Collect a Stored, unless ``keys`` is empty."""
        if keys:
            self.tell(Stored(level, tuple(keys)))

    def removed(self, level: str, keys: Sequence[BlockKey], reason: Reason) -> None:
        """Collect a Removed, unless ``keys`` is empty."""
        if keys:
            self.given_up(keys)
            self.tell(Removed(level, tuple(keys), reason))

    def given_up(self, keys: Sequence[BlockKey]) -> None:
        """A level was to get these, and does not: for journals, no event."""
        for journal in self._journals:
            journal.add(keys)

    def _tell(self) -> None:
        self._telling = False  # first: what happens from now on is told again
        for listener in self._listeners:
            listener()

    def _add(self, event: Event) -> None:
        if len(self._events) >= self._max:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)

    def take(self) -> list[Event]:
        """Everything collected since the last call, oldest first."""
        taken, self._events = self._events, deque()
        if self._lost:
            taken.appendleft(Overflow(self._lost))
        self._lost = 0
        return list(taken)


@dataclass(frozen=True)
class Shared:
    """What all levels of one stack have in common."""

    arena: Arena
    lock: StackLock
    clock: Clock
    events: EventBuffer
    notices: Notices
    purging: Counter[bytes] = field(default_factory=Counter[bytes])
    """Salts whose blocks are being removed: nothing of theirs is taken meanwhile."""
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    """See ``TierContext.fields``."""

    @cached_property
    def unreleased(self) -> Unreleased:
        """Fetches and saves whose owner lost them."""
        return Unreleased(self.notices)

    @property
    def bulk_step(self) -> int:
        """``BULK_STEP``, or less where books are too large for the processor's caches."""
        return BULK_STEP if self.arena.slots <= SMALL else BULK_STEP // 8

    @property
    def load_step(self) -> int:
        """How many blocks begin to come up at once, for which others may have to leave."""
        return BATCH if self.arena.slots <= SMALL else STEP

    def refuses(self, salt: bytes) -> bool:
        """Whether no level takes blocks of this salt now."""
        purging = self.purging
        return bool(purging) and (salt in purging or EVERYTHING in purging)


class StackCallbacks(Protocol):
    """What a level needs of the stack; with the lock held."""

    def room(self, count: int, priority: int) -> list[Slot]:
        """Lease slots for up to so many blocks of a priority."""
        ...

    def below(self, level: Level, key: BlockKey, meta: BlockMeta) -> Level | None:
        """The level below this one that should get the block when it leaves there."""
        ...

    def settled(self, level: Level, keys: Sequence[BlockKey], *, stored: bool) -> None:
        """Blocks that were offered to the level are stored, or given up."""
        ...

    def wake(self) -> None:
        """Have the loop thread look after the levels soon."""
        ...


class BaseLevelSettings(Protocol):
    """What every level has."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def rule(self) -> OffloadRule:
        """What it takes."""
        ...

    @property
    def policy(self) -> EvictionPolicy:
        """Which of its blocks goes first."""
        ...

    @property
    def shares(self) -> Shares:
        """How much of it salts may have."""
        ...


class BaseLevel(ABC, Generic[P]):
    """What the host level and those below it have in common: rule, index, statistics.

    Every call has the stack's lock held, from any thread. ``bit`` says which of the levels in a
    block's terms it is.
    """

    def __init__(
        self, settings: BaseLevelSettings, shared: Shared, *, bit: int, blocks_max: int
    ) -> None:
        self.name = settings.name
        self.rule = rule = settings.rule
        shares = settings.shares
        self.bit = bit
        self.shared = shared
        self.stats = LevelStats()
        now = shared.clock.now
        self.index: LevelIndex[P] = LevelIndex(
            settings.policy,
            blocks_max=blocks_max,
            ttl=rule.ttl_s is not None,
            now=now,
            tenants=Tenants(shares, rule.min_priority) if shares != NO_SHARES else None,
        )

    def admits(self, meta: BlockMeta) -> bool:
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
        self, keys: Sequence[BlockKey], places: Sequence[P], meta: BlockMeta, *, pins: int = 0
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


class Expiry:
    """Has levels forget blocks when the time that their requests gave them is over."""

    def __init__(self, levels: Sequence[BaseLevel[Any]], shared: Shared) -> None:
        self._levels = levels
        self._shared = shared
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Look at what is there now; on the loop thread, with the lock held."""
        next_s = min(level.index.next_end_s for level in self._levels)
        if self._timer is not None and self._timer.when() > next_s:
            self.cancel()
        if self._timer is None and next_s != inf:
            self._timer = asyncio.get_running_loop().call_at(next_s, self._ring)

    def cancel(self) -> None:
        """It does not go off."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        now_s = self._shared.clock.now()
        for level in self._levels:
            with self._shared.lock:
                level.expire(now_s, STEP)
        with self._shared.lock:
            self.set()
