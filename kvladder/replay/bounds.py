"""Bounds and curves over sizes, without a simulation of levels.

``lru_hits`` is the stack algorithm of Mattson et al. (IBM Systems Journal 9, 1970), with a binary
indexed tree over the times of last use as by Bennett and Kruskal (1975): one pass gives the hits of
an LRU cache of every size. Above ``EXACT_MAX`` accesses only blocks with a small hash are followed,
and sizes are scaled, as in SHARDS (Waldspurger et al., FAST 2015). ``belady`` is the greedy optimum
that knows the future.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvladder.policy.belady import belady as belady
from kvladder.traces.reader import Trace

EXACT_MAX: Final = 1_500_000
"""Largest number of accesses that are all followed: it takes some ten seconds."""
_MIX: Final = 0x9E3779B97F4A7C15


class LruCurve(NamedTuple):
    """The hits of an LRU cache by its size."""

    distances: NDArray[np.int64]
    """Smallest sizes in blocks at which each followed reuse is a hit, ascending."""
    asked: int
    rate: float
    """Fraction of the blocks that was followed; 1 is exact."""
    share: float = 1.0
    """Fraction of the accesses that was to these blocks."""

    def hits(self, blocks: float) -> int:
        """Return the number of hits, leading blocks of prompts, at a size in blocks."""
        found = int(np.searchsorted(self.distances, blocks * self.rate, side="right"))
        return round(found / self.share)

    def ratio(self, blocks: float) -> float:
        """Return the hits as a fraction of all blocks asked for."""
        return self.hits(blocks) / self.asked if self.asked else 0.0


def lru_hits(trace: Trace, *, exact_max: int = EXACT_MAX) -> LruCurve:
    """Return the hits of LRU at all sizes, where a request uses the end of its prefix first.

    So a block is never used later than those before it, and hits are leading blocks.
    """
    total = trace.blocks
    rate = min(1.0, exact_max / max(1, sum(len(one.used) for one in trace.requests)))
    limit = int(rate * (1 << 64))
    follows = [rate == 1.0 or (n * _MIX) % (1 << 64) < limit for n in range(trace.unique)]
    used = [[block for block in request.used if follows[block]] for request in trace.requests]
    wanted = [[block for block in request.wanted if follows[block]] for request in trace.requests]
    times = sum(map(len, used))
    tree, last = [0] * (times + 1), [0] * trace.unique
    distances: list[int] = []
    now = held = 0
    for asked, blocks in zip(wanted, used, strict=True):
        for block in asked:  # as of the request's begin
            then = last[block]
            if not then:
                continue
            older = 0
            at = then - 1
            while at:
                older += tree[at]
                at &= at - 1
            distances.append(held - older)
        for block in reversed(blocks):
            then = last[block]
            now += 1
            while then and then <= times:
                tree[then] -= 1
                then += then & -then
            held += not last[block]
            last[block] = at = now
            while at <= times:
                tree[at] += 1
                at += at & -at
    followed = sum(follows) / max(1, trace.unique)
    share = sum(map(len, wanted)) / total if total else 1.0
    found = np.sort(np.asarray(distances, np.int64))
    return LruCurve(found, total, followed or 1.0, share or 1.0)
