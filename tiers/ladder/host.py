"""The host level: blocks that lie in arena slots, one copy away from the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol, cast

from kvladder.arena import Slot
from kvladder.events import Reason
from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.metrics import LevelStats
from kvladder.policy.eviction import EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.tiers.base import HOST, Shared
from kvladder.tiers.ladder.index import LevelIndex, Meta

CLEAN_MAX = 4 * STEP
"""Blocks, next to go, that are written below while loads wait for their slots."""
SCAN_MAX = STEP
"""How far past a block that may not go yet the search for one that may goes on."""


class Target(Protocol):
    """A level below that still has to get a block."""

    def queue_all(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], metas: Sequence[Meta]
    ) -> bool:
        """See ``Level.queue_all``."""
        ...


Route = Callable[[Sequence[BlockKey], Sequence[Meta]], Sequence[Target | None]]
"""Where each block has to be written before it may go; None if a level has it, or none would."""


class HostSettings(NamedTuple):
    """The host level of a stack."""

    name: str
    rule: OffloadRule
    policy: EvictionPolicy
    reserve_blocks: int
    """Slots kept free or clean in the background, so that a save finds room at once."""


class HostLevel:
    """Level 0: its places are arena slots, so nothing moves when a block comes or goes.

    All methods are sync and called with the stack's lock held. The level holds one claim on the
    slot of each block; whoever loads from a slot holds another and pins the block.
    """

    medium = "CPU"

    def __init__(
        self,
        name: str,
        rule: OffloadRule,
        *,
        policy: EvictionPolicy,
        reserve_blocks: int,
        shared: Shared,
        router: Callable[[], Route],
        left: Callable[[Sequence[BlockKey]], object],
    ) -> None:
        self.name = name
        self.rule = rule
        self.reserve_blocks = reserve_blocks
        self.demand_blocks = 0
        """Slots that loads wait for, on top of the reserve."""
        self.stats = LevelStats()
        self.index = LevelIndex(policy, ttl=rule.ttl_s is not None, now=shared.clock.now)
        self._shared = shared
        self._may_go = inf
        """At most so many blocks may go now, as far as is known since room was short."""
        self.has_looked = False
        """Whether ``clean`` did not go by what it had found before."""
        self._ahead = 0
        """So many of the next to go were found to need nothing, or to be on their way below."""
        self._router = router
        """Makes a ``Route`` that holds until the lock is released."""
        self._left = left
        """Told of blocks that are not here any more."""

    def admits(self, meta: Meta) -> bool:
        """Whether a block of this meta would be taken now."""
        return (
            self.rule.admits(meta.floor, meta.hits)
            and bool(meta.terms.levels & HOST)
            and not self._shared.refuses(meta.terms.salt)
            and meta.terms.last(self._shared.clock)
        )

    def find(self, key: BlockKey) -> Slot | None:
        """The block's slot, or None; a block whose time has come is expired instead."""
        place = self.index.place(key)
        if place is None:
            return None
        end_s = self.index.expires_s(place)
        if end_s == inf or end_s > self._shared.clock.now():
            return Slot(place)
        self._expire([key])
        return None

    def expire(self, now_s: float, count_max: int) -> None:
        """Forget blocks, at most so many, whose request wanted them to expire by now."""
        self._expire(self.index.due(now_s, count_max))

    def _expire(self, keys: Sequence[BlockKey]) -> None:
        """Forget these; who has pinned one goes on with its slot."""
        self.stats.expired += len(keys)
        self._forget(keys, "expired")

    def _forget(self, keys: Sequence[BlockKey], reason: Reason) -> None:
        self._shared.events.removed(self.name, keys, reason)
        self._shared.arena.release([self.drop(key) for key in keys])

    def refuse(self, key: BlockKey) -> None:
        """Do not hold ``key`` any more, which is worth less than what is admitted here."""
        self.stats.evicted += 1
        self._forget([key], "evicted")

    def drop(self, key: BlockKey) -> Slot:
        """Do not hold ``key`` any more; the level's claim on its slot becomes the caller's."""
        self._left([key])
        self._ahead -= 1
        return Slot(self.index.drop(key))

    def insert(self, key: BlockKey, slot: Slot, meta: Meta, *, pins: int = 0) -> None:
        """Hold ``key`` in ``slot``; the caller's claim on it becomes the level's."""
        assert meta.floor >= self.rule.min_priority
        assert meta.terms.levels & HOST
        ttl_s = self.rule.ttl_s
        expires_s = inf if ttl_s is None else self._shared.clock.now() + ttl_s
        self.index.insert(key, slot, meta, expires_s=expires_s, pins=pins)

    def insert_all(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], meta: Meta, *, pins: int = 0
    ) -> None:
        """``insert`` them all, in that order."""
        assert meta.floor >= self.rule.min_priority
        assert meta.terms.levels & HOST
        ttl_s = self.rule.ttl_s
        expires_s = inf if ttl_s is None else self._shared.clock.now() + ttl_s
        self.index.insert_all(keys, slots, meta, expires_s=expires_s, pins=pins)

    def pin(self, slots: Sequence[Slot]) -> None:
        """Keep these blocks, and claim their slots once more."""
        self._shared.arena.share(slots)
        self._ahead -= len(slots)
        self.index.pin_all(slots)

    def unpin(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Undo ``pin``, tail first, so that a prefix outlives what follows it.

        A block that was removed meanwhile, or is somewhere else, is not pinned any more.
        """
        self._may_go += len(slots)
        pairs = zip(slots[::-1], self.index.places_of(keys[::-1]), strict=True)
        self.index.unpin_all([slot for slot, place in pairs if slot == place])
        self._shared.arena.release(slots)

    def remove(self, keys: Iterable[BlockKey]) -> int:
        """Forget the blocks; slots are free once nobody loads from them. How many were here."""
        held = [key for key in keys if key in self.index]
        self.stats.removed += len(held)
        self._forget(held, "removed")
        return len(held)

    def room(self, count: int, priority: int) -> list[Slot]:
        """Lease up to ``count`` slots for blocks of this priority, evicting exactly as needed.

        Never waits, and never evicts what is worth more than the newcomers or is still to be
        written to a level below: then there are fewer slots than asked for.
        """
        arena = self._shared.arena
        now = self._shared.clock.now()
        self.index.revert(now)
        missing = count - arena.free
        if missing > 0:
            gone = self._evictable(missing, priority)
            self._may_go = 0.0 if len(gone) < missing else max(0.0, self._may_go - missing)
            self._ahead -= len(gone)
            self._left(gone)
            arena.release(cast("list[Slot]", self.index.evict_all(gone, now)))
            self.stats.evicted += len(gone)
            self._shared.events.removed(self.name, gone, "evicted")
        return arena.lease(min(count, arena.free)) or []

    @property
    def room_max(self) -> float:
        """For more blocks than that it is not worth to ask for room again."""
        return self._shared.arena.free + max(0.0, self._may_go)

    def settled(self, count: int, *, stored: bool) -> None:
        """A level took some of these blocks, or gave them up: they may go."""
        self._may_go += count
        if not stored:
            self.doubt()

    def _evictable(self, count: int, priority: int) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        passed = seen = 0
        index, route = self.index, self._router()
        victims = index.victims()
        while len(chosen) < count and passed < SCAN_MAX:
            places = cast("list[Slot]", list(islice(victims, count - len(chosen))))
            if not places:
                break
            before = len(chosen)
            passed += len(places)
            # the others are being written, or read by a call left behind
            places = self._shared.arena.unshared(places)
            keys, metas = index.keys_at(places), index.metas(places)
            for key, meta, target in zip(keys, metas, route(keys, metas), strict=True):
                if meta.priority > priority:
                    return chosen
                if target is None:
                    chosen.append(key)
                else:  # the order is not as ``clean`` found it
                    self._ahead = min(self._ahead, seen)
            seen = passed + before
            passed -= len(chosen) - before
        return chosen

    def clean(self) -> None:
        """Have the next to go written below, so that a save finds room without waiting.

        Of a wide window, what needed nothing is not looked at again until most of it has gone.
        """
        short = self.reserve_blocks + self.demand_blocks - self._shared.arena.free
        window = min(short, CLEAN_MAX)
        self.has_looked = self._ahead <= max(window // 4, min(window, STEP) - 1)
        if short <= 0 or not self.has_looked:
            return
        index, route = self.index, self._router()
        self._ahead = 0
        places = cast("list[Slot]", list(islice(index.victims(), window)))
        staying = self._shared.arena.unshared(places)  # others are on their way
        passed = places.index(staying[STEP]) if len(staying) > STEP else len(places)
        del staying[STEP:]
        keys, metas = index.keys_at(staying), index.metas(staying)
        going: dict[Target, list[tuple[BlockKey, Slot, Meta]]] = {}
        for block, target in zip(
            zip(keys, staying, metas, strict=True), route(keys, metas), strict=True
        ):
            if target is not None:
                going.setdefault(target, []).append(block)
        for target, blocks in going.items():
            named, slots, known = zip(*blocks, strict=True)
            if not target.queue_all(named, slots, known):
                return  # the queue is full: again when it has room
        self._ahead = passed

    def doubt(self) -> None:
        """What is to go next, or where it would have to be written, may have changed."""
        self._ahead = 0
        self._may_go = inf

    def check(self) -> None:
        """Assert that the index is sound and holds claims on its slots; O(n), for tests."""
        self.index.check(self._shared.arena.slots)
        for key in self.index:
            place = self.index.place(key)
            assert place is not None
            assert self._shared.arena.claims(Slot(place)) >= 1 + self.index.pins(place)
