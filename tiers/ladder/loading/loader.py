"""Loads: blocks that come up from colder levels, read once for all fetches that want them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial, reduce
from itertools import islice, repeat
from typing import Any, NamedTuple

from kvladder.arena import NO_SLOT, Slot
from kvladder.errors import ClosedError
from kvladder.keys import BlockKey, Book, by_key
from kvladder.lock import BATCH
from kvladder.policy.eviction import BULK_MIN
from kvladder.policy.fetch_cost import (
    TRIAL_BLOCKS,
    FetchCostModel,
    LevelRun,
    RequestTimestamp,
    stretches,
)
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Fetch, PendingRead
from kvladder.tiers.ladder.loading.plan import (
    FetchDecision,
    MissingBlocks,
    Planner,
    among,
    joined,
    source,
)
from kvladder.tiers.ladder.loading.probe import Prober
from kvladder.tiers.ladder.loading.waiting import RoomWaitQueue
from kvladder.tiers.ladder.records.index import alike
from kvladder.tiers.ladder.records.terms import HOST


class ReadBatch(NamedTuple):
    """A batch that is to be read from a level."""

    level: Level
    blocks: list[PendingRead]
    mark: RequestTimestamp
    """Time at which the blocks were asked for."""


class Loader:
    """Fetches blocks into host slots: one read per key, one batch per call; a hole ends a fetch.

    Any thread may call ``fetch``, which never waits; the rest runs on the loop thread.
    """

    def __init__(
        self,
        host: HostLevel,
        levels: Sequence[Level],
        shared: Shared,
        *,
        post: Callable[..., object],
        blocks_max: int,
        landed: Callable[[], None],
        discard: Callable[[Sequence[BlockKey]], object],
        worth: FetchCostModel,
    ) -> None:
        self._host = host
        self._levels = levels
        self._shared = shared
        self._lock = shared.lock
        self._post = post
        self._max = blocks_max
        self._landed = landed
        self.discard = discard
        """Forgets blocks with bytes that turned out to be unusable."""
        self.arrivals: Book[PendingRead] = by_key(blocks_max)
        """Pending reads by key; others may look at it with the lock held."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._wanting = [lv for lv in levels if lv.rule.when == "commit" and lv.rule.min_hits]
        """Write-through levels that want blocks after a number of hits."""
        self.prober = Prober(levels, shared, self._known, self._grow)
        self._planner = Planner(worth, host, levels, shared, self.arrivals, self.prober.pace)
        self._room_queue = RoomWaitQueue(host, levels, shared, self.arrivals, self._planner)

    def recall(self, keys: Sequence[BlockKey], salt: bytes | None = None) -> None:
        """Throw away what arrives of removed blocks, only those of ``salt`` if one is given."""
        self.prober.recall(keys)
        for key in keys:
            arrival = self.arrivals.get(key)
            if arrival is not None and (salt is None or arrival.meta.terms.salt == salt):
                arrival.recall()

    def fetch(self, fetch: Fetch) -> None:
        """Pin the longest prefix of its keys, and begin to bring up what is not in host slots.

        If host is not among its levels, a block in host ends the prefix. So does a block that only
        other levels hold.

        Raises
        ------
        ClosedError
            The cache is closed.
        """
        if self._closed:
            raise ClosedError("the cache is closed")
        fetch.ask(asking=True)
        self._grow(fetch, new=True)
        if fetch.asking:
            self._post(self._run, lambda: self.prober.follow(fetch), "kvladder-ask")

    def _grow(self, fetch: Fetch, *, new: bool = False) -> None:
        """Extend the prefix of ``fetch`` as far as is known, and begin the reads that it needs.

        A ``new`` one is counted. The lock is released between steps. What was found is pinned or on
        its way by then; if a read fails meanwhile, the prefix ends.
        """
        decision: FetchDecision | None = None
        goes_on = True
        while goes_on:
            with self._lock:
                goes_on = self._serve(fetch, new=new)
                left = len(fetch.keys) - fetch.length
                is_known = decision is not None or left <= self._shared.load_step
                if not goes_on and is_known and fetch.asking:
                    goes_on = self._grow_on(fetch, decision, new=new)
            if not goes_on and not is_known and fetch.asking:
                decision, goes_on = self._preview(fetch), True

    def _serve(self, fetch: Fetch, *, new: bool) -> bool:
        """Take a step of blocks that are all in host; return whether there may be more."""
        start, end, host = fetch.length, len(fetch.keys), self._host
        # a hit may offer a block to ``_wanting`` levels, which ``_attach`` does one by one
        if start == end or not fetch.asking or self._wanting or not fetch.levels & HOST:
            return False
        slots = host.index.lasting(fetch.keys[start : start + self._shared.bulk_step])
        if slots is None:
            return False
        host.pin(slots)
        host.index.hit(slots)
        fetch.fill(slots, host.name)
        if new:
            self.count(len(slots), len(slots), 0, {})
        fetch.ask(asking=fetch.length < end)
        return fetch.length < end

    def _preview(self, fetch: Fetch) -> FetchDecision:
        """Look up how far a long prefix is known, and decide up to where to fetch it."""
        start, known = fetch.length, 0
        missing, runs = MissingBlocks(), list[LevelRun]()
        while known < len(fetch.keys) - start:
            keys = fetch.keys[start + known : start + known + BATCH]
            with self._lock:
                plan = self._planner.plan(keys, fetch.levels, known)
            known += len(plan.slots)
            missing.extend(plan.missing)
            runs += plan.runs
            if len(plan.slots) < len(keys):
                break
        decision = self._cut(fetch, start + known, missing, joined(runs))
        places = missing.places if len(missing) == known else ()
        return decision._replace(places=places, start=start)

    def _cut(
        self, fetch: Fetch, known: int, missing: MissingBlocks, runs: Sequence[LevelRun]
    ) -> FetchDecision:
        """Decide where the rest of ``fetch`` ends: the blocks after it are not worth the wait.

        Levels have the prefix up to ``known``; ``missing`` and ``runs`` say what of it has to come.
        """
        if not runs:
            return FetchDecision(known, known, {})
        parts = stretches(runs)
        with self._lock:
            cut = self._planner.cut(fetch, known, parts)
        dropped = Counter(missing.levels[missing.before(cut.end - fetch.length) :])
        if cut.why:
            with self._lock:
                for level, blocks in dropped.items():
                    level.stats.spare(cut.why, blocks)
        for trial in cut.trials:
            self._try(fetch, trial)
        return FetchDecision(cut.end, known, dropped)

    def _grow_on(self, fetch: Fetch, decision: FetchDecision | None, *, new: bool) -> bool:
        """Take a step of blocks wherever they are; return whether there may be more."""
        start, end = fetch.length, len(fetch.keys)
        step = self._shared.load_step
        keys = fetch.keys[start : min(start + step, end if decision is None else decision.end)]
        places = () if decision is None else decision.places[start - decision.start :][: len(keys)]
        found, missing, runs = self._planner.plan(keys, fetch.levels, places=places)
        if decision is None:
            decision = self._cut(fetch, start + len(found), missing, runs)
            # what is not worth the wait is left out
            del found[decision.end - start :]
            missing = missing[: missing.before(len(found))]
        self._host.pin([slot for slot in found if slot != NO_SLOT])
        # blocks behind blocks that wait for room wait, too
        waits = self._room_queue.has_last(fetch)
        slots = self._room_for(missing) if missing and not waits else []
        waits = waits or self._host.short_of == "room"  # a salt at its quota delays no other
        later = (
            self._room_queue.add(fetch, start, missing[len(slots) :]) if missing and waits else {}
        )
        cut_at, is_short = len(found), len(slots) + len(later) < len(missing)
        # neither a slot nor a place in the queue: the prefix ends there
        if is_short:
            cut_at = missing.positions[len(slots) + len(later)]
            self._host.stats.throttled += len(missing) - len(slots) - len(later)
            cut = [i for i in range(cut_at, len(found)) if found[i] != NO_SLOT]
            self._host.unpin([keys[i] for i in cut], [found[i] for i in cut])
        reads = self._begin(missing, slots, [fetch] * len(slots), start) if slots else []
        hits, joined = self._attach(fetch, found[:cut_at], missing)
        goes_on = cut_at == len(keys) and start + cut_at < decision.end
        there = Counter(missing.levels[: len(slots) + len(later)])
        if not goes_on:
            there.update(decision.dropped)
        # the last step counts all that is left as asked for
        asked = len(keys) if goes_on else end - start
        self.count(asked if new else 0, hits, joined, there)
        if reads:
            self._post(self._start, *reads)
        if later:
            self._landed()
        is_open = not is_short and decision.end == decision.known and fetch.length < end
        knows = is_open and self.prober.may_know(fetch.keys[fetch.length], fetch.levels)
        fetch.ask(asking=goes_on or (knows and self._asks(fetch, fetch.length)))
        return goes_on

    def _asks(self, fetch: Fetch, start: int) -> bool:
        """Return whether ``fetch`` should wait for an answer of shared tiers about the rest."""
        asking = self._planner.asks(fetch, start)
        if asking == "aside":
            keys, salt = fetch.keys[start:], fetch.salt
            self._post(self._run, lambda: self.prober.ask(keys, salt), "kvladder-ask")
        elif asking == "try":
            self._try(fetch, start)
        return asking == "wait"

    def _try(self, fetch: Fetch, start: int) -> None:
        """Read some of its blocks, with no fetch waiting, to measure how fast they come."""
        keys, levels, salt = fetch.keys[start : start + TRIAL_BLOCKS], fetch.levels, fetch.salt
        self._post(self._run, lambda: self._bring_some(keys, levels, salt), "kvladder-try")

    async def _bring_some(self, keys: Sequence[BlockKey], levels: int, salt: bytes) -> None:
        with self._lock:  # a level that cannot be asked may have lost it since
            asks = not self._known(keys[0]) and self.prober.may_know(keys[0], levels)
        if asks:
            await self.prober.ask(keys, salt)
        with self._lock:
            missing = self._planner.plan(keys, levels).missing
            slots = self._room_for(missing)
            reads = self._begin(missing, slots, [None] * len(slots))
        self._start(*reads)

    def _run(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Start a task that ``aclose`` ends (loop thread)."""
        if self._closed:
            return
        task = asyncio.get_running_loop().create_task(work(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._host.stats.task_failures += 1
            what = f"{task.get_name()} ended by {error!r}: what it was to bring is a miss"
            self._shared.notices.say("loader task", what)
            self._landed()

    def _known(self, key: BlockKey) -> bool:
        """Return whether the block is held or on its way, as far as is known without asking."""
        return (
            self._host.find(key) is not None
            or key in self.arrivals
            or any(level.find(key) is not None for level in self._levels if level.readable)
        )

    def fetchable(self, keys: Sequence[BlockKey], mask: int) -> Sequence[BlockKey]:
        """Return those of ``keys``, a set, that a fetch from these levels would serve now."""
        if len(keys) > 1 and self._host.index.lasting(keys) is not None:
            return keys
        return [key for key in keys if self._planner.plan([key], mask).slots]

    def resume(self) -> None:
        """Begin reads that waited for room, as far as there is some now (loop thread)."""
        while self._room_queue.prune():
            pass
        with self._lock:
            stuck = not self.arrivals and not any(level.pending for level in self._levels)
            missing = self._room_queue.due(BATCH if stuck else self._host.room_max)
            slots = self._room_for(missing)
            reads = self._begin(missing, slots, self._room_queue.fetches(len(slots)))
            self._room_queue.pop(len(slots))
            stuck = not self.arrivals and not any(level.pending for level in self._levels)
            if self._room_queue and missing and not slots and self._host.short_of == "quota":
                self._host.stats.throttled += self._room_queue.drop(1)
                self._post(self.resume)
            elif stuck and self._room_queue and not self._host.has_looked:
                self._host.doubt()
                self._landed()
            elif stuck and self._room_queue:  # no transfer is left that could make room
                self._host.stats.throttled += self._room_queue.drop()
                self._post(self.resume)
            self._host.demand(len(self._room_queue))
        self._start(*reads)

    def _room_for(self, missing: MissingBlocks) -> list[Slot]:
        """Lease slots for what has to come, as far as budget and room allow."""
        count = min(len(missing), self._max - len(self.arrivals))
        return missing[: max(0, count)].room(self._host)

    def _begin(
        self,
        missing: MissingBlocks,
        slots: Sequence[Slot],
        fetches: Sequence[Fetch | None],
        start: int = 0,
    ) -> list[ReadBatch]:
        """Register a pending read for each block that has a slot; return the batches to read.

        ``fetches`` wait for them; their positions in these count from ``start``.
        """
        batches: dict[Level, list[PendingRead]] = {}
        some = missing[: len(slots)]
        positions = [start + position for position in some.positions]
        for level, keys, places, *columns in some.by_level(slots, fetches, positions):
            level.places.begin_reads(places)
            level.index.hit(places)
            sides, metas = repeat(level.client.pipeline.side), level.index.metas(places)
            own, whose, at = columns
            blocks = [*map(PendingRead, sides, keys, places, own, metas, repeat(level), whose, at)]
            batches[level] = blocks
            are_new = self.arrivals.add(keys, blocks)
            assert are_new, "a block is on its way already"
        return self._reads(batches)

    def _reads(self, batches: dict[Level, list[PendingRead]]) -> list[ReadBatch]:
        now_s, reads = self._shared.clock.now(), list[ReadBatch]()
        for level, blocks in batches.items():
            mark, step = level.pace.asked(len(blocks), now_s), level.batch_max
            parts = [blocks[start : start + step] for start in range(0, len(blocks), step)]
            reads += [ReadBatch(level, part, mark) for part in parts]
        return reads

    def _attach(
        self, fetch: Fetch, found: Sequence[Slot], missing: MissingBlocks
    ) -> tuple[int, int]:
        """Fill ``fetch``, and have it join reads that are pending for others, not in ``missing``.

        Returns how many of its blocks are in the host level, and how many joined a pending read.
        """
        first, own = fetch.length, missing.before(len(found))
        sources = [level.name for level in missing.levels[:own]]
        if own < len(found):
            new = dict(zip(missing.positions, sources, strict=False))
            sources = list[str]()
            keys = fetch.keys[first : first + len(found)]
            for index, (key, slot) in enumerate(zip(keys, found, strict=True)):
                if slot != NO_SLOT:
                    sources.append(self._host.name)
                elif index in new:
                    sources.append(new[index])
                else:
                    arrival = self.arrivals[key]
                    sources.append(arrival.level.name)
                    arrival.join(fetch, first + index)
        here = [slot for slot in found if slot != NO_SLOT]
        if here:
            self._host.index.hit(here)
            self._write_on_hit(here)
        fetch.extend(found, sources)
        return len(here), len(found) - len(here) - own

    def count(self, asked: int, hits: int, joined: int, there: Mapping[Level, int]) -> None:
        """Count a fetch, with the lock held; a level is asked for what no hotter one has.

        ``there`` says how many blocks each level has.
        """
        stats = self._host.stats
        stats.queries += asked
        stats.hits += hits
        stats.joined += joined
        asked = max(0, asked - hits - joined)  # 0 if the fetch was counted before it grew
        for level in self._levels:
            if level.readable:
                level.stats.queries += asked
                asked = max(0, asked - there.get(level, 0))

    def _write_on_hit(self, slots: Sequence[Slot]) -> None:
        """Offer blocks to the write-through levels that want exactly as many hits as they have."""
        index = self._host.index
        for level in self._wanting:
            for key, slot in zip(index.keys_at(slots), slots, strict=True):
                meta = index.meta(slot)
                if meta.hits == level.rule.min_hits:
                    level.offer([key], [slot], [meta], stay=True)

    def _start(self, *reads: ReadBatch) -> None:
        """Begin to read batches from levels (loop thread)."""
        for read in reads:
            self._run(partial(self._bring, read), f"kvladder-read-{read.level.name}")

    async def _bring(self, read: ReadBatch) -> None:
        """Read a batch, publish what came, and read the rest from levels further down."""
        level, batch, mark = read
        found: Sequence[bool] = [False] * len(batch)
        try:
            answer = await level.client.get(batch, lambda: level.read_ended(batch))
            with self._lock:
                found = level.came(batch, answer)
        finally:
            with self._lock:
                level.pace.came(mark, len(batch), self._shared.clock.now(), found=any(found))
                was_full, free = len(self.arrivals) >= self._max, self._shared.arena.free
                reads = self._reads(self._land(level, batch, found))
                goes_on = self.arrivals or any(level.queued for level in self._levels)
                # what came is pinned, so room comes from writes, which call ``wake`` themselves
                if was_full or self._shared.arena.free > free or not goes_on:
                    self._landed()
        self._start(*reads)

    def _land(
        self, level: Level, batch: Sequence[PendingRead], found: Sequence[bool]
    ) -> dict[Level, list[PendingRead]]:
        """End these pending reads, tail first; return what to read from levels below instead."""
        retries: dict[Level, list[PendingRead]] = {}
        if all(found) and self._land_bulk(level, batch):
            return retries
        here: list[BlockKey] = []
        for arrival, ok in zip(reversed(batch), reversed(found), strict=True):
            key = arrival.key
            wanted = [(f, i) for f, i in arrival.waiters if f.waits_for([i])]
            if ok and not arrival.dead:
                if self._arrived(key, arrival, wanted):
                    here.append(key)
                level.stats.hits += 1
                continue
            self._shared.arena.release([arrival.slot])
            retry = None
            if not ok and wanted and not arrival.dead and not self._closed:
                retry = self._reroute(level, arrival, wanted)
            if retry is None:
                del self.arrivals[key]
            else:
                retries.setdefault(retry.level, []).insert(0, retry)
            for fetch, index in wanted:
                if retry is None or not fetch.levels & retry.level.bit:
                    fetch.failed(index)
        here.reverse()
        self._shared.events.stored(self._host.name, here)
        return retries

    def _land_bulk(self, level: Level, batch: Sequence[PendingRead]) -> bool:
        """Publish what ``level`` delivered of a batch, if one fetch waits for all of it.

        Otherwise changes nothing and returns False.
        """
        if len(batch) < BULK_MIN:
            return False
        host, fetch, meta = self._host, batch[0].fetch, batch[0].meta
        if any(one.dead or one.others or one.fetch is not fetch for one in batch):
            return False
        positions = [one.position for one in batch]
        if fetch is None or not fetch.waits_for(positions):
            return False
        if not alike([one.meta for one in batch]) or not host.admits(meta):
            return False
        keys, slots = [one.key for one in batch], [one.slot for one in batch]
        self.arrivals.pop_all(keys)
        self._shared.arena.share(slots)
        request = fetch.number(self._shared.requests)
        host.hold(keys[::-1], slots[::-1], meta, pins=1, request=request)
        fetch.arrived(positions, slots, level.name)
        level.stats.hits += len(keys)
        self._shared.events.stored(host.name, keys)
        return True

    def _arrived(
        self, key: BlockKey, arrival: PendingRead, wanted: Sequence[tuple[Fetch, int]]
    ) -> bool:
        """Hand the slot to the host level, if that admits the block, and to the waiting fetches."""
        del self.arrivals[key]
        slot = arrival.slot
        self._shared.arena.share([slot] * len(wanted))
        is_taken = self._host.admits(arrival.meta)
        if is_taken:
            request = 0 if arrival.fetch is None else arrival.fetch.number(self._shared.requests)
            self._host.hold([key], [slot], arrival.meta, pins=len(wanted), request=request)
        else:
            self._shared.arena.release([slot])
        for fetch, index in wanted:
            fetch.arrived([index], [slot], arrival.level.name)
        return is_taken

    def _reroute(
        self, level: Level, arrival: PendingRead, wanted: Sequence[tuple[Fetch, int]]
    ) -> PendingRead | None:
        """Have a block that ``level`` did not deliver read from below it, into another slot."""
        mask = reduce(int.__or__, [fetch.levels for fetch, _ in wanted])
        below = among([lv for lv in self._levels if lv.bit > level.bit and lv.readable], mask)
        key, found = arrival.key, source(below, arrival.key)
        meta = arrival.meta
        slots = [] if found is None else self._host.room(1, meta.priority, meta.terms.salt)
        if found is None or not slots:
            return None
        lower, place = found
        lower.places.begin_reads([place])
        side = lower.client.pipeline.side
        again = PendingRead(side, key, place, slots[0], meta, lower, None, 0)
        for waiter in arrival.waiters:
            again.join(*waiter)
        self.arrivals[key] = again
        return again

    # ---- for Fetch

    def late(self, levels: Sequence[str]) -> None:
        """Count blocks that have not arrived at their deadline."""
        with self._lock:
            for level in self._levels:
                level.stats.late += levels.count(level.name)

    def unpin(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Give pinned slots back, in steps, the tail first."""
        step = self._shared.bulk_step
        for end in range(len(keys), 0, -step):
            start = max(0, end - step)
            with self._lock:
                self._host.unpin(keys[start:end], slots[start:end])

    async def aclose(self) -> None:
        """End every load; what has not arrived is a miss."""
        self._closed = True
        while self._room_queue:
            with self._lock:
                self._room_queue.drop()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self.arrivals:  # reads that never began
            with self._lock:
                for arrival in [*islice(self.arrivals.values(), BATCH)]:
                    arrival.level.read_ended([arrival])
                    self._land(arrival.level, [arrival], [False])

    def check(self) -> None:
        """Assert what must hold of every pending read; for tests."""
        slots = [arrival.slot for arrival in self.arrivals.values()]
        assert len({*slots}) == len(slots) <= self._max
        assert self._host.index.disjoint(self.arrivals)
        assert not any(map(self._host.index.key_at, slots))
        assert all(map(self._shared.arena.claims, slots))
