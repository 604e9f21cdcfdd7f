"""What happened to which block, as plain objects in a bounded buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvladder.keys import BlockKey

Reason = Literal["evicted", "removed", "expired", "lost"]


class Stored(NamedTuple):
    """These blocks can be got from ``level`` from now on."""

    level: str
    keys: tuple[BlockKey, ...]


class Removed(NamedTuple):
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


class Journal:
    """Blocks that may be in no level any more: one lost them, or they did not get there.

    The stack's lock is held around every call.
    """

    def __init__(self) -> None:
        self._keys: dict[BlockKey, None] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[BlockKey]) -> None:
        """Something happened to these."""
        self._keys.update(dict.fromkeys(keys))

    def take(self) -> Collection[BlockKey]:
        """Each of them once, since the last call; in no time, however many there are."""
        taken, self._keys = self._keys, {}
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

    def stored(self, level: str, keys: Sequence[BlockKey]) -> None:
        """Collect a Stored, unless ``keys`` is empty."""
        if keys:
            self._wake()
            if self._max:
                self._add(Stored(level, tuple(keys)))

    def removed(self, level: str, keys: Sequence[BlockKey], reason: Reason) -> None:
        """Collect a Removed, unless ``keys`` is empty."""
        if keys:
            self.given_up(keys)
            self._wake()
            if self._max:
                self._add(Removed(level, tuple(keys), reason))

    def given_up(self, keys: Sequence[BlockKey]) -> None:
        """A level was to get these, and does not: for journals, no event."""
        for journal in self._journals:
            journal.add(keys)

    def _wake(self) -> None:
        if self._listeners and not self._telling:
            self._telling = True
            self._post(self._tell)

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
