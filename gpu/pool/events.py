"""What happened to which block of a device pool, in a bounded buffer shared by its groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvladder.gpu.tree.names import Root
from kvladder.keys import BlockKey

Why = Literal["evicted", "removed", "taken", "lost"]
"""By the cache, by the user, by a request that writes on in the block, by a failed copy."""


@dataclass(frozen=True, slots=True)
class Created:
    """A pool exists, and is empty."""

    id: int
    group: int
    block_tokens: int
    capacities: Mapping[str, int]
    """Blocks per level, the device first."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block that can be reused from now on."""

    key: BlockKey
    tokens: tuple[int, ...]
    """Its token ids; fewer than a whole block's for the tail of a prompt."""
    priority: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of a prefix are in the index from now on."""

    id: int
    group: int
    level: str
    parent: BlockKey | None
    """The block before the first of them; None at the beginning of a prefix."""
    blocks: tuple[StoredBlock, ...]
    salt: str
    lora: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A block is in no level any more."""

    id: int
    group: int
    key: BlockKey
    why: Why


@dataclass(frozen=True, slots=True)
class Updated:
    """A block moved to another level, or got another priority: ``(old, new)``."""

    id: int
    group: int
    key: BlockKey
    level: tuple[str, str] | None = None
    priority: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Overflow:
    """``lost`` events did not fit into the buffer: take a snapshot and go on from there."""

    id: int
    """Of the last event that was lost."""
    lost: int


PoolEvent = Created | Stored | Removed | Updated | Overflow


class PoolEvents:
    """At most ``events_max`` events, numbered from 1; the oldest give way to one Overflow.

    With 0 nothing is collected and ``enabled`` is False.
    """

    def __init__(self, events_max: int = 0) -> None:
        if events_max < 0:
            raise ValueError(f"{events_max} events: expected 0 or more")
        self._max = events_max
        self._events: deque[PoolEvent] = deque()
        self._last = 0
        self._lost = 0
        self._lost_id = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is collected."""
        return self._max > 0

    @property
    def last_id(self) -> int:
        """The number of the newest event; a snapshot taken now includes what it tells."""
        return self._last

    def _number(self) -> int:
        self._last += 1
        return self._last

    def _add(self, event: PoolEvent) -> None:
        if len(self._events) >= self._max:
            self._lost_id = self._events.popleft().id
            self._lost += 1
        self._events.append(event)

    def created(self, group: int, block_tokens: int, capacities: Mapping[str, int]) -> None:
        """Collect a Created."""
        if self._max:
            self._add(Created(self._number(), group, block_tokens, dict(capacities)))

    def stored(
        self,
        group: int,
        level: str,
        parent: BlockKey | None,
        blocks: Sequence[StoredBlock],
        root: Root,
    ) -> None:
        """Collect a Stored, unless ``blocks`` is empty."""
        if self._max and blocks:
            made = tuple(blocks)
            self._add(Stored(self._number(), group, level, parent, made, root.salt, root.lora))

    def removed(self, group: int, keys: Sequence[BlockKey], why: Why) -> None:
        """Collect one Removed per key."""
        for key in keys if self._max else ():
            self._add(Removed(self._number(), group, key, why))

    def moved(self, group: int, key: BlockKey, old: str, new: str) -> None:
        """Collect an Updated of a block's level, if it is another one."""
        if self._max and old != new:
            self._add(Updated(self._number(), group, key, level=(old, new)))

    def reprioritized(self, group: int, key: BlockKey, old: int, new: int) -> None:
        """Collect an Updated of a block's priority, if it is another one."""
        if self._max and old != new:
            self._add(Updated(self._number(), group, key, priority=(old, new)))

    def take(self) -> list[PoolEvent]:
        """Everything collected since the last call, oldest first; an Overflow comes first."""
        taken: list[PoolEvent] = [Overflow(self._lost_id, self._lost)] if self._lost else []
        taken.extend(self._events)
        self._events.clear()
        self._lost = 0
        return taken
