"""Finds processes, as Linux tells of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def family(pid: int) -> list[int]:
    """Return a process and its descendants, without those that end meanwhile."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):  # it has just ended
                found += [int(child) for child in task.read_text().split()]
    return found
