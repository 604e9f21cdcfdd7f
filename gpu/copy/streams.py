"""The copier for KV tensors on a device: three streams, jobs in slices, no thread."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from kvladder.arena import Arena
from kvladder.gpu.copy.addresses import AddressGroup, SliceLimits, UnfitJob
from kvladder.gpu.copy.copier import (
    LANES,
    SHORT_BYTES,
    Copier,
    CopyJob,
    Finished,
    JobId,
    Lane,
    lane_of,
)
from kvladder.gpu.copy.device import Addresses, CopyRuns, Device, Event
from kvladder.gpu.copy.pages import Parts, by_group
from kvladder.gpu.copy.ranges import ranged
from kvladder.gpu.copy.registration import PIECE_BYTES, Registration, piece_slots

STAGING_BYTES = 64 << 20
"""Device memory per stream to gather pages into blocks, if copies are not batched."""
TURN_BYTES = 256 << 10
"""Layers are copied together up to about this size: launching less takes as long as copying it."""
KERNEL_BYTES = 32 << 20
"""Largest slice for the kernel, which occupies processors for less than a millisecond then."""
KERNEL_RUNS_MIN = 16
"""Smallest number of runs for the kernel; launching it takes as long as copying fewer."""
STEP_S = 1.5e-3
"""Time of the engine's thread that a step spends on handing over slices, 2 ms with its rests."""
STEPS_S: Final = 5
"""A next step begins at the first poll after so many times ``STEP_S``."""
PAUSE_S = 200e-6
"""Seconds that an idle engine sleeps before it asks the device again."""


class _Handed(NamedTuple):
    """A slice that was handed over."""

    layers: Sequence[str]
    """Layers that are complete with it."""
    last: bool


@dataclass(slots=True, eq=False)
class _Copy:
    """A job in flight, as far as it was handed to the device."""

    job: CopyJob
    lane: Lane
    ready: Event
    """End of the engine's work that the copy comes after."""
    steps: Iterator[_Handed] = field(default_factory=lambda: iter(()))
    """Hands over one slice at each iteration."""
    whole: bool = False
    """True once all slices were handed over, or none will be any more."""
    begun: Event = None
    done: Event = None
    """Event after the last slice that was handed over."""
    held: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Memory that the device still uses."""
    error: str = ""
    """Reason why it fails; the device still does what was handed over."""
    came: dict[str, Event] = field(default_factory=dict[str, Event])
    """Event after each layer's bytes, for a job that goes by layer."""


