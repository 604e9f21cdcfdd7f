"""What is fetched and how long it is waited for, where computing may be faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.policy.worth import GRACE_S, Pace, Run, Stake, Worth
from kvladder.tiers.base import NO_SLOT, Shared
from kvladder.tiers.fetch import Arrival, Fetch, Want, among
from kvladder.tiers.level import Level

Asking = Literal["wait", "aside", "try", "leave"]
"""Shared tiers are asked and waited for, or asked only; a trial is due, or they are too slow."""


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

    def cut(self, fetch: Fetch, start: int, found: list[Slot], wants: list[Want]) -> int | None:
        """End ``found``, of the keys from ``start`` on, where fetching more takes too long.

        Drops from ``found`` and ``wants`` what is not fetched. Returns the position among the keys
        at which a trial of the level that was too slow is due, None if none is.
        """
        now_s = self._shared.clock.now()
        if NO_SLOT not in found:
            return None
        runs = self._runs(fetch.keys[start : start + len(found)], found, wants)
        if not runs:
            return None
        stake = self._stake(fetch)
        if stake is None:
            takes_s = max(run.pace.seconds(run.new, now_s) or 0.0 for run in runs)
            if fetch.saves is not None and now_s - fetch.begun_s + takes_s > GRACE_S:
                keep = len(fetch.keys) - self._worth.sample(fetch.saves, len(fetch.keys)) - start
                self._drop(max(0, keep), found, wants)
            return None
        first, end = runs[0].first, len(found)
        keep, expected_s = stake.choose(runs, end, now_s)
        if fetch.patience is None:
            fetch.patience = stake.patience(start + first, len(fetch.keys), now_s)
        if expected_s is not None:
            fetch.patience = stake.trusting(fetch.patience, keep - first, expected_s, now_s)
        if keep == end:
            return None
        for want in self._drop(keep, found, wants):
            want.level.stats.slower += 1
        slow = next(run.pace for run in runs if run.first >= keep)
        return start + keep if slow.spurn() else None

    @staticmethod
    def _drop(keep: int, found: list[Slot], wants: list[Want]) -> list[Want]:
        """End the prefix after so many blocks: what of it need not come."""
        del found[keep:]
        left = sum(want.position < keep for want in wants)
        dropped = wants[left:]
        del wants[left:]
        return dropped

    def _runs(
        self, keys: Sequence[BlockKey], found: Sequence[Slot], wants: Sequence[Want]
    ) -> list[Run]:
        """What is missing of a prefix, level by level."""
        if len(self._levels) == 1 and found.count(NO_SLOT) == len(wants):
            return [Run(wants[0].position, len(wants), wants[0].level.pace)]
        coming = {want.position: want.level for want in wants}
        by_bit = {level.bit: level for level in self._levels}
        runs: list[Run] = []
        for at, slot in enumerate(found):
            if slot != NO_SLOT:
                continue
            new = at in coming
            arrival = None if new else self._arrivals.get(keys[at])
            if not new and arrival is None:  # it has come since the prefix was looked at
                continue
            pace = (coming[at] if arrival is None else by_bit[arrival.bit]).pace
            if runs and runs[-1].pace is pace:
                runs[-1] = runs[-1]._replace(new=runs[-1].new + new)
            else:
                runs.append(Run(at, int(new), pace))
        return runs

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
        if fetch.patience is None:
            fetch.patience = stake.patience(start, len(fetch.keys), now_s)
        answer_s = self._questions.seconds(1, now_s) or 0.0
        return "wait" if now_s + answer_s <= fetch.patience.until_s else "aside"
