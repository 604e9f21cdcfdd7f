"""Base of all levels: index, rule, statistics, events, expiry. Nothing here awaits."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from math import inf
from typing import Any, Generic, Protocol

from kvladder.arena import Arena, Slot
from kvladder.events import Event, Overflow, Reason, Removed, Stored
from kvladder.keys import SMALL, BlockKey, unseen
from kvladder.lock import BATCH, BULK_STEP, STEP, StackLock
from kvladder.metrics import LevelStats, MissReason
from kvladder.notices import Notices
from kvladder.policy.eviction import PRIORITY_DEFAULT, EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_SHARES, Shares, Tenants
from kvladder.tiers.context import Clock
from kvladder.tiers.ladder.loading.unreleased import Unreleased
from kvladder.tiers.ladder.records.admission import AdmissionGate
from kvladder.tiers.ladder.records.ghosts import GhostTable, entries_for
from kvladder.tiers.ladder.records.index import LevelIndex, P
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import EVERYTHING
from kvladder.tiers.spans import Tracer


class Journal:
    """Keeps blocks that may be in no level any more: a level lost them, or never got them.

    The stack's lock is held around every call.
    """

    def __init__(self) -> None:
        self._keys: deque[BlockKey] = unseen(deque())

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Add blocks that were lost or given up."""
        self._keys.extend(keys)

    def take(self) -> Collection[BlockKey]:
        """Return all blocks since the last call, some twice, in constant time."""
        taken, self._keys = self._keys, unseen(deque[BlockKey]())
        return taken


class EventBuffer:
    """Keeps at most ``events_max`` events; the oldest give way and are reported by one Overflow.

    With 0 no event is collected. The stack's lock is held around every call.

    Parameters
    ----------
    post:
        Schedules a function on another thread, or on this one after it has released the lock.
    """

    def __init__(self, events_max: int, *, post: Callable[..., object]) -> None:
        self._max = events_max
        self._events: deque[Event] = deque()
        self._lost = 0
        self._post = post
        self._listeners: tuple[Callable[[], object], ...] = ()
        self._telling = False
        """True if the call of the listeners is scheduled."""
        self._journals: tuple[Journal, ...] = ()

    def listen(self, listener: Callable[[], object]) -> None:
        """Have ``post`` call ``listener`` soon after events, never under the lock."""
        self._listeners = (*self._listeners, listener)

    def ignore(self, listener: Callable[[], object]) -> None:
        """Undo ``listen``."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    def follow(self) -> Journal:
        """Return a journal of blocks that are lost or given up from now on, until ``unfollow``."""
        journal = Journal()
        self._journals = (*self._journals, journal)
        return journal

    def unfollow(self, journal: Journal) -> None:
        """Undo ``follow``; may be called again."""
        self._journals = tuple(other for other in self._journals if other is not journal)

    def wake(self) -> None:
        """Schedule the call of the listeners."""
        if self._listeners and not self._telling:
            self._telling = True
            self._post(self._tell)

    def tell(self, event: Stored | Removed) -> None:
        """Collect an event of a level above the ladder's; journals do not follow its blocks."""
        if self._listeners:
            self.wake()
        if self._max:
            if len(self._events) >= self._max:
                self._events.popleft()
                self._lost += 1
            self._events.append(event)

    def stored(self, level: str, keys: Sequence[BlockKey]) -> None:
        """Collect a Stored, unless ``keys`` is empty."""
        if keys:
            self.tell(Stored(level, tuple(keys)))

    def removed(self, level: str, keys: Sequence[BlockKey], reason: Reason) -> None:
        """Collect a Removed, unless ``keys`` is empty, and tell the journals."""
        if keys:
            self.given_up(keys)
            self.tell(Removed(level, tuple(keys), reason))

    def given_up(self, keys: Sequence[BlockKey]) -> None:
        """Tell journals, without an event, of blocks that a level was to get and does not get."""
        for journal in self._journals:
            journal.add(keys)

    def _tell(self) -> None:
        self._telling = False  # first, so that events from now on schedule another call
        for listener in self._listeners:
            listener()

    def take(self) -> list[Event]:
        """Return everything collected since the last call, oldest first."""
        taken, self._events = self._events, deque()
        if self._lost:
            taken.appendleft(Overflow(self._lost))
        self._lost = 0
        return list(taken)


