"""A kernel that moves runs of bytes from registered host memory to a device's memory.

A device's copy engines need at least the time that the bus takes for about 28 KiB for each run. For
smaller runs a kernel is faster, which accesses the host's memory across the bus itself. The other
way, the bus is the limit for copy engines, too, and they leave the processors to the engine.
"""
# ruff: noqa: ANN001, ANN202, N803 - Triton reads the source, and takes no annotation but its own
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvladder.gpu.copy.device import CopyRuns, Event

SMALL_BYTES: Final = 28 << 10
"""Largest average bytes per run for which the kernel is used."""
PROGRAMS_MAX: Final = 12
"""Programs that move runs at once: as vLLM has measured on an H100, more gain less than 5 %."""
TABLES: Final = 16
"""Number of tables of runs; each is in use by one launch in flight."""
ELEMENTS: Final = 1024
"""Elements that a program moves at a time."""
UNIT_MAX: Final = 8

Mover = Callable[[torch.Tensor, int], None]
"""Moves the runs of a table on the current stream, in elements of ``unit`` bytes."""

tl: Any = None
"""``triton.language``; the kernel's source uses this name."""


def _move(  # type: ignore[no-untyped-def]
    table,
    runs,
    unit,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Move every n-th run in each of n programs, ``WIDTH`` elements at a time."""
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = tl.load(table + run).to(tl.pointer_type(KIND))
        source = tl.load(table + runs + run).to(tl.pointer_type(KIND))
        count = tl.load(table + 2 * runs + run) // unit
        for first in range(0, count, WIDTH):
            at = first + tl.arange(0, WIDTH)
            tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def mover() -> Mover | None:
    """Return the kernel, which is compiled in its first run; None if Triton is not installed."""
    global tl
    try:
        triton: Any = import_module("triton")
        tl = import_module("triton.language")
    except ImportError:
        return None
    kernel = triton.jit(do_not_specialize=["runs", "unit"])(_move)
    kinds = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

    def move(table: torch.Tensor, unit: int) -> None:
        runs = table.shape[1]
        programs = min(runs, PROGRAMS_MAX)
        kernel[(programs,)](table, runs, unit, KIND=kinds[unit], WIDTH=ELEMENTS)

    return move


def table_of(batch: CopyRuns, table: NDArray[np.uint64]) -> int:
    """Write a batch into a table for the kernel; return the widest element that fits all its runs.

    ``table`` is ``[3, runs]``.
    """
    np.stack(batch[:3], out=table)
    bits = int(np.bitwise_or.reduce(table, axis=None)) | UNIT_MAX
    return bits & -bits


class Table:
    """A table of runs in pinned memory, its copy on the device, and the end of their last use.

    Parameters
    ----------
    runs_max:
        Largest number of runs.
    """

    def __init__(self, runs_max: int, device: torch.device) -> None:
        self.here = torch.empty(3 * runs_max, dtype=torch.int64).pin_memory()
        self.there = torch.empty(3 * runs_max, dtype=torch.int64, device=device)
        self.used: Event = None
        """End of its last use."""

    def use_until(self, end: Event) -> None:
        """Note the end of a use: before it, the table must not change."""
        self.used = end

    def load(self, batch: CopyRuns) -> tuple[torch.Tensor, int]:
        """Copy a batch to the device on the current stream; return the table there and the unit."""
        count = len(batch.sizes)
        here = self.here[: 3 * count]
        unit = table_of(batch, here.numpy().view(np.uint64).reshape(3, count))
        there = self.there[: 3 * count]
        there.copy_(here, non_blocking=True)
        return there.view(3, count), unit
