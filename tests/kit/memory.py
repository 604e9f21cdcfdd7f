"""How much memory a process has, and which of an arena's it may write to."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

from kvladder.arena import Arena


def resident_bytes() -> int:
    """Memory of this process, without what is free and could be given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def writable_slots(arena: Arena) -> list[int]:
    """Slots that this process may write to, as the kernel has it."""
    found = set[int]()
    for text in Path("/proc/self/maps").read_text().splitlines():
        limits, access, *_ = text.split()
        begin, end = (int(limit, 16) - arena.address for limit in limits.split("-"))
        if "w" in access:
            found |= {*range(begin // arena.slot_bytes, -(-end // arena.slot_bytes))}
    return sorted(found.intersection(range(arena.handle.slots)))
