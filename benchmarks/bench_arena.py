"""Measures the cost to make and attach an arena, in CPU seconds per GiB.

The limit is as much new memory of the process alone, in huge pages, which the kernel zeroes too.
The peer is the former way: one thread populated small pages, and each process that attached mapped
them once more. The note has zeros written over existing memory.

Where these zeros are far below the limit, the machine is virtual, and its host has to find each
page that the kernel touches. A virtual machine returns free memory to its host, and the next
process to ask for it pays twenty times. Each way is therefore measured over memory that was just
freed. But on a busy machine even that has gone back already, and no way can reach a quarter of the
peer. Above the limit, ours collapses one small page of each huge page, as the kernel gives shared
memory no huge pages otherwise.
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
"""Values from linux/mman.h that Python's mmap lacks."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def rows() -> Iterable[Row]:
    """Measure an arena of 8 GiB, or of a quarter of the free memory if that is less."""
    size = min(SIZE_BYTES, memory_available() // 4) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    there = (ctypes.c_uint8 * ZEROS_BYTES)()

    def zeros(size: int) -> None:
        for first in range(0, size, ZEROS_BYTES):
            ctypes.memset(there, 0, min(ZEROS_BYTES, size - first))

    ways = {"ours": _ours, "before": _before, "zeros": zeros, "new": _new}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            _before(size)
            taken[name].append(_cpu(way, size) / (size / 2**30))
    # the first round warms up
    ours, before, least, limit = (median(taken[name][1:]) for name in ways)
    yield Row(
        name=f"arena of {size / 2**30:.0f} GiB made and attached",
        unit="CPU s/GiB",
        limit=limit,
        peer=before,
        ours=ours,
        goal="<= 0.25 of the peer",
        note=f"{ours / before:.2f} of the peer; limit: new huge pages, {limit / least:.1f} times as"
        f" much as zeros over existing memory ({least:.3f})",
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
    """Make an arena in the former way: one thread populates small pages, twice."""
    fd = os.memfd_create("before")
    os.ftruncate(fd, size)
    for advice in (POPULATE_WRITE, POPULATE_READ):
        memory = map_shared(fd, size)
        _advise(ctypes.addressof(memory), size, mmap.MADV_NOHUGEPAGE)
        _advise(ctypes.addressof(memory), size, advice)
        del memory
    os.close(fd)


def _new(size: int) -> None:
    """Let the kernel make memory of this process alone, in huge pages."""
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
    address = -(-ctypes.addressof(begin) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    _advise(address, size, mmap.MADV_HUGEPAGE)
    _advise(address, size, POPULATE_WRITE)
    del begin
    memory.close()


def _advise(address: int, size: int, advice: int) -> None:
    if _libc.madvise(address, size, advice):
        raise OSError(ctypes.get_errno(), "madvise")