class AccessListener(Protocol):
    """Hears which blocks requests use. Its calls may come from any thread, and take no time."""

    def asked(self, keys: Sequence[BlockKey], found: int) -> None:
        """Note that a request asks for a prompt; the levels have the first ``found`` blocks.

        A fetch counts once, as for ``KeyedPolicy.requested``. ``keys`` stay as they are.
        """
        ...

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """Note that these blocks were computed, and are saved now. ``keys`` stay as they are."""
        ...


@dataclass(frozen=True)
class Shared:
    """The part that all levels of one stack have in common."""

    arena: Arena
    lock: StackLock
    clock: Clock
    events: EventBuffer
    notices: Notices
    purging: Counter[bytes] = field(default_factory=Counter[bytes])
    """Salts that are being purged: no level takes their blocks meanwhile."""
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    """See ``TierContext.fields``."""
    listener: AccessListener | None = None
    """Hears what requests use; None if no part wants to."""
    tracer: Tracer | None = None
    """Begins spans of fetches and saves; None without tracing, and then nothing is timed for it."""
    requests: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of saves and fetches, for eviction policies that are told which one brought a block.
    """

    began_s: float = field(init=False)
    """Loop time of the start."""
    unreleased: Unreleased = field(init=False)
    """Fetches and saves that their owner lost before their release."""
    ghosts: GhostTable = field(init=False)
    """Blocks that left the levels, or were not taken, and why."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ghosts", GhostTable(entries_for(self.arena)))
        object.__setattr__(self, "began_s", self.clock.now())
        object.__setattr__(self, "unreleased", Unreleased(self.notices))

    @property
    def bulk_step(self) -> int:
        """``BULK_STEP``, or less where the indexes do not fit the processor's caches."""
        return BULK_STEP if self.arena.slots <= SMALL else BULK_STEP // 8

    @property
    def load_step(self) -> int:
        """Number of loads that begin in one step; other blocks may have to be evicted for them."""
        return BATCH if self.arena.slots <= SMALL else STEP

    def refuses(self, salt: bytes) -> bool:
        """Return whether no level takes blocks of this salt now."""
        purging = self.purging
        return bool(purging) and (salt in purging or EVERYTHING in purging)


class StackCallbacks(Protocol):
    """The part of the stack that a level needs. The stack's lock is held around every call."""

    def room(self, count: int, priority: int) -> list[Slot]:
        """Lease slots for up to ``count`` blocks of a priority."""
        ...

    def settled(self, level: BaseLevel[int], keys: Sequence[BlockKey], *, stored: bool) -> None:
        """Note that blocks which were offered to the level are stored, or given up."""
        ...

    def wake(self) -> None:
        """Have the loop thread look after the levels soon."""
        ...


class BaseLevelSettings(Protocol):
    """Settings that every level has."""

    @property
    def name(self) -> str:
        """Name of the level."""
        ...

    @property
    def rule(self) -> OffloadRule:
        """Rule that says which blocks the level takes."""
        ...

    @property
    def policy(self) -> EvictionPolicy:
        """Order in which its blocks are evicted."""
        ...

    @property
    def shares(self) -> Shares:
        """Limits to the blocks that each salt may have there."""
        ...


