"""The copier for KV tensors on a device: its own streams, events, and a bounded staging buffer."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import gcd
from time import perf_counter
from typing import Any, Protocol

import torch

from kvladder.arena import Arena
from kvladder.gpu.copy import CopyJob, Direction, Finished, JobId, ThreadedCopier, require_places
from kvladder.gpu.pages import BlockPages, Page

logger = logging.getLogger("kvladder")

STAGING_BYTES = 64 << 20
"""Device memory per direction for gathering pages into blocks."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the device is past it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device is past it."""
        ...


class Device(Protocol):
    """The few things a copier needs of a device. ``None`` stands for the engine's own stream."""

    def new_stream(self) -> Any:
        """A stream that runs beside the engine's."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """What is told to the device in this context goes to ``stream``."""
        ...

    def mark(self, stream: Any = None) -> Event:
        """An event at the present end of a stream."""
        ...

    def after(self, stream: Any, event: Event) -> None:
        """What ``stream`` is told from now on happens after ``event``."""
        ...

    def pin(self, address: int, size: int) -> bool:
        """Register host memory, so that the device copies from and to it directly.

        False if that cannot be had: copies work, more slowly.
        """
        ...

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        ...


class CudaDevice:
    """CUDA through torch; also what torch calls CUDA on other makers' devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: Any = torch.cuda  # its annotations are incomplete

    def new_stream(self) -> Any:
        return self._cuda.Stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        used: AbstractContextManager[Any] = self._cuda.stream(stream)
        return used

    def mark(self, stream: Any = None) -> Event:
        event: Event = self._cuda.Event()
        (self._cuda.current_stream(self._device) if stream is None else stream).record_event(event)
        return event

    def after(self, stream: Any, event: Event) -> None:
        (self._cuda.current_stream(self._device) if stream is None else stream).wait_event(event)

    def pin(self, address: int, size: int) -> bool:
        with self._cuda.device(self._device):
            error = self._cuda.cudart().cudaHostRegister(address, size, 0)
        return int(error) == 0

    def unpin(self, address: int) -> None:
        self._cuda.cudart().cudaHostUnregister(address)


class HostDevice:
    """Main memory as a device whose every operation is over when it returns; for tests."""

    def new_stream(self) -> Any:
        return "beside the engine"

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def mark(self, stream: Any = None) -> Event:
        return _Past()

    def after(self, stream: Any, event: Event) -> None:
        event.synchronize()

    def pin(self, address: int, size: int) -> bool:
        return address > 0 and size > 0

    def unpin(self, address: int) -> None:
        assert address > 0