class StreamCopier(Copier):
    """Hands jobs to the device in slices; the device copies while the engine computes.

    Every job begins after the work queued on the engine's stream: a save reads bytes that this
    work writes, and a load writes bytes that it may still read. The engine's stream waits for a
    copy only at a fence. A step hands over slices for at most ``step_s`` seconds, and the next
    polls hand over the rest. A fence needs all slices of its jobs, so it hands over these at once.
    Short loads, and those that a forward pass waits for, have a stream of their own.

    The host waits in ``wait``, ``rest`` and ``drain``, and in a fence after a failure. The arena is
    registered in the background. A job with a slot that is not registered fails.

    Parameters
    ----------
    parts:
        This rank's pages, all on one device.
    arena:
        Must stay open until the copier is closed.
    staging_bytes:
        Largest device memory that each stream uses to gather pages, if the device cannot copy
        them in one call. It is halved until there is room for it.
    turn_bytes:
        Approximate least bytes to copy before an event marks the layers that are complete.
    slice_bytes:
        Largest slice, unless a single block has more; a load of one slice is short.
    step_s:
        Most seconds that a step spends on handing over slices, beside the first of them.
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
        slice_bytes: int = SHORT_BYTES,
        step_s: float = STEP_S,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._arena, self._parts = arena, by_group(parts)
        self._piece_slots = piece_slots(arena, piece_bytes)
        self.device = device
        self.moved()
        self._staging_bytes = staging_bytes
        self._turn_bytes = turn_bytes
        self._slice_bytes = slice_bytes
        self._staging: dict[Lane, torch.Tensor] = {}
        self._streams = {
            lane: device.new_stream(urgent=lane == "urgent") for lane in reversed(LANES)
        }
        self._waiting: dict[Lane, list[_Copy]] = {lane: [] for lane in LANES}
        """Jobs with slices to hand over, in order."""
        self._turns: list[Lane] = ["onboard", "offload"]
        """The lanes whose slices take turns, the next one first."""
        self._step_s = step_s
        self._begun_s = device.now()
        """Begin of the step."""
        self._used_s = 0.0
        """Time that the step has spent on handing over slices."""
        self._slice_s = 0.0
        """Time that the last slice took."""
        self._launched: list[_Copy] = []
        """Jobs that were handed over and have not ended."""
        self._finished: list[Finished] = []
        self._closed = False
        self._process = os.getpid()
        self._registration = Registration(device, arena, piece_bytes=piece_bytes)

    @property
    def settled(self) -> bool:
        return self._registration.over

    def moved(self) -> None:
        most = max(self.device.runs_max, self.device.move_runs_max)
        self._groups = {
            group: AddressGroup(part, self._arena, self._piece_slots, most)
            for group, part in self._parts.items()
        }

    def submit(self, job: CopyJob, *, by_layer: bool = False, urgent: bool = False) -> None:
        if self._closed:
            self._finished.append(Finished(job.id, False, 0, 0.0, "the copier is closed"))
            return
        try:
            group = self._groups[job.group]
            lane = self._lane(job, group.part.pages.block_bytes, urgent=urgent or by_layer)
            copy = _Copy(job, lane, self.device.mark())
            copy.steps = self._steps(group, copy, by_layer=by_layer and self.device.batched)
        except Exception as error:  # noqa: BLE001 - whatever it is, the bytes do not arrive
            self._finished.append(Finished(job.id, False, 0, 0.0, repr(error)))
            return
        self._waiting[lane].append(copy)
        self._hand_over()

    def _lane(self, job: CopyJob, block_bytes: int, *, urgent: bool) -> Lane:
        return lane_of(job, block_bytes, urgent=urgent, short_bytes=self._slice_bytes)

    # ---- slices

    def _hand_over(self) -> None:
        """Hand over slices until the step's time is used; some take longer than the one before."""
        now_s = self.device.now()
        if now_s - self._begun_s >= STEPS_S * self._step_s:
            self._begun_s, self._used_s = now_s, 0.0
        while not self._used_s or self._used_s + 2 * self._slice_s <= self._step_s:
            if not self._hand_one():
                return

    def _hand_one(self) -> bool:
        """Hand over the next slice of all jobs; return False if there is none."""
        for lane in ("urgent", *self._turns):
            if self._waiting[lane]:
                if lane == self._turns[0]:
                    self._turns.reverse()
                self._hand(self._waiting[lane][0])
                return True
        return False

    def _hand(self, copy: _Copy) -> None:
        """Hand over a job's next slice, with an event after it."""
        begun_s, stream = self.device.now(), self._streams[copy.lane]
        handed, nothing = _Handed((), last=True), False
        try:
            if copy.begun is None:
                self.device.after(stream, copy.ready)
                copy.begun = self.device.mark(stream)
            with ranged(copy.job.direction, len(copy.job.blocks)):
                handed = next(copy.steps, handed)
        except UnfitJob as error:
            copy.error, nothing = str(error), copy.done is None
        except Exception as error:  # noqa: BLE001 - whatever it is, the bytes do not arrive
            copy.error = repr(error)
        try:
            if not nothing:
                copy.done = self.device.mark(stream)
        except RuntimeError as error:  # a device that refuses a mark does no more work
            copy.error, nothing = copy.error or repr(error), True
        copy.came.update(dict.fromkeys(handed.layers, copy.done))
        if handed.last or nothing:
            copy.whole = True
            self._waiting[copy.lane].remove(copy)
            if nothing:
                self._report(copy, copy.error)
            else:
                self._launched.append(copy)
        self._slice_s = self.device.now() - begun_s
        self._used_s += self._slice_s

    def _steps(self, group: AddressGroup, copy: _Copy, *, by_layer: bool) -> Iterator[_Handed]:
        """Hand over a slice of a job at each iteration; the kernel moves small pages of loads."""
        job, device, most = copy.job, self.device, self._slice_bytes
        small = group.run_bytes(by_layer=by_layer) <= device.small_bytes
        small = small and job.direction == "onboard"
        if not (device.batched or len(group.part.pages.pages) == 1 or small):
            yield from self._staged(group, copy)
            return
        limits = SliceLimits(most, device.runs_max)
        if small:
            limits = SliceLimits(min(most, KERNEL_BYTES), device.move_runs_max)
        slices = group.whole(job, limits)
        if by_layer:
            slices = group.by_layer(job, limits, self._turn_bytes)
        for part in slices:
            self._require_registered(part.top)
            self._copy(copy.lane, part.runs, small=small)
            yield _Handed(part.layers, part.last)

    def _require_registered(self, slot: int) -> None:
        """Raise UnfitJob unless all slots up to this one are registered."""
        if slot >= self._registration.ready:
            what = f"slot {slot} is not registered with the device"
            raise UnfitJob(f"{what}; it has registered {self._registration.ready}")

    def _copy(self, lane: Lane, runs: CopyRuns, *, small: bool = False) -> None:
        """Hand runs to the device, in one call if possible."""
        stream, count, most = self._streams[lane], len(runs.sizes), self.device.runs_max
        if small and count >= KERNEL_RUNS_MIN and self.device.move(stream, runs):
            return
        for first in range(0, count, most):
            targets, sources, sizes = (row[first : first + most] for row in runs[:3])
            self.device.copy(stream, CopyRuns(targets, sources, sizes, runs.steady))

    def _staged(self, group: AddressGroup, copy: _Copy) -> Iterator[_Handed]:
        """Hand over a job by rows of staging memory, of as many blocks as fit in at a time."""
        places, size, start = group.places(copy.job), group.part.pages.block_bytes, 0
        while start < places.count:
            end = min(start + max(1, self._staging_bytes // size), places.count)
            _, slots = places.between(start, end)
            self._require_registered(int(slots.max()))
            try:
                self._stage(group, copy, copy.job.blocks[start:end], slots)
            except torch.OutOfMemoryError:
                if end - start == 1:
                    raise
                self._staging_bytes = (end - start) // 2 * size
            else:
                start = end
                yield _Handed((), start == places.count)

    def _stage(
        self, group: AddressGroup, copy: _Copy, blocks: Sequence[int], slots: Addresses
    ) -> None:
        """Gather blocks' pages into rows and copy rows to slots, or do the reverse."""
        stream, out = self._streams[copy.lane], copy.job.direction == "offload"
        pages = group.part.pages
        size = len(blocks) * pages.block_bytes
        memory = self._staging.get(copy.lane)
        if memory is None or len(memory) < size:
            if memory is not None:  # earlier copies still use it
                copy.held.append(memory)
            memory = self.device.staging(max(size, self._staging_bytes))
            self._staging[copy.lane] = memory
        rows = memory[:size].view(len(blocks), -1)
        ids = self.device.ids(blocks)
        copy.held.append(ids)
        if out:
            self.device.gather(stream, pages.pages, ids, rows, out=True)
        self._copy(copy.lane, group.rows(copy.job.direction, rows, slots))
        if not out:
            self.device.gather(stream, pages.pages, ids, rows, out=False)

    # ---- ends

    def _report(self, copy: _Copy, error: str) -> None:
        job, seconds = copy.job, 0.0
        if not error:
            seconds = self.device.seconds(copy.begun, copy.done)
        size = 0 if error else len(job.blocks) * self._groups[job.group].part.pages.block_bytes
        self._finished.append(Finished(job.id, not error, size, seconds, error))

    def _collect(self, wait: Collection[JobId] = ()) -> None:
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
        self._hand_over()
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def _named(self, ids: Collection[JobId]) -> list[_Copy]:
        """Return the jobs in flight with these ids."""
        waiting = (copy for lane in LANES for copy in self._waiting[lane])
        return [copy for copy in (*self._launched, *waiting) if copy.job.id in ids]

    def wait(self, ids: Sequence[JobId]) -> None:
        wanted = set(ids)
        for copy in self._named(wanted):
            while not copy.whole:
                self._hand(copy)
        self._collect(wait=wanted)

    def rest(self, timeout_s: float) -> None:
        end_s = self.device.now() + timeout_s
        while True:
            self._collect()
            left_s = end_s - self.device.now()
            if self._finished or left_s <= 0:
                return
            if not self._hand_one():
                self.device.pause(min(left_s, PAUSE_S) if self._launched else left_s)

    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        for copy in self._named(set(ids)):
            while not copy.whole and (layer is None or layer not in copy.came):
                self._hand(copy)
            if copy.done is None:  # it failed, and that is reported
                continue
            came = copy.done if layer is None else copy.came.get(layer, copy.done)
            self.device.after(None, came)
            if copy.error and copy.job.direction == "onboard":
                self.device.wait(copy.done)  # it must be reported before the blocks are read

    def drain(self) -> None:
        waiting = (copy for lane in LANES for copy in self._waiting[lane])
        self.wait([copy.job.id for copy in (*self._launched, *waiting)])

    def close(self) -> None:
        if self._closed or os.getpid() != self._process:  # a forked process has no device
            return
        self._closed = True
        self.drain()
        self._staging.clear()
        self._registration.close()
