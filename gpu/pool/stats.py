"""Exact counts of what a device pool did, per pool and per request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvladder.gpu.tree.order import STEP
from kvladder.metrics import AGES_S, DISTANCES, Histogram

MARK_S: Final = 0.25
"""Between two marks: ages are known as exactly as that."""
MARKS_MAX: Final = 4096
"""Marks that are kept; of the older half every second goes when there are more."""
UNCOUNTED_MAX: Final = 4096
"""Stamps that may wait to be counted: more would take the CPU's caches from the pool."""


def _rate(reused: int, missed: int) -> float:
    return reused / (reused + missed) if reused + missed else 0.0


def _joined(parts: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(parts), np.int64)


@dataclass(slots=True)
class PoolStats:
    """Counters of a pool since it was made, in blocks."""

    allocated: int = 0
    """Slots handed out."""
    reused: int = 0
    """Whole blocks of prompts that were served from the cache."""
    missed: int = 0
    """Blocks of prompts that were not; one of which a part was served counts here."""
    partial: int = 0
    """Blocks of prompts of which a part was served."""
    stored: int = 0
    """Blocks that became reusable."""
    duplicates: int = 0
    """Blocks that were complete when an equal one was already reusable."""
    evicted: int = 0
    """Blocks that left the device to make room."""
    offloaded: int = 0
    """Of those, the ones that a tier took or already held."""
    onboarded: int = 0
    """Blocks that came back from a tier."""
    lost: int = 0
    """Blocks whose copy to or from a tier failed."""

    def served(self, request: RequestStats) -> None:
        """Count what a prompt found."""
        self.reused += request.reused
        self.missed += request.missed
        self.partial += request.partial_tokens > 0

    @property
    def hit_rate(self) -> float:
        """Reused blocks among all blocks of prompts; 0 before there are any."""
        return _rate(self.reused, self.missed)

    def as_dict(self) -> dict[str, int]:
        """All counters by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request's prompt found when it began, in blocks."""

    reused: int
    """Whole blocks served from the cache."""
    missed: int
    """The others, each of which gets a slot of its own."""
    onboarded: int = 0
    """Of the reused ones, those that came from a tier."""
    partial_tokens: int = 0
    """Tokens served of the block behind the whole ones."""

    @property
    def hit_rate(self) -> float:
        """Reused blocks among all blocks of the prompt."""
        return _rate(self.reused, self.missed)


class Uses:
    """How long blocks that nobody holds stay, until they are used again or evicted.

    Nothing is kept per block: the stamps by which the order of eviction goes are looked up among a
    few marks, which say at what time which stamp came next. All but ``as_dict`` is called on the
    pool's thread.

    Parameters
    ----------
    now:
        The pool's clock, in seconds.
    stamp:
        The stamp that comes next now.
    """

    def __init__(self, now: Callable[[], float], stamp: int) -> None:
        self._now = now
        self._stamps = [stamp]
        self._times_s = [now()]
        self._reused: list[tuple[int, Sequence[int]]] = []
        """Since the last mark: the stamp that came next, and those of what was used then."""
        self._evicted: list[Sequence[int]] = []
        self._uncounted = 0
        """How many stamps there are in both."""
        self.reuse_s = Histogram(AGES_S)
        self.reuse_distance = Histogram(DISTANCES)
        """In blocks that became idle between."""
        self.eviction_s = Histogram(AGES_S)

    def reused(self, stamp: int, stamps: Sequence[int]) -> None:
        """Blocks with these stamps are used again, while ``stamp`` comes next."""
        self._reused.append((stamp, stamps))
        self._uncounted += len(stamps)
        if self._uncounted > UNCOUNTED_MAX:
            self._count()

    def evicted(self, stamps: Sequence[int]) -> None:
        """Blocks leave, which the order of eviction selected by these stamps, negated."""
        self._evicted.append(stamps)
        self._uncounted += len(stamps)
        if self._uncounted > UNCOUNTED_MAX:
            self._count()

    def mark(self, stamp: int) -> None:
        """Note that ``stamp`` comes next, and count what was used and evicted since, if it is time.

        Called before anything else is done with the pool.
        """
        now_s = self._now()
        if now_s < self._times_s[-1] + MARK_S:
            return
        if self._uncounted:
            self._count()
        self._stamps.append(stamp)
        self._times_s.append(now_s)
        if len(self._stamps) > MARKS_MAX:
            half = MARKS_MAX // 2
            del self._stamps[1:half:2], self._times_s[1:half:2]

    def _count(self) -> None:
        """Count what was used and evicted since the last mark, as if all of it was then."""
        stamps = _joined(one for _, one in self._reused)
        ahead = np.array([stamp for stamp, _ in self._reused], np.int64)
        distances = ahead.repeat([len(one) for _, one in self._reused]) - stamps
        known = stamps >= self._stamps[0]  # others were put before all that are
        self.reuse_distance.observe_all(distances[known] // STEP)
        self.reuse_s.observe_all(self._ages(stamps[known]))
        stamps = -_joined(self._evicted)
        self.eviction_s.observe_all(self._ages(stamps[stamps >= self._stamps[0]]))
        self._reused, self._evicted, self._uncounted = [], [], 0

    def _ages(self, stamps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds from when these stamps were given to the last mark, or up to ``MARK_S`` more."""
        marks = np.searchsorted(np.asarray(self._stamps), stamps, side="right") - 1
        return self._times_s[-1] - np.asarray(self._times_s)[marks]

    def as_dict(self) -> dict[str, Any]:
        """The histograms as plain data."""
        return {
            "reuse_age_s": self.reuse_s.as_dict(),
            "reuse_distance": self.reuse_distance.as_dict(),
            "eviction_age_s": self.eviction_s.as_dict(),
        }
