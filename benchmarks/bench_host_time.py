"""Measures the time of the engine's thread in calls of a copier: submit, poll and fence.

The limit is the budget of a step, 2 ms. A device with CUDA is used if there is one, and memory for
the blocks. Otherwise a silent device does nothing with the runs that it is handed, and no memory
is touched. Then the driver's own time for each run is missing, and the figures are the thread's
processor time, so that a busy machine changes them little. The longest step of a round is reported,
in the median of several rounds.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, thread_time
from typing import Any, cast

import numpy as np
import torch

from benchmarks.row import Row
from kvladder.arena import Arena, Slot, memory_available
from kvladder.gpu.copy.copier import CopyJob, Direction, JobId
from kvladder.gpu.copy.cuda import CudaDevice
from kvladder.gpu.copy.device import CopyRuns, Device, Event, Stream
from kvladder.gpu.copy.kernel import SMALL_BYTES, table_of
from kvladder.gpu.copy.pages import BlockPages, Page
from kvladder.gpu.copy.streams import StreamCopier

CUDA: Any = torch.cuda  # its annotations are incomplete
clock = perf_counter if torch.cuda.is_available() else thread_time
ROUNDS = 5
BUDGET_S = 2e-3
"""Most time of a step for all calls of a copier."""
STEP_LENGTH_S = 10e-3
"""Length of a step of the engine."""
STEPS_MAX = 10_000
MAP_NORESERVE = 0x4000
"""From linux/mman.h: memory that is never touched need not exist."""


@dataclass(frozen=True)
class Shape:
    """Blocks to load in one job."""

    name: str
    blocks: int
    layers: int
    page_bytes: int
    together: bool = False
    """True if a block's layers lie together."""
    by_layer: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the job."""
        return self.blocks * self.layers * self.page_bytes

    @property
    def runs(self) -> int:
        """Runs of bytes of the job, unless neighbours are joined."""
        return self.blocks * (1 if self.together and not self.by_layer else self.layers)


SHAPES = (
    Shape("LBHNC", 8192, 80, 64 << 10),
    Shape("LBHNC, pages for the kernel", 8192, 80, 8 << 10),
    Shape("BLHNC", 8192, 80, 64 << 10, together=True),
    Shape("BLHNC by layer", 8192, 80, 64 << 10, together=True, by_layer=True),
)
DECODE = Shape("LBHNC", 2, 80, 64 << 10)


class SilentDevice(Device):
    """Does with runs what the host does before it calls the driver, and nothing else."""

    batched = True
    small_bytes = SMALL_BYTES

    def __init__(self) -> None:
        self._table = np.empty((3, self.move_runs_max), np.uint64)
        self._ahead_s = 0.0

    def describe(self) -> str:
        return "a silent device are not made"

    def free_bytes(self) -> int:
        return 1 << 40

    def new_stream(self, *, urgent: bool = False) -> Stream:
        return object()

    def mark(self, stream: Stream = None) -> Event:
        return object()

    def after(self, stream: Stream, event: Event) -> None:
        """Order nothing."""

    def is_over(self, event: Event) -> bool:
        return True

    def wait(self, event: Event) -> None:
        """Return at once."""

    def seconds(self, begun: Event, ended: Event) -> float:
        return 1e-3

    def now(self) -> float:
        return thread_time() + self._ahead_s

    def pause(self, seconds: float) -> None:
        self._ahead_s += seconds

    def copy(self, stream: Stream, batch: CopyRuns) -> None:
        assert all(array.flags.c_contiguous and array.ctypes.data for array in batch[:3])

    def prepare(self) -> None:
        """Compile nothing."""

    def move(self, stream: Stream, batch: CopyRuns) -> bool:
        table_of(batch, self._table[:, : len(batch.sizes)])
        return True

    def ids(self, blocks: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError

    def staging(self, size: int) -> torch.Tensor:
        raise NotImplementedError

    def gather(
        self,
        stream: Stream,
        pages: Sequence[Page],
        ids: torch.Tensor,
        rows: torch.Tensor,
        *,
        out: bool,
    ) -> None:
        raise NotImplementedError

    def register(self, address: int, size: int) -> str:
        return ""

    def unregister(self, address: int) -> None:
        """Forget nothing."""

    def bind(self) -> None:
        """Select nothing."""

    def background(self, steps: Iterator[None]) -> Callable[[], None]:
        for _ in steps:
            pass
        return lambda: None


class Places:
    """Slots of an arena without memory, for a device that touches none."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = self.admitted = slots
        self.slot_bytes = slot_bytes
        self.address = 1 << 41
        self.huge_share = 0.0

    def admit(self, who: object, slots: int) -> None:
        """Take the number of slots that a device has registered."""

    def close(self) -> None:
        """Do nothing: there is no memory."""


def rows() -> Iterable[Row]:
    """Measure large jobs, whole and by fences, and a step that generates."""
    for shape in SHAPES:
        with _copier(shape) as made:
            if made is not None:
                yield from _large(shape, *made)
    with _copier(DECODE) as made:
        assert made is not None
        yield from _small(*made)


