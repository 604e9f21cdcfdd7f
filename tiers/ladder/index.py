"""The index of one level: which blocks it holds, where, and which goes first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from itertools import takewhile
from math import inf
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvladder.keys import BlockKey
from kvladder.lock import BULK_STEP, STEP
from kvladder.metrics import AGES_S, DISTANCES, Histogram
from kvladder.policy.eviction import BULK_MIN, PRIORITY_DEFAULT, EvictionPolicy
from kvladder.tiers.base import NO_TERMS, Deadlines, Terms, TermsByPlace
from kvladder.tiers.label import Kept

P = TypeVar("P", bound=int)
"""A place in a level: a small non-negative int, of host a slot."""
HITS_MAX = 255
_MASK = 0xFFFFFFFF


class Meta(NamedTuple):
    """What travels with a block from level to level."""

    priority: int = PRIORITY_DEFAULT
    floor: int = PRIORITY_DEFAULT
    """The lowest priority among the block and its ancestors; see ``OffloadRule``."""
    hits: int = 0
    """How often the block was used again, at most 255."""
    until_s: float = inf
    """Loop time at which ``priority`` reverts to the default."""
    terms: Terms = NO_TERMS
    """What its request said of it."""


def alike(metas: Sequence[Meta]) -> bool:
    """Whether all of them are the same, as they are where nothing was said of any."""
    return bool(metas) and metas.count(metas[0]) == len(metas)


class LevelIndex(Generic[P]):
    """Keys, places and the order of eviction of the blocks that one level holds.

    A place is a small non-negative int that the level gives out, at most one block in each.
    A pinned block is not in the policy, so it is never a victim. Not thread-safe: the stack's lock
    is held around every call. Costs about 190 bytes a block: the key (80), the dict (42), the
    place (32) and flat arrays (28, and 8 more with a TTL). Blocks with terms of their own cost
    about 100 more.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        ttl: bool = False,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.policy = policy
        self.ages = Histogram(AGES_S)
        """Seconds between the last use of a block and its eviction."""
        self.distances = Histogram(DISTANCES)
        """Between two uses of a block: how many blocks were stored or used, itself included."""
        self._now = now
        self._began_s = now()  # so that 4 bytes are exact enough
        self._uses = 0  # modulo 2**32
        self._used = array("I")
        """Per place, ``_uses`` when its block was used last."""
        self._used_s = array("f")
        self._place: dict[BlockKey, P] = {}
        self._key: list[BlockKey | None] = []
        self._priority = bytearray()
        self._floor = bytearray()
        self._hits = bytearray()
        self._expires = array("d") if ttl else None
        self._pins: dict[int, int] = {}
        self._until = Deadlines()
        """When retention ends that does."""
        self._terms = TermsByPlace()

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._place

    def __iter__(self) -> Iterator[BlockKey]:
        """All keys, oldest insertion first; do not change the index meanwhile."""
        return iter(self._place)

    def keys(self) -> KeysView[BlockKey]:
        """A view of all keys."""
        return self._place.keys()

    def as_dict(self) -> dict[str, Any]:
        """How many blocks it holds, and its histograms, as plain data."""
        return {
            "blocks": len(self),
            "eviction_age_s": self.ages.as_dict(),
            "reuse_distance": self.distances.as_dict(),
        }

    def place(self, key: BlockKey) -> P | None:
        """The block's place, or None if it is not held."""
        return self._place.get(key)

    def places_of(self, keys: Iterable[BlockKey]) -> Iterator[P | None]:
        """``place`` of each of ``keys``; do not change the index meanwhile."""
        return map(self._place.get, keys)

    def lasting(self, keys: Sequence[BlockKey]) -> Sequence[P] | None:
        """The places of ``keys``, one or more, if all are held and nothing here ever expires.

        None, too, where a key is named twice.
        """
        if self._expires is not None or self.next_end_s != inf:
            return None
        if len(keys) == 1:
            place = self._place.get(keys[0])
            return None if place is None else (place,)
        try:
            places: tuple[P, ...] = itemgetter(*keys)(self._place)
        except KeyError:
            return None
        return places if len({*places}) == len(places) else None

    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading ``keys`` are held."""
        return len([*takewhile(self._place.__contains__, keys)])

    def key_at(self, place: int) -> BlockKey | None:
        """The key of the block at ``place``, or None."""
        return self._key[place] if place < len(self._key) else None

    def priority(self, place: int) -> int:
        """The priority of the block at ``place``."""
        return self._priority[place]

    def meta(self, place: int) -> Meta:
        """What is known of the block at ``place``."""
        return Meta(
            self._priority[place],
            self._floor[place],
            self._hits[place],
            self._until.get(place, inf),
            self._terms.get(place, NO_TERMS),
        )

    def metas(self, places: Sequence[int]) -> list[Meta]:
        """What is known of the blocks at ``places``; those that are alike share an object."""
        if len(places) < 2 or self._until.of or self._terms.of:
            return [self.meta(place) for place in places]
        at = itemgetter(*places)
        columns = [bytes(at(column)) for column in (self._priority, self._floor, self._hits)]
        if all(column.count(column[0]) == len(column) for column in columns):
            priority, floor, hits = [column[0] for column in columns]
            return [Meta(priority, floor, hits)] * len(places)
        kinds = [*zip(*columns, strict=True)]
        metas = {kind: Meta(*kind) for kind in dict.fromkeys(kinds)}
        return [*map(metas.__getitem__, kinds)]

    def keys_at(self, places: Iterable[int]) -> list[BlockKey]:
        """The keys of the blocks at ``places``, at each of which there is one."""
        return cast("list[BlockKey]", [*map(self._key.__getitem__, places)])

    def expires_s(self, place: int) -> float:
        """Loop time at which the block at ``place`` expires; inf if never."""
        own_s = self._terms.get(place, NO_TERMS).expires_s
        return own_s if self._expires is None else min(own_s, self._expires[place])

    def insert(
        self,
        keys: Sequence[BlockKey],
        places: Sequence[P],
        meta: Meta,
        *,
        expires_s: float = inf,
        pins: int = 0,
    ) -> None:
        """Hold ``keys`` at these places, in that order; all of both are new here.

        With ``pins`` they start pinned. ``expires_s`` is when they expire here if not before, by
        their terms.
        """
        if len(keys) >= BULK_MIN and meta.until_s == inf and meta.terms == NO_TERMS:
            self._insert_bulk(keys, places, meta, expires_s, pins)
            return
        now_s = self._now() - self._began_s
        for key, place in zip(keys, places, strict=True):
            assert key not in self._place, "a key is held already"
            self._grow(place)
            assert self._key[place] is None, f"place {place} is taken"
            self._place[key] = place
            self._key[place] = key
            self._priority[place] = meta.priority
            self._floor[place] = meta.floor
            self._hits[place] = min(meta.hits, HITS_MAX)
            self._uses = uses = self._uses + 1 & _MASK
            self._used[place] = uses
            self._used_s[place] = now_s
            if self._expires is not None:
                self._expires[place] = expires_s
            if meta.terms != NO_TERMS:
                self._terms.put(place, meta.terms)
            if meta.until_s != inf:
                self._until.put(place, meta.until_s)
            if pins:
                self._pins[place] = pins
            else:
                self.policy.push(place, meta.priority)

    def _insert_bulk(
        self,
        keys: Sequence[BlockKey],
        places: Sequence[P],
        meta: Meta,
        expires_s: float,
        pins: int,
    ) -> None:
        """``insert`` many of which nothing special was said."""
        self._grow(max(places))
        held = len(self._place) + len(keys)
        self._place.update(zip(keys, places, strict=True))
        assert len(self._place) == held, "a key is held already"
        names, chain = self._key, array("i", places)
        for key, place in zip(keys, chain, strict=True):
            assert names[place] is None, f"place {place} is taken"
            names[place] = key
        at = np.frombuffer(chain, np.intc)
        np.frombuffer(self._priority, np.uint8)[at] = meta.priority
        np.frombuffer(self._floor, np.uint8)[at] = meta.floor
        np.frombuffer(self._hits, np.uint8)[at] = min(meta.hits, HITS_MAX)
        self._use_all(at)
        if self._expires is not None:
            np.frombuffer(self._expires, np.float64)[at] = expires_s
        if pins:
            self._pins.update(dict.fromkeys(places, pins))
        else:
            self.policy.push_all(chain, meta.priority)

    def disjoint(self, keys: Iterable[BlockKey]) -> bool:
        """Whether none of ``keys`` is held."""
        return self._place.keys().isdisjoint(keys)

    def widen(self, key: BlockKey, terms: Terms) -> None:
        """Another request offers a held block: from now on it may what either allows."""
        place = self._place[key]
        before = self._terms.get(place, NO_TERMS)
        after = before.merged(terms)
        if after != before:
            self._terms.put(place, after)

    @property
    def next_end_s(self) -> float:
        """Loop time at which ``due`` may have something; inf if never."""
        return self._terms.ends.next_s

    def due(self, now_s: float, count_max: int) -> list[BlockKey]:
        """Blocks whose request wanted them to expire by now, at most so many; told once."""
        due = self._terms.ends.due(now_s, count_max)
        return [key for place in due if (key := self._key[place]) is not None]

    def salted(self, salt: bytes | None, start: int) -> tuple[list[BlockKey], int]:
        """Some of the blocks of a salt, None for any, at places from ``start`` on; where to go on.

        Not more than ``STEP``.
        """
        if salt is None:
            return self.held(start, start + STEP), start + STEP
        found: list[BlockKey] = []
        end, terms = min(start + BULK_STEP, len(self._key)), self._terms.get
        for place in range(start, end):
            key = self._key[place]
            if key is not None and terms(place, NO_TERMS).salt == salt:
                found.append(key)
                if len(found) == STEP:
                    return found, place + 1
        return found, end

    def held(self, start: int, end: int) -> list[BlockKey]:
        """Blocks at places ``start <= n < end``."""
        return [key for key in self._key[start:end] if key is not None]

    @property
    def places(self) -> int:
        """All places are below it."""
        return len(self._key)

    def fill(self, blocks: Sequence[Kept], behind_s: float, here: int) -> None:
        """Hold what a tier recovered, oldest first: like ``insert``, in less time.

        ``behind_s`` is loop time minus wall time, ``here`` the level's bit.
        """
        if not blocks:
            return
        self._grow(max(block.place for block in blocks))
        held = len(self._place) + len(blocks)
        self._place.update([(block.key, cast("P", block.place)) for block in blocks])
        assert len(self._place) == held, "a key is recovered twice"
        keys, priorities, floors, push = self._key, self._priority, self._floor, self.policy.push
        for key, place, facts in blocks:
            priority, floor, _, salt, terms = facts
            assert keys[place] is None, f"place {place} is taken"
            keys[place] = key
            priorities[place] = priority
            floors[place] = floor
            push(place, priority)
            if salt or terms:
                self._terms.put(place, Terms.unpacked(facts, here, behind_s))
        if self._expires is not None:
            for _, place, facts in blocks:
                end_s = facts.expires_wall_s
                self._expires[place] = inf if end_s is None else end_s + behind_s

    def _grow(self, place: int) -> None:
        """Make room for ``place``, if there is none, and for more."""
        if place < len(self._key):
            return
        more = max(place + 1 - len(self._key), min(len(self._key), 1 << 16), 64)
        self._key.extend([None] * more)
        for column in (self._priority, self._floor, self._hits):
            column.extend(bytes(more))
        self._used.extend(array("I", [self._uses]) * more)
        self._used_s.extend(array("f", [self._now() - self._began_s]) * more)
        if self._expires is not None:
            self._expires.extend(array("d", [inf]) * more)

    def drop(self, keys: Sequence[BlockKey], *, evicted_s: float | None = None) -> list[P]:
        """Forget ``keys``, pinned or not, and return their places.

        ``evicted_s`` is the loop time if they go because others need the room; then none is pinned.
        """
        places = [*map(self._place.pop, keys)]
        for place in places:
            self._key[place] = None
        for place in places if self._until.of or self._terms.of else ():
            self._until.drop(place)
            self._terms.drop(place)
        pins, unpinned = self._pins, places
        if pins and evicted_s is None:
            unpinned = [place for place in places if not pins.pop(place, 0)]
        if len(unpinned) == 1:
            self.policy.remove(unpinned[0])
        else:
            self.policy.remove_all(unpinned)
        if evicted_s is not None and len(places) >= BULK_MIN:
            used_s = np.frombuffer(self._used_s, np.float32)[places]
            self.ages.observe_all(evicted_s - self._began_s - used_s)
        elif evicted_s is not None:
            for place in places:
                self.ages.observe(evicted_s - self._began_s - self._used_s[place])
        return places

    def touch(self, places: Sequence[int]) -> None:
        """Make these the most recently used; the last of ``places`` ends up the most recent."""
        now_s = self._now() - self._began_s
        if len(places) >= BULK_MIN and self._pins.keys().isdisjoint(places):
            chain = array("i", places)
            at = np.frombuffer(chain, np.intc)
            np.frombuffer(self._used, np.uint32)[at] = self._uses
            np.frombuffer(self._used_s, np.float32)[at] = now_s
            self.policy.touch_all(chain)
            return
        for place in places:
            self._used[place] = self._uses
            self._used_s[place] = now_s
            if place not in self._pins:
                self.policy.touch(place)

    def hit(self, places: Sequence[int]) -> None:
        """Count one more use of the blocks at ``places``, in that order."""
        if len(places) >= BULK_MIN and len({*places}) == len(places):
            at = np.frombuffer(array("i", places), np.intc)
            hits = np.frombuffer(self._hits, np.uint8)
            hits[at] = np.minimum(hits[at], HITS_MAX - 1) + 1
            self.distances.observe_all(self._use_all(at))
            return
        now_s = self._now() - self._began_s
        for place in places:
            self._hits[place] = min(self._hits[place] + 1, HITS_MAX)
            self._uses = uses = self._uses + 1 & _MASK
            self.distances.observe(uses - self._used[place] & _MASK)
            self._used[place] = uses
            self._used_s[place] = now_s

    def _use_all(self, at: NDArray[np.intc]) -> NDArray[np.int64]:
        """These places are used now, in that order; how long ago each was before, in uses."""
        used = np.frombuffer(self._used, np.uint32)
        uses = np.arange(self._uses + 1, self._uses + 1 + len(at)) & _MASK
        distances: NDArray[np.int64] = uses - used[at] & _MASK
        used[at], self._uses = uses, int(uses[-1])
        np.frombuffer(self._used_s, np.float32)[at] = self._now() - self._began_s
        return distances

    def pin(self, places: Sequence[int]) -> None:
        """Take the blocks at ``places`` out of eviction, once more for each time it is named."""
        pins, alone = self._pins, dict.fromkeys(reversed(places), 1)
        if len(alone) == len(places) and pins.keys().isdisjoint(alone):
            self.policy.remove_all(array("i", alone))  # a prefix lies there with its tail first
            pins.update(alone)
            return
        for place in places:
            if place not in pins:
                self.policy.remove(place)
            pins[place] = pins.get(place, 0) + 1

    def unpin(self, places: Sequence[int]) -> None:
        """Undo one pin of each; after the last a block is the most recent of its priority."""
        pins = self._pins
        if len(places) >= BULK_MIN:
            chain = array("i", places)
            priorities = np.frombuffer(self._priority, np.uint8)[np.frombuffer(chain, np.intc)]
            alone = itemgetter(*places)(pins).count(1) == len(places)
            if alone and (priorities == priorities[0]).all() and len({*places}) == len(places):
                for place in places:
                    del pins[place]
                self.policy.push_all(chain, int(priorities[0]))
                return
        for place in places:
            if pins[place] == 1:
                del pins[place]
                self.policy.push(place, self._priority[place])
            else:
                pins[place] -= 1

    def pins(self, place: int) -> int:
        """How often the block at ``place`` is pinned."""
        return self._pins.get(place, 0)

    def note(self, key: BlockKey, meta: Meta) -> None:
        """A held block was used elsewhere, and is worth this now; its terms stay."""
        place = self._place[key]
        self._floor[place] = meta.floor
        self._until.put(place, meta.until_s)
        self._reprioritize(place, meta.priority)
        self._hits[place] = max(self._hits[place], min(meta.hits, HITS_MAX))
        self.touch([place])

    def _reprioritize(self, place: int, priority: int) -> None:
        if priority != self._priority[place]:
            self._priority[place] = priority
            if place not in self._pins:
                self.policy.remove(place)
                self.policy.push(place, priority)

    def revert(self, now_s: float) -> None:
        """End retentions that have run out: such a block has the default priority again.

        Those that ran out first, if they are very many; the others with the next calls.

        Expiry never promotes: what was retained below the default stays there.
        """
        for place in self._until.due(now_s, STEP):
            self._reprioritize(place, min(self._priority[place], PRIORITY_DEFAULT))

    def victims(self) -> Iterator[P]:
        """Places in the order of eviction; do not change the index meanwhile."""
        return cast("Iterator[P]", iter(self.policy))

    def check(self, capacity: int) -> None:
        """Assert that keys, places, pins and policy agree; O(n), for tests."""
        held: dict[int, BlockKey] = {place: key for key, place in self._place.items()}
        assert len(held) == len(self._place) <= capacity, (len(self._place), capacity)
        for place, key in enumerate(self._key):
            assert held.get(place) == key
        for place in held:
            assert (place in self.policy) != (place in self._pins), place
        assert len(self.policy) + len(self._pins) == len(held)
        self._until.check(held)
        self._terms.check(held)
