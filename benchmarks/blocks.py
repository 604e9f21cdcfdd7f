"""Blocks for tiers to move in turns, and the times that it takes."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import median

from benchmarks.row import Row
from kvladder.arena import Arena
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.base import NO_PLACE, Tier
from kvladder.tiers.blocking import BlockingPool, SystemClock
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import Labels, Read, Ref, Write

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 4 * MIB)
"""Block sizes for the comparison of tiers that engines share."""
BATCHES = (1, 16, 64)
BATCH_BYTES = 64 * MIB
LARGE_BYTES = 16 * MIB
"""Batch size from which the bytes dominate the time, not the calls."""
ROUNDS = 7


def batches(size: int) -> list[int]:
    """Return the batch sizes, in blocks, for a block size."""
    return sorted({min(batch, BATCH_BYTES // size) for batch in BATCHES})


def told(size: int, batch: int) -> str:
    """Return a batch in words."""
    unit = f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"
    return f"{batch} of {unit} at once"


def key(number: int) -> BlockKey:
    """Return the key of a block."""
    return BlockKey(hashlib.sha256(b"bench %d" % number).digest())


class Blocks:
    """Blocks of random bytes in an arena, with the requests that a level gives to a tier."""

    def __init__(self, layout: Layout, count: int) -> None:
        self.layout = layout
        self.size = layout.block_bytes
        self.arena = Arena.create(count, layout.slot_bytes)
        self.slots = self.arena.lease(count) or []
        for slot in self.slots:
            data = hashlib.shake_128(b"%d" % slot).digest(4096) * (self.size // 4096)
            self.arena.view(slot)[:] = data
        self.views = [self.arena.view(slot) for slot in self.slots]
        self.refs = [Ref(key(slot), slot) for slot in self.slots]
        self._labels = Labels(layout.namespace(), self.size, verify=True)

    def writes(self) -> list[Write]:
        """Return write requests for all blocks."""
        every = zip(self.refs, self.slots, self.views, strict=True)
        return [Write(self._labels, *one) for one in every]

    def alike(self, numbers: Iterable[int]) -> list[Write]:
        """Return write requests for the first block's bytes under other keys."""
        refs = (Ref(key(number), NO_PLACE) for number in numbers)
        return [Write(self._labels, ref, self.slots[0], self.views[0]) for ref in refs]

    def reads(self) -> list[Read]:
        """Return read requests for all blocks."""
        every = zip(self.refs, self.slots, self.views, strict=True)
        return [Read(self._labels, *one) for one in every]

    def close(self) -> None:
        """Release the slots and close the arena."""
        self.arena.release(self.slots)
        self.arena.close()


async def timed(work: Callable[[], Awaitable[Sequence[bool | None] | int | None]]) -> float:
    """Return the seconds that a call takes; all its answers must be True."""
    began = time.perf_counter()
    answers = await work()
    took = time.perf_counter() - began
    assert isinstance(answers, int) or all(answers or ())
    return took


def timed_raw(work: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copied(blocks: Blocks) -> Callable[[], None]:
    """Return a function that copies all blocks to other memory, in one thread."""
    target = ctypes.create_string_buffer(blocks.size)

    def copy() -> None:
        for slot in blocks.slots:
            source = blocks.arena.address + slot * blocks.arena.slot_bytes
            ctypes.memmove(target, source, blocks.size)

    return copy


@asynccontextmanager
async def opened(tiers: Mapping[str, Tier], blocks: Blocks) -> AsyncGenerator[None]:
    """Open tiers over the arena of these blocks, under one namespace; close them at the end."""
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
    """Return the GB/s at which each of ``raw``, and each tier's put and get, moves all blocks.

    They take turns. The result is the median of the rounds; each round moves at least 16 MiB.
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
    """Return the row that shows the cost of a separate process for a tier: ours, inside."""
    size, batch = blocks.size, len(blocks.slots)
    return Row(
        name=f"{name} {call}, {told(size, batch)}, and inside the engine",
        unit="GB/s",
        peer=speed[f"{call} inside"],
        ours=speed[f"{call} ours"],
        goal="ratio >= 0.85" if size * batch >= LARGE_BYTES else "",
        note="what a process of its own costs",
    )
