"""Exact counters of a device pool, per pool and per request."""

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
"""Seconds between two marks, which limit the accuracy of ages."""
MARKS_MAX: Final = 4096
"""Number of marks kept; when there are more, every second one of the older half is dropped."""
UNCOUNTED_MAX: Final = 4096
"""Number of stamps that may wait to be counted; more would displace the pool's data in caches."""


def _rate(reused: int, missed: int) -> float:
    return reused / (reused + missed) if reused + missed else 0.0


def _joined(parts: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(parts), np.int64)


@dataclass(slots=True)
class PoolStats:
    """Counters of a pool since its creation, in blocks."""

    allocated: int = 0
    """Slots handed out."""
    reused: int = 0
    """Whole blocks of prompts that were served from the cache."""
    missed: int = 0
    """Blocks of prompts that were not served whole; partly served ones count here."""
    partial: int = 0
    """Blocks of prompts that were partly served."""
    stored: int = 0
    """Blocks that became reusable."""
    duplicates: int = 0
    """Blocks that were complete when an equal one was already reusable."""
    evicted: int = 0
    """Blocks that left the device to make room."""
    offloaded: int = 0
    """Evicted blocks that a tier took or already held."""
    onboarded: int = 0
    """Blocks that came back from a tier."""
    lost: int = 0
    """Blocks lost because a copy to or from a tier failed."""

    def served(self, request: RequestStats) -> None:
        """Add the figures of one prompt."""
        self.reused += request.reused
        self.missed += request.missed
        self.partial += request.partial_tokens > 0

    @property
    def hit_rate(self) -> float:
        """Share of reused blocks among all blocks of prompts; 0 before the first."""
        return _rate(self.reused, self.missed)

    def as_dict(self) -> dict[str, int]:
        """Return all counters by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Cache hits of a request's prompt at its beginning, in blocks."""

    reused: int
    """Whole blocks served from the cache."""
    missed: int
    """Other blocks; each gets a slot of its own."""
    onboarded: int = 0
    """Reused blocks that came from a tier."""
    partial_tokens: int = 0
    """Tokens served from the block behind the whole ones."""

    @property
    def hit_rate(self) -> float:
        """Share of reused blocks among all blocks of the prompt."""
        return _rate(self.reused, self.missed)


class Uses:
    """Measures how long idle blocks stay until they are reused or evicted.

    Nothing is kept per block. Marks record which eviction stamp came next at which time, and
    blocks' stamps are looked up among them. All calls except ``as_dict`` come from the pool's
    thread.

    Parameters
    ----------
    now:
        The pool's clock, in seconds.
    stamp:
        The next stamp at this time.
    """

    def __init__(self, now: Callable[[], float], stamp: int) -> None:
        self._now = now
        self._stamps = [stamp]
        self._times_s = [now()]
        self._reused: list[tuple[int, Sequence[int]]] = []
        """Uses since the last count: the next stamp then, and the stamps of the used blocks."""
        self._evicted: list[Sequence[int]] = []
        self._uncounted = 0
        """Number of stamps in both lists."""
        self.reuse_s = Histogram(AGES_S)
        self.reuse_distance = Histogram(DISTANCES)
        """Number of blocks that became idle between two uses of a block."""
        self.eviction_s = Histogram(AGES_S)

    def reused(self, stamp: int, stamps: Sequence[int]) -> None:
        """Record the reuse of blocks with these stamps; ``stamp`` is the next one now."""
        self._reused.append((stamp, stamps))
        self._uncounted += len(stamps)
        if self._uncounted > UNCOUNTED_MAX:
            self._count()

    def evicted(self, stamps: Sequence[int]) -> None:
        """Record the eviction of blocks; ``stamps`` are their stamps, negated by the selection."""
        self._evicted.append(stamps)
        self._uncounted += len(stamps)
        if self._uncounted > UNCOUNTED_MAX:
            self._count()

    def mark(self, stamp: int) -> None:
        """Note that ``stamp`` comes next now, and count uses and evictions since the last mark.

        Does nothing if the last mark is recent. Call it before other operations on the pool.
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
        """Count the recorded uses and evictions, as if all had happened at the last mark."""
        stamps = _joined(one for _, one in self._reused)
        ahead = np.array([stamp for stamp, _ in self._reused], np.int64)
        distances = ahead.repeat([len(one) for _, one in self._reused]) - stamps
        known = stamps >= self._stamps[0]  # lower ones were pushed to the front: no known time
        self.reuse_distance.observe_all(distances[known] // STEP)
        self.reuse_s.observe_all(self._ages(stamps[known]))
        stamps = -_joined(self._evicted)
        self.eviction_s.observe_all(self._ages(stamps[stamps >= self._stamps[0]]))
        self._reused, self._evicted, self._uncounted = [], [], 0

    def _ages(self, stamps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds from each stamp to the last mark, at most ``MARK_S`` too many."""
        marks = np.searchsorted(np.asarray(self._stamps), stamps, side="right") - 1
        return self._times_s[-1] - np.asarray(self._times_s)[marks]

    def as_dict(self) -> dict[str, Any]:
        """Return the histograms as plain data."""
        return {
            "reuse_age_s": self.reuse_s.as_dict(),
            "reuse_distance": self.reuse_distance.as_dict(),
            "eviction_age_s": self.eviction_s.as_dict(),
        }
