"""Shared memory from the kernel: aligned for huge pages, and allocated by several threads."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from weakref import finalize

logger = logging.getLogger("kvladder")

HUGE_PAGE_BYTES = 2 << 20
MAKERS_MAX = 8
"""Largest number of threads that allocate one mapping: more would wait for the kernel."""
MAKE_BYTES = 64 << 20
"""Bytes that a thread allocates at a time."""
POPULATE_BYTES = 4 << 20
"""Bytes mapped by one call. Meanwhile, other calls that map memory have to wait."""

# linux/mman.h and linux/mempolicy.h, which Python's mmap lacks
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # from Linux 5.14 on
_MADV_COLLAPSE = 25  # from Linux 6.1 on
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)  # its functions run without the interpreter lock
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_shared(fd: int, size: int, *, writable: bool = True) -> ctypes.Array[ctypes.c_uint8]:
    """Map a file's first ``size`` bytes, a multiple of huge pages, at a huge page's boundary.

    The memory is unmapped when nothing refers to it, or to a view of it, any more. Read-only memory
    has small pages, as ``protect`` would split huge ones. A process that writes to it is killed.

    Raises
    ------
    OSError
        The kernel refuses.
    """
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    whole = _mmap(None, size + HUGE_PAGE_BYTES, 0, reserve, -1)
    address = -(-whole // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if address > whole:
        _libc.munmap(whole, address - whole)
    if rest := whole + HUGE_PAGE_BYTES - address:
        _libc.munmap(address + size, rest)
    try:
        protection = _WRITABLE if writable else mmap.PROT_READ
        _mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(address, size)
        raise
    # has no effect without huge pages
    _libc.madvise(address, size, mmap.MADV_HUGEPAGE if writable else mmap.MADV_NOHUGEPAGE)
    memory = (ctypes.c_uint8 * size).from_address(address)
    finalize(memory, _libc.munmap, address, size).atexit = False  # threads may outlive Python
    return memory


def protect(address: int, size: int, *, writable: bool) -> None:
    """Allow or forbid writes to whole pages of a mapping; raises OSError if the kernel refuses."""
    if _libc.mprotect(address, size, _WRITABLE if writable else mmap.PROT_READ):
        raise _error()


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, size, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        raise _error()
    return found


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _advise(address: int, size: int, advice: int) -> None:
    """Pass the kernel advice on mapped memory; raises OSError."""
    if _libc.madvise(address, size, advice):
        raise _error()


def prefer_nodes(address: int, size: int, nodes: Collection[int]) -> bool:
    """Place memory that is not allocated yet on a NUMA node, or alternate between several nodes.

    Returns False if the kernel does not support it. If a node has no memory left, memory elsewhere
    is used.
    """
    number = _SYS_MBIND.get(platform.machine())
    if not nodes or number is None:
        return False
    mask = ctypes.c_ulong(sum(1 << node for node in set(nodes)))
    policy = _MPOL_PREFERRED if len(set(nodes)) == 1 else _MPOL_INTERLEAVE
    arguments = ctypes.c_void_p(address), ctypes.c_ulong(size), policy
    bits = ctypes.sizeof(mask) * 8
    return not _libc.syscall(number, *arguments, ctypes.byref(mask), ctypes.c_ulong(bits), 0)


def make(address: int, size: int, *, huge: bool) -> float:
    """Allocate a new mapping's memory now, by several threads; return its share in huge pages.

    The memory gets huge pages if possible; if not, the share without them is logged. ``huge`` means
    that the file itself consists of huge pages. Memory that the kernel cannot give is left out
    silently: the caller then allocates all of it once more, and gets the error.
    """
    starts = range(0, size, MAKE_BYTES)
    threads = min(MAKERS_MAX, len(os.sched_getaffinity(0)), len(starts))

    def one(start: int) -> str:
        return _make(address + start, min(MAKE_BYTES, size - start), collapse=not huge)

    if threads == 1:  # a thread takes longer to start than a small arena to make
        said = [one(start) for start in starts]
    else:
        with ThreadPoolExecutor(threads, "kvladder-make") as pool:
            said = [*pool.map(one, starts)]
    refusals = [*filter(None, said)]
    share = len(refusals) / len(starts)
    if refusals:
        logger.info("%.0f %% of the arena has no huge pages: %s", 100 * share, refusals[0])
    return 1.0 - share


def _make(address: int, size: int, *, collapse: bool) -> str:
    """Allocate a part; return why it has no huge pages, or "" if it has or needs none."""
    if not collapse:
        _libc.madvise(address, size, _MADV_POPULATE_WRITE)
        return ""
    try:
        for start in range(0, size, HUGE_PAGE_BYTES):  # empty ranges do not collapse
            _advise(address + start, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        _advise(address, size, _MADV_COLLAPSE)
    except OSError as error:
        _libc.madvise(address, size, _MADV_POPULATE_WRITE)
        return str(error.strerror)
    return ""


def populate(address: int, size: int, *, stop: Callable[[], bool]) -> None:
    """Map memory that another process made; a copy pays 3 to 14 us for each unmapped page."""
    for start in range(0, size, POPULATE_BYTES):
        part = min(POPULATE_BYTES, size - start)
        if stop() or _libc.madvise(address + start, part, _MADV_POPULATE_READ):
            return  # stopped, or the kernel cannot do it: it maps each page at its first use
