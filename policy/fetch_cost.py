"""Whether blocks come sooner from a tier than from computing them: what was measured, and a choice.

Nothing here does I/O or looks at a clock: whoever measures says when. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

GAIN = 0.8
"""Of the time that computing takes: what takes longer is not worth to be fetched."""
TRUST = 2.5
"""How many times as long as expected a fetch may take before it is given up."""
SPARE = 0.1
"""Of the time that computing takes: what may be spent in vain."""
GRACE_S = 0.002
"""What may be spent in vain in any case: nobody notices."""
JUMP = 3.0
"""A time that is off by more than this factor says that the tier is not what it was."""
FORGET = 128
"""A time is forgotten after so many others of which none was for about as much."""
TRIAL_EVERY = 4
"""Of fetches that a slow level was not asked for: one in so many begins a trial."""
TRIAL_BLOCKS = 8
"""Blocks that a trial reads, with nobody waiting for them."""
TOKENS_MIN = 64
"""Tokens below which the time for computing them bounds that of a token from above, and no more."""
SAMPLE_TOKENS = 256
"""Tokens that one request computes although they are cached, where nothing else tells how fast."""
ENDS_MAX = 32
"""Of how many ends of a prefix the best is chosen."""
STEPS = 16
"""How many measurements of computing are remembered, of short steps and of long ones."""


class Curve:
    """Seconds by amount, as measured lately.

    Kept is a point for every fifth or so, and interpolated between them. What is below all points
    is taken for proportional, what is above for equal: the best that they allow.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}
        self._newest: dict[int, int] = {}
        self._count = 0

    def at(self, amount: float) -> float | None:
        """Seconds for this amount; None as long as nothing was measured."""
        if not self._points:
            return None
        points = sorted(self._points.values())
        least, seconds = points[0]
        if amount <= least:
            return seconds * amount / least
        for (below, low_s), (above, high_s) in pairwise(points):
            if amount <= above:
                return low_s + (high_s - low_s) * (amount - below) / (above - below)
        return points[-1][1]

    @staticmethod
    def _place(amount: int) -> int:
        """A number that neighbouring amounts share: four for each power of two."""
        least = max(0, amount.bit_length() - 3)
        return 4 * least + (amount >> least)

    def within(self, amount: int) -> float | None:
        """Seconds within which so much is almost certain; None where too little was measured."""
        expected_s = self.at(amount)
        if expected_s is None or self._place(amount) in self._points:
            return expected_s
        most = max(point[0] for point in self._points.values())
        return TRUST * expected_s * max(1.0, amount / most)

    def _plausible(self, amount: int, seconds: float) -> bool:
        """Whether it may be the same tier still; beyond the points that may be slower by far."""
        least_s = self.at(amount)
        if least_s is None:
            return True
        amounts = [point[0] for point in self._points.values()]
        beyond = max(1.0, amount / max(amounts), min(amounts) / amount)
        return least_s / JUMP <= seconds <= least_s * JUMP * beyond

    def add(self, amount: int, seconds: float) -> None:
        """So much took so long: the point near it follows halfway, and a jump begins anew."""
        assert amount > 0
        seconds, place = max(seconds, 1e-9), self._place(amount)
        self._count += 1
        self._newest[place] = self._count
        if not self._plausible(amount, seconds):
            self._points.clear()
        old, old_s = self._points.get(place, (amount, seconds))
        self._points[place] = ((old + amount) / 2, (old_s + seconds) / 2)
        for at in [at for at in self._points if self._newest[at] <= self._count - FORGET]:
            del self._points[at]


class RequestTimestamp(NamedTuple):
    """When something was asked for, and how many had come until then."""

    at_s: float
    come: int