def _large(shape: Shape, copier: StreamCopier, where: str) -> Iterator[Row]:
    longest: list[float] = []
    fences: list[float] = []
    totals: list[float] = []
    steps = 0
    for number in range(ROUNDS + 1):
        taken = _steps(shape, copier, number)
        fence_s = _fence(shape, copier, number)
        if number:  # the first round warms up
            longest.append(max(taken))
            totals.append(sum(taken))
            fences.append(fence_s)
            steps = len(taken)
    name = f"{shape.runs:,} runs, {shape.name}"
    yield Row(
        name=f"host time of a step, {name}",
        unit="us",
        limit=1e6 * BUDGET_S,
        ours=1e6 * median(longest),
        goal="ratio <= 1",
        note=f"{steps} steps, {1e3 * median(totals):.1f} ms in all; {where}",
    )
    yield Row(
        name=f"host time of submit and fence, {name}",
        unit="us",
        ours=1e6 * median(fences),
        note=f"a fence hands over what is left, whatever that takes; {where}",
    )


def _small(copier: StreamCopier, where: str) -> Iterator[Row]:
    """Measure the calls of a step that saves two blocks."""
    submits: list[float] = []
    polls: list[float] = []
    fences: list[float] = []
    for number in range(200):
        job = _job(DECODE, number, "offload")
        times = [clock()]
        for call in (
            lambda job=job: copier.submit(job),
            lambda job=job: copier.fence([job.id]),
            lambda: copier.poll(),
        ):
            cast("Callable[[], object]", call)()
            times.append(clock())
        for seconds, begun_s, ended_s in zip(
            (submits, fences, polls), times[:-1], times[1:], strict=True
        ):
            seconds.append(ended_s - begun_s)
        copier.drain()
        copier.poll()
        copier.device.pause(STEP_LENGTH_S)
    for name, seconds in (("submit", submits), ("fence", fences), ("poll", polls)):
        yield Row(
            name=f"host time of {name}, a save of {DECODE.runs} runs",
            unit="us",
            limit=1e6 * BUDGET_S,
            ours=1e6 * median(seconds),
            note=where,
        )


def _job(shape: Shape, number: int, direction: Direction = "onboard") -> CopyJob:
    order = random.Random(number)
    blocks = order.sample(range(shape.blocks), shape.blocks)
    slots = order.sample(range(shape.blocks), shape.blocks)
    return CopyJob(JobId(number), direction, tuple(blocks), tuple(map(Slot, slots)))


def _steps(shape: Shape, copier: StreamCopier, number: int) -> list[float]:
    """Return the host's seconds in each step, from submit to the job's end."""
    job, taken = _job(shape, number), [0.0]
    begun_s = clock()
    copier.submit(job, by_layer=shape.by_layer)
    taken[0] = clock() - begun_s
    for _ in range(STEPS_MAX):
        copier.device.pause(STEP_LENGTH_S)
        begun_s = clock()
        ended = copier.poll()
        taken.append(clock() - begun_s)
        if ended:
            assert ended[0].ok, ended[0].error
            return taken
    raise AssertionError(f"no end after {STEPS_MAX} steps")


def _fence(shape: Shape, copier: StreamCopier, number: int) -> float:
    """Return the host's seconds for a job that the engine's stream waits for at once."""
    job = _job(shape, number)
    begun_s = clock()
    copier.submit(job, by_layer=shape.by_layer)
    copier.fence([job.id])
    seconds = clock() - begun_s
    copier.drain()
    assert copier.poll()[0].ok
    return seconds


@contextmanager
def _copier(shape: Shape) -> Generator[tuple[StreamCopier, str] | None]:
    """Yield a copier over all blocks of a shape, and its device; None if there is no room."""
    slot_bytes = shape.layers * shape.page_bytes
    on_cuda = torch.cuda.is_available()
    device: Device = SilentDevice()
    where = "silent device"
    arena: Any = Places(shape.blocks, slot_bytes)
    if on_cuda:
        free = min(memory_available() // 2, CUDA.mem_get_info()[0])
        if shape.bytes > free:
            print(f"  {shape.name}, {shape.bytes >> 30} GiB: skipped, there is too little memory")
            yield None
            return
        device = CudaDevice(torch.device("cuda", CUDA.current_device()))
        memory = torch.zeros(shape.bytes, dtype=torch.uint8, device="cuda")
        arena = Arena.create(shape.blocks, slot_bytes)
        where = CUDA.get_device_name()
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = torch.frombuffer(mmap.mmap(-1, shape.bytes, flags=flags), dtype=torch.uint8)
    if shape.together:
        kv = memory.view(shape.blocks, shape.layers, -1)
        tensors = {f"layer{n}": kv[:, n] for n in range(shape.layers)}
    else:
        kv = memory.view(shape.layers, shape.blocks, -1)
        tensors = {f"layer{n}": kv[n] for n in range(shape.layers)}
    copier = StreamCopier(BlockPages.of(tensors, blocks=shape.blocks), arena, device)
    try:
        while not copier.settled:
            device.pause(STEP_LENGTH_S)
        yield copier, where
    finally:
        copier.close()
        arena.close()
