"""Named NVTX ranges that show kvladder's work in a profiler; they do nothing without one."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Final

PROFILERS: Final = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Environment variables that profilers set in the profiled process."""
_NOTHING: Final = nullcontext()


@cache
def _nvtx() -> Any:
    """Return the module that pushes and pops ranges; None without a profiler or a device."""
    if not any(os.environ.get(name) for name in PROFILERS):
        return None
    import torch

    return torch.cuda.nvtx if torch.cuda.is_available() else None


def ranged(what: str, count: int | None = None) -> AbstractContextManager[None]:
    """Return a context that marks a range ``kvladder WHAT COUNT``, if a profiler is attached."""
    if _nvtx() is None:
        return _NOTHING
    return _range(f"kvladder {what}" if count is None else f"kvladder {what} {count}")


@contextmanager
def _range(name: str) -> Generator[None]:
    _nvtx().range_push(name)
    try:
        yield
    finally:
        _nvtx().range_pop()
