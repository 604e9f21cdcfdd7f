"""Fetch or compute: measures both, and chooses which blocks come sooner from a tier.

Nothing here does I/O or reads a clock: callers pass the time, in monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

GAIN = 0.8
"""Fraction of the computing time: a fetch that takes longer is not worth it."""
TRUST = 2.5
"""Factor by which a fetch may take longer than expected before it is given up."""
SPARE = 0.1
"""Fraction of the computing time that a request may lose by waiting."""
GRACE_S = 0.002
"""Seconds that a request may lose by waiting in any case: too few to notice."""
JUMP = 3.0
"""Factor: a time that is off by more means that the tier has changed."""
FORGET = 128
"""Number of measurements after which a point is dropped, if none of them was near it."""
TRIAL_EVERY = 4
"""Number of fetches that leave a slow level out per trial of that level."""
TRIAL_BLOCKS = 8
"""Blocks that a trial reads; no request waits for them."""
TOKENS_MIN = 64
"""Shortest step, in tokens, that measures the time of a token; others only bound it."""
SAMPLE_TOKENS = 256
"""Cached tokens that one request computes to measure the speed, if nothing else measures it."""
ENDS_MAX = 32
"""Largest number of ends of a prefix among which the best is chosen."""
STEPS = 16
"""Number of remembered measurements of computing, of short steps and of long ones each."""


class Curve:
    """Seconds by amount, from recent measurements.

    Keeps one point for each range of similar amounts, and interpolates between points. Below all
    points, time is proportional to the amount; above them, it is constant. Both are the most
    optimistic values that the points allow.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}
        self._newest: dict[int, int] = {}
        self._count = 0

    def at(self, amount: float) -> float | None:
        """Return the seconds for this amount; None without measurements."""
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
        """Return a number that similar amounts share: four numbers for each power of two."""
        least = max(0, amount.bit_length() - 3)
        return 4 * least + (amount >> least)

    def within(self, amount: int) -> float | None:
        """Return the seconds within which this amount is almost certain; None if unmeasured."""
        expected_s = self.at(amount)
        if expected_s is None or self._place(amount) in self._points:
            return expected_s
        most = max(point[0] for point in self._points.values())
        return TRUST * expected_s * max(1.0, amount / most)

    def _plausible(self, amount: int, seconds: float) -> bool:
        """Return whether the tier may be unchanged. Beyond all points it may be much slower."""
        least_s = self.at(amount)
        if least_s is None:
            return True
        amounts = [point[0] for point in self._points.values()]
        beyond = max(1.0, amount / max(amounts), min(amounts) / amount)
        return least_s / JUMP <= seconds <= least_s * JUMP * beyond

    def add(self, amount: int, seconds: float) -> None:
        """Record a measurement: the point near it moves halfway; a jump drops all old points."""
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
    """Time of a request for blocks, and the number of blocks that had come by then."""

    at_s: float
    come: int


class Pace:
    """Measures the time from asking a level for blocks to their arrival, queueing included."""

    def __init__(self) -> None:
        self.ahead = 0
        """Number of blocks asked for that have not come yet."""
        self._curve = Curve()
        self._come = 0
        self._moved_s = 0.0
        """Time when the last block came or, if none has, the first was asked for."""
        self._spurned = 0

    def asked(self, blocks: int, now_s: float) -> RequestTimestamp:
        """Record a request for ``blocks`` blocks; ``came`` reports each batch of them that ends."""
        if not self.ahead:
            self._moved_s = now_s
        self.ahead += blocks
        return RequestTimestamp(now_s, self._come)

    def came(self, mark: RequestTimestamp, blocks: int, now_s: float, *, found: bool) -> None:
        """Record the end of a batch of the blocks asked for.

        A batch without ``found`` blocks shows only that finding some would have taken longer.
        """
        self.ahead -= blocks
        self._moved_s = now_s
        self._come += blocks
        nth, took_s = self._come - mark.come, now_s - mark.at_s
        if found or took_s > (self._curve.at(nth) or 0.0):
            self._curve.add(nth, took_s)

    def seconds(self, blocks: int, now_s: float) -> float | None:
        """Return after how many seconds ``blocks`` more would be here; None without measurements.

        It is at least the time for which pending blocks have made no progress.
        """
        expected_s = self._curve.at(self.ahead + blocks)
        if not self.ahead:
            return expected_s
        return max(expected_s or 0.0, now_s - self._moved_s)

    def within(self, blocks: int) -> float:
        """Return the seconds within which this is almost certain; infinite if unmeasured."""
        within_s = self._curve.within(self.ahead + blocks)
        return inf if within_s is None else within_s

    def spurn(self) -> bool:
        """Count that the level was too slow to be asked; return whether a trial is due now."""
        self._spurned += 1
        if self._spurned < TRIAL_EVERY or self.ahead:
            return False
        self._spurned = 0
        return True


class AvoidedCompute(NamedTuple):
    """Work that an engine avoids if all blocks of a fetch come."""

    tokens: int
    """Tokens that it need not compute."""
    whole: bool = False
    """True if the blocks are of use only all together."""
    behind: int = 0
    """Tokens of other requests that it computes first."""


ANYTHING = AvoidedCompute(10**15)
"""More work than any fetch costs: always fetched, and waited for up to the deadline."""


class LevelRun(NamedTuple):
    """Consecutive blocks of a prefix that one level has to deliver."""

    first: int
    """Position in the prefix of the first block."""
    new: int
    """Number of blocks that are not in flight yet."""
    pace: Pace


