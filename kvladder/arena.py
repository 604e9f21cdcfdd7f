"""The arena: fixed-size slots in one shared-memory mapping.

Every byte below the GPU lies in a slot. To pass a block on, its holder passes on a counted claim on
the slot. The mapping is an anonymous file (``memfd_create``). The kernel frees it when the last
process that maps it ends, even by ``kill -9``. The size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import ctypes
import os
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NewType, cast

from kvladder.errors import ArenaError, ConfigError
from kvladder.keys import unseen
from kvladder.layout import PAGE_BYTES, align
from kvladder.mapping import HUGE_PAGE_BYTES, make, map_shared, populate, prefer_nodes, protect

Slot = NewType("Slot", int)
"""Number of a slot, ``0 <= slot < arena.slots``: a physical place, never a block's name."""
NO_SLOT = Slot(-1)

_MEMFD_NAME = "kvladder-arena"


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """The data that another process of the same user needs to map an arena; plain data."""

    pid: int
    fd: int
    slots: int
    slot_bytes: int
    huge_share: float = 0.0
    """Share of its memory in huge pages; 0 if that is not known."""


def memory_available(root: Path = Path("/")) -> int:
    """Return how many bytes this process may still use, on the machine and in its container.

    Reads ``/proc/meminfo`` and the limits of cgroup v2 and v1 below ``root``, enclosing cgroups
    included. Page cache charged to a container, such as a model's files, counts as available.
    """
    available = _meminfo(root, "MemAvailable")
    for folder, (limit_name, used_name, total) in _cgroups(root):
        try:
            limit = (folder / limit_name).read_text().strip()
            used = int((folder / used_name).read_text())
            stat = (folder / "memory.stat").read_text()
        except OSError:
            continue
        for line in stat.splitlines():
            name, _, value = line.partition(" ")
            if name in {f"{total}active_file", f"{total}inactive_file"}:
                used -= int(value)
        if limit.isdigit():
            available = min(available, max(0, int(limit) - max(0, used)))
    return available


_V2 = ("memory.max", "memory.current", "")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folder of each memory cgroup around this process, and the names of its files."""
    own = {"": "", "memory": ""}
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own.update(dict.fromkeys(controllers.split(","), path.strip("/")))
    for base, names, path in (("", _V2, own[""]), ("memory", _V1, own["memory"])):
        top = root / "sys/fs/cgroup" / base
        for folder in (top / path, *(top / path).parents):
            if folder.is_relative_to(top):
                yield folder, names


def _meminfo(root: Path, field: str, *, scale: int = 1024) -> int:
    """Return a field of ``/proc/meminfo`` times ``scale``; 0 if the kernel does not report it."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * scale
    return 0


