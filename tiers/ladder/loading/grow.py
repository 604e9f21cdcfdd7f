"""Growth of fetches: how far a prefix is known, which part is fetched, and what has to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from kvladder.arena import NO_SLOT, Slot
from kvladder.errors import ClosedError
from kvladder.keys import BlockKey
from kvladder.lock import BATCH
from kvladder.metrics import NEVER_SEEN, MissCause
from kvladder.policy.fetch_cost import TRIAL_BLOCKS, LevelRun, stretches
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Fetch
from kvladder.tiers.ladder.loading.misses import MissExplainer
from kvladder.tiers.ladder.loading.plan import FetchDecision, MissingBlocks, Planner, joined
from kvladder.tiers.ladder.loading.probe import Prober
from kvladder.tiers.ladder.loading.reads import BlockReader
from kvladder.tiers.ladder.loading.tasks import LoadTasks
from kvladder.tiers.ladder.loading.waiting import RoomWaitQueue
from kvladder.tiers.ladder.records.admission import AdmissionGate
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.records.terms import HOST


class FetchGrower:
    """Extends each fetch, step by step: pins what is in host, and has the rest read or wait.

    Any thread may call ``fetch``, ``unpin`` and ``late``, which never wait and take the stack's
    lock themselves. It is held around ``count``. The rest runs on the loop thread.

    Parameters
    ----------
    planner:
        Says where blocks are, and which are worth the wait.
    prober:
        Asks shared tiers for blocks that are not known.
    queue:
        Keeps blocks until there is room for them.
    reader:
        Begins reads.
    misses:
        Says why a prefix ends.
    post:
        Schedules a function on the loop thread.
    wake:
        Has the loop thread make room.
    """

    def __init__(
        self,
        host: HostLevel,
        levels: Sequence[Level],
        shared: Shared,
        tasks: LoadTasks,
        *,
        planner: Planner,
        prober: Prober,
        queue: RoomWaitQueue,
        reader: BlockReader,
        misses: MissExplainer,
        post: Callable[..., object],
        wake: Callable[[], None],
    ) -> None:
        self._host = host
        self._levels = levels
        self._shared = shared
        self._lock = shared.lock
        self._tasks = tasks
        self._planner = planner
        self._prober = prober
        self._queue = queue
        self._reader = reader
        self._misses = misses
        self._post = post
        self._wake = wake
        self._wanting: Sequence[Level] = ()
        """Write-through levels that want blocks after a number of hits."""
        self._told: Sequence[LevelIndex[Any] | AdmissionGate] = ()
        """Levels with policies that are told of requests, and with admissions."""
        self.arrange()
        self._asked: WeakValueDictionary[BlockKey, Fetch] = WeakValueDictionary()
        """By its last key, the fetch that these policies were told of last."""

    def arrange(self) -> None:
        """Look at the levels and their rules anew; with the lock held."""
        host, levels = self._host, self._levels
        self._wanting = [lv for lv in levels if lv.rule.when == "commit" and lv.rule.min_hits]
        indexes: list[LevelIndex[Any]] = [host.index, *(level.index for level in levels)]
        gates = [level.gate for level in levels if level.gate is not None]
        told: list[LevelIndex[Any] | AdmissionGate] = [one for one in indexes if one.is_told]
        self._told = [*told, *gates]

    def fetch(self, fetch: Fetch) -> None:
        """Pin the longest prefix of its keys, and begin to bring up what is not in host slots.

        If host is not among its levels, a block in host ends the prefix. So does a block that only
        other levels hold.

        Raises
        ------
        ClosedError
            The cache is closed.
        """
        if self._tasks.closed:
            raise ClosedError("the cache is closed")
        fetch.ask(asking=True)
        listener = self._shared.listener
        is_use = False
        if self._told or listener is not None:
            is_use = fetch.is_use and fetch.is_prefix and bool(fetch.keys) and self._tell(fetch)
        self._grow(fetch, new=True)
        if is_use and listener is not None:
            listener.asked(fetch.keys, fetch.length)
        if fetch.asking:
            self._post(self._tasks.begin, partial(self._follow, fetch), "kvladder-ask")

    def _tell(self, fetch: Fetch) -> bool:
        """Tell policies of a request; return False if an earlier fetch of it is not released."""
        with self._lock:
            last = fetch.keys[-1]
            if fetch.joins(self._asked.get(last)):
                return False
            self._asked[last] = fetch
            number = fetch.number(self._shared.requests)
            for index in self._told:
                index.requested(fetch.keys, number, in_session=fetch.in_session)
            return True

    async def _follow(self, fetch: Fetch) -> None:
        """Ask shared tiers, and extend ``fetch``, as long as that brings it further."""
        asked = -1
        try:
            while fetch.asking and asked < len(fetch.planned):
                asked = len(fetch.planned)
                begun_s = 0.0 if fetch.span is None else self._shared.clock.now()
                failed = await self._prober.ask(fetch.keys[asked:], fetch.salt, fetch.levels)
                self._grow(fetch)
                if fetch.span is not None:
                    left, found = len(fetch.keys) - asked, len(fetch.planned) - asked
                    fetch.span.probed(begun_s, left, found, failed)
        finally:
            with self._lock:
                fetch.ask(asking=False)

    # ---- the three steps

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
                # what fits into one step is decided within it; a longer rest is looked up first,
                # without the lock between its parts, so that the decision is about all of it
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
        missing, runs = MissingBlocks([], [], [], []), list[LevelRun]()
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
        # the steps look there first, if each position of the prefix has its place
        places = missing.places if len(missing) == known else ()
        return decision._replace(places=places, start=start)

    def _cut(
        self, fetch: Fetch, known: int, missing: MissingBlocks, runs: Sequence[LevelRun]
    ) -> FetchDecision:
        """Decide where the rest of ``fetch`` ends: the blocks after it are not worth the wait.

        Levels have the prefix up to ``known``; ``missing`` and ``runs`` say what of it has to come.
        """
        if not runs:  # all of it is in host
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
        why = None
        if cut.why:
            why = MissCause(next((level.name for level in dropped), ""), cut.why)
        return FetchDecision(cut.end, known, dropped, why=why)

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
        # at once, as room for the missing blocks is made from blocks that are not pinned
        self._host.pin([slot for slot in found if slot != NO_SLOT])
        coming = self._bring(fetch, start, missing) if missing else 0
        cut_at, is_short = len(found), coming < len(missing)
        if is_short:  # neither a slot nor a place in the queue: the prefix ends there
            cut_at = missing.positions[coming]
            self._host.stats.throttled += len(missing) - coming
            cut = [at for at in range(cut_at, len(found)) if found[at] != NO_SLOT]
            self._host.unpin([keys[at] for at in cut], [found[at] for at in cut])
        hits, joined = self._attach(fetch, found[:cut_at], missing)
        goes_on = cut_at == len(keys) and start + cut_at < decision.end
        there = Counter(missing.levels[:coming])
        if not goes_on:  # levels have what was left out, too
            there.update(decision.dropped)
        # the last step counts all that is left as asked for
        asked = len(keys) if goes_on else end - start
        self.count(asked if new else 0, hits, joined, there)
        # shared tiers may know more only where the levels' indexes ended the prefix
        is_open = not is_short and decision.end == decision.known and fetch.length < end
        knows = is_open and self._prober.may_know(fetch.keys[fetch.length], fetch.levels)
        fetch.ask(asking=goes_on or (knows and self._asks(fetch, fetch.length)))
        if fetch.length < end and not fetch.asking:
            self._end(fetch, decision, is_short=is_short, spared=knows)
        return goes_on

    def _end(self, fetch: Fetch, decision: FetchDecision, *, is_short: bool, spared: bool) -> None:
        """Record why ``fetch`` gets no further; ``spared`` if asking shared tiers takes longer."""
        host = self._host
        if is_short:
            cause = MissCause(host.name, host.short_of_slots)
        elif decision.end < decision.known and decision.why is not None:
            cause = decision.why
        else:
            cause = self._misses.cause(fetch.keys[fetch.length], fetch.levels)
            if spared and cause is NEVER_SEEN:
                cause = MissCause(self._prober.first(fetch.levels), "slower")
        fetch.ends(cause)

    def _bring(self, fetch: Fetch, start: int, missing: MissingBlocks) -> int:
        """Begin reads of ``missing``, or queue them for room; positions count from ``start``.

        Returns how many of the blocks come, now or once there is room.
        """
        begun = queued = 0
        # blocks behind blocks that wait for room wait, too: they are of no use before these
        is_behind = self._queue.is_last(fetch)
        if not is_behind:
            begun, reads = self._reader.begin(missing, [fetch] * len(missing), start)
            if reads:
                self._post(self._reader.start, *reads)
        # a salt at its quota delays no other, so its blocks do not wait
        if begun < len(missing) and (is_behind or self._host.short_of == "room"):
            queued = self._queue.add(fetch, start, missing[begun:])
        if queued:
            self._wake()
        return begun + queued

    def _attach(
        self, fetch: Fetch, found: Sequence[Slot], missing: MissingBlocks
    ) -> tuple[int, int]:
        """Fill ``fetch``, and have it join reads that are pending for others, not in ``missing``.

        Returns how many of its blocks are in the host level, and how many joined a pending read.
        """
        first, own = fetch.length, missing.before(len(found))
        sources = [level.name for level in missing.levels[:own]]
        if own < len(found):  # not all of them have to come
            new = dict(zip(missing.positions, sources, strict=False))
            sources = list[str]()
            keys = fetch.keys[first : first + len(found)]
            for index, (key, slot) in enumerate(zip(keys, found, strict=True)):
                if slot != NO_SLOT:
                    sources.append(self._host.name)
                elif index in new:
                    sources.append(new[index])
                else:
                    arrival = self._reader.arrivals[key]
                    sources.append(arrival.level.name)
                    arrival.join(fetch, first + index)
        here = [slot for slot in found if slot != NO_SLOT]
        if here:
            self._host.index.hit(here)
            self._write_on_hit(here)
        fetch.extend(found, sources)
        return len(here), len(found) - len(here) - own

    def _write_on_hit(self, slots: Sequence[Slot]) -> None:
        """Offer blocks to the write-through levels that want exactly as many hits as they have."""
        index = self._host.index
        for level in self._wanting:
            for key, slot in zip(index.keys_at(slots), slots, strict=True):
                meta = index.meta(slot)
                if meta.hits == level.rule.min_hits:
                    level.offer([key], [slot], [meta], stay=True)

    # ---- what is not known

    def _asks(self, fetch: Fetch, start: int) -> bool:
        """Return whether ``fetch`` should wait for an answer of shared tiers about the rest."""
        asking = self._planner.asks(fetch, start)
        if asking == "aside":
            work = partial(self._prober.ask, fetch.keys[start:], fetch.salt, fetch.levels)
            self._post(self._tasks.begin, work, "kvladder-ask")
        elif asking == "try":
            self._try(fetch, start)
        return asking == "wait"

    def _try(self, fetch: Fetch, start: int) -> None:
        """Read some of its blocks, with no fetch waiting, to measure how fast they come."""
        keys = fetch.keys[start : start + TRIAL_BLOCKS]
        work = partial(self._bring_some, keys, fetch.levels, fetch.salt)
        self._post(self._tasks.begin, work, "kvladder-try")

    async def _bring_some(self, keys: Sequence[BlockKey], levels: int, salt: bytes) -> None:
        with self._lock:  # a level that cannot be asked may have lost it since
            is_known = self._planner.known(keys[0], levels)
            asks = not is_known and self._prober.may_know(keys[0], levels)
        if asks:
            await self._prober.ask(keys, salt, levels)
        with self._lock:
            missing = self._planner.plan(keys, levels).missing
            _, reads = self._reader.begin(missing, [None] * len(missing))
        self._reader.start(*reads)

    # ---- counts, and what fetches give back

    def count(self, asked: int, hits: int, joined: int, there: Mapping[Level, int]) -> None:
        """Count a fetch; a level is asked for what no hotter one has.

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
