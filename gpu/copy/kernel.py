"""A kernel that moves runs of bytes between a device's memory and registered host memory.

The engines that copy memory spend about as long on any run as the bus takes for some 28 KiB. Below
that a kernel is faster, which reads and writes the host's memory across the bus itself.
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
"""Up to so many bytes in a run, on the average, the kernel is taken."""
PROGRAMS_MAX: Final = 32
"""How many programs move runs at once: enough for the bus, and few of a device's processors."""
ELEMENTS: Final = 1024
"""How many elements a program moves at a time."""
UNIT_MAX: Final = 8

Mover = Callable[[torch.Tensor, int], None]
"""Moves the runs of a table, by elements of so many bytes, on the current stream."""

tl: Any = None
"""triton.language, which the kernel's source names."""


def _move(  # type: ignore[no-untyped-def]
    table,
    runs,
    unit,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each program moves every n-th run, a width of elements at a time."""
    for run in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = tl.load(table + run).to(tl.pointer_type(KIND))
        source = tl.load(table + runs + run).to(tl.pointer_type(KIND))
        count = tl.load(table + 2 * runs + run) // unit
        for first in range(0, count, WIDTH):
            at = first + tl.arange(0, WIDTH)
            tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def mover() -> Mover | None:
    """The kernel, compiled when it first runs; None where Triton is not installed."""
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
    """A batch as the kernel reads it, and the widest element that all its runs consist of."""
    table = np.stack([batch.targets, batch.sources, batch.sizes])
    bits = int(np.bitwise_or.reduce(table, axis=None)) | UNIT_MAX
    return torch.from_numpy(table.view(np.int64)), bits & -bits