class Pace:
    """How long it takes from asking a level for blocks until they are here, queueing included."""

    def __init__(self) -> None:
        self.ahead = 0
        """Blocks that are on their way."""
        self._curve = Curve()
        self._come = 0
        self._moved_s = 0.0
        """When the last of them came, or the first was asked for."""
        self._spurned = 0

    def asked(self, blocks: int, now_s: float) -> RequestTimestamp:
        """So many blocks are asked for; every batch of them that ends is reported by ``came``."""
        if not self.ahead:
            self._moved_s = now_s
        self.ahead += blocks
        return RequestTimestamp(now_s, self._come)

    def came(self, mark: RequestTimestamp, blocks: int, now_s: float, *, found: bool) -> None:
        """A batch of what was asked for has ended.

        One in which nothing was ``found`` says only that it would have taken longer, if at all.
        """
        self.ahead -= blocks
        self._moved_s = now_s
        self._come += blocks
        nth, took_s = self._come - mark.come, now_s - mark.at_s
        if found or took_s > (self._curve.at(nth) or 0.0):
            self._curve.add(nth, took_s)

    def seconds(self, blocks: int, now_s: float) -> float | None:
        """In how many seconds so many more would be here; None as long as nothing is known.

        What is on its way and does not come is known to take at least as long as it has.
        """
        expected_s = self._curve.at(self.ahead + blocks)
        if not self.ahead:
            return expected_s
        return max(expected_s or 0.0, now_s - self._moved_s)

    def within(self, blocks: int) -> float:
        """The same if it should be certain; infinite as long as nothing is known."""
        within_s = self._curve.within(self.ahead + blocks)
        return inf if within_s is None else within_s

    def spurn(self) -> bool:
        """The level was not asked, since it takes too long: whether a trial is due now."""
        self._spurned += 1
        if self._spurned < TRIAL_EVERY or self.ahead:
            return False
        self._spurned = 0
        return True


class AvoidedCompute(NamedTuple):
    """What an engine is spared if all blocks of a fetch come."""

    tokens: int
    """That it need not compute."""
    whole: bool = False
    """Whether a part of the blocks is of no use."""
    behind: int = 0
    """Tokens of other requests that it computes before."""


ANYTHING = AvoidedCompute(10**15)
"""More than any tier takes: fetched, and waited for up to the deadline, in any case."""


class LevelRun(NamedTuple):
    """Blocks of a prefix that have to come from one level, one behind the other."""

    first: int
    """Position of the first of them in the prefix."""
    new: int
    """How many of them are not on their way yet."""
    pace: Pace


Stretch = Sequence[LevelRun]
"""Runs that are brought up all or not at all, one of each level."""


