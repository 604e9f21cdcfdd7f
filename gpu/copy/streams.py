"""The copier for KV tensors on a device: two streams, one call per job, no thread."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvladder.arena import Arena
from kvladder.gpu.copy.copier import (
    Copier,
    CopyJob,
    Direction,
    Finished,
    JobId,
    require_places,
)
from kvladder.gpu.copy.device import Addresses, CopyRuns, Device, Event, Stream
from kvladder.gpu.copy.pages import Page, Parts, RankShare, by_group
from kvladder.gpu.copy.ranges import ranged
from kvladder.gpu.copy.registration import PIECE_BYTES, Registration, piece_slots

STAGING_BYTES = 64 << 20
"""Device memory per direction to gather pages into blocks, if copies are not batched."""
TURN_BYTES = 256 << 10
"""Layers are copied together up to about this size: launching less takes as long as copying it."""
PAUSE_S = 200e-6
"""Seconds that an idle engine sleeps before it asks the device again."""


@dataclass(slots=True)
class _Launched:
    """A job that was handed to the device."""

    job: CopyJob
    begun: Event
    done: Event
    held: list[torch.Tensor]
    """Memory that the device still uses."""
    error: str
    """Reason why only a part was handed over; the device still does that part."""
    came: dict[str, Event] = field(default_factory=dict[str, Event])
    """Event after each layer's bytes, for a job that goes by layer."""


