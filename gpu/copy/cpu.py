"""The copier for KV tensors in main memory: one thread, and one memory copy per run of bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvladder.arena import Arena
from kvladder.gpu.copy.copier import CopyJob, Direction, ThreadedCopier, require_places
from kvladder.gpu.copy.pages import Page, Parts, RankShare, by_group

Bytes = NDArray[np.uint8]

STEP_BYTES = 8 << 20
"""Approximate bytes offloaded in one step; a request that waits for a load is delayed by that."""


class CpuCopier(ThreadedCopier):
    """Copies with NumPy, which releases the interpreter lock once per run of blocks.

    Pages of one size at even distances, such as consecutive layers, become one two-dimensional
    copy. Blocks that are neighbours on both sides are copied together. (A ``memmove`` per page
    would take the lock back once per page, which takes 5 ms while an engine is busy in Python.)

    Parameters
    ----------
    parts:
        This rank's pages; their device is ``cpu``.
    arena:
        Must stay open until the copier is closed.
    """

    def __init__(
        self, parts: Parts, arena: Arena, *, now: Callable[[], float] = perf_counter
    ) -> None:
        self._slots = arena.slots
        self._arena, self._parts = arena, by_group(parts)
        self.moved()
        super().__init__(name="kvladder-copy", now=now)

    def moved(self) -> None:
        self._groups = {
            group: _ArrayGroup(part, self._arena) for group, part in self._parts.items()
        }

    def block_bytes(self, group: int) -> int:
        return self._groups[group].pages.block_bytes

    def submit(self, job: CopyJob, *, by_layer: bool = False, urgent: bool = False) -> None:
        steps = self._layers(job) if by_layer else self._steps(job)
        self._submit(job, steps, urgent=urgent or by_layer)

    def _steps(self, job: CopyJob) -> Iterator[Sequence[str]]:
        """Copy whole blocks, some at each step."""
        group = self._groups[job.group]
        require_places(job, blocks=group.pages.blocks, slots=self._slots)
        for start in range(0, len(job.blocks), group.step_blocks):
            end = min(start + group.step_blocks, len(job.blocks))
            for neighbours in _neighbours(job, start, end):
                for run in group.runs:
                    _copy(job.direction, neighbours, run)
            yield ()

    def _layers(self, job: CopyJob) -> Iterator[Sequence[str]]:
        """Copy one layer of all blocks at each step; yield the layer's names."""
        group = self._groups[job.group]
        require_places(job, blocks=group.pages.blocks, slots=self._slots)
        runs = [*_neighbours(job, 0, len(job.blocks))]
        for names, layer in group.layers:
            for neighbours in runs:
                _copy(job.direction, neighbours, layer)
            yield names


class _ArrayGroup:
    """Blocks of one group, as arrays to copy between."""

    def __init__(self, part: RankShare, arena: Arena) -> None:
        self.pages = part.pages
        assert self.pages.device.type == "cpu"
        assert 0 <= part.offset <= arena.slot_bytes - self.pages.block_bytes
        self.step_blocks = max(1, STEP_BYTES // self.pages.block_bytes)
        base = arena.address + part.offset

        def both(run: Sequence[Page]) -> tuple[Bytes, Bytes]:
            slots = _slots(run, base, arena.handle.slots, arena.slot_bytes)
            return _blocks(run, self.pages.blocks), slots

        self.runs = [both(run) for run in _even_runs(self.pages.pages)]
        self.layers = [(page.names, both([page])) for page in self.pages.layers]


def _copy(direction: Direction, neighbours: tuple[int, int, int], run: tuple[Bytes, Bytes]) -> None:
    """Copy neighbouring blocks' bytes in a run of pages."""
    block, slot, count = neighbours
    mine, theirs = run[0][block : block + count], run[1][slot : slot + count]
    if direction == "offload":
        np.copyto(theirs, mine)
    else:
        np.copyto(mine, theirs)


def _neighbours(job: CopyJob, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs ``(block, slot, count)`` of pairs that are consecutive on both sides."""
    while start < end:
        block, slot = job.blocks[start], job.slots[start]
        stop = start + 1
        while stop < end and (job.blocks[stop] - block, job.slots[stop] - slot) == (
            stop - start,
            stop - start,
        ):
            stop += 1
        yield block, slot, stop - start
        start = stop


def _even_runs(pages: Sequence[Page]) -> list[list[Page]]:
    """Split pages, in order, into runs of equal pages at equal distances."""
    runs: list[list[Page]] = []
    for page in pages:
        if runs and _continues(runs[-1], page):
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs


def _continues(run: Sequence[Page], page: Page) -> bool:
    last = run[-1]
    same = (last.size_bytes, last.stride_bytes) == (page.size_bytes, page.stride_bytes)
    step = page.view.data_ptr() - last.view.data_ptr()
    first_step = run[1].view.data_ptr() - run[0].view.data_ptr() if len(run) > 1 else step
    return same and step == first_step and step > 0


def _blocks(run: Sequence[Page], blocks: int) -> Bytes:
    """Return the engine's memory as ``[blocks, pages, bytes]``."""
    first = run[0]
    step = run[1].view.data_ptr() - first.view.data_ptr() if len(run) > 1 else first.size_bytes
    shape = (blocks, len(run), first.size_bytes)
    return _array(first.view.data_ptr(), shape, (first.stride_bytes, step, 1))


def _slots(run: Sequence[Page], base: int, slots: int, slot_bytes: int) -> Bytes:
    """Return the arena as ``[slots, pages, bytes]``."""
    first = run[0]
    shape = (slots, len(run), first.size_bytes)
    return _array(base + first.offset, shape, (slot_bytes, first.size_bytes, 1))


def _array(address: int, shape: tuple[int, int, int], strides: tuple[int, int, int]) -> Bytes:
    """Return a view of memory that has another owner."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = memoryview((ctypes.c_uint8 * span).from_address(address)).cast("B")
    return np.ndarray(shape, np.uint8, memory, 0, strides)
