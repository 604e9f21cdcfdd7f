"""The stack: the host level and the levels below it, hot to cold, as one cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

from kvladder.arena import Slot
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey, Namespace
from kvladder.layout import Layout
from kvladder.lock import BATCH, STEP
from kvladder.policy.admission import AdaptiveAdmission
from kvladder.policy.fetch_cost import FetchCostModel
from kvladder.schema import within
from kvladder.tiers.ladder.base_level import BaseLevel, Expiry, Shared
from kvladder.tiers.ladder.calling.client import Threads
from kvladder.tiers.ladder.definition import LevelDefinition
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.host import HostSettings as HostSettings
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.lifecycle import LevelLifecycle
from kvladder.tiers.ladder.loading.loader import Loader
from kvladder.tiers.ladder.records.admission import AdmissionGate
from kvladder.tiers.ladder.records.lineage import Lineage
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import ANYWHERE, HOST
from kvladder.tiers.ladder.removing import StackRemovals
from kvladder.tiers.ladder.saving import Saving

T = TypeVar("T")


class Post(Protocol):
    """Schedules ``function(*args)`` on the loop thread; may be called from any thread."""

    def __call__(self, function: Callable[..., object], /, *args: Any) -> object: ...


class Portal(Protocol):
    """What a manager needs of the loop thread; ``kvladder.runtime.Runtime`` implements it."""

    @property
    def post(self) -> Post:
        """See ``Runtime.post``."""
        ...

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """See ``Runtime.call``."""
        ...

    @property
    def faults(self) -> int:
        """See ``Runtime.faults``."""
        ...

    def close(self, *, timeout_s: float = 2.0) -> None:
        """See ``Runtime.close``."""
        ...


class Debts(Protocol):
    """Keeps what purges owe of a level that is detached and attached while the cache serves.

    ``medium`` is the identity of what the level stores its blocks on.
    """

    async def arriving(self, level: Level, medium: str) -> None:
        """Have a level forget what it owes; it has joined the stack, and opens afterwards."""
        ...

    def departed(self, level: Level, medium: str) -> None:
        """Note what a level still owes that has left the stack; its tier closes afterwards."""
        ...


class TierStack(StackRemovals):
    """Levels hot to cold. Sync methods may be called from any thread and never wait for a tier.

    One lock guards all bookkeeping; it is never held across an await or an I/O call. Calls with
    many blocks release it between steps, so each block is handled for itself. Every block is
    reserved, filled and then published once. A failure below is a miss.
    """

    def __init__(
        self,
        host: HostSettings,
        levels: Sequence[LevelDefinition],
        shared: Shared,
        *,
        post: Post,
        fetch_blocks_max: int,
        worth: FetchCostModel | None = None,
    ) -> None:
        self.shared = shared
        self._unreleased = shared.unreleased
        self.lock = shared.lock
        self._last_bit = HOST
        self.known = {host.name: HOST}
        self.levels = [self.make_level(spec) for spec in levels]
        self.host = HostLevel(host, shared, self.levels)
        self._lifecycles = [LevelLifecycle(level, self) for level in self.levels]
        self.away = {}
        self.debts: Debts | None = None
        """Keeps what purges owe; None if no receipts are configured."""
        self._join()
        for lifecycle in self._lifecycles:
            if lifecycle.level.tier.durable:  # the first one keeps what host's policy has learned
                lifecycle.learned["host"] = self.host.index
                break
        self._post = post
        self._saving = Saving(shared.arena.slots)
        self.lineage: Lineage | None = None
        """Parents and times of saved blocks; None if no purge by prefix or age may be asked."""
        self._scheduled = False
        self._closed = False
        self.worth = worth or FetchCostModel()
        self.loader = Loader(
            self.host,
            self.levels,
            shared,
            post=post,
            blocks_max=fetch_blocks_max,
            landed=self.wake,
            discard=partial(self.remove, for_all=False),
            worth=self.worth,
            saving=self._saving,
        )
        self._expiry = Expiry(lambda: self._all_levels, shared)

    def __repr__(self) -> str:
        return f"<TierStack: {', '.join(level.name for level in self._all_levels)}>"

    def make_level(self, spec: LevelDefinition) -> Level:
        """Return a new level with a bit of its own; it takes part once it is joined."""
        self._last_bit <<= 1  # never used again: blocks' terms may name a level that is gone
        self.known[spec.name] = self._last_bit
        return Level(spec, self.shared, self, bit=self._last_bit)

    @property
    def lifecycles(self) -> Sequence[LevelLifecycle]:
        """The lifecycles of ``levels``, in their order."""
        return self._lifecycles

    def rejoin(self, lifecycles: Sequence[LevelLifecycle]) -> None:
        """Consist of the levels of these lifecycles from now on, hottest first; lock held.

        Called on the loop thread. Also called after a change of rules and policies.
        """
        self._lifecycles[:] = lifecycles
        self.levels[:] = [lifecycle.level for lifecycle in lifecycles]
        self._join()
        self.host.arrange()
        self.loader.arrange()
        self.loader.prober.forget_absent()
        self.wake()

    def _join(self) -> None:
        """Tell the levels and their admissions of each other."""
        self._all_levels = (self.host, *self.levels)
        self._told = [level for level in self._all_levels if level.index.is_told]
        self.host.admissions.clear()
        for level in self._all_levels:
            level.tell(None)
        for number, level in enumerate(self.levels, 1):
            self._connect(level, self._all_levels[:number])

    def _connect(self, level: Level, hotter: Sequence[HostLevel | Level]) -> None:
        """Make the admission of a level, if it is to have one, and tell it what happens above."""
        if level.rule.admit != "adaptive":
            level.obey(None)
            return
        blocks, gate = level.capacity_blocks, level.gate
        is_same = gate is not None and gate.blocks == blocks
        admission = gate.admission if gate and is_same else AdaptiveAdmission(blocks)
        again = partial(self.host.offer_again, bit=level.bit)
        level.obey(AdmissionGate(admission, [one.index for one in hotter], again, blocks))
        hotter[-1].tell(admission.left)
        self.host.admissions.append(admission)

    async def open(self, layout: Layout, namespace: Namespace, threads: Threads) -> None:
        """Open the levels one after the other; if one refuses, close those that are open.

        Raises
        ------
        ConfigError
            A tier cannot work as configured; its path begins with its place in the stack.
        """
        for number, lifecycle in enumerate(self._lifecycles, 1):
            try:
                await lifecycle.open(layout, namespace, threads)
            except BaseException as error:
                for opened in self._lifecycles[:number]:
                    await opened.aclose()
                if isinstance(error, ConfigError):  # it lacks its place in the stack
                    raise within(f"tiers[{number}]", error) from error
                raise

    # ---- what levels need of it, see ``WriterCallbacks``; with the lock held

    def room(self, count: int, priority: int) -> list[Slot]:
        """Lease slots for up to ``count`` blocks of a priority."""
        return self.host.room(count, priority)

    def below(self, level: Level, key: BlockKey, meta: BlockMeta) -> Level | None:
        """Return the level below ``level`` that should get the block when it leaves, if any."""
        start = self.levels.index(level) + 1 if level in self.levels else len(self.levels)
        for lower in self.levels[start:]:
            if lower.admits(meta):
                return None if lower.holds(key) else lower
        return None

    def settled(self, level: BaseLevel[int], keys: Sequence[BlockKey], *, stored: bool) -> None:
        """Note that the level stored these blocks or gave them up: host may evict its own."""
        if keys:
            self.host.settled(level, keys, stored=stored)
            if stored:
                self.loader.prober.stored(keys, level.bit)
            else:
                self.shared.events.given_up(keys)
            self.wake()

    def wake(self) -> None:
        """Have the loop thread look after the levels soon; schedules it once."""
        if not self._scheduled and (self.levels or self.host.index.next_end_s != inf):
            self._scheduled = True
            self._post(self._tidy)

    def _tidy(self) -> None:
        """Write the next victims of the host level before their slots are needed (loop thread)."""
        if self._closed:
            return
        with self.lock:
            is_behind = self.host.catch_up()
        with self.lock:
            for key, slot, meta in self.host.excess() if self.host.index.above else ():
                self._send_down(key, slot, meta)
                self.host.forget([key], "evicted", "quota")
            self.host.clean()
            self._expiry.set()
            self._scheduled = False  # a wake by the offers above is of no use
            if is_behind:
                self.wake()
        for level, lifecycle in zip(self.levels, self._lifecycles, strict=True):
            if level.due:
                lifecycle.writer.wake()
        self.loader.resume()

    # ---- load

    def reach(self, keys: Sequence[BlockKey], levels: int = ANYWHERE) -> int:
        """Return how many leading ``keys`` to fetch: all if a shared tier has to be asked."""
        _, total = self.lookup(keys, levels)
        with self.lock:
            asks = total < len(keys) and self.loader.prober.may_know(keys[total], levels)
        return len(keys) if asks else total

    # ---- everything else

    def note(
        self,
        keys: Sequence[BlockKey],
        saved: Sequence[int],
        parent: BlockKey | None,
        *,
        links: bool,
    ) -> None:
        """See ``Lineage.note``; without a lineage, do nothing."""
        if self.lineage is not None:
            self.lineage.note(keys, saved, parent, self.shared.clock.wall(), links=links)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Make these blocks the most recently used in every level, the head most of all."""
        self._post(self._touch, list(keys))

    def _touch(self, keys: list[BlockKey]) -> None:
        batch = keys[-STEP:]
        del keys[-STEP:]
        with self.lock:
            recent = [*dict.fromkeys(batch)][::-1]
            for level in self._all_levels:
                places = level.index.places_of(recent)
                level.index.touch([place for place in places if place is not None])
        if keys:
            self._post(self._touch, keys)

    async def flush(self) -> None:
        """Write what only the host level holds to the levels that outlive it and admit it."""
        left: list[BlockKey] = []
        durable = [level for level in self.levels if level.outlives]
        lifecycles = [lifecycle for lifecycle in self._lifecycles if lifecycle.level.outlives]
        bulk_step = self.shared.bulk_step
        for start in range(0, self.host.index.places if durable else 0, bulk_step):
            with self.lock:
                left += self.host.index.held(start, start + bulk_step)
        step = min([BATCH, *(level.settings.queue_blocks for level in durable)])
        for start in range(0, len(left) + step if durable else 0, step):
            for lifecycle in lifecycles:  # so that the queues have room
                await lifecycle.drain()
            with self.lock:
                self._flush_some(durable, left[start : start + step])
        for lifecycle in lifecycles:
            await lifecycle.drain(erased=True)

    def _flush_some(self, durable: Sequence[Level], keys: Sequence[BlockKey]) -> None:
        """Offer those of ``keys`` that none of the levels holds to the first that takes them."""
        for level in durable:
            left = [key for key in keys if not any(other.holds(key) for other in durable)]
            found = [(key, slot) for key in left if (slot := self.host.find(key)) is not None]
            slots = [slot for _, slot in found]
            level.offer([key for key, _ in found], slots, self.host.index.metas(slots))

    async def aclose(self, *, flush_timeout_s: float) -> None:
        """Flush, end every transfer, close every tier, release every slot; may be called again."""
        if self._closed:
            return
        with self.lock:
            self._closed = True
            self._expiry.cancel()
        flushing = asyncio.ensure_future(self.flush())
        _, late = await asyncio.wait({flushing}, timeout=flush_timeout_s)
        if late:
            what = f"closing: blocks that only {self.host.name} held"
            what += f" were not all written in {flush_timeout_s:g} s: the rest is lost"
            self.shared.notices.say("flush", what)
        flushing.cancel()
        await asyncio.wait({flushing})
        await self.loader.aclose()
        for lifecycle in self._lifecycles:  # hot to cold, as their writers hand blocks over
            await lifecycle.writer.aclose()
        await asyncio.gather(*(lifecycle.aclose() for lifecycle in self._lifecycles))
        for start in range(0, self.host.index.places, STEP):
            with self.lock:
                held = self.host.index.held(start, start + STEP)
                self.host.on_drop(held)
                self.shared.arena.release(self.host.index.drop(held))

    def moving(self, *, wanted: int | None = None) -> bool:
        """Return whether anything is under way that may make room: writes, loads, copies, pins.

        A save that begins to wait passes the number of its blocks, so that the next victims are
        written meanwhile. One that no longer waits passes 0.
        """
        with self.lock:
            if wanted is not None:
                self.host.wait_for(wanted)
            if wanted:
                self.wake()
            looks = self.levels and not self.host.has_looked
            held = self.loader.arrivals or len(self._saving) or self.host.index.pinned
            return bool(looks or held or self.pending)

    def held(self) -> tuple[int, int]:
        """Return how many blocks fetches have pinned, and how many saves have reserved."""
        with self.lock:
            return self.host.index.pinned, len(self._saving)

    @property
    def pending(self) -> bool:
        """True if a level has something left to write."""
        return self.host.waits or any(level.pending for level in self.levels)

    def check(self) -> None:
        """Assert every invariant that can be seen from here; O(n), for tests."""
        with self.lock:
            self.host.check()
            self.shared.arena.check()
            for level in self.levels:
                level.check()
            slots = self._saving.slots()
            assert len(set(slots)) == len(slots)
            assert all(self.shared.arena.claims(slot) >= 1 for slot in slots)
            assert all(self.host.index.key_at(slot) is None for slot in slots)
            self.loader.check()
