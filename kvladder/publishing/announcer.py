"""Events that tell what each level holds, exactly and from the beginning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from kvladder.events import Overflow, Reason, Removed, Stored
from kvladder.keys import BlockKey
from kvladder.tiers.ladder import Holdings, Ladder

COMPARE_MAX: Final = 1024
"""Blocks compared per call, so that an engine's step is not held up; about a millisecond."""


class Announcer:
    """Takes a cache's events and makes a stream of them that, replayed, gives each level's index.

    What was recovered at start is announced as stored. Where the buffer of events has overflowed,
    what was said is compared with what is there, a part per call, and the difference announced, so
    that nobody has to forget everything. For that it remembers what it said: about 50 bytes a
    block. It is the only one who takes the cache's events; its calls come from one thread.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._events = ladder.events
        self._lock = ladder.lock
        self._indexes = ladder.indexes
        self._told: dict[str, set[BlockKey]] = {name: set() for name in self._indexes}
        self._doubts: deque[tuple[str, Iterator[BlockKey]]] = deque()
        self._again: deque[tuple[str, Iterator[BlockKey]]] = deque()
        self._renew = False
        self._doubt()

    def _doubt(self) -> None:
        """Compare everything in the calls to come."""
        self._doubts.clear()
        for name, index in self._indexes.items():
            if index.places:
                self._doubts.append((name, self._held(index)))
            if self._told[name]:
                self._doubts.append((name, iter(list(self._told[name]))))

    def _held(self, index: Holdings) -> Iterator[BlockKey]:
        """What it holds, a part at a time; what comes meanwhile is told by events."""
        for start in range(0, index.places, COMPARE_MAX):
            with self._lock:
                part = index.held(start, start + COMPARE_MAX)
            yield from part

    def repeat(self) -> None:
        """Announce all that was announced again, in the calls to come.

        For listeners who were told that everything is cleared. Those who did not take it to be
        about these levels hear of blocks that they know; and each hears of all that are removed.
        """
        self._again = deque((name, iter(list(told))) for name, told in self._told.items() if told)
        self._renew = self._renew and bool(self._again)

    def renew(self) -> None:
        """Announce all that was announced as removed and as stored, in the calls to come.

        For a caller who tells listeners other names from now on.
        """
        self.repeat()
        self._renew = bool(self._again)

    @property
    def pending(self) -> bool:
        """Whether another call has something to announce even if nothing happens meanwhile."""
        return bool(self._doubts or self._again)

    def take(self) -> list[Stored | Removed]:
        """What is to be announced now, in order."""
        found: list[Stored | Removed] = []
        with self._lock:
            events = self._events.take()
        for event in events:
            if isinstance(event, Overflow):
                self._doubt()
            elif isinstance(event, Stored):
                self._stored(found, event.level, event.keys)
            else:
                self._removed(found, event.level, event.keys, event.reason)
        if self._again:
            name, keys = self._again[0]
            batch = list(islice(keys, COMPARE_MAX))
            still = tuple(key for key in batch if key in self._told[name])
            if still and self._renew:
                found.append(Removed(name, still, "removed"))
            if still:
                found.append(Stored(name, still))
            if not batch:
                self._again.popleft()
                self._renew = self._renew and bool(self._again)
        elif self._doubts:
            self._compare(found)
        return found

    def _compare(self, found: list[Stored | Removed]) -> None:
        """Announce a part of what differs. What events tell later is then no news to ``_told``."""
        name, keys = self._doubts[0]
        batch = list(islice(keys, COMPARE_MAX))
        if not batch:
            self._doubts.popleft()
            return
        index = self._indexes[name]
        with self._lock:
            here = [key in index for key in batch]
        held = [key for key, is_here in zip(batch, here, strict=True) if is_here]
        self._stored(found, name, held)
        gone = [key for key, is_here in zip(batch, here, strict=True) if not is_here]
        self._removed(found, name, gone, "lost")

    def _stored(self, found: list[Stored | Removed], level: str, keys: Sequence[BlockKey]) -> None:
        told = self._told[level]
        news = tuple(key for key in keys if key not in told)
        if news:
            told.update(news)
            found.append(Stored(level, news))

    def _removed(
        self, found: list[Stored | Removed], level: str, keys: Sequence[BlockKey], reason: Reason
    ) -> None:
        told = self._told[level]
        news = tuple(key for key in keys if key in told)
        if news:
            told.difference_update(news)
            found.append(Removed(level, news, reason))
