"""What sizes of memory and disk bring on a trace: hits, seconds and money, the knee, the split.

Memory holds the most recently used blocks. The disk gets every block as it is saved (``when:
commit``), so both together serve what the larger of the two would. The knee is the point of the
curve furthest above the line between its ends, over the logarithm of the size (Kneedle, Satopaa et
al., 2011).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2
from typing import Any, Final, NamedTuple

from kvladder.errors import ConfigError
from kvladder.layout import align
from kvladder.policy.prices import GIB, MONTH_S
from kvladder.policy.prices import Prices as Prices
from kvladder.traces.reader import Trace
from kvladder.units import Size, counted

STEPS: Final = 2
"""Sizes looked at for each doubling."""
PROMPTS_MIN: Final = 2
"""Longest prompts that memory has room for, as half of the arena may be in flight upwards."""
SMALLEST_TRACE_S: Final = 1.0
"""Shortest trace from which a month is told."""

Hits = Callable[[float], float]
"""Returns the blocks found in a cache of a size in blocks."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a trace does not tell."""

    block_bytes: int
    token_s: float | None = None
    """Seconds to compute a token."""
    disk_read: float | None = None
    """Bytes that the disk reads in a second; None reads in no time."""
    prices: Prices = field(default_factory=Prices)
    disk_overhead: int = 0
    """Bytes of the disk that a block takes beside its own."""
    batch: int = 64
    """Blocks that a level must have room for."""
    memory_max: int | None = None
    """Largest size of memory, in bytes."""
    disk_max: int | None = None

    @property
    def memory_block(self) -> int:
        """Bytes of memory that a block takes."""
        return align(self.block_bytes)

    @property
    def disk_block(self) -> int:
        """Bytes of the disk that a block takes."""
        return align(self.block_bytes) + self.disk_overhead


class SizePoint(NamedTuple):
    """A size of memory and of disk in blocks, and what they bring on the trace."""

    memory: int
    disk: int
    memory_hits: float
    disk_hits: float
    saved_s: float | None
    """Seconds of computing saved over the trace, loading from disk deducted."""
    cost: float | None
    """Of a month."""
    value: float | None
    """Of the seconds saved in a month."""

    @property
    def net(self) -> float | None:
        """Money left of a month; None if a price is missing."""
        return None if self.value is None or self.cost is None else self.value - self.cost


