"""The memory of a process, and the slots of an arena that it may write to."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

from kvladder.arena import Arena


def resident_bytes() -> int:
    """Return the memory of this process, without free memory that could be given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def writable_slots(arena: Arena) -> list[int]:
    """Return the slots that this process may write to, according to the kernel."""
    found = set[int]()
    for text in Path("/proc/self/maps").read_text().splitlines():
        limits, access, *_ = text.split()
        begin, end = (int(limit, 16) - arena.address for limit in limits.split("-"))
        if "w" in access:
            found |= {*range(begin // arena.slot_bytes, -(-end // arena.slot_bytes))}
    return sorted(found.intersection(range(arena.handle.slots)))
