"""Reads: blocks that come up from colder levels, read once for all fetches, and where they land."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import islice, repeat
from typing import NamedTuple

from kvladder.keys import BlockKey, Book, by_key
from kvladder.lock import BATCH
from kvladder.metrics import MissCause
from kvladder.policy.eviction import BULK_MIN
from kvladder.policy.fetch_cost import RequestTimestamp
from kvladder.tiers.label import Outcome
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Fetch
from kvladder.tiers.ladder.loading.pending import (
    NEXT,
    READING,
    RECALLED,
    PendingRead,
    ReadState,
    become,
)
from kvladder.tiers.ladder.loading.plan import MissingBlocks, among, source
from kvladder.tiers.ladder.loading.tasks import LoadTasks
from kvladder.tiers.ladder.records.meta import alike
from kvladder.tiers.ladder.records.states import may_become
from kvladder.tiers.spans import ReadTiming, TierRead


class ReadBatch(NamedTuple):
    """A batch that is to be read from a level."""

    level: Level
    blocks: list[PendingRead]
    mark: RequestTimestamp
    """Time at which the blocks were asked for."""
    is_retry: bool = False
    """True if a level above did not deliver the blocks."""


class BlockReader:
    """Reads blocks into host slots, one read per key, and hands them to host and to fetches.

    The stack's lock is held around ``begin``, ``recall`` and ``check``, from any thread. ``start``
    and ``close`` run on the loop thread without it.

    Parameters
    ----------
    tasks:
        Runs one task for each batch.
    blocks_max:
        Most pending reads.
    landed:
        Is called, under the lock, when reads have ended and other blocks may find room.
    """

    def __init__(
        self,
        host: HostLevel,
        levels: Sequence[Level],
        shared: Shared,
        tasks: LoadTasks,
        *,
        blocks_max: int,
        landed: Callable[[], None],
    ) -> None:
        self._host = host
        self._levels = levels
        self._shared = shared
        self._lock = shared.lock
        self._tasks = tasks
        self._max = self._most = blocks_max
        self._landed = landed
        self.arrivals: Book[PendingRead] = by_key(blocks_max)
        """Pending reads by key; others may look at it with the lock held."""
        self._checked: list[tuple[PendingRead, ReadState]] = []
        """Pending reads at the last ``check``, and their states then."""

    def limit(self, blocks_max: int) -> None:
        """Begin reads only while fewer than ``blocks_max`` are pending; with the lock held."""
        self._max, self._most = blocks_max, max(blocks_max, len(self.arrivals))

    # ---- begin

    def begin(
        self, missing: MissingBlocks, fetches: Sequence[Fetch | None], start: int = 0
    ) -> tuple[int, list[ReadBatch]]:
        """Lease slots for the first of ``missing``, and register a pending read for each of these.

        Budget and room limit their number, which is returned with the batches to ``start``.
        ``fetches`` wait for the blocks; the positions in ``missing`` count from ``start``.
        """
        count = min(len(missing), self._max - len(self.arrivals))
        slots = missing[: max(0, count)].room(self._host)
        batches: dict[Level, list[PendingRead]] = {}
        some = missing[: len(slots)]
        positions = [start + position for position in some.positions]
        columns = slots, fetches[: len(slots)], positions
        for level, keys, places, own, whose, at in some.by_level(*columns):
            level.places.begin_reads(places)
            level.index.hit(places)
            labels, view = level.client.pipeline.side
            slot = repeat(labels), keys, places, own, map(view, own)
            row = level.index.metas(places), repeat(level), whose, at
            blocks = [*map(PendingRead, *slot, *row)]
            batches[level] = blocks
            are_new = self.arrivals.add(keys, blocks)
            assert are_new, "a block is on its way already"
        return len(slots), self._batches(batches)

    def _batches(
        self, blocks: dict[Level, list[PendingRead]], *, is_retry: bool = False
    ) -> list[ReadBatch]:
        now_s, reads = self._shared.clock.now(), list[ReadBatch]()
        for level, own in blocks.items():
            mark, step = level.pace.asked(len(own), now_s), level.batch_max
            parts = [own[start : start + step] for start in range(0, len(own), step)]
            reads += [ReadBatch(level, part, mark, is_retry) for part in parts]
        return reads

    def start(self, *reads: ReadBatch) -> None:
        """Begin to read batches from levels."""
        for read in reads:
            self._tasks.begin(partial(self._bring, read), f"kvladder-read-{read.level.name}")

    async def _bring(self, read: ReadBatch) -> None:
        """Read a batch, publish what came, and read the rest from levels further down."""
        level, batch, mark, _ = read
        found: Sequence[bool] = [False] * len(batch)
        timing = None if self._shared.tracer is None else ReadTiming(mark.at_s)
        error = "cancelled"
        try:
            answer = await level.client.get(batch, lambda: level.read_ended(batch), timing)
            error = answer.error
            with self._lock:
                found = level.came(batch, answer)
        finally:
            if timing is not None:
                self._trace(read, timing, found, error)
            with self._lock:
                level.pace.came(mark, len(batch), self._shared.clock.now(), found=any(found))
                was_full, free = len(self.arrivals) >= self._max, self._shared.arena.free
                reads = self._batches(self._land(level, batch, found), is_retry=True)
                goes_on = self.arrivals or any(level.queued for level in self._levels)
                # what came is pinned, so room comes from writes, which call ``wake`` themselves
                if was_full or self._shared.arena.free > free or not goes_on:
                    self._landed()
        self.start(*reads)

    def _trace(
        self, read: ReadBatch, timing: ReadTiming, found: Sequence[bool], error: str
    ) -> None:
        """Tell the spans of the fetches that wait for a batch how its read went."""
        level, batch, tracer = read.level, read.blocks, self._shared.tracer
        with self._lock:
            fetches = dict.fromkeys(fetch for one in batch for fetch, _ in one.waiters)
        spans = [fetch.span for fetch in fetches if fetch.span is not None]
        if tracer is None or not spans:
            return
        verdicts = (one.verdict[0] for one in batch)
        told = TierRead(
            level.name,
            timing,
            self._shared.clock.now(),
            blocks=len(batch),
            found=sum(map(bool, found)),
            damaged=sum(one is not None and one is not Outcome.GOOD for one in verdicts),
            error=error,
            is_retry=read.is_retry,
        )
        tracer.read(spans, told)

    # ---- land

    def _land(
        self, level: Level, batch: Sequence[PendingRead], found: Sequence[bool]
    ) -> dict[Level, list[PendingRead]]:
        """End these pending reads, tail first; return what to read from levels below instead."""
        retries: dict[Level, list[PendingRead]] = {}
        here: list[BlockKey] = []
        fetch = self._only_waiter(batch) if all(found) else None
        if fetch is not None:
            # nearly every batch of a long prefix; one by one, its blocks take four times as long
            here = self._hand_over(batch, [(fetch, [one.position for one in batch])])
        else:
            for one, ok in zip(reversed(batch), reversed(found), strict=True):
                waiters = [(f, [at]) for f, at in one.waiters if f.waits_for([at])]
                if ok and one.state is READING:
                    here += self._hand_over([one], waiters)
                elif (again := self._miss(one, waiters, retry=not ok)) is not None:
                    retries.setdefault(again.level, []).insert(0, again)
            here.reverse()
        self._shared.events.stored(self._host.name, here)
        return retries

    def _only_waiter(self, batch: Sequence[PendingRead]) -> Fetch | None:
        """Return the fetch that waits for all of a batch, if it is the only one for each block.

        None also if the batch is small, or if its blocks differ in what is known of them.
        """
        fetch = batch[0].fetch
        if len(batch) < BULK_MIN or fetch is None:
            return None
        if any(one.state is not READING or one.others or one.fetch is not fetch for one in batch):
            return None
        is_wanted = fetch.waits_for([one.position for one in batch])
        return fetch if is_wanted and alike([one.meta for one in batch]) else None

    def _hand_over(
        self, blocks: Sequence[PendingRead], waiters: Sequence[tuple[Fetch, list[int]]]
    ) -> list[BlockKey]:
        """Hand the slots of blocks that came to host, if that admits them, and to the ``waiters``.

        Each of the fetches waits for all of the blocks, at these positions. What is known of the
        blocks is alike. Returns the keys that host holds now.
        """
        host, level, meta = self._host, blocks[0].level, blocks[0].meta
        keys, slots = [one.key for one in blocks], [one.slot for one in blocks]
        self.arrivals.pop_all(keys)
        self._shared.arena.share(slots * len(waiters))
        is_taken = host.admits(meta)
        if is_taken:  # tail first, so that a prefix outlives what follows it
            brought = blocks[0].fetch
            is_use = brought is not None and brought.is_use
            request = brought.number(self._shared.requests) if brought and is_use else 0
            host.hold(keys[::-1], slots[::-1], meta, pins=len(waiters), request=request)
        else:
            self._shared.arena.release(slots)
        for fetch, positions in waiters:
            fetch.arrived(positions, slots, level.name)
        become(blocks, ReadState.LANDED)
        level.stats.hits += len(blocks)
        return keys if is_taken else []

    def _miss(
        self, one: PendingRead, waiters: Sequence[tuple[Fetch, list[int]]], *, retry: bool
    ) -> PendingRead | None:
        """End a read whose bytes did not come or are not used; return the read that replaces it."""
        self._shared.arena.release([one.slot])
        again = None
        # a removed block is not looked for again, nor one that no fetch waits for any more
        if retry and waiters and one.state is READING and not self._tasks.closed:
            again = self._reroute(one, reduce(int.__or__, [fetch.levels for fetch, _ in waiters]))
        if again is None:
            del self.arrivals[one.key]
        cause = self._cause(one)
        become([one], ReadState.DROPPED if again is None else ReadState.REROUTED)
        for fetch, (position,) in waiters:
            if again is None or not fetch.levels & again.level.bit:
                fetch.failed(position, cause)
        return again

    def _cause(self, one: PendingRead) -> MissCause:
        """Return why a read ends without its block."""
        level = one.level
        if one.state is RECALLED:
            return MissCause(level.name, "removed")
        if self._tasks.closed:
            return MissCause(level.name, "ended")
        if level.index.key_at(one.place) == one.key:  # the level still has it, so the call failed
            return MissCause(level.name, "failed")
        return self._shared.ghosts.get(one.key) or MissCause(level.name, "lost")

    def _reroute(self, one: PendingRead, mask: int) -> PendingRead | None:
        """Have a block that its level did not deliver read from below it, into another slot.

        The old slot is free by then. An abandoned call may still claim it.
        """
        # a level that was detached meanwhile has none below it, so all are asked
        start = self._levels.index(one.level) + 1 if one.level in self._levels else 0
        levels = [level for level in self._levels[start:] if level.readable]
        key, meta, found = one.key, one.meta, source(among(levels, mask), one.key)
        slots = [] if found is None else self._host.room(1, meta.priority, meta.terms.salt)
        if found is None or not slots:
            return None
        lower, place = found
        lower.places.begin_reads([place])
        labels, view = lower.client.pipeline.side
        again = PendingRead(labels, key, place, slots[0], view(slots[0]), meta, lower, None, 0)
        for waiter in one.waiters:
            again.join(*waiter)
        self.arrivals[key] = again
        return again

    # ---- end

    def recall(self, keys: Sequence[BlockKey], salt: bytes | None = None) -> None:
        """Throw away what arrives of removed blocks, only those of ``salt`` if one is given."""
        for key in keys:
            one = self.arrivals.get(key)
            if one is None or one.state is not READING:  # none, or recalled already
                continue
            if salt is None or one.meta.terms.salt == salt:
                become([one], RECALLED)

    def close(self) -> None:
        """End the reads that never began; the tasks have ended."""
        while self.arrivals:
            with self._lock:
                for one in [*islice(self.arrivals.values(), BATCH)]:
                    one.level.read_ended([one])
                    self._land(one.level, [one], [False])

    def check(self) -> None:
        """Assert what must hold of pending reads, and how states changed since the last check."""
        reads = [*self.arrivals.values()]
        slots = [one.slot for one in reads]
        assert len({*slots}) == len(slots) <= self._most
        assert self._host.index.disjoint(self.arrivals)
        assert not any(map(self._host.index.key_at, slots))
        assert all(map(self._shared.arena.claims, slots))
        assert all(one.key == key and NEXT[one.state] for key, one in self.arrivals.items())
        pending = {*map(id, reads)}
        for one, before in self._checked:
            assert may_become(before, one.state, NEXT), f"{before.name} to {one.state.name}"
            assert bool(NEXT[one.state]) == (id(one) in pending), one.state.name
        self._checked = [(one, one.state) for one in reads]