class SizePlan:
    """Computes points of the curve for one trace.

    Parameters
    ----------
    hits:
        The hits by the size of a cache.

    Raises
    ------
    ConfigError
        A largest size has no room for one batch of blocks.
    """

    def __init__(self, trace: Trace, hits: Hits, settings: PlanSettings) -> None:
        self._trace = trace
        self._hits = hits
        self.settings = settings
        self.asked = max(1, trace.blocks)
        longest = max(len(one.blocks) for one in trace.requests)
        self.least = max(settings.batch, PROMPTS_MIN * longest)
        """Least memory in blocks: with less, a long prompt could not be loaded as a whole."""
        self._memory_max = self._most(
            settings.memory_max,
            settings.memory_block,
            "--most memory",
            self.least,
            f"{PROMPTS_MIN} of the longest prompt",
        )
        self._disk_max = self._most(
            settings.disk_max, settings.disk_block, "--most disk", settings.batch, "one batch"
        )

    def _most(self, given: int | None, block_bytes: int, flag: str, least: int, what: str) -> int:
        if given is None:
            return max(least, self._trace.unique)
        if given // block_bytes < least:
            held = f"{Size(given).brief()} holds {counted(given // block_bytes, 'block')}"
            needed = Size(least * block_bytes).brief()
            hint = f"expected at least {needed}, {counted(least, 'block')}"
            raise ConfigError(f"{held}, less than {what}", path=flag, hint=hint)
        return min(max(least, self._trace.unique), given // block_bytes)

    def point(self, memory: int, disk: int) -> SizePoint:
        """Return what these sizes, in blocks, bring."""
        settings, prices = self.settings, self.settings.prices
        near = self._hits(memory)
        far = max(0.0, self._hits(max(memory, disk)) - near) if disk else 0.0
        saved = value = cost = None
        if settings.token_s is not None:
            block_s = self._trace.block_tokens * settings.token_s
            load_s = settings.block_bytes / settings.disk_read if settings.disk_read else 0.0
            saved = near * block_s + far * max(0.0, block_s - load_s)
            if prices.gpu is not None and self._trace.seconds >= SMALLEST_TRACE_S:
                value = saved / 3600 * prices.gpu * MONTH_S / self._trace.seconds
        has_prices = prices.memory is not None and (prices.disk is not None or not disk)
        if has_prices:
            cost = memory * settings.memory_block / GIB * (prices.memory or 0.0)
            cost += disk * settings.disk_block / GIB * (prices.disk or 0.0)
        return SizePoint(memory, disk, near, far, saved, cost, value)

    def sizes(self, most: int) -> list[int]:
        """Return sizes in blocks from the least to ``most``, a few for each doubling."""
        least = min(self.least, most)
        steps = max(1, round(STEPS * log2(max(1.0, most / least))))
        found = {round(least * (most / least) ** (step / steps)) for step in range(steps + 1)}
        return sorted(found)

    def curve(self) -> list[SizePoint]:
        """Return points of memory alone, from the least to all blocks."""
        return [self.point(size, 0) for size in self.sizes(self._memory_max)]

    def disk_curve(self) -> list[SizePoint]:
        """Return points of a disk below the least memory."""
        sizes = self.sizes(self._disk_max)
        return [self.point(self.least, size) for size in sizes if size > self.least]

    def best(self) -> SizePoint | None:
        """Return the split with most money left; None if a price or a speed is missing."""
        found: list[SizePoint] = []
        for memory in self.sizes(self._memory_max):
            found.append(self.point(memory, 0))
            if self.settings.prices.disk is not None:
                found += [self.point(memory, d) for d in self.sizes(self._disk_max) if d > memory]
        nets = [(one.net, one) for one in found if one.net is not None]
        return max(nets, key=lambda pair: pair[0])[1] if nets else None


def knee(points: Sequence[SizePoint], *, of_disk: bool = False) -> SizePoint | None:
    """Return the point after which more size brings less and less; None for a flat curve."""
    if len(points) < 3:
        return None
    sizes = [log2(one.disk if of_disk else one.memory) for one in points]
    hits = [one.memory_hits + one.disk_hits for one in points]
    wide, high = sizes[-1] - sizes[0], max(hits) - hits[0]
    if not wide or high <= 0:
        return None
    above = [
        (hit - hits[0]) / high - (size - sizes[0]) / wide
        for size, hit in zip(sizes, hits, strict=True)
    ]
    return points[above.index(max(above))]


def interpolated(measured: Sequence[tuple[int, float]]) -> Hits:
    """Return a curve through measured sizes and hits, ascending; straight over the logarithm."""

    def hits(blocks: float) -> float:
        if blocks <= measured[0][0]:
            return measured[0][1] * blocks / measured[0][0]
        for (low, below), (high, above) in pairwise(measured):
            if blocks <= high:
                share = log2(blocks / low) / log2(high / low)
                return below + (above - below) * share
        return measured[-1][1]

    return hits


def as_data(plan: SizePlan, point: SizePoint | None) -> dict[str, Any] | None:
    """Return a point as plain data, with sizes in bytes."""
    if point is None:
        return None
    settings = plan.settings
    return {
        "memory_bytes": point.memory * settings.memory_block,
        "memory_blocks": point.memory,
        "disk_bytes": point.disk * settings.disk_block,
        "disk_blocks": point.disk,
        "ratio": (point.memory_hits + point.disk_hits) / plan.asked,
        "memory_ratio": point.memory_hits / plan.asked,
        "disk_ratio": point.disk_hits / plan.asked,
        "saved_s": point.saved_s,
        "cost_a_month": point.cost,
        "value_a_month": point.value,
        "net_a_month": point.net,
    }
