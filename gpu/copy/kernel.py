"""A kernel that moves runs of bytes between a device's memory and registered host memory.

A device's copy engine spends on any run at least the time in which the bus moves about 28 KiB.
Below that size a kernel is faster: it reads and writes the host's memory across the bus itself.
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

from kvladder.gpu.copy.device import CopyRuns

SMALL_BYTES: Final = 28 << 10
"""Largest average run, in bytes, for which the kernel is used."""
PROGRAMS_MAX: Final = 32
"""Programs that move runs at once: enough for the bus, and few of a device's processors."""
ELEMENTS: Final = 1024
"""Number of elements that a program moves at a time."""
UNIT_MAX: Final = 8

Mover = Callable[[torch.Tensor, int], None]
"""Moves the runs of a table on the current stream; the number is the bytes per element."""

tl: Any = None
"""The module ``triton.language``, which the kernel's source names; set by ``mover``."""


def _move(  # type: ignore[no-untyped-def]
    table,
    runs,
    unit,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Move every n-th run, for n programs; ``WIDTH`` elements at a time."""
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = tl.load(table + run).to(tl.pointer_type(KIND))
        source = tl.load(table + runs + run).to(tl.pointer_type(KIND))
        count = tl.load(table + 2 * runs + run) // unit
        for first in range(0, count, WIDTH):
            at = first + tl.arange(0, WIDTH)
            tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def mover() -> Mover | None:
    """Return the kernel, compiled at its first run; None if Triton is not installed."""
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


def table_of(batch: CopyRuns) -> tuple[torch.Tensor, int]:
    """Return a batch as the kernel's table, and the widest element size that fits all its runs."""
    table = np.stack([batch.targets, batch.sources, batch.sizes])
    bits = int(np.bitwise_or.reduce(table, axis=None)) | UNIT_MAX
    return torch.from_numpy(table.view(np.int64)), bits & -bits