def stretches(runs: Sequence[LevelRun]) -> list[Stretch]:
    """Not more than ``ENDS_MAX``: each is one run, unless levels take turns very often."""
    size = -(-len(runs) // ENDS_MAX)
    found: list[Stretch] = []
    for start in range(0, len(runs), max(1, size)):
        of_pace: dict[Pace, LevelRun] = {}
        for run in runs[start : start + size]:
            before = of_pace.get(run.pace)
            of_pace[run.pace] = run if before is None else before._replace(new=before.new + run.new)
        found.append(list(of_pace.values()))
    return found


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request waits for a fetch before it computes what has not come.

    If it always gave up when it has waited for so long in vain that computing would have been done
    at ``1 + SPARE`` of its time, it would be never slower than that. What is expected to come soon
    is waited for beyond it, but not as long as computing takes.
    """

    until_s: float
    """When what was spent in vain is too much, if nothing arrives."""
    block_s: float
    """How much later for each leading block that has arrived."""
    first: int
    """The first block that has to arrive."""
    trusted_s: float = 0.0
    """Until when the fetch is trusted to be as fast as others were."""

    def end_s(self, arrived: int) -> float:
        """When it is over if so many leading blocks of the prefix are here."""
        in_vain_s = self.until_s + max(0, arrived - self.first) * self.block_s
        return max(in_vain_s, self.trusted_s)


class CostEstimate:
    """One request's choice: what computing its blocks takes, against what tiers take.

    Parameters
    ----------
    block_s, behind_s:
        Seconds to compute a block, and until the engine could begin with the first.
    whole:
        Whether a part of the blocks is of no use.
    """

    def __init__(self, block_s: float, behind_s: float, *, whole: bool) -> None:
        self._block_s = block_s
        self._behind_s = behind_s
        self._whole = whole

    def _computed_s(self, blocks: int) -> float:
        return self._behind_s + blocks * self._block_s

    def spare_s(self, blocks: int) -> float:
        """How long it may wait in vain before it computes so many blocks."""
        return self._behind_s + SPARE * self._computed_s(blocks) + GRACE_S

    def worth(self, blocks: int, seconds: float) -> bool:
        """Whether blocks that come in so many seconds are worth waiting for."""
        return seconds <= GAIN * self._computed_s(blocks)

    def patience(self, first: int, end: int, now_s: float) -> Patience:
        """For blocks ``first <= n < end`` of which it is not known how fast they come."""
        block_s = 0.0 if self._whole else self._block_s
        return Patience(now_s + self.spare_s(end - first), block_s, first)

    def trusting(self, old: Patience, blocks: int, expected_s: float, now_s: float) -> Patience:
        """The same where so many blocks are expected after so many seconds."""
        most_s = min(TRUST * expected_s, self._computed_s(blocks))
        return replace(old, trusted_s=max(old.trusted_s, now_s + most_s))

    def choose(self, parts: Sequence[Stretch], end: int, now_s: float) -> tuple[int, float | None]:
        """How far it is worth to bring a prefix up, which ``parts`` are missing of.

        Returns where to end it, between its first missing block and ``end``, and the seconds after
        which that much is expected; None if nobody can tell.
        """
        first = parts[0][0].first
        best, least_s, expected_s = first, self._behind_s, None
        asked: dict[Pace, int] = {}
        ends = [*(part[0].first for part in parts[1:]), end]
        for part, cut in zip(parts, ends, strict=True):
            for run in part:
                asked[run.pace] = asked.get(run.pace, 0) + run.new
            if self._whole and cut < end:
                continue
            takes_s = max(pace.seconds(n, now_s) or 0.0 for pace, n in asked.items())
            cost_s = max(takes_s, self._behind_s) - (cut - first) * self._block_s
            if cost_s < least_s and self.worth(cut - first, takes_s):
                within_s = max(pace.within(n) for pace, n in asked.items())
                sure = self.worth(cut - first, within_s)
                best, least_s, expected_s = cut, cost_s, max(takes_s, within_s) if sure else None
        return best, expected_s


class _Steps:
    """The last steps of an engine that computed prompts."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS)
        self.token_s: float | None = None
        """Seconds of the median token: one slow step is nothing."""

    def add(self, tokens: int, seconds: float) -> None:
        """One more."""
        self._steps.append((seconds / tokens, tokens))
        half = sum(count for _, count in self._steps) / 2
        for token_s, count in sorted(self._steps):
            half -= count
            if half <= 0:
                self.token_s = token_s
                return


class FetchCostModel:
    """How long computing tokens takes, as the engine tells.

    Parameters
    ----------
    always:
        Nothing is remembered: what tiers have is always fetched.
    """

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._few, self._short, self._long = _Steps(), _Steps(), _Steps()
        """Of fewer than ``TOKENS_MIN`` tokens; of fewer than a sample, which hide behind what a
        step takes anyway; and others."""
        self._told = False

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Computing so many tokens of prompts at once took so long."""
        self._told = not self._always
        if self._always or tokens < 1 or not 0 <= seconds < inf:
            return
        if tokens < TOKENS_MIN:
            self._few.add(tokens, seconds)
        else:
            (self._short if tokens < SAMPLE_TOKENS else self._long).add(tokens, seconds)

    def _measured_s(self, tokens: int) -> float | None:
        """Seconds a token of so many, from steps of about as many if there were any."""
        first, second = self._short.token_s, self._long.token_s
        if tokens >= SAMPLE_TOKENS:
            first, second = second, first
        return second if first is None else first

    def _token_s(self, tokens: int) -> float | None:
        """The same; before anything else is known, at most so long, from steps of few tokens.

        That a step of few tokens takes longer for each costs some waiting; to know nothing would
        cost the whole deadline, again and again.
        """
        measured_s = self._measured_s(tokens)
        return self._few.token_s if measured_s is None else measured_s

    def seconds(self, tokens: int) -> float | None:
        """How long computing so many tokens of prompts takes; None as long as nobody told."""
        token_s = self._token_s(tokens)
        return None if token_s is None else token_s * tokens

    def sample(self, saves: AvoidedCompute, blocks: int) -> int:
        """Return how many blocks to compute only to measure how long that takes.

        0 if it was measured, or if the engine does not tell. A prompt that is too short for a good
        measurement is a sample only while nothing at all is known: it gives an upper bound.
        """
        known = self._measured_s(saves.tokens) is not None
        if not self._told or known or saves.whole or saves is ANYTHING:
            return 0
        count = min(-(-SAMPLE_TOKENS * blocks // saves.tokens), max(1, blocks // 2))
        tells = count * saves.tokens >= TOKENS_MIN * blocks or self._few.token_s is None
        return count if tells else 0

    def estimate(self, saves: AvoidedCompute, blocks: int) -> CostEstimate | None:
        """What computing so many blocks takes; None as long as nothing was measured."""
        token_s = self._token_s(saves.tokens + saves.behind)
        if token_s is None or not blocks:
            return None
        return CostEstimate(
            token_s * saves.tokens / blocks, token_s * saves.behind, whole=saves.whole
        )
