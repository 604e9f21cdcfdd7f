"""What happened to which block, as plain objects in a bounded buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvladder.keys import BlockKey

Reason = Literal["evicted", "removed", "expired", "lost"]


@dataclass(frozen=True, slots=True)
class Stored:
    """These blocks can be got from ``level`` from now on."""

    level: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """These blocks cannot be got from ``level`` any more.

    Evicted by the cache, removed by the user, expired by time, or lost by the tier.
    """

    level: str
    keys: tuple[BlockKey, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Overflow:
    """``lost`` events did not fit into the buffer; what follows is complete again."""

    lost: int


Event = Stored | Removed | Overflow


class EventBuffer:
    """At most ``events_max`` events; the oldest give way and are reported by one Overflow.

    With 0 nothing is collected.
    """

    def __init__(self, events_max: int) -> None:
        self._max = events_max
        self._events: deque[Event] = deque()
        self._lost = 0
        self.observers: list[Callable[[Sequence[BlockKey]], None]] = []
        """Told at once which blocks came to a level or left one, with the stack's lock held."""

    def stored(self, level: str, keys: Sequence[BlockKey]) -> None:
        """Collect a Stored, unless ``keys`` is empty."""
        for tell in self.observers:
            tell(keys)
        if keys and self._max:
            self._add(Stored(level, tuple(keys)))

    def removed(self, level: str, keys: Sequence[BlockKey], reason: Reason) -> None:
        """Collect a Removed, unless ``keys`` is empty."""
        for tell in self.observers:
            tell(keys)
        if keys and self._max:
            self._add(Removed(level, tuple(keys), reason))

    def _add(self, event: Event) -> None:
        if len(self._events) >= self._max:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)

    def take(self) -> list[Event]:
        """Everything collected since the last call, oldest first."""
        taken: list[Event] = [Overflow(self._lost)] if self._lost else []
        taken.extend(self._events)
        self._events.clear()
        self._lost = 0
        return taken
