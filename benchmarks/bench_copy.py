"""Copies between KV tensors and slots against plain memcpy of the same bytes, block by block.

The limit is one ``memmove`` per block between the same two memories, in the same order. In ours, a
block's bytes are in 16 pieces, one per layer. The layers are consecutive in one allocation, as in
vLLM.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter

import torch

from benchmarks.row import Row
from kvladder.arena import Arena, Slot
from kvladder.gpu.copy.copier import CopyJob, Direction, JobId
from kvladder.gpu.copy.cpu import CpuCopier
from kvladder.gpu.copy.pages import BlockPages

LAYERS = 16
TOTAL_BYTES = 256 << 20
ROUNDS = 9
DIRECTIONS: tuple[Direction, ...] = ("offload", "onboard")


def rows() -> Iterable[Row]:
    """Measure both directions at three block sizes."""
    for size, name in ((64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (4 << 20, "4 MiB")):
        for direction in DIRECTIONS:
            yield copy(size, name, direction)


def copy(size: int, name: str, direction: Direction) -> Row:
    """Return one row: ours and memcpy in turn, medians compared."""
    count = TOTAL_BYTES // size
    kv = torch.ones(LAYERS, count, size // LAYERS, dtype=torch.uint8)
    tensors = {f"layer{n}": kv[n] for n in range(LAYERS)}
    flat = torch.ones(count, size, dtype=torch.uint8)
    order = random.Random(1)
    blocks = order.sample(range(count), count)
    slots = [Slot(slot) for slot in order.sample(range(count), count)]
    arena = Arena.create(count, size)
    copier = CpuCopier(BlockPages.of(tensors, blocks=count), arena)
    try:
        base, source = arena.address, flat.data_ptr()
        ctypes.memset(base, 1, TOTAL_BYTES)

        def memcpy() -> None:
            for block, slot in zip(blocks, slots, strict=True):
                ends = (base + slot * size, source + block * size)
                target, origin = ends if direction == "offload" else ends[::-1]
                ctypes.memmove(target, origin, size)

        def ours() -> None:
            job = CopyJob(JobId(1), direction, tuple(blocks), tuple(slots))
            copier.submit(job)
            copier.wait([job.id])
            (finished,) = copier.poll()
            assert finished.ok

        limit_s, ours_s = in_turn(memcpy, ours)
    finally:
        copier.close()
        arena.close()
    return Row(
        name=f"copy {direction} {name}",
        unit="GB/s",
        limit=TOTAL_BYTES / limit_s / 1e9,
        ours=TOTAL_BYTES / ours_s / 1e9,
        goal="ratio >= 0.9" if size >= 1 << 20 else "",
        note=f"{LAYERS} pieces a block, one thread; the limit is memcpy of whole blocks",
    )


def in_turn(one: Callable[[], None], two: Callable[[], None]) -> tuple[float, float]:
    """Return the median seconds of two calls, run in turn."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS + 1):
        for call, seconds in zip((one, two), taken, strict=True):
            begun = perf_counter()
            call()
            if number:  # the first round warms up
                seconds.append(perf_counter() - begun)
    return median(taken[0]), median(taken[1])
