"""The kernel for small pages, by Triton's interpreter; without Triton it is skipped by name."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
import torch

from kvladder.gpu.copy import kernel
from kvladder.gpu.copy.device import Addresses, CopyRuns
from kvladder.gpu.copy.kernel import mover, table_of


def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert mover() is None


@pytest.mark.parametrize(
    ("offset", "size", "unit"),
    [(0, 4096, 8), (0, 1000, 8), (4, 1004, 4), (2, 34, 2), (1, 4095, 1), (0, 20000, 8)],
)
def test_the_widest_element_common_to_all_runs_is_found(offset: int, size: int, unit: int) -> None:
    batch, *_ = runs(offset, size)
    table = np.empty((3, 40), np.uint64)
    assert table_of(batch, table) == unit
    assert all(map(np.array_equal, table, batch[:3]))


@pytest.mark.parametrize(("offset", "size"), [(0, 4096), (4, 1004), (2, 34), (1, 9001)])
def test_a_kernel_moves_its_runs_and_writes_nothing_else(
    offset: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    move = mover()
    assert move is not None
    batch, source, target, order = runs(offset, size)
    table = np.empty((3, 40), np.uint64)
    unit = table_of(batch, table)
    move(torch.from_numpy(table.view(np.int64)), unit)
    wanted = torch.zeros_like(target)
    wanted[order, offset : offset + size] = source[:, offset : offset + size]
    assert torch.equal(target, wanted)


@pytest.mark.slow
def test_the_kernel_compiles_without_its_device() -> None:
    """The interpreter accepts code that the compiler refuses, such as other names of the module."""
    triton = pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    assert mover() is not None
    numbers = dict.fromkeys(("runs", "unit"), "i32") | dict.fromkeys(("KIND", "WIDTH"), "constexpr")
    source = compiler.ASTSource(
        triton.jit(kernel._move),
        signature={"table": "*i64", **numbers},
        constexprs={"KIND": kernel.tl.int64, "WIDTH": kernel.ELEMENTS},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Triton's own defaults
        made = triton.compile(source, target=target)
    assert "ld.global.b64" in made.asm["ptx"]


def runs(offset: int, size: int) -> tuple[CopyRuns, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a batch of 40 runs, their sources and targets, and the target rows."""
    stride = -(-(offset + size) // 8) * 8 + 8
    source = torch.randint(0, 256, (40, stride), dtype=torch.uint8)
    target = torch.zeros(40, stride, dtype=torch.uint8)
    order = torch.randperm(40)

    def begins(memory: torch.Tensor, rows: torch.Tensor) -> Addresses:
        first = np.uint64(memory.data_ptr() + offset)
        return first + rows.numpy().astype(np.uint64) * np.uint64(stride)

    sizes = np.full(40, size, np.uint64)
    batch = CopyRuns(begins(target, order), begins(source, torch.arange(40)), sizes, steady=True)
    return batch, source, target, order
