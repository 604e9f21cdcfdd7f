"""The stack: the host level and the levels below it, hot to cold, as one cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from kvladder.arena import Slot
from kvladder.errors import ClosedError
from kvladder.keys import BlockKey
from kvladder.policy.eviction import EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.tiers.base import NO_SLOT, Item, Shared
from kvladder.tiers.fetch import Arrival, Fetch
from kvladder.tiers.host import HostLevel
from kvladder.tiers.index import Meta
from kvladder.tiers.level import Level

TOUCH_BATCH = 256
"""Blocks touched per turn of the loop, so that the lock is never held for long."""


class Post(Protocol):
    """Has the loop thread call ``function(*args)`` soon; may be called from any thread."""

    def __call__(self, function: Callable[..., object], /, *args: Any) -> None: ...


class HostSettings(NamedTuple):
    """The host level of a stack."""

    name: str
    rule: OffloadRule
    policy: EvictionPolicy
    reserve_blocks: int
    """Slots kept free or clean in the background, so that a save finds room at once."""


class Want(NamedTuple):
    """A block that a fetch has to bring from a level."""

    position: int
    key: BlockKey
    level: Level
    place: int


class TierStack:
    """Levels hot to cold. Sync methods may be called from any thread and never wait for a tier.

    One lock guards all bookkeeping; it is never held across an await or an I/O call. Every block
    is reserved, filled and then published once; what fails below is a miss.
    """

    def __init__(
        self, host: HostSettings, levels: Sequence[Level], shared: Shared, *, post: Post,
        fetch_blocks_max: int,
    ) -> None:
        self.levels = list(levels)
        self.shared = shared
        self.lock = shared.lock
        self.fetch_blocks_max = fetch_blocks_max
        """The fetch budget: blocks that may be on their way up at once."""
        self.host = HostLevel(
            host.name,
            host.rule,
            policy=host.policy,
            reserve_blocks=host.reserve_blocks,
            shared=shared,
            loose=self._loose,
        )
        self._post = post
        self._arrivals: dict[BlockKey, Arrival] = {}
        self._saving: dict[BlockKey, tuple[Slot, Meta]] = {}
        self._refused: set[BlockKey] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        for position, level in enumerate(self.levels):
            level.below = self.levels[position + 1 :]
            level.observer = self._written

    # ---- where blocks go when they leave the host level

    def _target(self, key: BlockKey, meta: Meta) -> Level | None:
        """The level that a block of the host level still has to be written to, if any."""
        for level in self.levels:
            if level.admits(meta):
                return None if key in level.index or key in self._refused else level
        return None

    def _loose(self, key: BlockKey, meta: Meta) -> bool:
        return self._target(key, meta) is None

    def _written(self, level: Level, key: BlockKey, *, stored: bool) -> None:
        """A level settled a block: if it did not take it, the host level need not wait for it."""
        if stored:
            self._refused.discard(key)
        elif key in self.host.index:
            self._refused.add(key)
        if level is self.levels[0]:
            self._post(self._clean_ahead)

    def _clean_ahead(self) -> None:
        """Write the next victims of the host level before their slots are needed (loop thread)."""
        with self.lock:
            if self._closed:
                return
            self._refused = {key for key in self._refused if key in self.host.index}
            for key, slot, meta in self.host.next_to_go():
                target = self._target(key, meta)
                if target is not None:
                    target.offer(key, slot, meta)
        self._wake()

    def _wake(self) -> None:
        for level in self.levels:
            if level.pending:
                level.wake()

    # ---- save

    def reserve(
        self, keys: Sequence[BlockKey], metas: Sequence[Meta], *, explicit: bool
    ) -> tuple[list[int], list[Slot]]:
        """Lease slots for those ``keys``, consecutive blocks of a prefix, that are to be saved.

        Left out is what is here already and what no level takes, with all that follows it. Returns
        positions in ``keys`` and their slots. ``explicit`` metas replace those of blocks that are
        here. Each key returned must be given to ``publish`` or ``abandon``.
        """
        wanted: list[int] = []
        with self.lock:
            self._require_open()
            for index, (key, meta) in enumerate(zip(keys, metas, strict=True)):
                place = self.host.find(key)
                if place is not None:
                    if explicit:
                        self.host.index.set_priority(key, meta)
                elif key not in self._saving and key not in self._arrivals:
                    if not self._admitted(meta):
                        break
                    wanted.append(index)
            lowest = min((metas[index].priority for index in wanted), default=0)
            slots = self.host.room(len(wanted), lowest) if wanted else []
            if len(slots) < len(wanted):
                self.host.stats.dropped["room"] += len(wanted) - len(slots)
                self._post(self._clean_ahead)
            del wanted[len(slots) :]
            for index, slot in zip(wanted, slots, strict=True):
                self._saving[keys[index]] = (slot, metas[index])
        return wanted, slots

    def _admitted(self, meta: Meta) -> bool:
        return self.host.rule.admits(meta.floor, meta.hits) or any(
            level.admits(meta) for level in self.levels
        )

    def publish(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """The bytes of these reserved blocks are complete: from now on they are hits."""
        stored: list[BlockKey] = []
        with self.lock:
            for key, slot in zip(reversed(keys), reversed(slots), strict=True):
                saving = self._saving.get(key)
                if saving is None or saving[0] != slot:  # removed, or saved anew, meanwhile
                    self.shared.arena.release([slot])
                    continue
                del self._saving[key]
                meta = saving[1]
                if self.host.rule.admits(meta.floor, meta.hits):
                    self.host.insert(key, slot, meta)
                    stored.append(key)
                    self._write_through(key, slot, meta)
                else:
                    target = self._target(key, meta)
                    if target is not None:
                        target.offer(key, slot, meta)
                    self.shared.arena.release([slot])
            size = len(stored)
            self.host.stats.stored += size
            self.host.stats.stored_bytes += size * self.shared.block_bytes
            self.shared.events.stored(self.host.name, stored[::-1])
        if self.levels:
            self._post(self._clean_ahead)

    def _write_through(self, key: BlockKey, slot: Slot, meta: Meta) -> None:
        for level in self.levels:
            if level.rule.when == "commit":
                level.offer(key, slot, meta)

    def abandon(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """These reserved blocks will not be filled: their slots are free again."""
        with self.lock:
            for key, slot in zip(keys, slots, strict=True):
                saving = self._saving.get(key)
                if saving is not None and saving[0] == slot:
                    del self._saving[key]
            self.shared.arena.release(slots)

    # ---- load

    def lookup(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """How many leading ``keys`` the host level holds, and how many some level does."""
        with self.lock:
            host = self.host.index.prefix(keys)
            open_levels = [level for level in self.levels if level.gate.open()]
            for index in range(host, len(keys)):
                key = keys[index]
                if key not in self.host.index and not any(
                    key in level.index for level in open_levels
                ):
                    return host, index
        return host, len(keys)

    def fetch(self, keys: Sequence[BlockKey], *, deadline_s: float = inf) -> Fetch:
        """Pin the longest prefix of ``keys`` and begin to bring up what is not in host slots.

        ``deadline_s`` is loop time: from then on the answer is what has arrived.
        """
        with self.lock:
            self._require_open()
            fetch = Fetch(
                keys, stack=self, lock=self.lock, clock=self.shared.clock, deadline_s=deadline_s
            )
            found, wants = self._plan(keys)
            self.host.pin([slot for slot in found if slot != NO_SLOT])
            end = len(found)
            slots = self._room_for(wants)
            if len(slots) < len(wants):
                end = wants[len(slots)].position
                self.host.stats.throttled += len(wants) - len(slots)
                late = [i for i in range(end, len(found)) if found[i] != NO_SLOT]
                self.host.unpin([keys[i] for i in late], [found[i] for i in late])
                del wants[len(slots) :]
            items = self._begin(wants, slots)
            self._attach(fetch, keys[:end], found)
        for level, batch in items.items():
            self._post(self._start, level, batch)
        return fetch

    def _plan(self, keys: Sequence[BlockKey]) -> tuple[list[Slot], list[Want]]:
        """Slots of the longest prefix, ``NO_SLOT`` where a block has to come, and what must."""
        found: list[Slot] = []
        wants: list[Want] = []
        levels = [level for level in self.levels if level.gate.open()]
        host_find, arrivals = self.host.find, self._arrivals
        for index, key in enumerate(keys):
            slot = host_find(key)
            if slot is None:
                slot = NO_SLOT
                arrival = arrivals.get(key)
                if arrival is None:
                    want = self._source(levels, index, key)
                    if want is None:
                        break
                    wants.append(want)
                elif arrival.dead:
                    break
            found.append(slot)
        return found, wants

    @staticmethod
    def _source(levels: Sequence[Level], index: int, key: BlockKey) -> Want | None:
        for level in levels:
            place = level.find(key)
            if place is not None:
                return Want(index, key, level, place)
        return None

    def _room_for(self, wants: Sequence[Want]) -> list[Slot]:
        """Slots for what has to come, as far as budget and room go."""
        count = min(len(wants), self.fetch_blocks_max - len(self._arrivals))
        if count <= 0:
            return []
        lowest = min(want.level.index.meta(want.place).priority for want in wants[:count])
        return self.host.room(count, lowest)

    def _begin(self, wants: Sequence[Want], slots: Sequence[Slot]) -> dict[Level, list[Item]]:
        """Register an arrival for each block that has to come: what to read, by level."""
        batches: dict[Level, list[Item]] = {}
        for (_, key, level, place), slot in zip(wants, slots, strict=True):
            level.begin_read(place)
            hits = level.index.hit(place)
            meta = level.index.meta(place)._replace(hits=hits)
            self._arrivals[key] = Arrival(slot, meta, level.name)
            batches.setdefault(level, []).append(Item(key, place, slot))
        return batches

    def _attach(self, fetch: Fetch, keys: Sequence[BlockKey], found: Sequence[Slot]) -> None:
        """Fill ``fetch`` and have it wait for what is on its way."""
        for index, (key, slot) in enumerate(zip(keys, found, strict=False)):
            if slot == NO_SLOT:
                arrival = self._arrivals[key]
                fetch.add(NO_SLOT, arrival.level)
                arrival.waiters.append((fetch, index))
                continue
            fetch.add(slot, self.host.name)
            hits = self.host.index.hit(slot)
            self.host.stats.hits += 1
            self._write_on_hit(key, slot, hits)

    def _write_on_hit(self, key: BlockKey, slot: Slot, hits: int) -> None:
        """Offer a block to a write-through level that asks for just this many hits."""
        for level in self.levels:
            if level.rule.when == "commit" and 0 < level.rule.min_hits == hits:
                level.offer(key, slot, self.host.index.meta(slot))

    def _start(self, level: Level, items: Sequence[Item]) -> None:
        """Begin to read ``items`` from ``level``, a task per batch (loop thread)."""
        step = level.tier.batch_max
        for start in range(0, len(items), step):
            work = self._bring(level, items[start : start + step])
            task = asyncio.get_running_loop().create_task(work, name=f"kvladder-read-{level.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._wake()

    async def _bring(self, level: Level, batch: Sequence[Item]) -> None:
        """Read ``batch``, publish what came, look further down for what did not."""
        found: Sequence[bool] = [False] * len(batch)
        try:
            found = await level.read(batch)
        finally:
            with self.lock:
                retries = self._land(level, batch, found)
        for below, items in retries.items():
            self._start(below, items)
        self._clean_ahead()

    def _land(
        self, level: Level, batch: Sequence[Item], found: Sequence[bool]
    ) -> dict[Level, list[Item]]:
        """End these arrivals, tail first; what is to be read from levels below instead."""
        retries: dict[Level, list[Item]] = {}
        for item, ok in zip(reversed(batch), reversed(found), strict=True):
            arrival = self._arrivals[item.key]
            wanted = [(f, i) for f, i in arrival.waiters if f.waits_for(i)]
            if ok and not arrival.dead:
                level.stats.hits += 1
                self._arrived(item.key, arrival, wanted)
                continue
            self.shared.arena.release([arrival.slot])
            retry = None
            if not ok and wanted and not arrival.dead and not self._closed:
                retry = self._reroute(level, item.key, arrival)
            if retry is None:
                del self._arrivals[item.key]
                for fetch, index in wanted:
                    fetch.failed(index)
            else:
                retries.setdefault(retry[0], []).insert(0, retry[1])
        return retries

    def _arrived(
        self, key: BlockKey, arrival: Arrival, wanted: Sequence[tuple[Fetch, int]]
    ) -> None:
        """Hand the slot over to the host level and to those who wait for it."""
        del self._arrivals[key]
        slot = arrival.slot
        self.shared.arena.share([slot] * len(wanted))
        if self.host.rule.admits(arrival.meta.floor, arrival.meta.hits):
            self.host.insert(key, slot, arrival.meta, pins=len(wanted))
            self.shared.events.stored(self.host.name, [key])
        else:
            self.shared.arena.release([slot])
        for fetch, index in wanted:
            fetch.arrived(index, slot)

    def _reroute(self, level: Level, key: BlockKey, arrival: Arrival) -> tuple[Level, Item] | None:
        """Have a block that ``level`` did not deliver come from below it, into another slot."""
        below = [lower for lower in level.below if lower.gate.open()]
        want = self._source(below, 0, key)
        slots = [] if want is None else self.host.room(1, arrival.meta.priority)
        if want is None or not slots:
            return None
        want.level.begin_read(want.place)
        arrival.slot, arrival.level = slots[0], want.level.name
        return want.level, Item(key, want.place, slots[0])

    # ---- for Fetch

    def unpin(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Give pinned slots back."""
        with self.lock:
            self.host.unpin(keys, slots)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks whose bytes turned out to be of no use."""
        self.remove(keys)

    # ---- everything else

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forget these blocks in every level; no transfer under way brings them back."""
        with self.lock:
            for key in keys:
                self._saving.pop(key, None)
                arrival = self._arrivals.get(key)
                if arrival is not None:
                    arrival.dead = True
                self.host.remove(key)
                for level in self.levels:
                    level.remove(key)
        self._post(self._wake)

    def clear(self) -> None:
        """Forget every block."""
        with self.lock:
            everything = {*self.host.index, *self._saving, *self._arrivals}
            for level in self.levels:
                everything.update(level.keys())
            self.remove(sorted(everything))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These blocks were used, by whichever way: they are the most recent, the head last."""
        self._post(self._touch, list(keys))

    def _touch(self, keys: list[BlockKey]) -> None:
        batch = keys[-TOUCH_BATCH:]
        del keys[-TOUCH_BATCH:]
        with self.lock:
            for index in (self.host.index, *(level.index for level in self.levels)):
                places = (index.place(key) for key in reversed(batch))
                index.touch(place for place in places if place is not None)
        if keys:
            self._post(self._touch, keys)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the cache is closed")

    async def flush(self) -> None:
        """Write what only the host level holds to the durable levels that admit it."""
        with self.lock:
            left = [
                key for place in self.host.index.victims()
                if (key := self.host.index.key_at(place)) is not None
            ]
        durable = [level for level in self.levels if level.tier.durable]
        step = min((level.settings.queue_blocks for level in durable), default=1)
        for start in range(0, len(left) if durable else 0, step):
            with self.lock:
                for key in left[start : start + step]:
                    self._flush_one(durable, key)
            for level in durable:
                await level.drain()

    def _flush_one(self, durable: Sequence[Level], key: BlockKey) -> None:
        slot = self.host.find(key)
        if slot is None or any(level.holds(key) for level in durable):
            return
        meta = self.host.index.meta(slot)
        for level in durable:
            if level.offer(key, slot, meta):
                return

    async def aclose(self, *, flush_timeout_s: float) -> None:
        """Flush, end every transfer, close every tier, release every slot; may be called again."""
        if self._closed:
            return
        with self.lock:
            self._closed = True
        flushing = asyncio.ensure_future(self.flush())
        await asyncio.wait({flushing}, timeout=flush_timeout_s)
        tasks = {flushing, *self._tasks}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for level in self.levels:
            await level.aclose()
        with self.lock:
            for key in list(self.host.index):
                self.shared.arena.release([Slot(self.host.index.drop(key))])
            self._refused.clear()

    def check(self) -> None:
        """Assert every invariant that can be seen from here; O(n), for tests."""
        with self.lock:
            self.host.check()
            self.shared.arena.check()
            for level in self.levels:
                level.check()
            slots = [slot for slot, _ in self._saving.values()]
            slots += [arrival.slot for arrival in self._arrivals.values()]
            assert len(set(slots)) == len(slots)
            for slot in slots:
                assert self.shared.arena.claims(slot) >= 1
                assert self.host.index.key_at(slot) is None
            assert not self._saving.keys() & set(self.host.index)
            assert not self._arrivals.keys() & set(self.host.index)
            assert len(self._arrivals) <= self.fetch_blocks_max
