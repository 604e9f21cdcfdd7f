"""Named ranges of NVTX, so that a profiler shows what kvladder does when; nothing without one."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Final

PROFILERS: Final = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""What a profiler sets in the environment of the process that it looks at."""
_NOTHING: Final = nullcontext()


@cache
def _nvtx() -> Any:
    """What pushes and pops ranges; None where no profiler is attached, or no device."""
    if not any(os.environ.get(name) for name in PROFILERS):
        return None
    import torch

    return torch.cuda.nvtx if torch.cuda.is_available() else None


def ranged(what: str, count: int | None = None) -> AbstractContextManager[None]:
    """A range ``kvladder WHAT COUNT`` around what one thread does, if a profiler is attached."""
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
