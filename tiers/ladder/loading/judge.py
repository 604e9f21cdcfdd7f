"""What is fetched and how long it is waited for, where computing may be faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.policy.worth import GRACE_S, Pace, Run, Stake, Stretch, Worth
from kvladder.tiers.base import NO_SLOT
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Arrival, Fetch, Want, among
from kvladder.tiers.ladder.shelf import Shared

Asking = Literal["wait", "aside", "try", "leave"]
"""Shared tiers are asked and waited for, or asked only; a trial is due, or they are too slow."""


class Cut(NamedTuple):
    """What is fetched of a prefix."""

    end: int
    """Up to which position among the keys."""
    slower: bool = False
    """Whether it ends there because the rest would come later than computing it."""
    trials: Sequence[int] = ()
    """From which positions on trials of the levels are due that are not asked for the rest."""


class Judged(NamedTuple):
    """What is to be fetched of a prefix; positions among the keys of the fetch."""

    end: int
    """Up to where."""
    known: int
    """Up to where levels have it."""
    dropped: Mapping[Level, int]
    """How many blocks between them would have to come, by level."""


def _extend(runs: list[Run], run: Run) -> None:
    """Append a run, to the last one if both come from one level."""
    if runs and runs[-1].pace is run.pace:
        runs[-1] = runs[-1]._replace(new=runs[-1].new + run.new)
    else:
        runs.append(run)


class Judge:
    """Compares what was measured of levels with what the engine takes to compute.

    Everything is called with the stack's lock held. Where nothing was measured of the engine,
    everything is fetched and waited for up to the deadline.

    Parameters
    ----------
    arrivals:
        What is on its way, by key.
    questions:
        How long shared tiers take to say what they have.
    """

    def __init__(
        self,
        worth: Worth,
        levels: Sequence[Level],
        shared: Shared,
        arrivals: Mapping[BlockKey, Arrival],
        questions: Pace,
    ) -> None:
        self._worth = worth
        self._levels = levels
        self._shared = shared
        self._arrivals = arrivals
        self._questions = questions

    def _stake(self, fetch: Fetch) -> Stake | None:
        saves = fetch.saves
        return None if saves is None else self._worth.stake(saves, len(fetch.keys))

    def cut(self, fetch: Fetch, start: int, end: int, parts: Sequence[Stretch]) -> Cut:
        """Where to end a prefix whose blocks from ``start`` on are known up to ``end``.

        ``parts``, which count from ``start``, say what of them has to come.
        """
        now_s = self._shared.clock.now()
        if not parts:
            return Cut(end)
        runs = [run for part in parts for run in part]
        stake = self._stake(fetch)
        if stake is None:
            takes_s = max(run.pace.seconds(run.new, now_s) or 0.0 for run in runs)
            if fetch.saves is not None and now_s - fetch.begun_s + takes_s > GRACE_S:
                keep = len(fetch.keys) - self._worth.sample(fetch.saves, len(fetch.keys))
                return Cut(max(start, min(keep, end)))
            return Cut(end)
        first = runs[0].first
        keep, expected_s = stake.choose(parts, end - start, now_s)
        patience = fetch.patience or stake.patience(start + first, len(fetch.keys), now_s)
        if expected_s is not None:
            patience = stake.trusting(patience, keep - first, expected_s, now_s)
        fetch.be_patient(patience)
        if start + keep == end:
            return Cut(end)
        # whichever is the slow one: a level that others hide would never be tried again
        left = {run.pace: run.first for run in reversed(runs) if run.first >= keep}
        trials = [start + first for pace, first in left.items() if pace.spurn()]
        return Cut(start + keep, slower=True, trials=trials)

    def extend(
        self,
        runs: list[Run],
        keys: Sequence[BlockKey],
        found: Sequence[Slot],
        wants: Sequence[Want],
        first: int,
    ) -> None:
        """Append to ``runs`` what is missing of the next step of a prefix, level by level.

        ``found`` and ``wants`` are of ``keys``, the first of which is at position ``first``.
        """
        if len(self._levels) == 1 and found.count(NO_SLOT) == len(wants):
            if wants:
                _extend(runs, Run(wants[0].position, len(wants), wants[0].level.pace))
            return
        coming = {want.position: want.level for want in wants}
        for at, (key, slot) in enumerate(zip(keys, found, strict=False), first):
            if slot == NO_SLOT:
                new = at in coming
                level = coming[at] if new else self._arrivals[key].level
                _extend(runs, Run(at, int(new), level.pace))

    def asks(self, fetch: Fetch, start: int) -> Asking:
        """What to do about keys from ``start`` on, which shared tiers may have.

        If a fetch is to wait for their answer, it is given the patience for it.
        """
        stake = self._stake(fetch)
        if stake is None:
            return "wait"
        now_s, left = self._shared.clock.now(), len(fetch.keys) - start
        slow: list[Pace] = []
        for level in among(self._levels, fetch.levels):
            if level.tier.shared and level.answers:
                if stake.worth(left, level.pace.seconds(left, now_s) or 0.0):
                    break
                slow.append(level.pace)
        else:
            due = [pace.spurn() for pace in slow]
            return "try" if any(due) else "leave"
        patience = fetch.patience or stake.patience(start, len(fetch.keys), now_s)
        fetch.be_patient(patience)
        answer_s = self._questions.seconds(1, now_s) or 0.0
        return "wait" if now_s + answer_s <= patience.until_s else "aside"