class StreamCopier(Copier):
    """Submits a job to the device at once; the device copies while the engine computes.

    Both directions begin after the work queued on the engine's stream: a save reads bytes that this
    work writes, and a load writes bytes that it may still read. The engine's stream waits for a
    copy only at a fence. The host waits in ``wait``, ``rest`` and ``drain``, and in a fence after a
    failure. The arena is registered in the background.

    Parameters
    ----------
    parts:
        This rank's pages, all on one device.
    arena:
        Must stay open until the copier is closed.
    staging_bytes:
        Largest device memory that each direction uses to gather pages, if the device cannot copy
        them in one call. It is halved until there is room for it.
    turn_bytes:
        Approximate least bytes to copy before an event marks the layers that are complete.
    piece_bytes:
        Bytes of the arena's memory that one call registers.
    """

    def __init__(
        self,
        parts: Parts,
        arena: Arena,
        device: Device,
        *,
        staging_bytes: int = STAGING_BYTES,
        turn_bytes: int = TURN_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._arena, self._parts = arena, by_group(parts)
        self._piece_slots = piece_slots(arena, piece_bytes)
        self.moved()
        self.device = device
        self._slots = arena.slots
        self._staging_bytes = staging_bytes
        self._turn_bytes = turn_bytes
        self._staging: dict[Direction, torch.Tensor] = {}
        self._streams = {"offload": device.new_stream(), "onboard": device.new_stream()}
        self._launched: list[_Launched] = []
        self._finished: list[Finished] = []
        self._closed = False
        self._process = os.getpid()
        self._registration = Registration(device, arena, piece_bytes=piece_bytes)

    def moved(self) -> None:
        self._groups = {
            group: _AddressGroup(part, self._arena, self._piece_slots)
            for group, part in self._parts.items()
        }

    def submit(self, job: CopyJob, *, by_layer: bool = False) -> None:
        if self._closed:
            self._finished.append(Finished(job.id, False, 0, 0.0, "the copier is closed"))
            return
        launched: _Launched | None = None
        try:
            group = self._groups[job.group]
            require_places(job, blocks=group.part.pages.blocks, slots=self._slots)
            stream = self._streams[job.direction]
            self.device.after(stream, self.device.mark())
            begun = self.device.mark(stream)
            launched = _Launched(job, begun, begun, [], "")
            with ranged(job.direction, len(job.blocks)):
                if by_layer and self.device.batched:
                    self._launch_layers(group, launched)
                else:
                    self._launch(group, launched)
        except Exception as error:  # noqa: BLE001 - whatever it is, the bytes do not arrive
            if launched is None:
                self._finished.append(Finished(job.id, False, 0, 0.0, repr(error)))
                return
            launched.error = repr(error)
        self._mark_end(launched)

    def _mark_end(self, launched: _Launched) -> None:
        """Mark the end of a job in its stream, even if only a part of it was handed over."""
        try:
            launched.done = self.device.mark(self._streams[launched.job.direction])
        except RuntimeError as error:  # a device that refuses a mark does no more work
            self._report(launched, launched.error or repr(error))
        else:
            self._launched.append(launched)

    def _launch(self, group: _AddressGroup, launched: _Launched) -> None:
        """Hand a whole job to the device: in one call, or by rows of staging memory."""
        job, stream = launched.job, self._streams[launched.job.direction]
        batch = group.whole(job)
        if self.device.batched or len(group.part.pages.pages) == 1 or self._small(job, batch):
            self._copy(stream, batch, launched)
            return
        start = 0
        while start < len(job.blocks):
            part = self._within_staging(job, start, group)
            try:
                self._stage(group, part, launched)
            except torch.OutOfMemoryError:
                if len(part.blocks) == 1:
                    raise
                self._staging_bytes = len(part.blocks) // 2 * group.part.pages.block_bytes
            else:
                start += len(part.blocks)

    def _launch_layers(self, group: _AddressGroup, launched: _Launched) -> None:
        """Hand a job to the device layer by layer, with an event after each."""
        stream = self._streams[launched.job.direction]
        for names, batch in group.by_layer(launched.job, self._turn_bytes):
            self._copy(stream, batch, launched)
            launched.came.update(dict.fromkeys(names, self.device.mark(stream)))

    def _small(self, job: CopyJob, batch: CopyRuns) -> bool:
        """Return whether the kernel moves a batch: its runs are small, and its slots registered."""
        most = self.device.small_bytes * len(batch.sizes)
        return bool(most) and batch.sizes.sum() <= most and self._registration.holds(job.slots)

    def _copy(self, stream: Stream, batch: CopyRuns, launched: _Launched) -> None:
        """Hand a batch to the device in one call."""
        if self._small(launched.job, batch):
            launched.held.append(self.device.move(stream, batch))
        else:
            self.device.copy(stream, batch)

    def _within_staging(self, job: CopyJob, start: int, group: _AddressGroup) -> CopyJob:
        """Return the part of a job from ``start`` that fits into staging, at least one block."""
        end = start + max(1, self._staging_bytes // group.part.pages.block_bytes)
        return CopyJob(
            job.id, job.direction, job.blocks[start:end], job.slots[start:end], job.group
        )

    def _stage(self, group: _AddressGroup, job: CopyJob, launched: _Launched) -> None:
        """Gather the blocks' pages into rows and copy rows to slots, or do the reverse."""
        stream, out = self._streams[job.direction], job.direction == "offload"
        pages = group.part.pages
        size = len(job.blocks) * pages.block_bytes
        memory = self._staging.get(job.direction)
        if memory is None or len(memory) < size:
            if memory is not None:  # earlier copies still use it
                launched.held.append(memory)
            memory = self.device.staging(max(size, self._staging_bytes))
            self._staging[job.direction] = memory
        rows = memory[:size].view(len(job.blocks), -1)
        ids = self.device.ids(job.blocks)
        launched.held.append(ids)
        if out:
            self.device.gather(stream, pages.pages, ids, rows, out=True)
        self._copy(stream, group.rows(job, rows), launched)
        if not out:
            self.device.gather(stream, pages.pages, ids, rows, out=False)

    def _report(self, launched: _Launched, error: str) -> None:
        job, seconds = launched.job, 0.0
        if not error:
            seconds = self.device.seconds(launched.begun, launched.done)
        size = 0 if error else len(job.blocks) * self._groups[job.group].part.pages.block_bytes
        self._finished.append(Finished(job.id, not error, size, seconds, error))

    def _collect(self, wait: Sequence[JobId] = ()) -> None:
        """Report the jobs that the device has finished, and wait for those in ``wait``."""
        launched, self._launched = self._launched, []
        for one in launched:
            try:
                if one.job.id in wait:
                    self.device.wait(one.done)
                if self.device.is_over(one.done):
                    self._report(one, one.error)
                else:
                    self._launched.append(one)
            except RuntimeError as error:  # the device failed: no bytes arrive any more
                self._report(one, one.error or repr(error))

    def poll(self) -> list[Finished]:
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, ids: Sequence[JobId]) -> None:
        self._collect(wait=ids)

    def rest(self, timeout_s: float) -> None:
        end_s = self.device.now() + timeout_s
        while True:
            self._collect()
            left_s = end_s - self.device.now()
            if self._finished or left_s <= 0:
                return
            self.device.pause(min(left_s, PAUSE_S) if self._launched else left_s)

    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        wanted = set(ids)
        for one in self._launched:
            if one.job.id in wanted:
                came = one.done if layer is None else one.came.get(layer, one.done)
                self.device.after(None, came)
                if one.error:  # a known failure must be reported before the blocks are read
                    self.device.wait(one.done)

    def drain(self) -> None:
        self._collect(wait=[one.job.id for one in self._launched])

    def close(self) -> None:
        if self._closed or os.getpid() != self._process:  # a forked process has no device
            return
        self._closed = True
        self.drain()
        self._staging.clear()
        self._registration.close()


class _AddressGroup:
    """Addresses of one group's blocks on both sides, as arrays for calculations."""

    def __init__(self, part: RankShare, arena: Arena, piece_slots: int) -> None:
        self.part = part
        self._piece_slots = piece_slots
        assert 0 <= part.offset <= arena.slot_bytes - part.pages.block_bytes
        self._slot_bytes = arena.slot_bytes
        self._first_slot = arena.address + part.offset
        self._pages = _Columns.of(part.pages.pages)
        self._layers = _Columns.of(part.pages.layers)
        self._dense = [(page.size_bytes, page.stride_bytes) for page in part.pages.pages] == [
            (arena.slot_bytes, arena.slot_bytes)
        ]
        """True if neighbouring blocks are one run of bytes on both sides."""

    def whole(self, job: CopyJob) -> CopyRuns:
        """Return a job as runs of bytes, page by page; if dense, neighbours form one run.

        No run crosses two registered pieces of the arena: the device would refuse it.
        """
        blocks, slots = _numbers(job.blocks), _numbers(job.slots)
        sizes = np.broadcast_to(self._pages.sizes, (len(self._pages.sizes), len(blocks)))
        if self._dense and len(blocks) > 1:
            apart = (np.diff(blocks) != 1) | (np.diff(slots) != 1)
            apart |= np.diff(slots // self._piece_slots) != 0
            begins = np.concatenate([[0], np.flatnonzero(apart) + 1])
            counts = np.diff(begins, append=len(blocks)).astype(np.uint64)
            blocks, slots, sizes = blocks[begins], slots[begins], self._pages.sizes * counts
        mine, theirs = self._pages.ends(blocks, self._at(slots))
        return _batch(job, mine.ravel(), theirs.ravel(), np.ascontiguousarray(sizes).ravel())

    def by_layer(self, job: CopyJob, turn_bytes: int) -> Iterator[tuple[list[str], CopyRuns]]:
        """Yield a job as batches of one layer, or of several up to about ``turn_bytes``.

        With each batch come the names of the layers that are complete after it.
        """
        slots = self._at(_numbers(job.slots))
        mine, theirs = self._layers.ends(_numbers(job.blocks), slots)
        sizes = np.repeat(self._layers.sizes, len(job.blocks), axis=1)
        layers = self.part.pages.layers
        first, told = 0, 0
        for end, layer in enumerate(layers, start=1):
            told += layer.size_bytes * len(job.blocks)
            if told >= turn_bytes or end == len(layers):
                names = [name for page in layers[first:end] for name in page.names]
                part = (ends[first:end].ravel() for ends in (mine, theirs, sizes))
                yield names, _batch(job, *part)
                first, told = end, 0

    def rows(self, job: CopyJob, rows: torch.Tensor) -> CopyRuns:
        """Return the copies between rows of staging memory and the job's slots."""
        size = rows.stride(0)
        mine = np.uint64(rows.data_ptr()) + np.arange(len(rows), dtype=np.uint64) * np.uint64(size)
        theirs = self._at(_numbers(job.slots))
        return _batch(job, mine, theirs, np.full(len(rows), size, np.uint64))

    def _at(self, slots: Addresses) -> Addresses:
        return np.uint64(self._first_slot) + slots * np.uint64(self._slot_bytes)


class _Columns(NamedTuple):
    """Page numbers as columns, to be combined with rows of blocks."""

    bases: Addresses
    strides: Addresses
    sizes: Addresses
    offsets: Addresses

    @classmethod
    def of(cls, pages: Sequence[Page]) -> _Columns:
        return cls(
            _column(page.view.data_ptr() for page in pages),
            _column(page.stride_bytes for page in pages),
            _column(page.size_bytes for page in pages),
            _column(page.offset for page in pages),
        )

    def ends(self, blocks: Addresses, slots: Addresses) -> tuple[Addresses, Addresses]:
        """Return the address of each page of each block, on the device and in its slot."""
        return self.bases + self.strides * blocks, self.offsets + slots


def _column(numbers: Iterable[int]) -> Addresses:
    return np.array([*numbers], np.uint64)[:, None]


def _numbers(places: Sequence[int]) -> Addresses:
    return np.array(places, np.uint64)


def _batch(job: CopyJob, mine: Addresses, theirs: Addresses, sizes: Addresses) -> CopyRuns:
    """Return the runs in the job's direction; slots to load from are claimed, and so steady."""
    if job.direction == "offload":
        return CopyRuns(theirs, mine, sizes, steady=False)
    return CopyRuns(mine, theirs, sizes, steady=True)
