"""Plans of fetches: where the blocks of a prefix are, and which are worth the wait."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from kvladder.arena import NO_SLOT, Slot
from kvladder.keys import BlockKey, Book
from kvladder.metrics import MissCause
from kvladder.policy.eviction import BULK_MIN
from kvladder.policy.fetch_cost import (
    GRACE_S,
    CostEstimate,
    FetchCostModel,
    LevelRun,
    Pace,
    Stretch,
)
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Fetch
from kvladder.tiers.ladder.loading.pending import RECALLED, PendingRead
from kvladder.tiers.ladder.records.terms import ANYWHERE, HOST

Asking = Literal["wait", "aside", "try", "leave"]
"""Ask shared tiers and wait, ask without waiting, begin a trial read, or leave them alone."""


@dataclass(slots=True)
class MissingBlocks:
    """Blocks that a fetch has to bring, in order, in columns.

    Making and collecting an object for each would take longer than looking its block up.
    """

    positions: list[int]
    keys: list[BlockKey]
    levels: list[Level]
    places: list[int]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, part: slice) -> MissingBlocks:
        return MissingBlocks(
            self.positions[part], self.keys[part], self.levels[part], self.places[part]
        )

    def add(self, position: int, key: BlockKey, level: Level, place: int) -> None:
        """Append one block."""
        self.positions.append(position)
        self.keys.append(key)
        self.levels.append(level)
        self.places.append(place)

    def extend(self, more: MissingBlocks) -> None:
        """Append the blocks that follow."""
        self.positions += more.positions
        self.keys += more.keys
        self.levels += more.levels
        self.places += more.places

    def by_level(self, *columns: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield each level with its own part of keys, places and further columns."""
        whole: tuple[Sequence[Any], ...] = (self.keys, self.places, *columns)
        for level in dict.fromkeys(self.levels):
            if self.levels.count(level) == len(self):
                yield level, *whole
                continue
            own = [one is level for one in self.levels]
            yield level, *([*compress(each, own)] for each in whole)

    def room(self, host: HostLevel) -> list[Slot]:
        """Lease slots of host for the first blocks. With quotas it ends before another salt."""
        count, salt = len(self), b""
        if count and host.index.has_quota:
            both = zip(self.levels, self.places, strict=True)
            salt, same = next(groupby(level.index.salt(place) for level, place in both))
            count = len([*same])
        each = self[:count].by_level()
        lowest = min((level.index.lowest(places) for level, _, places in each), default=0)
        return host.room(count, lowest, salt)

    def before(self, position: int) -> int:
        """Return how many blocks stand before this position."""
        return bisect_left(self.positions, position)


class Plan(NamedTuple):
    """Levels and places of the blocks of a prefix, up to the first block that no level has."""

    slots: list[Slot]
    """Slots of host; ``NO_SLOT`` where a block has to come or is on its way."""
    missing: MissingBlocks
    """Blocks that have to come, in order."""
    runs: list[LevelRun]
    """Blocks that have to come or are on their way, by level."""


class FetchLimit(NamedTuple):
    """End of the part of a prefix that is fetched, and the reason for it."""

    end: int
    """Position among the keys at which it ends."""
    why: Literal["", "slower", "sampled"] = ""
    """Reason for the end; also the name of the counter. "slower": the rest would come later than
    computing it. "sampled": the rest is computed to measure how long that takes.
    """
    trials: Sequence[int] = ()
    """Positions from which to begin trial reads of levels that are not used for the rest."""


class FetchDecision(NamedTuple):
    """The part of a prefix that is to be fetched; positions among the keys of the fetch."""

    end: int
    """Position at which the fetch ends."""
    known: int
    """Position up to which levels have the prefix."""
    dropped: Mapping[Level, int]
    """Number of blocks between them that would have to come, by level."""
    places: Sequence[int] = ()
    """Places of all blocks from position ``start`` on, if all have to come."""
    start: int = 0
    why: MissCause | None = None
    """Reason for which it ends there, if levels have more."""


def among(levels: Sequence[Level], mask: int) -> Sequence[Level]:
    """Return those levels that have their bit in ``mask``."""
    return levels if mask == ANYWHERE else [level for level in levels if level.bit & mask]


def source(levels: Sequence[Level], key: BlockKey) -> tuple[Level, int] | None:
    """Return the hottest of these levels that has the block, and the place, or None."""
    for level in levels:
        place = level.find(key)
        if place is not None:
            return level, place
    return None


def joined(parts: Sequence[tuple[int, int, Pace]]) -> list[LevelRun]:
    """Join parts that follow each other and are of one level into one run."""
    if len(parts) == 1:
        return [LevelRun(*parts[0])]
    runs: list[LevelRun] = []
    for pace, same in groupby(parts, itemgetter(2)):
        firsts, new, _ = zip(*same, strict=True)
        runs.append(LevelRun(firsts[0], sum(new), pace))
    return runs