class BaseLevel(ABC, Generic[P]):
    """Base of the host level and of those below it: rule, index, statistics.

    Every call has the stack's lock held, from any thread. ``bit`` is the level's bit in ``levels``
    of a block's terms.
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
        self.gate: AdmissionGate | None = None
        """Chooses among the blocks that are offered; None takes all that the rule admits."""
        self.on_evicted: Callable[[Sequence[BlockKey]], object] | None = None
        """Is told of blocks that were evicted to make room; None where no admission asks."""
        now = shared.clock.now
        self.index: LevelIndex[P] = LevelIndex(
            settings.policy,
            blocks_max=blocks_max,
            ttl=rule.ttl_s is not None,
            now=now,
            tenants=Tenants(shares, rule.min_priority) if shares != NO_SHARES else None,
            say=lambda why: shared.notices.say(f"{self.name} policy", f"tier {self.name}: {why}"),
        )

    def admits(self, meta: BlockMeta) -> bool:
        """Return whether a block of this meta would be taken now."""
        return (
            self.rule.admits(meta.floor, meta.hits)
            and bool(meta.terms.levels & self.bit)
            and not self.shared.refuses(meta.terms.salt)
            and meta.terms.last(self.shared.clock)
        )

    def obey(self, gate: AdmissionGate | None) -> None:
        """Leave out what the gate's admission does not want, from now on; None takes all."""
        self.gate = gate

    def tell(self, evicted: Callable[[Sequence[BlockKey]], object] | None) -> None:
        """Have ``evicted`` called with blocks that are evicted to make room; None calls nothing."""
        self.on_evicted = evicted

    def left_out(
        self, gate: AdmissionGate, keys: Sequence[BlockKey], metas: Sequence[BlockMeta]
    ) -> list[bool]:
        """Return which of these blocks the admission leaves out; count them, tell the policy.

        A block with a priority above the default is never left out.
        """
        rows = zip(keys, metas, gate.admission.wants(keys), strict=True)
        out = [
            not (wanted or meta.priority > PRIORITY_DEFAULT or key in self.index)
            and self.admits(meta)
            for key, meta, wanted in rows
        ]
        for meta in compress(metas, out):
            self.stats.drop("admission", meta.priority)
        self.index.refused([*compress(keys, out)], "admission")
        return out

    def find(self, key: BlockKey) -> P | None:
        """Return the block's place, or None. A block with its time over is expired instead."""
        place = self.index.place(key)
        if place is None:
            return None
        end_s = self.index.expires_s(place)
        if end_s == inf or end_s > self.shared.clock.now():
            return place
        self.forget([key], "expired")
        return None

    def hold(
        self,
        keys: Sequence[BlockKey],
        places: Sequence[P],
        meta: BlockMeta,
        *,
        pins: int = 0,
        request: int = 0,
    ) -> None:
        """Hold blocks at these places, all with one ``meta``, in that order.

        ``request`` is the number of the save or fetch that brought them; 0 if none did.
        """
        assert meta.floor >= self.rule.min_priority
        assert meta.terms.levels & self.bit
        ttl_s = self.rule.ttl_s
        expires_s = inf if ttl_s is None else self.shared.clock.now() + ttl_s
        self.index.insert(keys, places, meta, expires_s=expires_s, pins=pins, request=request)

    def expire(self, now_s: float, count_max: int) -> None:
        """Forget at most ``count_max`` blocks that expire by their terms by ``now_s``."""
        self.forget(self.index.due(now_s, count_max), "expired")

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Forget the blocks by a user's wish, and return how many were here."""
        known = self.index.keys()
        held = [key for key in keys if key in known]
        if held:
            self.forget(held, "removed")
        return len(held)

    def forget(
        self, keys: Sequence[BlockKey], reason: Reason, why: MissReason | None = None
    ) -> None:
        """Hold these blocks no longer. Their readers, and fetches that pinned them, keep their
        slots.

        Later misses of them are counted under ``why``; None stands for ``reason``.
        """
        if keys:
            self.shared.ghosts.add(keys, self.name, why or reason)
            if reason != "lost":  # a lost block is counted as a miss
                setattr(self.stats, reason, getattr(self.stats, reason) + len(keys))
            places = self.index.drop(keys, evicted=reason == "evicted")
            self._freed(keys, places, reason)
            self.shared.events.removed(self.name, keys, reason)

    @abstractmethod
    def _freed(self, keys: Sequence[BlockKey], places: Sequence[P], reason: Reason) -> None:
        """Free what belonged to blocks that just left the index for ``reason``, at these places."""


class Expiry:
    """Has levels forget blocks when the time that their requests gave them is over."""

    def __init__(self, levels: Callable[[], Sequence[BaseLevel[Any]]], shared: Shared) -> None:
        self._levels = levels
        self._shared = shared
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Set the timer for the next block that expires; on the loop thread, with the lock held."""
        next_s = min(level.index.next_end_s for level in self._levels())
        if self._timer is not None and self._timer.when() > next_s:
            self.cancel()
        if self._timer is None and next_s != inf:
            self._timer = asyncio.get_running_loop().call_at(next_s, self._ring)

    def cancel(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        now_s = self._shared.clock.now()
        for level in self._levels():
            with self._shared.lock:
                level.expire(now_s, STEP)
        with self._shared.lock:
            self.set()
