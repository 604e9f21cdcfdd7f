"""Named NVTX ranges, which show kvladder's work in a profiler; without one they do nothing."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Final

PROFILERS: Final = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Environment variables that a profiler sets in the process that it observes."""
_NOTHING: Final = nullcontext()


@cache
def _nvtx() -> Any:
    """Return torch's NVTX module; None if no profiler or no device is there."""
    if not any(os.environ.get(name) for name in PROFILERS):
        return None
    import torch

    return torch.cuda.nvtx if torch.cuda.is_available() else None


def ranged(what: str, count: int | None = None) -> AbstractContextManager[None]:
    """Return a context that marks a range ``kvladder WHAT COUNT`` if a profiler is attached.

    The range covers the work of the thread that enters it.
    """
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
