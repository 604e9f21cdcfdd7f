"""The CPU seconds per GiB to make and attach an arena.

The limit is zeros written over memory that is mapped already, because the kernel must zero all
memory that it gives. The peer is the former way to make an arena: one thread, page by page, and the
same again at attach. A virtual machine returns memory to its host after it was free for seconds,
and the next allocation then costs ten times as much. So each way runs over memory just freed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from statistics import median
from time import process_time

from benchmarks.row import Row
from kvladder.arena import Arena, memory_available
from kvladder.mapping import HUGE_PAGE_BYTES, map_shared

SIZE_BYTES = 8 << 30
SLOT_BYTES = 4 << 20
ROUNDS = 3
ZEROS_BYTES = 1 << 30
POPULATE_READ, POPULATE_WRITE = 22, 23
"""Constants of linux/mman.h that Python's mmap lacks."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def rows() -> Iterable[Row]:
    """Measure an arena of 8 GiB, or of a quarter of the available memory if that is less."""
    size = min(SIZE_BYTES, memory_available() // 4) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    there = (ctypes.c_uint8 * ZEROS_BYTES)()

    def zeros(size: int) -> None:
        for first in range(0, size, ZEROS_BYTES):
            ctypes.memset(there, 0, min(ZEROS_BYTES, size - first))

    ways = {"ours": _ours, "before": _before, "zeros": zeros}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            _before(size)
            taken[name].append(_cpu(way, size) / (size / 2**30))
    ours, before, limit = (median(taken[name][1:]) for name in ways)  # the first round warms up
    yield Row(
        name=f"arena of {size / 2**30:.0f} GiB made and attached",
        unit="CPU s/GiB",
        limit=limit,
        peer=before,
        ours=ours,
        goal="<= 0.25 of the peer",
        note=f"{ours / before:.2f} of the peer; limit: as many zeros",
    )


def _cpu(call: Callable[[int], None], size: int) -> float:
    begun_s = process_time()
    call(size)
    return process_time() - begun_s


def _ours(size: int) -> None:
    arena = Arena.create(size // SLOT_BYTES, SLOT_BYTES)
    attached = Arena.attach(arena.handle)
    populating = attached._populating  # pyright: ignore[reportPrivateUsage]
    assert populating is not None
    populating.join()
    attached.close()
    arena.close()


def _before(size: int) -> None:
    """Make memory the former way: small pages, one thread, and mapped once more to attach."""
    fd = os.memfd_create("before")
    os.ftruncate(fd, size)
    for advice in (POPULATE_WRITE, POPULATE_READ):
        memory = map_shared(fd, size)
        _advise(ctypes.addressof(memory), size, mmap.MADV_NOHUGEPAGE)
        _advise(ctypes.addressof(memory), size, advice)
        del memory
    os.close(fd)


def _advise(address: int, size: int, advice: int) -> None:
    if _libc.madvise(address, size, advice):
        raise OSError(ctypes.get_errno(), "madvise")