class Arena:
    """Slots of ``slot_bytes`` each, leased and released by count.

    A slot is free or leased. A leased slot has one or more claims; when the last one is released,
    the slot is free again. Code that may still touch a slot holds a claim. So a slot with a copy in
    flight is never handed out. All methods may be called from any thread.
    """

    def __init__(
        self, fd: int, *, slots: int, slot_bytes: int, huge: bool, writable: bool = True
    ) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.huge = huge
        """True if the mapping has its own huge pages, reserved by the administrator."""
        self.huge_share = 1.0 if huge else 0.0
        """Share of its memory in huge pages; 0 if that is not known."""
        self._fd = fd
        self.size_bytes = align(slots * slot_bytes, HUGE_PAGE_BYTES)
        """Bytes of the whole mapping."""
        memory = map_shared(fd, self.size_bytes, writable=writable)
        self._guarded = not writable
        self.address = ctypes.addressof(memory)
        """Address of slot 0 in this process; slot n begins ``n * slot_bytes`` later."""
        self._memory: ctypes.Array[ctypes.c_uint8] | None = memory
        self._buffer = memoryview(memory).cast("B")
        self._lock = threading.Lock()
        self._claims = unseen([0] * slots)
        self._free = unseen(list(range(slots - 1, -1, -1)))
        self._admitted: dict[object, int] = {}
        self._held_back = unseen(list[int]())
        """Free slots that are not handed out yet; descending."""
        self._closing = False
        self._kept = False
        """True if it is closed but stays mapped, because slots are still claimed."""
        self._populating: threading.Thread | None = None

    @classmethod
    def create(
        cls,
        slots: int,
        slot_bytes: int,
        *,
        nodes: Collection[int] = (),
        available_bytes: int | None = None,
    ) -> Arena:
        """Map ``slots`` slots of ``slot_bytes`` and reserve their memory, near NUMA ``nodes``.

        Raises
        ------
        ConfigError
            The memory is not available; the message says what would fit.
        """
        if slots < 1:
            hint = f"expected room for at least one block, {slot_bytes} bytes"
            raise ConfigError(f"{slots} slots of {slot_bytes} bytes", path="arena.size", hint=hint)
        if slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
            raise ConfigError(f"slots of {slot_bytes} bytes", hint="expected a multiple of 4096")
        size = align(slots * slot_bytes, HUGE_PAGE_BYTES)
        available = memory_available() if available_bytes is None else available_bytes
        huge = _meminfo(Path("/"), "HugePages_Free", scale=HUGE_PAGE_BYTES) >= size
        if size > available and not huge:
            fits = max(0, available * 9 // 10) // slot_bytes * slot_bytes
            raise ConfigError(
                f"{size / 2**30:.2f} GiB do not fit in the {available / 2**30:.2f} GiB of memory"
                " that are available here",
                path="arena.size",
                hint=f"{fits / 2**30:.2f} GiB would fit",
            )
        if huge:
            with suppress(ConfigError):  # another process took them meanwhile
                return cls._reserve(slots, slot_bytes, os.MFD_HUGETLB, nodes)
        return cls._reserve(slots, slot_bytes, 0, nodes)

    @classmethod
    def _reserve(cls, slots: int, slot_bytes: int, flags: int, nodes: Collection[int]) -> Arena:
        size = align(slots * slot_bytes, HUGE_PAGE_BYTES)
        arena, fd = None, -1
        try:
            fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC | flags)
            os.ftruncate(fd, size)
            arena = cls(fd, slots=slots, slot_bytes=slot_bytes, huge=bool(flags))
            prefer_nodes(arena.address, size, nodes)
            arena.huge_share = make(arena.address, size, huge=arena.huge)
            os.posix_fallocate(fd, 0, size)  # does nothing if all is there, else it raises
        except OSError as error:
            if arena is not None:
                arena.close()
            elif fd >= 0:
                os.close(fd)
            what = f"cannot reserve {size} bytes of shared memory: {error.strerror}"
            hint = "make the arena smaller, or raise the memory limit"
            raise ConfigError(what, path="arena.size", hint=hint) from error
        return arena

    @classmethod
    def attach(
        cls, handle: ArenaHandle, *, inherited: int | None = None, writable: bool = True
    ) -> Arena:
        """Map the arena of another process of the same user (or of this one).

        The attached side leases no slots: it only reads and writes those that the owner names. A
        thread that ends with ``close`` maps the pages in the background. A process that inherited
        the descriptor passes its number as ``inherited``. Unless the arena is ``writable``, the
        kernel ends a process that writes to a slot, except between ``allow_writes`` and
        ``forbid_writes``.
        """
        try:
            path = f"/proc/{handle.pid}/fd/{handle.fd}"
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if inherited is None else inherited
        except OSError as error:
            what = f"cannot open the arena of process {handle.pid}: {error.strerror}"
            raise ArenaError(what) from error
        size = align(handle.slots * handle.slot_bytes, HUGE_PAGE_BYTES)
        if os.fstat(fd).st_size != size:
            os.close(fd)
            raise ArenaError(f"arena of process {handle.pid} is not {size} bytes long")
        slots, slot_bytes = handle.slots, handle.slot_bytes
        arena = cls(fd, slots=slots, slot_bytes=slot_bytes, huge=False, writable=writable)
        arena.huge_share = handle.huge_share
        arena._populating = threading.Thread(target=arena._populate, name="kvladder-populate")
        arena._populating.start()
        return arena

    def _populate(self) -> None:
        populate(self.address, self.size_bytes, stop=lambda: self._closing)

    @property
    def handle(self) -> ArenaHandle:
        """Handle for :meth:`attach` in another process; valid while this arena is open."""
        claims, share = len(self._claims), self.huge_share
        return ArenaHandle(os.getpid(), self._fd, claims, self.slot_bytes, share)

    @property
    def free(self) -> int:
        """Number of free slots that may be handed out."""
        return len(self._free)

    def lease(self, count: int) -> list[Slot] | None:
        """Claim ``count`` free slots, all or none; return None at once if there are too few."""
        with self._lock:
            free = self._free
            if count > len(free):
                return None
            taken = free[len(free) - count :][::-1]
            del free[len(free) - count :]
            for slot in taken:
                self._claims[slot] = 1
        return cast("list[Slot]", taken)

    def set_aside(self, count: int) -> list[Slot]:
        """Claim the last ``count`` slots for good and return them. ``slots`` no longer counts them.

        Called before any slot is leased.
        """
        with self._lock:
            aside = sorted(self._free[:count])
            del self._free[:count]
            self.slots -= count
            assert len(self._free) == self.slots >= 0, "expected all slots to be free"
            for slot in aside:
                self._claims[slot] = 1
        return [Slot(slot) for slot in aside]

    @property
    def admitted(self) -> int:
        """Number of slots, from the first, that may be handed out; see ``admit``."""
        return min(self._admitted.values(), default=self.slots)

    def admit(self, who: object, slots: int) -> None:
        """Set the limit of ``who``: from now on, only the first ``slots`` slots are handed out.

        The lowest limit of all callers counts. A caller that copies to a device sets one while the
        device cannot reach all slots.
        """
        with self._lock:
            before = self.admitted
            self._admitted[who] = slots
            after, held = self.admitted, self._held_back
            if after < before:
                held += [slot for slot in self._free if slot >= after]
                held.sort(reverse=True)
                self._free[:] = [slot for slot in self._free if slot < after]
            else:
                first = bisect_right(held, -after, key=lambda slot: -slot)
                self._free[:0] = held[first:]
                del held[first:]

    def share(self, slots: Sequence[Slot]) -> None:
        """Add one claim to each of ``slots``; all of them are leased already."""
        with self._lock:
            claims = self._claims
            if not all(map(claims.__getitem__, slots)):
                free = next(slot for slot in slots if not claims[slot])
                raise ArenaError(f"slot {free} is free: it cannot be shared")
            for slot in slots:
                claims[slot] += 1

    def release(self, slots: Sequence[Slot]) -> None:
        """Give up one claim on each of ``slots``; raise, changing nothing, if one is free."""
        with self._lock:
            claims = self._claims
            for index, slot in enumerate(slots):
                count = claims[slot]
                if count < 1:
                    for undone in slots[:index]:
                        self._unrelease(undone)
                    raise ArenaError(f"slot {slot} is released more often than it was leased")
                claims[slot] = count - 1
                if count == 1:
                    self._free.append(slot)
            ended = self._kept and not any(claims[: self.slots])
            self._kept = self._kept and not ended
        if ended:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._memory))
            self._unmap()

    def _unrelease(self, slot: Slot) -> None:
        if self._claims[slot] == 0:
            self._free.remove(slot)
        self._claims[slot] += 1

    def claims(self, slot: Slot) -> int:
        """Return the number of claims on ``slot``."""
        return self._claims[slot]

    def unshared(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return those of ``slots``, all leased, that have exactly one claim."""
        claims = self._claims
        return [slot for slot in slots if claims[slot] == 1]

    def view(self, slot: Slot) -> memoryview:
        """Return the bytes of ``slot``, writable. The caller holds a claim on it."""
        start = slot * self.slot_bytes
        return self._buffer[start : start + self.slot_bytes]

    def allow_writes(self, slots: Collection[int]) -> None:
        """Allow writes to ``slots`` through this mapping, if it is not writable as a whole.

        Raises
        ------
        OSError
            The kernel refuses; then writes to all of ``slots`` are forbidden.
        """
        if self._guarded:
            try:
                self._protect(slots, writable=True)
            except OSError:
                self.forbid_writes(slots)
                raise

    def forbid_writes(self, slots: Collection[int]) -> None:
        """Forbid writes to ``slots`` through this mapping again; raises OSError."""
        if self._guarded:
            self._protect(slots, writable=False)

    def _protect(self, slots: Collection[int], *, writable: bool) -> None:
        for first, end in _runs(slots):
            start, size = first * self.slot_bytes, (end - first) * self.slot_bytes
            protect(self.address + start, size, writable=writable)

    def check(self) -> None:
        """Assert that every slot is either free or leased and that the states sum up."""
        with self._lock:
            assert len(self._free) == len(set(self._free))
            assert all(self._claims[slot] == 0 for slot in self._free)
            leased = sum(1 for count in self._claims[: self.slots] if count)
            assert min(self._claims, default=0) >= 0
            states = leased, len(self._free), len(self._held_back)
            assert sum(states) == self.slots, states
            assert all(self._claims[slot] == 0 for slot in self._held_back)

    def close(self) -> bool:
        """Unmap; may be called again. Views that are still held keep their memory alive.

        If a slot is still claimed, its holder may still write into it. Then the memory stays mapped
        until the last claim is released or the process ends, and False is returned.
        """
        if self._fd < 0:
            return not self._kept
        self._closing = True
        if self._populating is not None:
            self._populating.join()
        os.close(self._fd)
        with self._lock:
            self._fd = -1
            if any(self._claims[: self.slots]):
                self._kept = True
                # a library's thread may outlive this object, and the end of the interpreter
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
                return False
        self._unmap()
        return True

    def _unmap(self) -> None:
        with suppress(BufferError):  # a view is still held: its holder frees the mapping
            self._buffer.release()
        self._memory = None


def _runs(slots: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield slots as ranges: the first slot of each and the one after its last."""
    first = end = -1
    for slot in sorted(slots):
        if slot != end:
            if end >= 0:
                yield first, end
            first = slot
        end = slot + 1
    if end >= 0:
        yield first, end
