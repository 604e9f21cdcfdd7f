"""The copier for KV tensors on a device: its own streams, events, and a bounded staging buffer."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import gcd
from time import perf_counter
from typing import Any

import torch

from kvladder.arena import Arena
from kvladder.errors import LayoutError
from kvladder.gpu.copy.copier import (
    Copier,
    CopyJob,
    Direction,
    Finished,
    JobId,
    ThreadedCopier,
    require_places,
)
from kvladder.gpu.copy.cpu import CpuCopier
from kvladder.gpu.copy.pages import BlockPages, Page, Parts, by_group

logger = logging.getLogger("kvladder")

STAGING_BYTES = 64 << 20
"""Device memory per direction for gathering pages into blocks."""


Event = Any
"""A point in a stream's work, which can be asked and waited for: ``torch.cuda.Event``."""


class CudaDevice:
    """The few things a copier needs of CUDA, or of what torch calls CUDA on others' devices.

    ``None`` stands for the engine's own stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: Any = torch.cuda  # its annotations are incomplete

    def new_stream(self) -> Any:
        """A stream that runs beside the engine's."""
        return self._cuda.Stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """What is told to the device in this context goes to ``stream``."""
        used: AbstractContextManager[Any] = self._cuda.stream(stream)
        return used

    def _stream(self, stream: Any) -> Any:
        return self._cuda.current_stream(self._device) if stream is None else stream

    def mark(self, stream: Any = None) -> Event:
        """An event at the present end of a stream."""
        event = self._cuda.Event()
        self._stream(stream).record_event(event)
        return event

    def after(self, stream: Any, event: Event) -> None:
        """What ``stream`` is told from now on happens after ``event``."""
        self._stream(stream).wait_event(event)

    def pin(self, address: int, size: int) -> bool:
        """Register host memory, so that the device copies from and to it directly.

        False if that cannot be had: copies work, more slowly.
        """
        with self._cuda.device(self._device):
            error = self._cuda.cudart().cudaHostRegister(address, size, 0)
        return int(error) == 0

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        self._cuda.cudart().cudaHostUnregister(address)


class StreamCopier(ThreadedCopier):
    """Gathers a block's pages on the device and moves whole blocks to and from pinned slots.

    The thread only launches; the device copies on one stream per direction while the engine
    computes. Registering the arena with the device, which takes long, happens in the thread.

    Parameters
    ----------
    parts:
        This rank's pages, all on one device.
    arena:
        Stays open until the copier is closed.
    device:
        None: what the pages' device needs.
    staging_bytes:
        Bound of the device memory that each direction uses.
    """

    def __init__(
        self,
        parts: Parts,
        arena: Arena,
        *,
        device: CudaDevice | None = None,
        staging_bytes: int = STAGING_BYTES,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self._groups = by_group(parts)
        self._address, self._size = arena.address, arena.size_bytes
        memory = (ctypes.c_uint8 * (arena.slots * arena.slot_bytes)).from_address(arena.address)
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(arena.slots, arena.slot_bytes)
        self._slots: dict[int, torch.Tensor] = {}
        for group, (pages, offset) in self._groups.items():
            assert 0 <= offset <= arena.slot_bytes - pages.block_bytes
            self._slots[group] = slots[:, offset : offset + pages.block_bytes]
        widest = max(part.pages.block_bytes for part in self._groups.values())
        self._staging_bytes = max(staging_bytes, widest)
        self._torch_device = next(iter(self._groups.values())).pages.device
        self._device = CudaDevice(self._torch_device) if device is None else device
        self._staging: dict[Direction, torch.Tensor] = {}
        self._streams: dict[Direction, Any] = {
            "offload": self._device.new_stream(),
            "onboard": self._device.new_stream(),
        }
        self._launched: list[tuple[CopyJob, float, Event]] = []
        self._pinned: bool | None = None
        super().__init__(name="kvladder-copy", now=now)

    def block_bytes(self, group: int) -> int:
        return self._groups[group].pages.block_bytes

    def submit(self, job: CopyJob) -> None:
        self._submit(job, self._steps(job, self._device.mark()))

    def _steps(self, job: CopyJob, ready: Event) -> Iterator[None]:
        pages, slots_of_group = self._groups[job.group].pages, self._slots[job.group]
        require_places(job, blocks=pages.blocks, slots=slots_of_group.shape[0])
        batch = self._staging_bytes // pages.block_bytes
        self._pin()
        stream = self._streams[job.direction]
        self._device.after(stream, ready)
        with torch.inference_mode():
            for start in range(0, len(job.blocks), batch):
                blocks = job.blocks[start : start + batch]
                slots = [slots_of_group[slot] for slot in job.slots[start : start + batch]]
                with self._device.use(stream):
                    self._move(job.direction, pages, blocks, slots)
        return
        yield  # launching is quick: a job is one step

    def _pin(self) -> None:
        if self._pinned is None:
            self._pinned = self._device.pin(self._address, self._size)
            if not self._pinned:
                logger.warning("%d bytes of host memory cannot be pinned: slower", self._size)

    def _room(self, direction: Direction, pages: BlockPages, count: int) -> torch.Tensor:
        """Rows of a direction's staging buffer; its stream keeps batches apart."""
        if direction not in self._staging:
            self._staging[direction] = torch.empty(
                self._staging_bytes, dtype=torch.uint8, device=self._torch_device
            )
        return self._staging[direction][: count * pages.block_bytes].view(count, -1)

    def _move(
        self,
        direction: Direction,
        pages: BlockPages,
        blocks: Sequence[int],
        slots: Sequence[torch.Tensor],
    ) -> None:
        """Copy blocks to slots, by rows of the staging buffer that hold a block each, or back."""
        out = direction == "offload"
        page = pages.pages[0].view
        if len(pages.pages) == 1:  # the engine keeps a block's layers together
            for block, slot in zip(blocks, slots, strict=True):
                source, target = (page[block], slot) if out else (slot, page[block])
                target.copy_(source, non_blocking=True)
            return
        rows = self._room(direction, pages, len(blocks))
        ids = torch.tensor(blocks, dtype=torch.int64).to(self._torch_device)
        for row, slot in zip(rows, slots, strict=True) if not out else ():
            row.copy_(slot, non_blocking=True)
        for one in pages.pages:
            mine, theirs = _wide(one, rows)
            if out:
                theirs.copy_(mine.index_select(0, ids))
            else:
                mine.index_copy_(0, ids, theirs)
        for row, slot in zip(rows, slots, strict=True) if out else ():
            slot.copy_(row, non_blocking=True)

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


def copier_for(parts: Parts, arena: Arena) -> Copier:
    """The copier that fits a device: between these pages and the slots of ``arena``.

    The arena outlives it.

    Raises
    ------
    LayoutError
        The tensors are on a device that there is no copier for.
    """
    device = next(iter(by_group(parts).values())).pages.device
    if device.type == "cpu":
        return CpuCopier(parts, arena)
    if device.type == "cuda":
        return StreamCopier(parts, arena)
    raise LayoutError(f"KV tensors on {device}", hint="expected cpu or cuda")