Stretch = Sequence[LevelRun]
"""Runs that are promoted all or not at all; at most one for each level."""


def stretches(runs: Sequence[LevelRun]) -> list[Stretch]:
    """Return at most ``ENDS_MAX`` stretches, each of one run unless levels alternate often."""
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
    """How long a request waits for a fetch before it computes the missing blocks.

    ``until_s`` bounds the loss: a request that always gave up there would be done after at most
    ``1 + SPARE`` of the computing time. It waits longer for blocks that are expected soon, but not
    longer than computing takes.
    """

    until_s: float
    """Time at which the loss becomes too large if nothing arrives."""
    block_s: float
    """Seconds by which ``until_s`` is extended for each leading block that has arrived."""
    first: int
    """Position of the first block that has to arrive."""
    trusted_s: float = 0.0
    """Time up to which the fetch is trusted to be as fast as others were."""

    def end_s(self, arrived: int) -> float:
        """Return when waiting ends if ``arrived`` leading blocks of the prefix are here."""
        in_vain_s = self.until_s + max(0, arrived - self.first) * self.block_s
        return max(in_vain_s, self.trusted_s)


class CostEstimate:
    """One request's choice: the time to compute its blocks against the time to fetch them.

    Parameters
    ----------
    block_s, behind_s:
        Seconds to compute a block, and seconds until the engine could begin with the first.
    whole:
        True if the blocks are of use only all together.
    """

    def __init__(self, block_s: float, behind_s: float, *, whole: bool) -> None:
        self._block_s = block_s
        self._behind_s = behind_s
        self._whole = whole

    def _computed_s(self, blocks: int) -> float:
        return self._behind_s + blocks * self._block_s

    def spare_s(self, blocks: int) -> float:
        """Return how long a request may wait without result before it computes ``blocks``."""
        return self._behind_s + SPARE * self._computed_s(blocks) + GRACE_S

    def worth(self, blocks: int, seconds: float) -> bool:
        """Return whether ``blocks`` that come after ``seconds`` are worth waiting for."""
        return seconds <= GAIN * self._computed_s(blocks)

    def patience(self, first: int, end: int, now_s: float) -> Patience:
        """Return the patience for blocks ``first <= n < end`` of unknown speed."""
        block_s = 0.0 if self._whole else self._block_s
        return Patience(now_s + self.spare_s(end - first), block_s, first)

    def trusting(self, old: Patience, blocks: int, expected_s: float, now_s: float) -> Patience:
        """Return ``old`` extended for ``blocks`` that are expected after ``expected_s``."""
        most_s = min(TRUST * expected_s, self._computed_s(blocks))
        return replace(old, trusted_s=max(old.trusted_s, now_s + most_s))

    def choose(self, parts: Sequence[Stretch], end: int, now_s: float) -> tuple[int, float | None]:
        """Choose how much of a prefix to promote; ``parts`` are its missing stretches.

        Returns the position where to end, between the first missing block and ``end``, and the
        seconds after which these blocks are expected; None instead if that is not certain enough.
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
    """Measurements of the last steps in which an engine computed prompts."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS)
        self.token_s: float | None = None
        """Seconds of the median token; one slow step does not matter."""

    def add(self, tokens: int, seconds: float) -> None:
        """Add one step."""
        self._steps.append((seconds / tokens, tokens))
        half = sum(count for _, count in self._steps) / 2
        for token_s, count in sorted(self._steps):
            half -= count
            if half <= 0:
                self.token_s = token_s
                return


class FetchCostModel:
    """Time to compute tokens, from what the engine reports.

    Parameters
    ----------
    always:
        True to record nothing: blocks that tiers have are always fetched.
    """

    def __init__(self, *, always: bool = False) -> None:
        self.decide(always=always)

    def decide(self, *, always: bool) -> None:
        """Begin anew, with or without recording; see the class."""
        self._always = always
        self._few, self._short, self._long = _Steps(), _Steps(), _Steps()
        """Steps of fewer than ``TOKENS_MIN`` tokens, of fewer than ``SAMPLE_TOKENS`` (these hide
        behind a step's fixed cost), and others."""
        self._told = False

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Record that one step computed ``tokens`` prompt tokens in ``seconds``."""
        self._told = not self._always
        if self._always or tokens < 1 or not 0 <= seconds < inf:
            return
        if tokens < TOKENS_MIN:
            self._few.add(tokens, seconds)
        else:
            (self._short if tokens < SAMPLE_TOKENS else self._long).add(tokens, seconds)

    def _measured_s(self, tokens: int) -> float | None:
        """Return the seconds per token for ``tokens``, preferably from steps of similar length."""
        first, second = self._short.token_s, self._long.token_s
        if tokens >= SAMPLE_TOKENS:
            first, second = second, first
        return second if first is None else first

    def _token_s(self, tokens: int) -> float | None:
        """Return the same or, without such steps, an upper bound from steps of few tokens.

        The bound costs some waiting, since short steps take longer per token. Without it, requests
        would wait for the whole deadline again and again.
        """
        measured_s = self._measured_s(tokens)
        return self._few.token_s if measured_s is None else measured_s

    def seconds(self, tokens: int) -> float | None:
        """Return the time to compute ``tokens`` prompt tokens; None if the engine reported none."""
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
        """Return the cost estimate for computing ``blocks`` blocks; None without measurements."""
        token_s = self._token_s(saves.tokens + saves.behind)
        if token_s is None or not blocks:
            return None
        return CostEstimate(
            token_s * saves.tokens / blocks, token_s * saves.behind, whole=saves.whole
        )
