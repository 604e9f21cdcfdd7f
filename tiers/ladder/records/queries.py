"""Questions to the index of one level; they change nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import takewhile
from math import inf
from operator import itemgetter
from typing import Any, cast

import numpy as np

from kvladder.keys import BlockKey, Book
from kvladder.lock import BULK_STEP, STEP
from kvladder.metrics import Histogram
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.tenancy import P as P
from kvladder.tiers.ladder.records.tenancy import Tenanted


class IndexQueries(Tenanted[P]):
    """Answers of an index about the blocks that its level holds; the columns are the index's."""

    ages: Histogram
    distances: Histogram
    _place: Book[P]
    _floor: bytearray
    _hits: bytearray
    _expires: array[float] | None
    _now: Callable[[], float]
    _began_s: float
    _used_s: array[float]
    _pinned: int
    _end: int

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._place

    def __iter__(self) -> Iterator[BlockKey]:
        """Iterate over all keys; do not change the index meanwhile."""
        return iter(self._place)

    def keys(self) -> Container[BlockKey]:
        """Return all keys, as a live view."""
        return self._place

    def as_dict(self) -> dict[str, Any]:
        """Return the number of blocks and the histograms as plain data."""
        tenants = {} if self.tenants is None else self.tenants.as_dict()
        return {
            "blocks": len(self),
            "pinned": self._pinned,
            "clipped": self.clipped,
            "tenants": tenants,
            "eviction_age_s": self.ages.as_dict(),
            "reuse_distance": self.distances.as_dict(),
        }

    @property
    def pinned(self) -> int:
        """Number of pinned blocks."""
        return self._pinned

    def place(self, key: BlockKey) -> P | None:
        """Return the block's place, or None if it is not held."""
        return self._place.get(key)

    def places_of(self, keys: Iterable[BlockKey]) -> list[P | None]:
        """Return ``place`` of each of ``keys``."""
        return self._place.get_all(keys)

    def lasting(self, keys: Sequence[BlockKey], known: Sequence[int] = ()) -> Sequence[P] | None:
        """Return the places of ``keys``, one or more, if all are held and no block here ever
        expires.

        Otherwise None; also where a key is named twice. It takes less time if the blocks are still
        at the ``known`` places.
        """
        if not self.lasts:
            return None
        if len(keys) == 1:
            place = self._place.get(keys[0])
            return None if place is None else (place,)
        places = cast("Sequence[P]", known)
        if len(known) != len(keys) or self.at(known) != [*keys]:
            try:
                places = self._place.all_of(keys)
            except KeyError:
                return None
        return places if len({*places}) == len(places) else None

    @property
    def lasts(self) -> bool:
        """True if no block here ever expires."""
        return self._expires is None and self.next_end_s == inf

    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading ``keys`` are held."""
        return len([*takewhile(self._place.__contains__, keys)])

    def key_at(self, place: int) -> BlockKey | None:
        """Return the key of the block at ``place``, or None."""
        return self._key[place] if place < len(self._key) else None

    def priority(self, place: int) -> int:
        """Return the priority of the block at ``place``."""
        return self._priority[place]

    def lowest(self, places: Iterable[int]) -> int:
        """Return the lowest priority among the blocks at ``places``, one or more."""
        return min(map(self._priority.__getitem__, places))

    def meta(self, place: int) -> BlockMeta:
        """Return what is known of the block at ``place``."""
        return BlockMeta(
            self._priority[place],
            self._floor[place],
            self._hits[place],
            self._until.get(place),
            self._terms.of[place],
        )

    def metas(self, places: Sequence[int]) -> list[BlockMeta]:
        """Return what is known of the blocks at ``places``; equal metas share an object."""
        if len(places) < 2 or self._until.of or self._terms.count:
            return [self.meta(place) for place in places]
        at = itemgetter(*places)
        priorities, floors, hits = [
            bytes(at(column)) for column in (self._priority, self._floor, self._hits)
        ]
        first, lowest = priorities[0], floors[0]
        if priorities.count(first) == floors.count(lowest) == len(places):
            by_hits = {count: BlockMeta(first, lowest, count) for count in {*hits}}
            return [*map(by_hits.__getitem__, hits)]
        kinds = [*zip(priorities, floors, hits, strict=True)]
        metas = {kind: BlockMeta(*kind) for kind in dict.fromkeys(kinds)}
        return [*map(metas.__getitem__, kinds)]

    def at(self, places: Iterable[int]) -> list[BlockKey | None]:
        """Return the key at each of ``places``, which were taken once; None where there is none.

        To check a block's place in this way takes less time than to look up its key.
        """
        try:
            return [*map(self._key.__getitem__, places)]
        except IndexError:  # a host slot may be leased for a block that host does not admit
            return [*map(self.key_at, places)]

    def keys_at(self, places: Iterable[int]) -> list[BlockKey]:
        """Return the keys of the blocks at ``places``; there is one at each."""
        return cast("list[BlockKey]", self.at(places))

    def idle_s(self, place: int) -> float:
        """Return the seconds since the block at ``place`` was stored here, or used."""
        return max(0.0, self._now() - self._began_s - self._used_s[place])

    def expires_s(self, place: int) -> float:
        """Return the loop time at which the block at ``place`` expires; inf if never."""
        own_s = self._terms.of[place].expires_s
        return own_s if self._expires is None else min(own_s, self._expires[place])

    @property
    def next_end_s(self) -> float:
        """Loop time at which ``due`` may have blocks; inf if never."""
        return self._terms.ends.next_s

    def due(self, now_s: float, count_max: int) -> list[BlockKey]:
        """Return at most ``count_max`` blocks that have expired by their terms, each once."""
        due = self._terms.ends.due(now_s, count_max)
        return [key for place in due if (key := self._key[place]) is not None]

    def salted(self, salt: bytes | None, start: int) -> tuple[list[BlockKey], int]:
        """Return some blocks of a salt, None for any, from place ``start`` on; and the next start.

        At most ``STEP`` blocks.
        """
        if salt is None:
            return self.held(start, start + STEP), start + STEP
        found: list[BlockKey] = []
        end, terms = min(start + BULK_STEP, self._end), self._terms.of
        for place in range(start, end):
            key = self._key[place]
            if key is not None and terms[place].salt == salt:
                found.append(key)
                if len(found) == STEP:
                    return found, place + 1
        return found, end

    def below(self, least: int, start: int) -> tuple[list[BlockKey], int]:
        """Return at most ``STEP`` blocks with a floor below ``least``, from place ``start`` on.

        Also returns the next start.
        """
        end = min(start + BULK_STEP, self._end)
        floors = np.frombuffer(self._floor, np.uint8)[start:end]
        found: list[BlockKey] = []
        places: list[int] = np.flatnonzero(floors < least).tolist()
        for at in places:
            key = self._key[start + at]
            if key is not None:
                found.append(key)
                if len(found) == STEP:
                    return found, start + at + 1
        return found, end

    def held(self, start: int, end: int) -> list[BlockKey]:
        """Return the blocks at places ``start <= n < end``."""
        return [key for key in self._key[start:end] if key is not None]

    def salts(self, start: int, end: int) -> list[bytes | None]:
        """Return the salt of each of ``held``'s blocks."""
        both = zip(self._key[start:end], self._terms.of[start:end], strict=True)
        return [terms.salt for key, terms in both if key is not None]

    @property
    def places(self) -> int:
        """Number above all places that were ever taken."""
        return self._end
