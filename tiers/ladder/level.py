"""A level: everything that stands around a tier, written once instead of once per tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from kvladder.arena import Slot
from kvladder.errors import ConfigError
from kvladder.events import Reason
from kvladder.keys import BlockKey, Namespace
from kvladder.layout import Layout
from kvladder.lock import STEP
from kvladder.metrics import LevelStats
from kvladder.policy.eviction import PRIORITY_DEFAULT, EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.policy.worth import Pace
from kvladder.tiers.base import NO_PLACE, Blocking, Item, Shared, Terms, Tier, TierContext
from kvladder.tiers.codecs.edge import Edge, EdgeSettings
from kvladder.tiers.ladder.gate import Gate, GateSettings, contained
from kvladder.tiers.ladder.index import LevelIndex, Meta
from kvladder.tiers.ladder.opening import Opening
from kvladder.tiers.ladder.places import Places
from kvladder.tiers.ladder.queue import Purges
from kvladder.tiers.ladder.writer import Writer

CLOSE_TIMEOUT_S = 5.0
"""How long a tier may take to close, if it is not to be left behind."""
CALLS_TIMEOUT_S = 1.0
"""How long its calls are waited for, once they are cancelled before and after that."""

Threads = Callable[[str], Blocking]
"""Makes a few threads of this name for blocking calls."""


@dataclass(frozen=True, slots=True)
class LevelSettings:
    """How a level treats its tier."""

    gate: GateSettings = field(default_factory=GateSettings)
    queue_blocks: int = 256
    """Blocks that may wait to be written; each keeps an arena slot busy."""
    reads_max: int = 4
    """Reads under way at once."""
    edge: EdgeSettings = field(default_factory=EdgeSettings)


class Observer(Protocol):
    """Told, with the lock held, that blocks offered to the level were stored or given up."""

    def __call__(self, level: Level, keys: Sequence[BlockKey], *, stored: bool) -> None: ...


class Level:
    """A tier's place in the stack: rule, index, exact capacity, one writer, breaker, statistics.

    Sync methods are called with the stack's lock held, from any thread, and never wait; coroutines
    run on the loop thread and take the lock only between their awaits. Whatever the tier does,
    the level answers with a miss or a drop.
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
        scratch: Sequence[Slot] = (),
    ) -> None:
        self.name = name
        self.tier = tier
        self.edge = Edge(tier, settings.edge, scratch)
        self.rule = rule
        self.settings = settings
        self.capacity_blocks = capacity_blocks
        self.stats = LevelStats()
        self.index = LevelIndex(policy, ttl=rule.ttl_s is not None, now=shared.clock.now)
        self.gate = Gate(name, settings.gate, shared, self.stats, wake=self._uncrowded)
        self.bit = 0
        """Which of the levels in a block's terms it is; set by the stack."""
        self.below: Sequence[Level] = ()
        self.observer: Observer | None = None
        self.stir: Callable[[], None] = lambda: None
        """Has the loop thread wake this level soon; set by the stack."""
        self.room: Callable[[int, int], list[Slot]] = lambda count, _: (
            shared.arena.lease(count) or []
        )
        """Leases slots for so many blocks of a priority; the stack's may evict for it."""
        self.places = Places(capacity_blocks)
        self.pace = Pace()
        """How long reads take, with the stack's lock held."""
        self.shared = shared
        self.opening = Opening(self)
        self.purges = Purges(tier, self.gate, self.stats, shared)
        self._writer = Writer(self)
        self._read_gate = asyncio.Semaphore(settings.reads_max)

    # ---- sync, with the lock held

    def admits(self, meta: Meta) -> bool:
        """Whether a block of this meta would be taken now."""
        return (
            self.rule.admits(meta.floor, meta.hits)
            and bool(meta.terms.levels & self.bit)
            and not self.shared.refuses(meta.terms.salt)
            and meta.terms.last(self.shared.clock)
            and self.writable
        )

    @property
    def writable(self) -> bool:
        """Whether blocks may be put now; into a shared tier not while it cannot be purged."""
        if self.purges and self.tier.shared and not self.gate.open("remove"):
            return False
        return self.gate.open("put")

    @property
    def readable(self) -> bool:
        """Whether blocks may be got now."""
        return self.gate.open("get")

    @property
    def batch_max(self) -> int:
        """The largest batch that is given to the tier, so that its bookkeeping stays short."""
        return min(self.tier.batch_max, STEP)

    @property
    def outlives(self) -> bool:
        """Whether what is written here outlives the engine."""
        return self.tier.durable or self.tier.shared

    def holds(self, key: BlockKey) -> bool:
        """Whether the block is here or on its way."""
        return key in self.index or key in self._writer

    def offer(self, key: BlockKey, slot: Slot, meta: Meta, *, stays: bool = False) -> bool:
        """Queue the block in ``slot`` to be written, with a claim of the level's own.

        False, and nothing changed, if the level has it, does not admit it, or is so far behind that
        something less valuable would have to give way and there is none. That is counted as a drop
        unless the block ``stays`` where it is and is going to be offered again.
        """
        return self.admits(meta) and self.queue(key, slot, meta, stays=stays)

    def queue(self, key: BlockKey, slot: Slot, meta: Meta, *, stays: bool = False) -> bool:
        """``offer``, of a block that is admitted."""
        if self.holds(key):
            return False
        taken = self._writer.offer(key, slot, meta, stays=stays)
        if taken:
            self.stir()
        return taken

    def queue_all(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], metas: Sequence[Meta]
    ) -> bool:
        """``queue`` each, of blocks that stay where they are; False if one was not taken."""
        if self.index.disjoint(keys) and self._writer.offer_all(keys, slots, metas):
            self.stir()
            return True
        blocks = zip(keys, slots, metas, strict=True)
        return all(self.queue(key, slot, meta, stays=True) for key, slot, meta in blocks)

    def settled(self, keys: Sequence[BlockKey], *, stored: bool) -> None:
        """Blocks that were offered are stored or given up: tell the stack."""
        if self.observer is not None and keys:
            self.observer(self, keys, stored=stored)

    def find(self, key: BlockKey) -> int | None:
        """The block's place, or None; a block whose time has come is expired instead."""
        place = self.index.place(key)
        if place is None:
            return None
        end_s = self.index.expires_s(place)
        if end_s == inf or end_s > self.shared.clock.now():
            return place
        self._forget([key], "expired")
        return None

    def expire(self, now_s: float, count_max: int) -> None:
        """Forget blocks, at most so many, whose request wanted them to expire by now."""
        self._forget(self.index.due(now_s, count_max), "expired")

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """``remove`` what is of no use here; a shared tier keeps it, for others it may be."""
        if self.tier.shared:
            self._forget([key for key in keys if key in self.index], "lost")
        else:
            self.remove(keys)

    def remove(self, keys: Iterable[BlockKey]) -> int:
        """Forget the blocks; no transfer that began before brings one back. How many were here.

        A shared tier forgets them for everybody.
        """
        held: list[BlockKey] = []
        foreign: list[Item] = []
        for key in keys:
            if self.gate.absent:
                self.opening.unwanted.add(key)
            is_recalled = self._writer.recall(key)
            if key in self.index:
                held.append(key)
            elif self.tier.shared and not is_recalled:  # others may have put it there
                foreign.append(Item(key, NO_PLACE))
        self._forget(held, "removed")
        if foreign:
            self._writer.remove_later(foreign)
            self.stir()
        return len(held)

    @property
    def answers(self) -> bool:
        """Whether a shared tier can be asked now what others put there."""
        return self.readable and self.gate.open("contains") and not self.purges

    def died(self, error: BaseException) -> None:
        """A task of the level died of an error; it is started again."""
        self.stats.task_failures += 1
        self.shared.notices.say(
            f"{self.name} task", f"a task of level {self.name} died and is started again: {error!r}"
        )

    def leaving(self, key: BlockKey) -> bool:
        """Whether the tier has still to forget the block, or may still come to store it."""
        return self._writer.leaving(key)

    def forget_later(self, salt: bytes | None) -> None:
        """Blocks of a salt, or all, are being removed: also what it has and has not yet said."""
        if self.gate.absent:
            self.opening.unwanted.add(salt)

    def purge(self, salt: bytes | None) -> None:
        """Have the writer purge a shared tier of a salt, or all; one that keeps bytes erases."""
        self.purges.add(salt)
        self._writer.purged(salt)
        self.stir()

    def adopt(self, keys: Sequence[BlockKey], salt: bytes, spare: AbstractSet[BlockKey]) -> None:
        """Hold blocks of a salt that others put into a shared tier, as many as can be, head first.

        Where there is no place, the next to go give way, but none of ``spare``. What is being
        removed from here is not held again.
        """
        if not self.answers or self.shared.refuses(salt):
            return
        wanted: list[BlockKey] = []
        for key in keys:
            if self.holds(key) or self.leaving(key):
                break
            wanted.append(key)
        lowest = max(PRIORITY_DEFAULT, self.rule.min_priority)
        places = self.places.take(len(wanted))
        if len(places) < len(wanted):
            self._make_way(len(wanted) - len(places), lowest, spare)
            places += self.places.take(len(wanted) - len(places))
        ttl_s, now = self.rule.ttl_s, self.shared.clock.now()
        expires_s = inf if ttl_s is None else now + ttl_s
        adopted, meta = wanted[: len(places)], Meta(lowest, lowest, terms=Terms(salt=salt))
        for key, place in zip(reversed(adopted), reversed(places), strict=True):
            self.index.insert(key, place, meta, expires_s=expires_s)
        self.stats.found += len(adopted)
        self.shared.events.stored(self.name, adopted)

    def _make_way(self, count: int, priority: int, spare: AbstractSet[BlockKey]) -> None:
        """Free up to ``count`` places of a shared tier, where they are no addresses, at once."""
        gone: list[tuple[BlockKey, int]] = []
        for place in self.index.victims():
            if len(gone) == count or self.index.priority(place) > priority:
                break
            key = self.index.key_at(place)
            if key is not None and key not in spare and not self.places.being_read(place):
                gone.append((key, place))
        for key, _ in gone:
            self.index.evict(key, self.shared.clock.now())
        self.places.give([place for _, place in gone])
        self.evicted([key for key, _ in gone])

    def evicted(self, keys: Sequence[BlockKey]) -> None:
        """Tell everybody; host need not write them again: they would come and go for ever."""
        self.stats.evicted += len(keys)
        self.shared.events.removed(self.name, keys, "evicted")
        self.settled(keys, stored=False)

    def refuse(self, key: BlockKey) -> None:
        """Do not hold ``key`` any more, which is worth less than what is admitted here."""
        self.stats.evicted += 1
        self._forget([key], "evicted")

    def coming(self) -> list[BlockKey]:
        """Every block that waits to be written or is being written."""
        return self._writer.keys()

    def recall_all(self) -> Iterator[None]:
        """Have nothing come that is on its way here, in steps; nothing is offered meanwhile.

        Called without the lock.
        """
        return self._writer.recall_all()

    def recall(self, keys: Iterable[BlockKey], salt: bytes) -> None:
        """Those of ``keys`` that are on their way here and of this salt do not come."""
        self._writer.recall_salted(keys, salt)

    def _forget(self, keys: Sequence[BlockKey], reason: Reason) -> None:
        """Drop held blocks from the index; their places are free once the tier knows, if it has to.

        A shared one is told what a user removes, and nothing else.
        """
        if not keys:
            return
        items = [Item(key, self.index.drop(key)) for key in keys]
        if reason == "removed":
            self._writer.remove_later(items)
        else:
            self._writer.let_go(items)
        if reason == "lost":
            self._writer.lost(keys)
        elif reason == "expired":
            self.stats.expired += len(keys)
        elif reason == "removed":
            self.stats.removed += len(keys)
        self.shared.events.removed(self.name, keys, reason)
        self.stir()

    @property
    def pending(self) -> bool:
        """Whether the writer has something to do."""
        return self._writer.pending

    @property
    def due(self) -> bool:
        """Whether the writer has something to do that it may do now."""
        return self._writer.due

    @property
    def queue_full(self) -> bool:
        """Whether what is offered now would have to displace something."""
        return self._writer.full

    @property
    def queued(self) -> int:
        """Blocks that wait to be written or are being written."""
        return len(self._writer)

    @property
    def queue_age_s(self) -> float:
        """How long the oldest of them has waited; 0 without any."""
        return self._writer.oldest_s()

    @property
    def removals(self) -> int:
        """Blocks that the tier still has to forget, and purges of it that are not over."""
        return self._writer.removals + len(self.purges)

    @property
    def left_behind(self) -> int:
        """Blocks of writes and removals that were left behind and have not ended yet."""
        return self._writer.left_behind

    def target(self, key: BlockKey, meta: Meta) -> Level | None:
        """The level below that should get this block when it leaves here, if it lacks it."""
        for level in self.below:
            if level.admits(meta):
                return None if level.holds(key) else level
        return None

    def check(self) -> None:
        """Assert capacity, places and claims; O(n), for tests."""
        self.index.check(self.capacity_blocks)
        self._writer.check()
        self.places.check()
        assert len(self.index) <= self.places.taken <= self.capacity_blocks

    # ---- on the loop

    def _uncrowded(self) -> None:
        """So many calls that were left behind have ended that others may begin again."""
        with self.shared.lock:
            self.stir()  # others may have something for it again
        self.wake()

    def wake(self) -> None:
        """Have the writer look at what waits."""
        self._writer.wake()

    async def open(
        self, layout: Layout, namespace: Namespace, *, threads: Threads, verify: bool = True
    ) -> None:
        """Open the tier, take back what it recovered and start the writer: see ``Opening``.

        The tier gets ``threads`` of its own and its codecs others, so that what hangs there holds
        up nobody else.
        """
        if self.tier.batch_max < 1:
            raise ConfigError(f"batch_max is {self.tier.batch_max}", hint="expected 1 or more")
        context = TierContext(
            arena=self.shared.arena,
            layout=layout,
            namespace=namespace,
            capacity_blocks=self.capacity_blocks,
            clock=self.shared.clock,
            run_blocking=threads(self.name),
            verify=verify,
            timeout_s=self.settings.gate.timeout_s,
            say=self._say,
        )
        self.edge.open(context, threads(f"{self.name}-codecs"))
        await self.opening.begin(context)

    def take(self, places: Sequence[int], gone: Sequence[Item]) -> None:
        """The tier has said all that it has: these places are taken, those blocks have to go."""
        self.places.occupy(places)
        for start in range(0, len(gone), STEP):
            with self.shared.lock:
                self._writer.remove_later(gone[start : start + STEP])
        self.stats.recovered = len(self.index)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Know nothing of blocks that the tier will tell of again."""
        for key in keys:
            self.index.drop(key)
        self._writer.begin_anew()

    def opened(self) -> None:
        """The tier is open, now or late: the level is there."""
        self._writer.start()
        self._writer.wake()  # what was recovered and is not to be held has to be removed
        with self.shared.lock:
            self.gate.absent = False
            self.opening.unwanted.clear()
            self.stir()

    def _say(self, text: str) -> None:
        self.shared.notices.say(text, f"tier {self.name}: {text}")

    async def probe(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Whether a shared tier says that it has these blocks; False if it says nothing in time."""
        items = [Item(key, NO_PLACE) for key in keys]
        if not self.answers:
            return [False] * len(keys)
        answer = await self.gate.call(
            "contains",
            lambda: self.tier.contains(items),
            lambda: None,
            expected=len(items),
            timeout_s=self.tier.probe_timeout_s,
        )
        self.stats.probed += len(keys)
        if answer.results is None:
            return [False] * len(keys)
        return [*map(bool, answer.results)]

    async def read(self, items: Sequence[Item]) -> Sequence[bool]:
        """Fill the items' slots; False where that failed, for whatever reason.

        The caller called ``places.begin_reads``, which this ends, and holds its own
        claims on the slots. A block that the tier turns out not to have leaves the index.
        """
        results: list[bool] = []
        begun = 0
        try:
            async with self._read_gate:
                while begun < len(items):
                    batch = items[begun : begun + self.batch_max]
                    begun += len(batch)
                    results += await self._read_batch(batch)
        finally:
            with self.shared.lock:
                self.places.end_reads([item.place for item in items[begun:]])
        return results

    async def _read_batch(self, items: Sequence[Item]) -> Sequence[bool]:
        def ended() -> None:
            self.places.end_reads([item.place for item in items])

        now = self.shared.clock.now()
        slots = [item.slot for item in items]
        answer = await self.gate.call(
            "get", lambda: self.edge.get(items), ended, slots=slots, expected=len(items)
        )
        with self.shared.lock:
            self.stats.loaded_s += self.shared.clock.now() - now
            if answer.quiet:
                ended()
            if answer.results is None:
                return [False] * len(items)
            used: list[int] = []
            for item, ok in zip(reversed(items), reversed(answer.results), strict=True):
                held = self.index.place(item.key) == item.place
                if ok and held:
                    used.append(item.place)
                elif held and ok is not None:
                    self.stats.misses += 1
                    self._forget([item.key], "lost")
            self.index.touch(used)
            self.stats.errors += None in answer.results
            found = [*map(bool, answer.results)]
            self.stats.loaded += sum(found)
            self.stats.loaded_bytes += sum(found) * self.shared.block_bytes
        return found

    async def drain(self, *, erased: bool = False) -> None:
        """Wait until everything offered was written or given up; then for purges, if ``erased``."""
        self.purges.paused = not erased
        await self._writer.drain()

    async def stop(self) -> None:
        """Stop the writer and give up what waits; may be called again."""
        await self._writer.aclose()

    async def aclose(self) -> None:
        """Stop, and close the tier; may be called again.

        Whatever the tier does, this ends within ``CLOSE_TIMEOUT_S`` and twice ``CALLS_TIMEOUT_S``,
        thrice if it was not open yet.
        """
        await self.opening.aclose(timeout_s=CALLS_TIMEOUT_S)
        await self.stop()
        await self.gate.aclose(timeout_s=CALLS_TIMEOUT_S)
        closing = asyncio.ensure_future(contained(self.tier.aclose()))
        await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
        if not closing.done():
            closing.cancel()
            closing.add_done_callback(lambda task: task.cancelled() or task.exception())
            what = f"tier {self.name} has not closed within {CLOSE_TIMEOUT_S:g} s: left behind"
            self.shared.notices.say(f"{self.name} close", what)
        elif not closing.cancelled() and closing.exception() is not None:
            what = f"tier {self.name} failed to close: {closing.exception()!r}"
            self.shared.notices.say(f"{self.name} close", what)
        await self.gate.aclose(timeout_s=CALLS_TIMEOUT_S)  # what only its end could end