class _Past:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class StreamCopier(ThreadedCopier):
    """Gathers a block's pages on the device and moves whole blocks to and from pinned slots.

    The thread only launches; the device copies on one stream per direction while the engine
    computes. Registering the arena with the device, which takes long, happens in the thread.

    Parameters
    ----------
    pages:
        This rank's pages.
    arena:
        Stays open until the copier is closed.
    offset:
        Where this rank's bytes begin in each slot.
    device:
        None: what the pages' device needs.
    staging_bytes:
        Bound of the device memory that each direction uses.
    """

    def __init__(
        self,
        pages: BlockPages,
        arena: Arena,
        *,
        offset: int = 0,
        device: Device | None = None,
        staging_bytes: int = STAGING_BYTES,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        assert 0 <= offset <= arena.slot_bytes - pages.block_bytes
        self._pages = pages
        self._device = CudaDevice(pages.device) if device is None else device
        self._address, self._size = arena.address, arena.size_bytes
        memory = (ctypes.c_uint8 * (arena.slots * arena.slot_bytes)).from_address(arena.address)
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(arena.slots, arena.slot_bytes)
        self._slots = slots[:, offset : offset + pages.block_bytes]
        self._batch = max(1, staging_bytes // pages.block_bytes)
        self._staging: dict[Direction, torch.Tensor] = {}
        self._streams: dict[Direction, Any] = {
            "offload": self._device.new_stream(),
            "onboard": self._device.new_stream(),
        }
        self._launched: list[tuple[CopyJob, float, Event]] = []
        self._pinned: bool | None = None
        super().__init__(name="kvladder-copy", now=now)

    @property
    def block_bytes(self) -> int:
        return self._pages.block_bytes

    def submit(self, job: CopyJob) -> None:
        self._submit(job, self._steps(job, self._device.mark()))

    def _steps(self, job: CopyJob, ready: Event) -> Iterator[None]:
        require_places(job, blocks=self._pages.blocks, slots=self._slots.shape[0])
        self._pin()
        stream = self._streams[job.direction]
        self._device.after(stream, ready)
        with torch.inference_mode():
            for start in range(0, len(job.blocks), self._batch):
                blocks = job.blocks[start : start + self._batch]
                slots = job.slots[start : start + self._batch]
                with self._device.use(stream):
                    if job.direction == "offload":
                        self._offload(blocks, slots)
                    else:
                        self._onboard(blocks, slots)
        return
        yield  # launching is quick: a job is one step

    def _pin(self) -> None:
        if self._pinned is None:
            self._pinned = self._device.pin(self._address, self._size)
            if not self._pinned:
                logger.warning("%d bytes of host memory cannot be pinned: slower", self._size)

    def _room(self, direction: Direction, count: int) -> torch.Tensor:
        """The first rows of a direction's staging buffer; its stream keeps batches apart."""
        if direction not in self._staging:
            shape = (self._batch, self._pages.block_bytes)
            self._staging[direction] = torch.empty(
                shape, dtype=torch.uint8, device=self._pages.device
            )
        return self._staging[direction][:count]

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self._pages.device)

    def _offload(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        rows, ids = self._room("offload", len(blocks)), self._ids(blocks)
        for page in self._pages.pages:
            source, target = _wide(page, rows)
            target.copy_(source.index_select(0, ids))
        for row, slot in zip(rows, slots, strict=True):
            self._slots[slot].copy_(row, non_blocking=True)

    def _onboard(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        rows, ids = self._room("onboard", len(blocks)), self._ids(blocks)
        for row, slot in zip(rows, slots, strict=True):
            row.copy_(self._slots[slot], non_blocking=True)
        for page in self._pages.pages:
            target, source = _wide(page, rows)
            target.index_copy_(0, ids, source)

    def _through(self, job: CopyJob, begun_s: float) -> None:
        done = self._device.mark(self._streams[job.direction])
        with self._changed:
            self._launched.append((job, begun_s, done))
            self._changed.notify_all()

    def _collect(self) -> None:
        """Report what the device is through with."""
        over: list[tuple[CopyJob, float, Event]] = []
        left: list[tuple[CopyJob, float, Event]] = []
        with self._changed:
            for entry in self._launched:
                (over if entry[2].query() else left).append(entry)
            self._launched = left
        for job, begun_s, _ in over:
            self._report(job, begun_s)

    def poll(self) -> list[Finished]:
        self._collect()
        return super().poll()

    def _events(self, ids: Sequence[JobId]) -> list[Event]:
        """The ends of those of these jobs that the device has yet to reach."""
        wanted = set(ids)
        with self._changed:
            self._changed.wait_for(
                lambda: not (wanted & self._active) - {job.id for job, *_ in self._launched}
            )
            return [done for job, _, done in self._launched if job.id in wanted]

    def wait(self, ids: Sequence[JobId]) -> None:
        for done in self._events(ids):
            done.synchronize()
        self._collect()

    def fence(self, ids: Sequence[JobId]) -> None:
        for done in self._events(ids):
            self._device.after(None, done)

    def close(self) -> None:
        super().close()
        self.wait([job.id for job, *_ in self._launched])
        if self._pinned:
            self._device.unpin(self._address)
            self._pinned = False


def _wide(page: Page, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A page and its columns of the staging rows, in the widest elements that fit both."""
    part = rows[:, page.offset : page.offset + page.size_bytes]
    unit = gcd(page.size_bytes, page.stride_bytes, page.view.data_ptr(), part.data_ptr(), 8)
    unit = gcd(unit, rows.stride(0))
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(unit, torch.uint8)
    return page.view.view(dtype), part.view(dtype)
