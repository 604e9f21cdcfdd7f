"""The index of one level: which blocks it holds, where, and in which order they are evicted."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvladder.keys import BlockKey, Book, by_key, unseen
from kvladder.lock import STEP
from kvladder.metrics import AGES_S, DISTANCES, Histogram
from kvladder.policy.eviction import (
    BULK_MIN,
    GROWTH_MAX,
    PRIORITY_DEFAULT,
    EvictionPolicy,
)
from kvladder.policy.tenants import Tenants
from kvladder.tiers.label import RecoveredBlock
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.ranking import RankedIndex
from kvladder.tiers.ladder.records.tenancy import P as P
from kvladder.tiers.ladder.records.terms import NO_TERMS, Deadlines, Terms, TermsByPlace

HITS_MAX = 255
RESERVED_MAX = 1 << 20
"""Largest number of blocks for which columns are made at the start; growing them takes longest."""
_MASK = 0xFFFFFFFF


class LevelIndex(RankedIndex[P]):
    """Keys, places and the order of eviction of the blocks that one level holds.

    A place is a small non-negative int that the level gives out, at most one block in each. A
    pinned block is not in the policy, so it is never a victim. Not thread-safe: the stack's lock is
    held around every call. Costs about 190 bytes a block: the key (80), the dict (42), the place
    (32) and flat columns (40, and 8 more with a TTL). Blocks that expire by their terms cost about
    125 more. No change of it takes long, and garbage collection does not traverse it.

    Parameters
    ----------
    policy:
        Decides the order of eviction.
    blocks_max:
        The most blocks that it will hold. Columns for these are made at the start, but for at
        most ``RESERVED_MAX``.
    ttl:
        Whether blocks expire here, whatever their terms are.
    now:
        Returns the loop time.
    tenants:
        Counts the blocks of each salt, where there are limits.
    say:
        Is told once if the policy failed and was left.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        *,
        blocks_max: int = 0,
        ttl: bool = False,
        now: Callable[[], float] = lambda: 0.0,
        tenants: Tenants | None = None,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._say = say
        self._now = now
        self.policy, self._keyed = self._guarded(policy)
        self.tenants = tenants
        self.clipped = 0
        self.ages = Histogram(AGES_S)
        """Seconds between the last use of a block and its eviction."""
        self.distances = Histogram(DISTANCES)
        """Number of blocks stored or used between two uses of a block, itself included."""
        self._began_s = now()  # so that 4-byte floats are exact enough
        self._uses = 0  # modulo 2**32
        self._used = array("I")
        """Per place, ``_uses`` when its block was used last."""
        self._used_s = array("f")
        self._place: Book[P] = by_key(blocks_max)
        self.disjoint = self._place.isdisjoint
        """Returns whether none of some keys is held."""
        self._key: list[BlockKey | None] = unseen([])
        self._priority = bytearray()
        self._floor = bytearray()
        self._hits = bytearray()
        self._expires = array("d") if ttl else None
        self._pins = array("I")
        """Per place, how often its block is pinned."""
        self._pinned = 0
        self.lent = {}
        self.recounting = False
        self._until = Deadlines()
        """Ends of retention, by place."""
        self._terms = TermsByPlace()
        self._end = 0
        if self._keyed is not None and blocks_max:
            self._keyed.attached(blocks_max, self.places_of)
        self._reserve(min(blocks_max, RESERVED_MAX))
        self.policy.reserve(len(self._key))

    def insert(
        self,
        keys: Sequence[BlockKey],
        places: Sequence[P],
        meta: BlockMeta,
        *,
        expires_s: float = inf,
        pins: int = 0,
        request: int = 0,
    ) -> None:
        """Hold ``keys`` at these places, in that order; all of both are new here.

        With ``pins`` they start pinned. ``expires_s`` is when they expire here, if their terms do
        not end earlier. ``request`` is the number of the save or fetch that brought them, for
        policies that are told.
        """
        if self._keyed is not None:
            self._keyed.inserted(places, keys, request)
        if len(keys) >= BULK_MIN and meta.until_s == inf and meta.terms == NO_TERMS:
            self._insert_bulk(keys, places, meta, expires_s, pins)
            return
        now_s = self._now() - self._began_s
        for key, place in zip(keys, places, strict=True):
            assert key not in self._place, "a key is held already"
            if place >= self._end:
                self._reach(place)
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
                self._pinned += 1
            else:
                self.policy.push(place, meta.priority)
        tenants = self.tenants
        if tenants is not None and (meta.terms.salt or meta.priority > tenants.base):
            self._note_held(places, meta.terms.salt, meta.priority)  # others have no limits

    def _insert_bulk(
        self,
        keys: Sequence[BlockKey],
        places: Sequence[P],
        meta: BlockMeta,
        expires_s: float,
        pins: int,
    ) -> None:
        """``insert`` many blocks that have no terms and no end of retention."""
        chain = array("i", places)
        at = np.frombuffer(chain, np.intc)
        self._reach(int(at.max()))
        are_new = self._place.add(keys, places)
        assert are_new, "a key is held already"
        self._name(keys, places, at)
        np.frombuffer(self._priority, np.uint8)[at] = meta.priority
        np.frombuffer(self._floor, np.uint8)[at] = meta.floor
        np.frombuffer(self._hits, np.uint8)[at] = min(meta.hits, HITS_MAX)
        self._use_all(at)
        if self._expires is not None:
            np.frombuffer(self._expires, np.float64)[at] = expires_s
        if pins:
            np.frombuffer(self._pins, np.uint32)[at] = pins
            self._pinned += len(at)
        else:
            self.policy.push_all(chain, meta.priority)
        self._note_held(places, b"", meta.priority)

    def _name(self, keys: Sequence[BlockKey], places: Sequence[P], at: NDArray[np.intc]) -> None:
        """Set the keys at ``places``, or ``at``; neighbouring places are set as one slice."""
        names, step = self._key, places[1] - places[0]
        if abs(step) == 1 and not np.count_nonzero(np.diff(at) != step):
            start = min(places[0], places[-1])
            run = slice(start, start + len(places))
            assert not any(names[run]), "a place is taken"
            names[run] = keys[::step]
            return
        for key, place in zip(keys, places, strict=True):
            assert names[place] is None, f"place {place} is taken"
            names[place] = key

    def widen(self, key: BlockKey, terms: Terms) -> None:
        """Merge the terms of another request for a held block: it may do what either allows."""
        place = self._place[key]
        before = self._terms.of[place]
        after = before.merged(terms)
        if after == before:
            return
        self._terms.put(place, after)
        if self.tenants is not None and after.salt != before.salt:
            self.tenants.drop(before.salt, place)
            self._note_held([place], after.salt, self._priority[place])

    def fill(self, blocks: Sequence[RecoveredBlock], behind_s: float, here: int) -> None:
        """Hold what a tier recovered, oldest first: like ``insert``, in less time.

        ``behind_s`` is loop time minus wall time, ``here`` the level's bit.
        """
        if not blocks:
            return
        self._reach(max(block.place for block in blocks))
        places = cast("list[P]", [block.place for block in blocks])
        are_new = self._place.add([block.key for block in blocks], places)
        assert are_new, "a key is recovered twice"
        if self._keyed is not None:
            self._keyed.inserted(places, [block.key for block in blocks], 0)
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
            if self.tenants is not None:
                self._note_held((cast("P", place),), salt, priority)
        if self._expires is not None:
            for _, place, facts in blocks:
                end_s = facts.expires_wall_s
                self._expires[place] = inf if end_s is None else end_s + behind_s

    def _reach(self, place: int) -> None:
        """Make sure that there are columns for ``place``, which is about to be taken."""
        self._end = max(self._end, place + 1)
        self._reserve(place + 1)

    def _reserve(self, places: int) -> None:
        """Extend the columns to at least ``places``, with room for more."""
        if places <= len(self._key):
            return
        more = max(places - len(self._key), min(len(self._key), GROWTH_MAX), 64)
        self._key.extend([None] * more)
        self._terms.of.extend([NO_TERMS] * more)
        for column in (self._priority, self._floor, self._hits):
            column.extend(bytes(more))
        self._used.extend(array("I", [self._uses]) * more)
        self._pins.extend(array("I", [0]) * more)
        self._used_s.extend(array("f", [self._now() - self._began_s]) * more)
        if self._expires is not None:
            self._expires.extend(array("d", [inf]) * more)

    def drop(
        self, keys: Sequence[BlockKey], *, evicted_s: float | None = None, evicted: bool = False
    ) -> list[P]:
        """Forget ``keys``, pinned or not, and return their places.

        ``evicted_s`` is the loop time if they are evicted to make room; then none of them is
        pinned. ``evicted`` says that they are evicted for another reason.
        """
        places = self._place.pop_all(keys)
        for place in places:
            self._key[place] = None
        self._note_dropped(places)
        for place in places if self._until.of or self._terms.count else ():
            self._until.drop(place)
            self._terms.drop(place)
        pins, unpinned = self._pins, places
        if self._pinned and evicted_s is None:
            unpinned = [place for place in places if not pins[place]]
            self._pinned -= len(places) - len(unpinned)
            for place in places:
                pins[place] = 0
        if len(unpinned) == 1:
            self.policy.remove(unpinned[0])
        else:
            self.policy.remove_all(unpinned)
        if self._keyed is not None:
            self._keyed.dropped(places, evicted=evicted or evicted_s is not None)
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
        if len(places) >= BULK_MIN:
            chain = array("i", places)
            at = np.frombuffer(chain, np.intc)
            if not np.count_nonzero(np.frombuffer(self._pins, np.uint32)[at]):
                np.frombuffer(self._used, np.uint32)[at] = self._uses
                np.frombuffer(self._used_s, np.float32)[at] = now_s
                self.policy.touch_all(chain)
                self._note_used(places)
                return
        for place in places:
            self._used[place] = self._uses
            self._used_s[place] = now_s
            if not self._pins[place]:
                self.policy.touch(place)
        self._note_used(places)

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

    def _use_all(self, at: NDArray[np.intc]) -> NDArray[np.uint32]:
        """Mark these places as used now, in that order; return the uses since the last of each."""
        used = np.frombuffer(self._used, np.uint32)
        uses = np.arange(1, len(at) + 1, dtype=np.uint32) + np.uint32(self._uses)
        distances: NDArray[np.uint32] = uses - used[at]  # both modulo 2**32
        used[at], self._uses = uses, int(uses[-1])
        np.frombuffer(self._used_s, np.float32)[at] = self._now() - self._began_s
        return distances

    def pin(self, places: Sequence[int]) -> None:
        """Take the blocks at ``places`` out of eviction, once for each time a place is named."""
        pins = self._pins
        if len(places) >= BULK_MIN and len({*places}) == len(places):
            chain = array("i", places[::-1])  # a prefix lies there with its tail first
            at, column = np.frombuffer(chain, np.intc), np.frombuffer(pins, np.uint32)
            if not np.count_nonzero(column[at]):
                self.policy.remove_all(chain)
                column[at] = 1
                self._pinned += len(places)
                return
        for place in places:
            if not pins[place]:
                self.policy.remove(place)
                self._pinned += 1
            pins[place] += 1

    def unpin(self, places: Sequence[int]) -> None:
        """Undo one pin of each; after the last one a block is the most recent of its priority."""
        pins = self._pins
        if len(places) >= BULK_MIN:
            chain = array("i", places)
            at, column = np.frombuffer(chain, np.intc), np.frombuffer(pins, np.uint32)
            priorities = np.frombuffer(self._priority, np.uint8)[at]
            alone = (column[at] == 1).all() and len({*places}) == len(places)
            if alone and (priorities == priorities[0]).all():
                column[at] = 0
                self._pinned -= len(places)
                self.policy.push_all(chain, int(priorities[0]))
                self._note_used(places)
                return
        for place in places:
            assert pins[place], f"the block at place {place} is not pinned"
            pins[place] -= 1
            if not pins[place]:
                self._pinned -= 1
                self.policy.push(place, self._priority[place])
        self._note_used(places)

    def pins(self, place: int) -> int:
        """Return how often the block at ``place`` is pinned."""
        return self._pins[place]

    def note(self, key: BlockKey, meta: BlockMeta) -> None:
        """Update what a held block is worth after a use elsewhere; its terms stay."""
        place = self._place[key]
        self._floor[place] = meta.floor
        self._until.put(place, meta.until_s)
        self._reprioritize(place, meta.priority)
        self._hits[place] = max(self._hits[place], min(meta.hits, HITS_MAX))
        self.touch([place])

    def _reprioritize(self, place: int, priority: int) -> None:
        if priority != self._priority[place]:
            self._priority[place] = priority
            if not self._pins[place]:
                self.policy.remove(place)
                self.policy.push(place, priority)
            if self.tenants is not None:
                self._lower(self.tenants.ranked(self.salt(place), place, priority))

    def revert(self, now_s: float) -> None:
        """End retentions that have run out: such a block has the default priority again.

        Ends at most ``STEP`` of them, the earliest first; the next calls end the others.

        Expiry never promotes: a block that was retained below the default stays there.
        """
        for place in self._until.due(now_s, STEP):
            self._reprioritize(place, min(self._priority[place], PRIORITY_DEFAULT))

    def victims(self) -> Iterator[P]:
        """Iterate over places in the order of eviction; do not change the index meanwhile."""
        return cast("Iterator[P]", iter(self.policy))

    def check(self, capacity: int) -> None:
        """Assert that keys, places, pins and policy agree; O(n), for tests."""
        held: dict[int, BlockKey] = {place: key for key, place in self._place.items()}
        assert len(held) == len(self._place) <= capacity, (len(self._place), capacity)
        assert len(self._key) - self._key.count(None) == len(held)
        for place, key in held.items():
            assert self._key[place] == key
            assert (place in self.policy) != bool(self._pins[place]), place
        assert len(self.policy) + self._pinned == len(held)
        assert len(self._pins) - self._pins.count(0) == self._pinned
        self._until.check(held)
        self._terms.check(held)
        self._check_tenants(held)
