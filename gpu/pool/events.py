"""Events about the blocks of device pools, in a bounded buffer that a model's pools share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from kvladder.gpu.tree.names import Extra, Root
from kvladder.keys import BlockKey

Why = Literal["evicted", "removed", "taken", "lost"]
"""Cause: the cache, the user, a request that continues in the block's slot, or a failed copy."""
BELOW: Final = "tiers"
"""Level of a block that left the device for a tier; the tiers' own events say which one."""


@dataclass(frozen=True, slots=True)
class Created:
    """A pool was created; it is empty."""

    id: int
    group: int
    block_tokens: int
    capacities: Mapping[str, int]
    """Blocks per level, with the device first."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block that can now be reused."""

    key: BlockKey
    tokens: tuple[int, ...]
    """Its token ids; fewer than a whole block's for the tail of a prompt."""
    priority: int
    extra: Extra = ()
    """Its content beyond its tokens, by the offset within the block."""


@dataclass(frozen=True, slots=True)
class PoolStored:
    """Consecutive blocks of a prefix were added to the index."""

    id: int
    group: int
    level: str
    """Name of the device, or ``BELOW``."""
    parent: BlockKey | None
    """Key of the block before the first one; None at the beginning of a prefix."""
    blocks: tuple[StoredBlock, ...]
    salt: str
    lora: str


@dataclass(frozen=True, slots=True)
class PoolRemoved:
    """A block is neither on the device nor in a tier any more."""

    id: int
    group: int
    key: BlockKey
    why: Why


@dataclass(frozen=True, slots=True)
class Updated:
    """A block left the device for a tier, came back, or got another priority: ``(old, new)``."""

    id: int
    group: int
    key: BlockKey
    level: tuple[str, str] | None = None
    priority: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PoolOverflow:
    """``lost`` events did not fit into the buffer: take a snapshot and continue from there."""

    id: int
    """Number of the last lost event."""
    lost: int


Stored, Removed, Overflow = PoolStored, PoolRemoved, PoolOverflow
"""Names of these events until version 0.2."""

PoolEvent = Created | PoolStored | PoolRemoved | Updated | PoolOverflow


class PoolEvents:
    """Keeps at most ``events_max`` events, numbered from 1; one Overflow replaces the oldest.

    With 0 nothing is collected. Listeners receive every event of their group at once, even if it is
    not collected.
    """

    def __init__(self, events_max: int = 0) -> None:
        if events_max < 0:
            raise ValueError(f"{events_max} events: expected 0 or more")
        self._max = events_max
        self._listeners: dict[int, Callable[[PoolEvent], object]] = {}
        self._events: deque[PoolEvent] = deque()
        self._lost = 0
        self._lost_id = 0
        self.last_id = 0
        """Number of the newest event; a snapshot taken now includes its effect."""

    def listen(self, group: int, listener: Callable[[PoolEvent], object]) -> None:
        """Call ``listener`` with every event of a group; its pool must not exist yet."""
        assert group not in self._listeners
        self._listeners[group] = listener

    def enabled(self, group: int) -> bool:
        """Return whether events of this group are collected or have a listener."""
        return self._max > 0 or group in self._listeners

    def add(self, group: int, make: Callable[[int], PoolEvent]) -> None:
        """Create an event of a group by ``make(id)``; pass it to the listener and collect it."""
        self.last_id += 1
        if group in self._listeners:
            self._listeners[group](make(self.last_id))
        if not self._max:
            return
        if len(self._events) >= self._max:
            self._lost_id = self._events.popleft().id
            self._lost += 1
        self._events.append(make(self.last_id))

    def take(self) -> list[PoolEvent]:
        """Return all events collected since the last call, oldest first, after any Overflow."""
        taken: list[PoolEvent] = [PoolOverflow(self._lost_id, self._lost)] if self._lost else []
        taken.extend(self._events)
        self._events.clear()
        self._lost = 0
        return taken


class Reports:
    """Reports one pool's events, if enabled; pools may share the buffer."""

    def __init__(self, events: PoolEvents, group: int, level: str) -> None:
        self.enabled = events.enabled(group)
        self._events = events
        self._group = group
        self._level = level

    def _add(self, make: Callable[[int], PoolEvent]) -> None:
        self._events.add(self._group, make)

    def created(self, block_tokens: int, capacities: Mapping[str, int]) -> None:
        """Collect a Created."""
        if self.enabled:
            self._add(lambda n: Created(n, self._group, block_tokens, dict(capacities)))

    def stored(
        self, parent: BlockKey, blocks: Sequence[StoredBlock], root: Root, *, below: bool = False
    ) -> None:
        """Collect a Stored, unless ``blocks`` is empty; ``parent`` may be the root's key."""
        if blocks and self.enabled:
            place = self._group, BELOW if below else self._level
            above = None if parent == root.key else parent
            made = tuple(blocks)
            self._add(lambda n: PoolStored(n, *place, above, made, root.salt, root.lora))

    def removed(self, keys: Sequence[BlockKey], why: Why) -> None:
        """Collect one Removed per key."""
        for key in keys if self.enabled else ():
            self._add(partial(PoolRemoved, group=self._group, key=key, why=why))

    def moved(self, key: BlockKey, *, off: bool) -> None:
        """Collect an Updated for a block in a tier that went ``off`` the device, or came to it."""
        if self.enabled:
            level = (self._level, BELOW) if off else (BELOW, self._level)
            self._add(lambda n: Updated(n, self._group, key, level=level))

    def reprioritized(self, key: BlockKey, old: int, new: int) -> None:
        """Collect an Updated for a block with a changed priority."""
        if self.enabled:
            self._add(lambda n: Updated(n, self._group, key, priority=(old, new)))
