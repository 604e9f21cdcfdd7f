"""Memory of a played machine: devices', page-locked, registered; torch's allocators.

Memory that torch frees is kept, and overwritten as soon as another tensor might get it.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tests.kit.played import rules
from tests.kit.played.machine import Machine, Stream

GARBAGE = 0xEE
ALIGNMENT = 512
HOST = (-1, 0)
ALIAS = 1 << 46
"""Distance of a device's pointer to host memory, where the host's own is not usable."""
Kind = Literal["device", "pinned", "registered", "pageable"]


@dataclass(eq=False)
class Region:
    """Memory of one kind."""

    start: int
    size: int
    kind: Kind
    device: int
    owner: Any = None
    stream: Stream | None = None
    """The stream that torch allocated it on."""
    used: list[Stream] = field(default_factory=list[Stream])
    """Other streams recorded for it."""
    portable: bool = True
    free: bool = False
    """True once torch may give the memory to another tensor."""

    def release(self) -> None:
        """Let the memory be another's, which writes to it."""
        self.free = True
        ctypes.memset(self.start, GARBAGE, self.size)


class Span(NamedTuple):
    """A tensor's place in memory; it does not keep the memory."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Span:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def size(self) -> int:
        """Bytes from the first to the last element."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """Return an ordinary tensor over this memory."""
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype)
        memory = (ctypes.c_char * self.size).from_address(self.address)
        flat = torch.frombuffer(memory, dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride)


class Memory:
    """All memory of a machine that is not pageable.

    Parameters
    ----------
    room:
        Free bytes of each device.
    register_max, registered_max:
        Largest registration, and the largest sum of all.
    same_pointers:
        Whether devices may use the host's own pointers to registered memory.
    pageable_access:
        Whether kernels reach pageable memory.
    keeps_host:
        Whether torch keeps freed page-locked memory until its own copies have ended. It does, but
        nothing documents it. vLLM relies on it.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        room: int = 1 << 40,
        register_max: int = 1 << 40,
        registered_max: int = 1 << 50,
        same_pointers: bool = True,
        pageable_access: bool = False,
        keeps_host: bool = False,
    ) -> None:
        self._machine = machine
        self.room = dict.fromkeys(range(machine.devices), room)
        self.register_max = register_max
        self.registered_max = registered_max
        self.same_pointers = same_pointers
        self.pageable_access = pageable_access
        self.keeps_host = keeps_host
        self.unmapped: list[tuple[int, int]] = []
        self._starts: list[int] = []
        self._regions: dict[int, Region] = {}
        self._free: dict[tuple[int, int], list[Region]] = defaultdict(list)
        """Memory to use again, by device and stream; host memory by (-1, 0)."""

    # ---- regions

    def add(self, region: Region) -> None:
        self._starts.insert(bisect_right(self._starts, region.start), region.start)
        self._regions[region.start] = region

    def drop(self, region: Region) -> None:
        self._starts.remove(region.start)
        del self._regions[region.start]

    def overlapping(self, address: int, size: int) -> list[Region]:
        """Return the regions that share bytes with a range."""
        at = max(0, bisect_right(self._starts, address) - 1)
        found: list[Region] = []
        for start in self._starts[at:]:
            if start >= address + size:
                break
            if address < start + self._regions[start].size:
                found.append(self._regions[start])
        return found

    def at(self, address: int) -> Region | None:
        """Return the region of an address; None in pageable memory."""
        return next(iter(self.overlapping(address, 1)), None)

    def beginning(self, address: int) -> Region | None:
        """Return the region that begins at an address."""
        return self._regions.get(address)

    @property
    def registered(self) -> int:
        """Bytes of host memory that are registered."""
        kinds = self._regions.values()
        return sum(region.size for region in kinds if region.kind == "registered")

    def translated(self, address: int) -> int:
        """Return the host's pointer for a device's pointer to host memory."""
        if self.same_pointers:
            return address
        there = self.at(address - ALIAS)
        return address - ALIAS if there is not None and there.kind != "device" else address

    # ---- access

    def touch(self, address: int, size: int) -> None:
        """Check that memory is mapped, and not freed."""
        for at, length in self.unmapped:
            if address < at + length and at < address + size:
                raise self._machine.violate(rules.UNMAPPED, "unmapped memory was touched")
        for region in self.overlapping(address, size):
            if region.free:
                rule = rules.FREED_HOST if region.kind == "pinned" else rules.ALLOCATOR
                raise self._machine.violate(rule, "memory was freed while it was in use")

    def reach(self, span: Span, device: int) -> Span:
        """Check that a kernel on ``device`` may access memory; return where it is for the host."""
        size = span.size
        if not size:
            return span
        if span.address % span.dtype.itemsize:
            raise self._machine.violate(rules.ALIGNED, f"{span.dtype} at {span.address:#x}")
        here = span._replace(address=self.translated(span.address))
        self.touch(here.address, size)
        found = self.overlapping(here.address, size)
        kinds = {region.kind for region in found}
        if not _covered(here.address, size, found):
            if self.pageable_access and "device" not in kinds:
                return here
            raise self._machine.violate(
                rules.KERNEL_HOST, "a kernel reads or writes memory that is not registered"
            )
        if any(region.kind == "device" and region.device != device for region in found):
            raise self._machine.violate(rules.PEER, f"a kernel on device {device} elsewhere")
        if "registered" in kinds and not self.same_pointers and here.address == span.address:
            raise self._machine.violate(rules.HOST_POINTER, "a host's pointer on a device")
        return here

    # ---- torch's allocators

    def take(self, kind: Kind, device: int, size: int, stream: Stream | None) -> NDArray[np.uint8]:
        """Return memory; it is freed with the array, and with the tensors over it."""
        region = self._reused(device, size, stream)
        if region is None:
            if stream is not None and size > self.room[device]:
                raise torch.OutOfMemoryError(f"{size} bytes")
            whole = np.full(size + ALIGNMENT, GARBAGE, np.uint8)
            offset = -whole.ctypes.data % ALIGNMENT
            region = Region(whole.ctypes.data + offset, max(size, 1), kind, device, whole, stream)
            self.add(region)
        if stream is not None:
            self.room[device] -= region.size
        offset = region.start - region.owner.ctypes.data
        handle: NDArray[np.uint8] = region.owner[offset : offset + size]
        weakref.finalize(handle, self._freed, region).atexit = False
        return handle

    def _reused(self, device: int, size: int, stream: Stream | None) -> Region | None:
        """Return freed memory of that stream, or of the host."""
        free = self._free[HOST if stream is None else (device, stream.cuda_stream)]
        room = self.room[device] if stream is not None else size
        for region in free:
            if size <= region.size <= room and region.size <= 2 * size:
                free.remove(region)
                region.free = False
                return region
        return None

    def _freed(self, region: Region) -> None:
        """Let others have memory once the streams that torch knows of no longer use it."""
        streams = [*region.used] if region.stream is None else [region.stream, *region.used]
        region.used = []
        key = HOST if region.stream is None else (region.device, region.stream.cuda_stream)
        if region.stream is not None:
            self.room[region.device] += region.size

        def again() -> None:
            region.release()
            self._free[key].append(region)

        if streams:
            self._machine.after([stream.moment() for stream in streams], again)
        else:
            again()

    # ---- what tests do

    def own(self, tensor: torch.Tensor, device: int) -> None:
        """Have an ordinary tensor's storage be device memory."""
        storage = tensor.untyped_storage()
        if self.beginning(storage.data_ptr()) is None:
            self.add(Region(storage.data_ptr(), storage.nbytes(), "device", device, storage))

    def unmap(self, tensor: torch.Tensor) -> None:
        """Unmap a tensor's memory, as a sleeping engine does."""
        storage = tensor.untyped_storage()
        self.unmapped.append((storage.data_ptr(), storage.nbytes()))


def _covered(address: int, size: int, regions: Sequence[Region]) -> bool:
    """Return whether regions in order hold a whole range."""
    at = address
    for region in regions:
        if region.start > at:
            return False
        at = region.start + region.size
    return at >= address + size
