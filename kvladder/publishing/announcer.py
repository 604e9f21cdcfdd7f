"""Makes an exact stream of events of what each level holds, from the beginning."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Final

from kvladder.events import Overflow, Reason, Removed, Stored
from kvladder.keys import BlockKey
from kvladder.tiers.ladder import Holdings, Ladder

COMPARE_MAX: Final = 1024
"""Blocks compared per call, about a millisecond, so that an engine's step is not delayed."""


def _parts(keys: Sequence[BlockKey]) -> Iterator[Sequence[BlockKey]]:
    return (keys[at : at + COMPARE_MAX] for at in range(0, len(keys), COMPARE_MAX))


class Announcer:
    """Turns a cache's events into a stream; replaying the stream gives the index of each level.

    Blocks recovered at start are announced as stored. If the buffer of events overflows, the
    announcer compares what it has announced with what the levels hold, a part per call. It
    announces only the differences, so listeners need not forget everything. For that it remembers
    what it has announced: about 50 bytes per block. No other caller may take the cache's events.
    All calls come from one thread.

    Parameters
    ----------
    above:
        Levels above the ladder's, hottest first. Their events are among the ladder's.
    order:
        Returns blocks in the order in which listeners learn most, such as parents first. Repeats
        and comparisons begin with these blocks, whichever level holds them.
    """

    def __init__(
        self,
        ladder: Ladder,
        *,
        above: Mapping[str, Holdings] | None = None,
        order: Callable[[], Sequence[BlockKey]] = tuple,
    ) -> None:
        self._events = ladder.events
        self._lock = ladder.lock
        self._above = above or {}
        self._ladder = ladder
        self._order = order
        self._told: dict[str, set[BlockKey]] = {name: set() for name in self._indexes}
        self._doubts: deque[tuple[str, Iterator[BlockKey]]] = deque()
        self._first: Sequence[BlockKey] = ()
        """Blocks to be announced again before anything else, in this order."""
        self._again: Iterator[BlockKey] | None = None
        """Further blocks to be announced again, in parts and in any order."""
        self._renew = False
        self._doubt()

    @property
    def _indexes(self) -> dict[str, Holdings]:
        """The blocks of each level; levels may be attached and detached."""
        return {**self._above, **self._ladder.indexes}

    def _doubt(self) -> None:
        """Compare everything in the next calls."""
        self._doubts.clear()
        for name, index in self._indexes.items():
            if index.places:
                self._doubts.append((name, self._held(index)))
        for name, told in self._told.items():
            if told:
                self._doubts.append((name, iter(list(told))))

    def _held(self, index: Holdings) -> Iterator[BlockKey]:
        """Yield the blocks of a level, read a part at a time. Events tell of later changes."""
        for start in range(0, index.places, COMPARE_MAX):
            with self._lock:
                part = index.held(start, start + COMPARE_MAX)
            yield from part

    def repeat(self) -> None:
        """Announce everything again, in the next calls.

        For listeners that were told that everything is cleared. A listener that did not clear
        these levels hears of blocks that it knows. Every listener still hears of every removal.
        """
        rest = set[BlockKey]().union(*self._told.values())
        self._first = [key for key in self._order() if key in rest]
        rest.difference_update(self._first)
        self._again = iter(sorted(rest, key=self._levels)) if rest else None
        self._renew = self._renew and bool(self._first or rest)

    def _levels(self, key: BlockKey) -> list[str]:
        """Return the levels at which a block is announced."""
        return [name for name, told in self._told.items() if key in told]

    def retell(self, keys: Sequence[BlockKey]) -> None:
        """Announce those of ``keys`` again that are announced: more is known of them now."""
        self._first = [*self._first, *keys]

    def renew(self) -> None:
        """Announce every announced block as removed and as stored again, in the next calls.

        For a caller that gives listeners other names from now on.
        """
        self.repeat()
        self._renew = bool(self._first or self._again)

    @property
    def pending(self) -> bool:
        """True if the next ``take`` may return something even without new events."""
        return bool(self._doubts or self._first or self._again)

    def take(self) -> list[Stored | Removed]:
        """Return the events to be announced now, in order."""
        found: list[Stored | Removed] = []
        first, self._first = self._first, ()
        for batch in _parts(first):
            self._repeat(found, batch)
        with self._lock:
            events = self._events.take()
        for event in events:
            if isinstance(event, Overflow):
                self._doubt()
                for batch in _parts(self._order()):
                    self._compare(found, [*self._indexes], batch)
                break  # the comparison covers the later events, too
            if isinstance(event, Stored):
                self._stored(found, event.level, event.keys)
            else:
                self._removed(found, event.level, event.keys, event.reason)
        if self._again is not None:
            batch = list(islice(self._again, COMPARE_MAX))
            self._repeat(found, batch)
            if not batch:
                self._again, self._renew = None, False
        else:
            self._renew = False
            if self._doubts:
                name, keys = self._doubts[0]
                batch = list(islice(keys, COMPARE_MAX))
                self._compare(found, [name], batch)
                if not batch:
                    self._doubts.popleft()
        return found

    def _repeat(self, found: list[Stored | Removed], batch: Sequence[BlockKey]) -> None:
        """Announce blocks again: for each block all its levels, then the next block."""
        for levels, run in groupby(batch, key=self._levels):
            keys = tuple(run)
            if self._renew:
                found += [Removed(name, keys, "removed") for name in levels]
            found += [Stored(name, keys) for name in levels]

    def _compare(
        self, found: list[Stored | Removed], names: Sequence[str], batch: Sequence[BlockKey]
    ) -> None:
        """Announce differences and note them in ``_told``, so later events do not repeat them."""
        held: dict[str, set[BlockKey]] = {}
        indexes = self._indexes
        for name in names:
            index = indexes.get(name, ())
            with self._lock:
                held[name] = {key for key in batch if key in index}
        for levels, run in groupby(batch, key=lambda key: [n for n in names if key in held[n]]):
            keys = tuple(run)
            for name in levels:
                self._stored(found, name, keys)
        for name in names:
            gone = [key for key in batch if key not in held[name]]
            self._removed(found, name, gone, "lost")

    def _stored(self, found: list[Stored | Removed], level: str, keys: Sequence[BlockKey]) -> None:
        told = self._told.setdefault(level, set())
        news = tuple(key for key in keys if key not in told)
        if news:
            told.update(news)
            found.append(Stored(level, news))

    def _removed(
        self, found: list[Stored | Removed], level: str, keys: Sequence[BlockKey], reason: Reason
    ) -> None:
        told = self._told.setdefault(level, set())
        news = tuple(key for key in keys if key in told)
        if news:
            told.difference_update(news)
            found.append(Removed(level, news, reason))
