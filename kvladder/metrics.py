"""Counters and histograms of one level, and shares of clients, as plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

SECTIONS: Final = (
    *(
        "arena",
        "copies",
        "events",
        "export",
        "hints",
        "listeners",
        "loop",
        "misses",
        "preemption",
        "ranks",
        "rebalance",
        "record",
    ),
    "shadow",
)
"""Sections of statistics that are not levels; no level may have these names."""
POOL: Final = "gpu."
"""Prefix of the sections of the device's pools; a group's name follows."""

Stats = dict[str, dict[str, Any]]
"""Plain data by level or section: numbers, and mappings or lists of numbers."""

DropReason = Literal[
    "room", "queue", "arena", "outranked", "full", "quota", "busy", "failed", "refused", "breaker",
    "admission",
]  # fmt: skip

MissReason = Literal[
    "never_seen", "evicted", "quota", "removed", "expired", "threshold", "refused",
    "lost", "damaged", "foreign", "unreadable", "failed", "unavailable",
    "slower", "sampled", "late", "room", "saving", "levels", "ended",
    "unsearched",
]  # fmt: skip
"""Reason why a requested block was not served; ``docs/reference/misses.md`` explains each."""


class MissCause(NamedTuple):
    """Why a block is not served, and the level that caused it; empty if no single level did."""

    level: str
    reason: MissReason


class Missed(NamedTuple):
    """Consecutive blocks of a request that were not served for one cause."""

    level: str
    reason: MissReason
    blocks: int


NEVER_SEEN: Final = MissCause("", "never_seen")

AGES_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
"""Upper bounds of the buckets for a block's age."""
DURATIONS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
"""Upper bounds of the buckets for the duration of a call to a tier."""
DISTANCES = tuple(4**power for power in range(2, 13))
"""Upper bounds of the buckets for a reuse distance in blocks: 16 to 16 million."""


class Histogram:
    """Counts of values in fixed buckets; ``le`` are their inclusive upper bounds."""

    __slots__ = ("counts", "le", "sum")

    def __init__(self, le: Sequence[float]) -> None:
        self.le = le
        self.counts = [0] * (len(le) + 1)
        """Counts per bucket, not cumulative; the last counts values above all bounds."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.le, value)] += 1
        self.sum += value

    def observe_all(self, values: NDArray[np.uint32 | np.int64 | np.float32 | np.float64]) -> None:
        """Count each of ``values``."""
        buckets = np.searchsorted(np.asarray(self.le), values)
        found = np.bincount(buckets, minlength=len(self.counts)).tolist()
        self.counts = [a + b for a, b in zip(self.counts, found, strict=True)]
        self.sum += float(values.sum())

    def as_dict(self) -> dict[str, Any]:
        """Return bounds, counts and sum as plain data."""
        return {"le": list(self.le), "counts": list(self.counts), "sum": self.sum}


@dataclass(slots=True)
class LevelStats:
    """Counters of one level since it was opened, in blocks unless a name says otherwise."""

    queries: int = 0
    """Blocks that fetches asked for and no hotter level had."""
    hits: int = 0
    """Blocks served from this level."""
    joined: int = 0
    """Blocks that were already being read for another fetch; of the host level only."""
    misses: int = 0
    """Blocks that the index named but the tier did not deliver."""
    late: int = 0
    """Blocks that had not arrived when their fetch was over."""
    slower: int = 0
    """Blocks not fetched because computing them is faster."""
    sampled: int = 0
    """Blocks not fetched so that the engine computes them once: this measures its speed."""
    stored: int = 0
    stored_call_s: Histogram = field(default_factory=lambda: Histogram(DURATIONS_S))
    """Durations of the calls that write; calls that time out count with their timeout."""
    loaded: int = 0
    loaded_call_s: Histogram = field(default_factory=lambda: Histogram(DURATIONS_S))
    """Durations of the calls that read."""
    recovered: int = 0
    probed: int = 0
    """Blocks that a shared tier was asked about."""
    found: int = 0
    """Blocks that turned out to be stored by other caches."""
    evicted: int = 0
    expired: int = 0
    removed: int = 0
    purged: int = 0
    """Blocks that a purge removed from a shared tier, or overwrote in one that forgot them."""
    denied: int = 0
    """Removed blocks and purges for which the medium gives the tier no rights: they stay there."""
    errors: int = 0
    """Calls that failed, even in part; includes timeouts."""
    timeouts: int = 0
    task_failures: int = 0
    """Tasks that ended with an error; a level's task is started again."""
    throttled: int = 0
    """Blocks not fetched because of the fetch budget or a lack of slots."""
    dropped: Counter[tuple[DropReason, int]] = field(
        default_factory=Counter[tuple[DropReason, int]]
    )
    """Blocks that could have been kept and were not, by reason and tens of priority."""

    def drop(self, reason: DropReason, priority: int) -> None:
        """Count a block of this priority that could have been kept and was not."""
        self.dropped[reason, priority // 10 * 10] += 1

    def spare(self, why: Literal["slower", "sampled"], blocks: int) -> None:
        """Count blocks that were not fetched because the engine is to compute them."""
        setattr(self, why, getattr(self, why) + blocks)

    def as_dict(self, block_bytes: int) -> dict[str, Any]:
        """Return numbers by name; drops as ``dropped_<reason>`` and ``dropped[reason][tens]``."""
        found: dict[str, Any] = {
            name: getattr(self, name) for name in self.__slots__ if name != "dropped"
        }
        for name in ("stored", "loaded"):
            calls = found[f"{name}_call_s"] = found[f"{name}_call_s"].as_dict()
            found[f"{name}_s"] = calls["sum"]  # seconds during which calls were in flight
            found[f"{name}_bytes"] = found[name] * block_bytes
        dropped: dict[str, dict[str, int]] = {}
        for (reason, tens), count in sorted(self.dropped.items()):
            dropped.setdefault(reason, {})[str(tens)] = count
        found["dropped"] = dropped
        for name, counts in dropped.items():
            found[f"dropped_{name}"] = sum(counts.values())
        return found


CLIENTS_SHOWN: Final = 8
"""Number of clients that are shown by name, those that hold most; the others are summed up."""
OTHERS: Final = "others"


def shown(held: Mapping[str, int]) -> dict[str, int]:
    """Return what the largest clients hold, by name, and the sum of the others."""
    ranked = sorted(held.items(), key=lambda one: (-one[1], one[0]))
    found = {name: count for name, count in ranked[:CLIENTS_SHOWN] if count}
    if rest := sum(count for _, count in ranked[CLIENTS_SHOWN:]):
        found[OTHERS] = rest
    return found


def summed(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sums of what connections hold, by the name of their client."""
    found: Counter[str] = Counter()
    for name, count in rows:
        found[name] += count
    return dict(found)


def largest(held: Mapping[str, int]) -> str:
    """Return the client that holds most, and how much, for users."""
    name, count = max(held.items(), key=lambda one: one[1], default=("", 0))
    return f"{count}, of {name}" if count else "0"