class Planner:
    """Looks up where blocks are, and compares how fast they come with computing them.

    The stack's lock is held around every call. Before the engine was measured, everything is
    fetched and waited for up to the deadline.

    Parameters
    ----------
    arrivals:
        Pending reads, by key.
    questions:
        How long shared tiers take to say what they have.
    """

    def __init__(
        self,
        worth: FetchCostModel,
        host: HostLevel,
        levels: Sequence[Level],
        shared: Shared,
        arrivals: Book[PendingRead],
        questions: Pace,
    ) -> None:
        self._worth = worth
        self._host = host
        self._levels = levels
        self._shared = shared
        self._arrivals = arrivals
        self._questions = questions

    # ---- where blocks are

    def known(self, key: BlockKey, mask: int) -> bool:
        """Return whether host or one of these levels holds the block, or it is on its way.

        This is as far as is known without asking.
        """
        if self._host.find(key) is not None or key in self._arrivals:
            return True
        levels = among(self._levels, mask)
        return any(level.find(key) is not None for level in levels if level.readable)

    def fetchable(self, keys: Sequence[BlockKey], mask: int) -> Sequence[BlockKey]:
        """Return those of ``keys``, a set, that a fetch from these levels would serve now."""
        if len(keys) > 1 and self._host.index.lasting(keys) is not None:
            return keys
        return [key for key in keys if self.plan([key], mask).slots]

    def plan(
        self, keys: Sequence[BlockKey], mask: int, first: int = 0, places: Sequence[int] = ()
    ) -> Plan:
        """Look up the longest prefix of ``keys``; the first of them is at position ``first``.

        ``places`` says where the blocks were before, if that is known.
        """
        levels = among([level for level in self._levels if level.readable], mask)
        alike = self.wants_bulk(keys, first, levels, places)
        if alike is not None:
            run = LevelRun(first, len(alike), alike.levels[0].pace)
            return Plan([NO_SLOT] * len(keys), alike, [run])
        slots: list[Slot] = []  # ``list[Slot]()`` takes twenty times as long
        parts: list[tuple[int, int, Pace]] = []
        missing = MissingBlocks([], [], [], [])
        host_find, arrivals = self._host.find, self._arrivals
        for index, key in enumerate(keys, first):
            slot = host_find(key)
            if slot is None:
                slot = NO_SLOT
                arrival = arrivals.get(key)
                if arrival is None:
                    found = source(levels, key)
                    if found is None:
                        break
                    missing.add(index, key, *found)
                    parts.append((index, 1, found[0].pace))
                elif arrival.state is RECALLED or not arrival.level.bit & mask:
                    break
                else:
                    parts.append((index, 0, arrival.level.pace))
            elif not mask & HOST:
                break
            slots.append(slot)
        return Plan(slots, missing, joined(parts))

    def wants_bulk(
        self,
        keys: Sequence[BlockKey],
        first: int,
        levels: Sequence[Level],
        known: Sequence[int],
    ) -> MissingBlocks | None:
        """Look up the next blocks of a prefix, if one level has all of them and none expires.

        None if that is not so, or if one of them is in host or a hotter level, or on its way there.
        ``known`` is where they were when last looked up, empty if they were not. Built-in functions
        over many blocks take a third of the time of a loop.
        """
        if len(keys) < BULK_MIN or not self._host.index.disjoint(keys):
            return None
        if not self._arrivals.isdisjoint(keys):
            return None
        for level in levels:
            places = level.index.lasting(keys, known)
            if places is not None:
                positions = [*range(first, first + len(keys))]
                return MissingBlocks(positions, [*keys], [level] * len(keys), [*places])
            if not level.index.disjoint(keys):
                return None
        return None

    # ---- what of them is worth it

    def _estimate(self, fetch: Fetch) -> CostEstimate | None:
        saves = fetch.saves
        return None if saves is None else self._worth.estimate(saves, len(fetch.keys))

    def cut(self, fetch: Fetch, end: int, parts: Sequence[Stretch]) -> FetchLimit:
        """Decide where to end the rest of ``fetch``, which is known up to ``end``.

        ``parts``, which count from the end of what it has, say what has to come.
        """
        start, now_s = fetch.length, self._shared.clock.now()
        runs = [run for part in parts for run in part]
        estimate = self._estimate(fetch)
        if estimate is None:
            takes_s = max(run.pace.seconds(run.new, now_s) or 0.0 for run in runs)
            if fetch.saves is not None and now_s - fetch.begun_s + takes_s > GRACE_S:
                keep = len(fetch.keys) - self._worth.sample(fetch.saves, len(fetch.keys))
                return FetchLimit(max(start, min(keep, end)), why="sampled")
            return FetchLimit(end)
        first = runs[0].first
        keep, expected_s = estimate.choose(parts, end - start, now_s)
        patience = fetch.patience or estimate.patience(start + first, len(fetch.keys), now_s)
        if expected_s is not None:
            patience = estimate.trusting(patience, keep - first, expected_s, now_s)
        fetch.be_patient(patience)
        if start + keep == end:
            return FetchLimit(end)
        # try each level that is left out: one that others hide would never be measured again
        left = {run.pace: run.first for run in reversed(runs) if run.first >= keep}
        trials = [start + first for pace, first in left.items() if pace.spurn()]
        return FetchLimit(start + keep, why="slower", trials=trials)

    def asks(self, fetch: Fetch, start: int) -> Asking:
        """Decide what to do about keys from ``start`` on, which shared tiers may have.

        If a fetch is to wait for their answer, it is given the patience for it.
        """
        estimate = self._estimate(fetch)
        if estimate is None:
            return "wait"
        now_s, left = self._shared.clock.now(), len(fetch.keys) - start
        slow: list[Pace] = []
        for level in among(self._levels, fetch.levels):
            if level.tier.shared and level.answers:
                if estimate.worth(left, level.pace.seconds(left, now_s) or 0.0):
                    break
                slow.append(level.pace)
        else:
            due = [pace.spurn() for pace in slow]
            return "try" if any(due) else "leave"
        patience = fetch.patience or estimate.patience(start, len(fetch.keys), now_s)
        fetch.be_patient(patience)
        answer_s = self._questions.seconds(1, now_s) or 0.0
        return "wait" if now_s + answer_s <= patience.until_s else "aside"
