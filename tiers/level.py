"""A level: everything that stands around a tier, written once instead of once per tier."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from kvladder.arena import Slot
from kvladder.events import Reason
from kvladder.keys import BlockKey
from kvladder.metrics import LevelStats
from kvladder.policy.eviction import PRIORITY_DEFAULT, EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.tiers.base import Item, Shared, Tier, TierContext
from kvladder.tiers.gate import Answer, Gate, GateSettings
from kvladder.tiers.inbox import Inbox, Pending
from kvladder.tiers.index import LevelIndex, Meta
from kvladder.tiers.places import Places

FULL_RETRY_S = 60.0
"""After a full disk, how long a level works within the places it has before it tries for more."""


@dataclass(frozen=True, slots=True)
class LevelSettings:
    """How a level treats its tier."""

    gate: GateSettings = field(default_factory=GateSettings)
    queue_blocks: int = 256
    """Blocks that may wait to be written; each keeps an arena slot busy."""
    reads_max: int = 4
    """Reads under way at once."""


class Observer(Protocol):
    """Told, with the lock held, that a block offered to the level was stored or given up."""

    def __call__(self, level: Level, key: BlockKey, *, stored: bool) -> None: ...


class Level:
    """A tier's place in the stack: rule, index, exact capacity, one writer, breaker, statistics.

    Sync methods are called with the stack's lock held, from any thread, and never wait; coroutines
    run on the loop thread and take the lock only between their awaits. Whatever the tier does,
    the level answers with a miss or a drop.

    A place is free, or taken by a block of the index, or *busy*: being written, being given up, or
    still read by somebody. Only the first are given out.
    """

    def __init__(
        self,
        name: str,
        tier: Tier,
        rule: OffloadRule,
        *,
        capacity_blocks: int,
        policy: EvictionPolicy,
        settings: LevelSettings,
        shared: Shared,
    ) -> None:
        self.name = name
        self.tier = tier
        self.rule = rule
        self.settings = settings
        self.capacity_blocks = capacity_blocks
        self.stats = LevelStats()
        self.index = LevelIndex(policy, ttl=rule.ttl_s is not None)
        self.gate = Gate(name, settings.gate, shared, self.stats)
        self.below: Sequence[Level] = ()
        self.observer: Observer | None = None
        self._shared = shared
        self._lock = shared.lock
        self._places = Places(capacity_blocks)
        self._full_until_s = -inf
        self._busy = 0
        self._inbox = Inbox(shared.arena, blocks_max=settings.queue_blocks)
        self._writing: dict[BlockKey, Pending] = {}
        self._tombstones: set[BlockKey] = set()
        self._removals: list[Item] = []
        self._reads: Counter[int] = Counter()
        self._retired: set[int] = set()
        self._wakeup = asyncio.Event()
        self._idle = asyncio.Event()
        self._read_gate = asyncio.Semaphore(settings.reads_max)
        self._writer: asyncio.Task[None] | None = None

    # ---- sync, with the lock held

    def admits(self, meta: Meta) -> bool:
        """Whether a block of this meta would be taken now."""
        return self.rule.admits(meta.floor, meta.hits) and self.gate.open()

    def holds(self, key: BlockKey) -> bool:
        """Whether the block is here or on its way."""
        return key in self.index or key in self._inbox or key in self._writing

    def offer(self, key: BlockKey, slot: Slot, meta: Meta) -> bool:
        """Queue the block in ``slot`` to be written, with a claim of the level's own.

        False, and nothing changed, if the level has it, does not admit it, or is so far behind that
        something less valuable would have to give way and there is none.
        """
        if not self.admits(meta) or self.holds(key):
            return False
        if self._inbox.full:
            self.stats.dropped["queue"] += 1
            loser = self._inbox.loser(meta.priority)
            if loser is None:
                return False
            self._give_up(loser)
        self._inbox.add(key, slot, meta)
        return True

    def _give_up(self, key: BlockKey) -> None:
        self._inbox.remove(key)
        self._tell_observer(key, stored=False)

    def _tell_observer(self, key: BlockKey, *, stored: bool) -> None:
        if self.observer is not None:
            self.observer(self, key, stored=stored)

    def find(self, key: BlockKey) -> int | None:
        """The block's place, or None; a block whose time has come is expired instead."""
        place = self.index.place(key)
        if place is None or self.rule.ttl_s is None:
            return place
        if self.index.expires_s(place) > self._shared.clock.now():
            return place
        self._forget(key, "expired")
        return None

    def begin_read(self, place: int) -> None:
        """Keep ``place`` from being reused until ``read`` has ended."""
        self._reads[place] += 1

    def _end_read(self, place: int) -> None:
        self._reads[place] -= 1
        if not self._reads[place]:
            del self._reads[place]
            if place in self._retired:
                self._retired.remove(place)
                self._free([place])

    def _free(self, places: Sequence[int]) -> None:
        """Busy places hold nothing that is wanted: free those that nobody reads."""
        for place in places:
            if place in self._reads:
                self._retired.add(place)
            else:
                self._busy -= 1
                self._places.give([place])

    def remove(self, key: BlockKey) -> None:
        """Forget the block; a transfer that began before does not bring it back."""
        if key in self._inbox:
            self._give_up(key)
        if key in self._writing:
            self._tombstones.add(key)
        if key in self.index:
            self._forget(key, "removed")

    def _forget(self, key: BlockKey, reason: Reason) -> None:
        """Drop a held block from the index; the writer tells the tier."""
        place = self.index.drop(key)
        self._busy += 1
        self._removals.append(Item(key, place))
        if reason == "expired":
            self.stats.expired += 1
        elif reason == "removed":
            self.stats.removed += 1
        self._shared.events.removed(self.name, [key], reason)

    def keys(self) -> list[BlockKey]:
        """Every block that is here or on its way."""
        return [*self.index, *self._inbox, *self._writing]

    @property
    def pending(self) -> bool:
        """Whether the writer has something to do."""
        return bool(self._inbox or self._writing or self._removals)

    @property
    def queued(self) -> int:
        """Blocks that wait to be written or are being written."""
        return len(self._inbox) + len(self._writing)

    def target(self, key: BlockKey, meta: Meta) -> Level | None:
        """The level below that should get this block when it leaves here, if it lacks it."""
        for level in self.below:
            if level.admits(meta):
                return None if level.holds(key) else level
        return None

    def check(self) -> None:
        """Assert capacity, places and claims; O(n), for tests."""
        self.index.check(self.capacity_blocks)
        self._inbox.check()
        self._places.check()
        assert self._places.taken == len(self.index) + self._busy
        assert self._places.taken <= self.capacity_blocks
        for pending in self._writing.values():
            assert self._shared.arena.claims(pending.slot) > 0
        for key in self.index:
            place = self.index.place(key)
            assert place is not None
            assert self.index.meta(place).floor >= self.rule.min_priority

    # ---- on the loop

    def wake(self) -> None:
        """Have the writer look at its inbox."""
        self._wakeup.set()

    async def open(self, context: TierContext) -> None:
        """Open the tier, take back what it recovered and start the writer."""
        await self.tier.open(context)
        if self.tier.durable:
            await self._recover()
        self._writer = asyncio.create_task(self._run(), name=f"kvladder-writer-{self.name}")

    async def _recover(self) -> None:
        clock = self._shared.clock
        behind_s = clock.now() - clock.wall()
        places: list[int] = []
        async for batch in self.tier.recover():
            with self._lock:
                for item in batch:
                    places.append(item.place)
                    if item.floor < self.rule.min_priority:
                        self._busy += 1
                        self._removals.append(item)
                        continue
                    wall_s = item.expires_wall_s
                    expires_s = inf if wall_s is None else wall_s + behind_s
                    meta = Meta(item.priority, item.floor)
                    self.index.insert(item.key, item.place, meta, expires_s=expires_s)
        self._places.occupy(places)
        self.stats.recovered = len(self.index)

    async def _run(self) -> None:
        while True:
            wait_s = self.gate.retry_in_s if self._removals else None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), wait_s)
            self._wakeup.clear()
            while self.pending and self.gate.open():
                await self._step()
            with self._lock:
                self._abandon()
            self._idle.set()

    def _abandon(self) -> None:
        """The tier is left alone: what waits is dropped rather than keep slots from others."""
        if self._inbox:
            self.stats.dropped["breaker"] += len(self._inbox)
        for key in list(self._inbox):
            self._give_up(key)

    async def _step(self) -> None:
        """One batch of removals or one of writes, whichever is due; removals first."""
        with self._lock:
            removals = self._removals[: self.tier.batch_max]
            del self._removals[: self.tier.batch_max]
        if removals:
            await self._remove_from_tier(removals)
            return
        with self._lock:
            self._writing = self._inbox.take(self.tier.batch_max)
        try:
            await self._write()
        finally:
            with self._lock:
                self._settle([], Answer(()))

    async def _remove_from_tier(self, items: Sequence[Item]) -> None:
        """Have the tier forget ``items``, then free their places; if it fails, later again.

        Until then a durable tier would bring them back at the next start.
        """
        def again() -> None:
            self._removals.extend(items)

        async def removing() -> Sequence[bool]:
            await self.tier.remove(items)
            return ()

        answer = await self.gate.call(removing, (), again)
        with self._lock:
            if answer.results is not None:
                self._free([item.place for item in items])
            elif answer.quiet:
                again()

    async def _write(self) -> None:
        """Make room for what is in ``_writing`` and store it."""
        await self._make_room(len(self._writing))
        now = self._shared.clock.now()
        with self._lock:
            places = self._places.take(len(self._writing))
            self._busy += len(places)
            missing = len(self._writing) - len(places)
            if missing:
                self.stats.dropped["full" if self._places.limited else "busy"] += missing
            items = [
                self._item(key, place, pending)
                for place, (key, pending) in zip(places, self._writing.items(), strict=False)
            ]
        if not items:
            return
        answer = await self.gate.call(
            lambda: self.tier.put(items),
            [item.slot for item in items],
            lambda: self._free(places),
        )
        with self._lock:
            self.stats.stored_s += self._shared.clock.now() - now
            self._settle(items, answer)

    def _item(self, key: BlockKey, place: int, pending: Pending) -> Item:
        """What is written. A priority that ends is not stored: after a restart it has ended."""
        meta, ttl_s = pending.meta, self.rule.ttl_s
        lasting = meta.priority if meta.until_s == inf else min(meta.priority, PRIORITY_DEFAULT)
        wall_s = None if ttl_s is None else self._shared.clock.wall() + ttl_s
        return Item(key, place, pending.slot, lasting, meta.floor, wall_s)

    def _settle(self, items: Sequence[Item], answer: Answer) -> None:
        """End the write under way: publish what was stored, free the rest, tell the stack."""
        if answer.full:
            self._full([item.place for item in items])
        elif answer.results is None:
            self.stats.dropped["failed"] += len(items)
            if answer.quiet:
                self._free([item.place for item in items])
        else:
            self._publish(items, answer.results)
        for key, pending in self._writing.items():
            self._shared.arena.release([pending.slot])
            self._tell_observer(key, stored=key in self.index)
        self._writing = {}
        self._tombstones.clear()

    def _publish(self, items: Sequence[Item], results: Sequence[bool]) -> None:
        ttl_s = self.rule.ttl_s
        expires_s = inf if ttl_s is None else self._shared.clock.now() + ttl_s
        stored: list[BlockKey] = []
        for item, kept in zip(reversed(items), reversed(results), strict=True):
            if not kept:
                self._free([item.place])
                self.stats.dropped["refused"] += 1
            elif item.key in self._tombstones:
                self._removals.append(item)
            else:
                self._busy -= 1
                meta = self._writing[item.key].meta
                self.index.insert(item.key, item.place, meta, expires_s=expires_s)
                stored.append(item.key)
        self.stats.stored += len(stored)
        self.stats.stored_bytes += len(stored) * self._shared.block_bytes
        self._shared.events.stored(self.name, stored[::-1])

    def _full(self, places: Sequence[int]) -> None:
        """The medium is full: work within the places in use, try for more after a while."""
        self.stats.dropped["full"] += len(places)
        self._busy -= len(places)
        self._places.withhold(places)
        self._full_until_s = self._shared.clock.now() + FULL_RETRY_S
        self._shared.notices.say(
            f"{self.name} full",
            f"tier {self.name}: its medium is full with {len(self.index)} of"
            f" {self.capacity_blocks} blocks; older blocks give way from now on",
        )

    async def _make_room(self, count: int) -> None:
        """Evict exactly as much as ``count`` blocks need; victims go to a level below first."""
        with self._lock:
            now = self._shared.clock.now()
            if self._places.limited and now >= self._full_until_s:
                self._places.unlimit()
            self.index.revert(now)
            victims = self._victims(count - self._places.free)
        if not victims:
            return
        await self._demote(victims)
        with self._lock:
            gone: list[Item] = []
            for key, place in victims:
                if self.index.place(key) == place and place not in self._reads:
                    self.index.drop(key)
                    self._busy += 1
                    gone.append(Item(key, place))
            self.stats.evicted += len(gone)
            self._shared.events.removed(self.name, [item.key for item in gone], "evicted")
        for start in range(0, len(gone), self.tier.batch_max):
            await self._remove_from_tier(gone[start : start + self.tier.batch_max])

    def _victims(self, count: int) -> list[tuple[BlockKey, int]]:
        """At most ``count`` blocks in the order of eviction, none of which is being read."""
        chosen: list[tuple[BlockKey, int]] = []
        if count <= 0:
            return chosen
        for place in self.index.victims():
            key = self.index.key_at(place)
            if key is not None and place not in self._reads:
                chosen.append((key, place))
                if len(chosen) == count:
                    break
        return chosen

    async def _demote(self, victims: Sequence[tuple[BlockKey, int]]) -> None:
        """Read those victims that a level below admits and hand them to it."""
        arena = self._shared.arena
        moves: list[tuple[Item, Meta, Level]] = []
        with self._lock:
            for key, place in victims:
                meta = self.index.meta(place)
                target = self.target(key, meta)
                if target is None:
                    continue
                slots = arena.lease(1)
                if slots is None:
                    self.stats.dropped["arena"] += 1
                    continue
                self.begin_read(place)
                moves.append((Item(key, place, slots[0]), meta, target))
        found: Sequence[bool] = [False] * len(moves)
        try:
            found = await self.read([item for item, _, _ in moves])
        finally:
            with self._lock:
                for (item, meta, target), ok in zip(moves, found, strict=True):
                    if ok and self.index.place(item.key) == item.place:
                        target.offer(item.key, item.slot, meta)
                    arena.release([item.slot])
                    target.wake()

    async def read(self, items: Sequence[Item]) -> Sequence[bool]:
        """Fill the items' slots; False where that failed, for whatever reason.

        The caller called ``begin_read`` for each place, which this ends, and holds its own claims
        on the slots. A block that the tier turns out not to have leaves the index.
        """
        results: list[bool] = []
        begun = 0
        try:
            async with self._read_gate:
                while begun < len(items):
                    batch = items[begun : begun + self.tier.batch_max]
                    begun += len(batch)
                    results += await self._read_batch(batch)
        finally:
            with self._lock:
                for item in items[begun:]:
                    self._end_read(item.place)
        return results

    async def _read_batch(self, items: Sequence[Item]) -> Sequence[bool]:
        def ended() -> None:
            for item in items:
                self._end_read(item.place)

        now = self._shared.clock.now()
        slots = [item.slot for item in items]
        answer = await self.gate.call(lambda: self.tier.get(items), slots, ended)
        with self._lock:
            self.stats.loaded_s += self._shared.clock.now() - now
            if answer.quiet:
                ended()
            if answer.results is None:
                return [False] * len(items)
            for item, ok in zip(reversed(items), reversed(answer.results), strict=True):
                held = self.index.place(item.key) == item.place
                if ok and held:
                    self.index.touch([item.place])
                elif held:
                    self.stats.misses += 1
                    self._forget(item.key, "lost")
                    self.wake()
            good = sum(answer.results)
            self.stats.loaded += good
            self.stats.loaded_bytes += good * self._shared.block_bytes
        return answer.results

    async def drain(self) -> None:
        """Wait until everything offered was written or given up."""
        while self.pending and self.gate.open():
            self._idle.clear()
            self.wake()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Stop the writer, give up what waits, close the tier; may be called again."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait({self._writer})
            self._writer = None
        with self._lock:
            self._abandon()
        await self.gate.aclose()
        closing = asyncio.ensure_future(self.tier.aclose())
        await asyncio.wait({closing}, timeout=self.settings.gate.timeout_s)
        if not closing.done():
            closing.cancel()
        elif not closing.cancelled() and closing.exception() is not None:
            self._shared.notices.say(self.name, f"tier {self.name}: {closing.exception()!r}")
