"""Lets tiers move blocks in turns, and measures the time that this takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import median

from benchmarks.row import Row
from kvladder.measuring.blocks import KIB, MIB, Blocks, timed_raw, told
from kvladder.tiers.base import Tier
from kvladder.tiers.blocking import BlockingPool, SystemClock
from kvladder.tiers.context import TierContext

SIZES = (64 * KIB, MIB, 4 * MIB)
"""Block sizes for comparing tiers that engines share."""
BATCHES = (1, 16, 64)
BATCH_BYTES = 64 * MIB
LARGE_BYTES = 16 * MIB
"""Batch size from which the bytes dominate the time, not the calls."""
ROUNDS = 7


def batches(size: int) -> list[int]:
    """Return the batch sizes to measure for blocks of this size."""
    return sorted({min(batch, BATCH_BYTES // size) for batch in BATCHES})


async def timed(work: Callable[[], Awaitable[Sequence[bool | None] | int | None]]) -> float:
    """Return the seconds of a call; all its answers must be True."""
    began = time.perf_counter()
    answers = await work()
    took = time.perf_counter() - began
    assert isinstance(answers, int) or all(answers or ())
    return took


@asynccontextmanager
async def opened(tiers: Mapping[str, Tier], blocks: Blocks) -> AsyncGenerator[None]:
    """Keep tiers open over the arena of these blocks, under one namespace."""
    layout, pool = blocks.layout, BlockingPool(4, "bench")
    space = layout.namespace()
    for tier in tiers.values():
        await tier.open(TierContext(blocks.arena, layout, space, 1 << 16, SystemClock(), pool.run))
    try:
        yield
    finally:
        for tier in tiers.values():
            await tier.aclose()
        pool.close(timeout_s=5)


async def in_turns(
    blocks: Blocks, raw: Mapping[str, Callable[[], None]], tiers: Mapping[str, Tier]
) -> dict[str, float]:
    """Measure GB/s to move all blocks: by each of ``raw``, and by a put and a get of each tier.

    They take turns. A figure is the median of all rounds; a round moves at least 16 MiB.
    """
    took: dict[str, list[float]] = defaultdict(list)
    batch_bytes = blocks.size * len(blocks.slots)
    repeats = max(1, LARGE_BYTES // batch_bytes)
    for _ in range(ROUNDS):
        sums: dict[str, float] = defaultdict(float)
        for _ in range(repeats):
            for name, call in raw.items():
                sums[name] += timed_raw(call)
            for name, tier in tiers.items():
                await tier.remove(blocks.refs)
                sums[f"put {name}"] += await timed(lambda: tier.put(blocks.writes()))  # noqa: B023
                sums[f"get {name}"] += await timed(lambda: tier.get(blocks.reads()))  # noqa: B023
        for name, seconds in sums.items():
            took[name].append(seconds)
    return {name: batch_bytes * repeats / 1e9 / median(each) for name, each in took.items()}


def isolation(name: str, blocks: Blocks, call: str, speed: Mapping[str, float]) -> Row:
    """Return the row that compares a tier in its own process (``ours``) with ``inside``."""
    size, batch = blocks.size, len(blocks.slots)
    return Row(
        name=f"{name} {call}, {told(size, batch)}, and inside the engine",
        unit="GB/s",
        peer=speed[f"{call} inside"],
        ours=speed[f"{call} ours"],
        goal="ratio >= 0.85" if size * batch >= LARGE_BYTES else "",
        note="what a process of its own costs",
    )
