"""A simulated device: streams, events, virtual time, and a memory that tears.

A stream's work happens in virtual time. A copy reads and writes one half of each run when it
begins and the other half when it ends. The bytes not yet written are garbage, so a concurrent read
or write of the same bytes finds an invalid block.

The rules are CUDA's. A copy from or to unregistered memory waits for the stream. A run must not lie
in two registrations. A kernel raises the error left by an earlier call. A thread without a current
device works on the first. Unmapped memory must not be touched. There is one copy engine for each
direction; it does one operation at a time, and takes turns between streams.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvladder.gpu.copy.device import Addresses, CopyRuns, Device, Event, Stream
from kvladder.gpu.copy.pages import Page

GARBAGE = 0xEE
BYTE_S = 1e-9
STUCK_S = 1000.0
CALL_S = 1e-4
"""The device's time for any operation, beside its bytes'."""


@dataclass(eq=False)
class Operation:
    """A stream's work for a while."""

    seconds: float
    begin: Callable[[], None]
    end: Callable[[], None]
    begun_s: float | None = None
    by: str = ""
    """The copy engine that does it, if any."""


@dataclass(eq=False)
class Moment:
    """An event; ``at_s`` is when the device has reached it."""

    at_s: float | None = None


@dataclass(eq=False)
class Line:
    """A stream: its pending work."""

    name: str
    todo: deque[Operation | Moment | tuple[Moment]] = field(default_factory=deque)
    """Operations, events to reach, and, in tuples, events to wait for."""
    urgent: bool = False
    copied: int = 0
    """Number of the last operation that a copy engine did for it."""


class FakeDevice(Device):
    """The second of two devices; the test's thread is the engine's.

    The machine has ``batched`` copies and ``room`` bytes of staging memory. Its driver registers
    ``register_max`` bytes at a time, and ``registered_max`` in all. Its kernel moves runs up to
    ``small``, and has ``tables`` for launches in flight. Each run that is handed over takes
    ``run_s`` of the host's time. ``calls`` counts the calls, and ``host_waits`` lists the host's
    waits with their reasons.
    """

    def __init__(
        self,
        *,
        batched: bool = True,
        room: int = 1 << 40,
        register_max: int = 1 << 40,
        registered_max: int = 1 << 40,
        small: int = 0,
        tables: int = 1 << 40,
        runs_max: int = 4096,
        run_s: float = 0.0,
    ) -> None:
        self.batched = batched
        self.room = room
        self.register_max = register_max
        self.registered_max = registered_max
        self.runs_max = runs_max
        self.run_s = run_s
        self._small = small
        self._tables = tables
        self._copying: dict[str, Operation] = {}
        """What each copy engine does now."""
        self._copied = 0
        self.time_s = 0.0
        self.engine = Line("engine")
        self.lines = [self.engine]
        self.calls: list[str] = []
        self.host_waits: list[tuple[str, float]] = []
        self.contexts: set[int] = set()
        self.failing = ""
        """The error of all calls from now on."""
        self.pending = ""
        """The error that the last refused call left, for the next kernel to raise."""
        self._owned: dict[int, tuple[int, Any]] = {}
        self._registered: dict[int, int] = {}
        self._unmapped: list[tuple[int, int]] = []
        self._thread_device = 1
        self._background: list[Iterator[None]] = []
        self._bound: set[Iterator[None]] = set()

    # ---- the machine: memory and time

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have a tensor's storage be device memory."""
        storage = tensor.untyped_storage()
        self._owned[storage.data_ptr()] = storage.nbytes(), storage
        return tensor

    def unmap(self, tensor: torch.Tensor) -> None:
        """Unmap memory, as a sleeping engine does: any later access is an error."""
        storage = tensor.untyped_storage()
        self._unmapped.append((storage.data_ptr(), storage.nbytes()))

    def remap(self) -> None:
        """The engine is awake again."""
        self._unmapped.clear()

    @property
    def registered(self) -> int:
        """Bytes of host memory that are registered."""
        return sum(self._registered.values())

    def told(self, line: Line | None, operation: Operation) -> None:
        """Append an operation to a stream, as a kernel of the engine's."""
        if self.failing or self.pending:
            error, self.pending = self.failing or self.pending, ""
            raise RuntimeError(error)
        self.contexts.add(self._thread_device)
        (line or self.engine).todo.append(operation)

    def advance(self, seconds: float) -> None:
        """Let time pass: streams work, and threads in the background do a step each."""
        self.step_background()
        self.run_on(seconds)

    def run_on(self, seconds: float) -> None:
        """Let time pass for streams alone."""
        self._run(self.time_s + seconds)

    def settle(self) -> None:
        """Let all streams finish their work."""
        end_s = self.time_s + STUCK_S
        while any(line.todo for line in self.lines):
            assert self.time_s < end_s, "streams that wait for each other"
            self._run(self.time_s + 1.0)

    def work_in_background(self) -> None:
        """Let the background threads finish their work."""
        while self._background:
            self.step_background()

    def step_background(self) -> None:
        """Let each thread in the background do a step."""
        for steps in list(self._background):
            before, self._thread_device = self._thread_device, 0  # as in any new thread
            if steps in self._bound:
                self._thread_device = 1
            try:
                next(steps)
            except StopIteration:
                self._background.remove(steps)
            if self._thread_device == 1:
                self._bound.add(steps)
            self._thread_device = before

    def _run(self, until_s: float) -> None:
        while True:
            while any(map(self._go_on, self.lines)):
                pass
            ends = [
                head.begun_s + head.seconds
                for line in self.lines
                if line.todo
                and isinstance(head := line.todo[0], Operation)
                and head.begun_s is not None
            ]
            if not ends or min(ends) > until_s:
                self.time_s = max(self.time_s, until_s)
                return
            self.time_s = max(self.time_s, min(ends))

    def _go_on(self, line: Line) -> bool:
        """Do the work of a stream that is possible now; return whether there was any."""
        if not line.todo:
            return False
        head = line.todo[0]
        if isinstance(head, Moment):
            head.at_s = self.time_s
        elif isinstance(head, tuple):
            if head[0].at_s is None:
                return False
        elif head.begun_s is None:
            if not self._has_turn(line, head):
                return False
            head.begun_s = self.time_s
            head.begin()
            return True
        elif head.begun_s + head.seconds > self.time_s:
            return False
        else:
            head.end()
            self._copying.pop(head.by, None)
        line.todo.popleft()
        return True

    def _has_turn(self, line: Line, operation: Operation) -> bool:
        """Return whether an operation may begin; if it is a copy, reserve its copy engine."""
        if not operation.by:
            return True
        others = (other for other in self.lines if other.copied < line.copied and other.todo)
        heads = (other.todo[0] for other in others)
        if operation.by in self._copying or any(
            isinstance(head, Operation) and head.by == operation.by for head in heads
        ):
            return False
        self._copying[operation.by] = operation
        self._copied += 1
        line.copied = self._copied
        return True

    # ---- calls of a copier

    def describe(self) -> str:
        return "a simulated device are made in virtual time"

    def free_bytes(self) -> int:
        return self.room

    def new_stream(self, *, urgent: bool = False) -> Stream:
        self.lines.append(Line(f"stream {len(self.lines)}", urgent=urgent))
        return self.lines[-1]

    def mark(self, stream: Stream = None) -> Event:
        if self.failing:
            raise RuntimeError(self.failing)
        moment = Moment()
        (stream or self.engine).todo.append(moment)
        return moment

    def after(self, stream: Stream, event: Event) -> None:
        (stream or self.engine).todo.append((event,))

    def is_over(self, event: Event) -> bool:
        if self.failing:
            raise RuntimeError(self.failing)
        self._run(self.time_s)
        return event.at_s is not None

    def wait(self, event: Event) -> None:
        self._wait_until(event, "event")

    def seconds(self, begun: Event, ended: Event) -> float:
        return float(ended.at_s - begun.at_s)

    def now(self) -> float:
        return self.time_s

    def pause(self, seconds: float) -> None:
        self.advance(seconds)

    def copy(self, stream: Stream, batch: CopyRuns) -> None:
        self.calls.append("copy")
        self._spend(batch)
        host = [self._host(address, size) for address, size in self._ends(batch)]
        self._tell(stream, self._runs(batch), early=batch.steady, by=self._direction(batch))
        if not all(host):
            self._wait_for(stream, "memory that is not registered")

    def prepare(self) -> None:
        self.small_bytes = self._small

    def move(self, stream: Stream, batch: CopyRuns) -> bool:
        assert batch.steady, "the bus bounds saves; the processors are the engine's"
        if len(batch.sizes) > self.runs_max or not self._tables:
            return False
        self.calls.append("move")
        self._spend(batch)
        reached = all(self._host(address, size) for address, size in self._ends(batch))
        assert reached, "a kernel reads or writes memory that is not registered"
        self._tables -= 1
        self._tell(stream, self._runs(batch), early=False, ended=self._read_table)
        return True

    def _read_table(self) -> None:
        self._tables += 1

    def _spend(self, batch: CopyRuns) -> None:
        """Let the time pass that the host takes to hand over runs."""
        assert len(batch.sizes) <= self.runs_max, "too many runs for one call"
        if self.run_s:
            self.run_on(self.run_s * len(batch.sizes))

    def _direction(self, batch: CopyRuns) -> str:
        """Return the copy engine for a batch; the device's own memory needs none."""
        ends = [(array[0], batch.sizes[0]) for array in batch[:2] if len(batch.sizes)]
        target, source = [self._own(int(at), int(size)) for at, size in ends] or (True, True)
        return "" if target and source else "to the device" if target else "to the host"

    def ids(self, blocks: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(blocks, dtype=torch.int64)
        self._registered[ids.data_ptr()] = ids.nbytes
        return ids

    def staging(self, size: int) -> torch.Tensor:
        if size > self.room:
            raise torch.OutOfMemoryError(f"{size} bytes")
        self.room -= size
        return self.own(torch.full((size,), GARBAGE, dtype=torch.uint8))

    def gather(
        self,
        stream: Stream,
        pages: Sequence[Page],
        ids: torch.Tensor,
        rows: torch.Tensor,
        *,
        out: bool,
    ) -> None:
        self.calls.append("gather")
        runs: list[tuple[int, int, int]] = []
        for page in pages:
            mine, theirs = page.view.data_ptr(), rows.data_ptr() + page.offset
            for row, block in enumerate(ids.tolist()):
                ends = theirs + row * rows.stride(0), mine + block * page.stride_bytes
                runs.append((*(ends if out else ends[::-1]), page.size_bytes))
        registered = ids.data_ptr() in self._registered
        self._tell(stream, runs, early=False)
        if not registered:
            self._wait_for(stream, "ids that are not registered")

    def register(self, address: int, size: int) -> str:
        self.calls.append("register")
        self.contexts.add(self._thread_device)
        if size > self.register_max or self.registered + size > self.registered_max:
            return f"{size} bytes are too many"
        self._registered[address] = size
        return ""

    def unregister(self, address: int) -> None:
        del self._registered[address]

    def bind(self) -> None:
        self._thread_device = 1

    def background(self, steps: Iterator[None]) -> Callable[[], None]:
        self._background.append(steps)

        def join() -> None:
            while steps in self._background:
                self.step_background()

        return join

    # ---- copies

    def _ends(self, batch: CopyRuns) -> Iterator[tuple[int, int]]:
        for ends in (batch.targets, batch.sources):
            yield from zip(ends.tolist(), batch.sizes.tolist(), strict=True)

    def _host(self, address: int, size: int) -> bool:
        """Return whether memory is the device's or registered; refuse runs in two registrations."""
        if self._own(address, size):
            return True
        inside = [
            at
            for at, length in self._registered.items()
            if address < at + length and at < address + size
        ]
        if inside and not _within(address, size, self._registered.items()):
            raise RuntimeError("invalid argument: a run in two registrations")
        return bool(inside)

    def _own(self, address: int, size: int) -> bool:
        """Return whether memory is the device's."""
        return _within(address, size, ((at, length) for at, (length, _) in self._owned.items()))

    def _runs(self, batch: CopyRuns) -> list[tuple[int, int, int]]:
        arrays: list[Addresses] = [batch.targets, batch.sources, batch.sizes]
        return [*zip(*(array.tolist() for array in arrays), strict=True)]

    def _tell(
        self,
        stream: Stream,
        runs: list[tuple[int, int, int]],
        *,
        early: bool,
        by: str = "",
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Let a stream copy runs; it reads ``early`` ones, in part, before their turn."""
        firsts: list[bytes] = []

        def read() -> None:
            firsts.extend(self._bytes(source, size // 2) for _, source, size in runs)

        def begin() -> None:
            if not early:
                read()
            for (target, _, size), first in zip(runs, firsts, strict=True):
                self._write(target, first + bytes([GARBAGE]) * (size - len(first)))

        def end() -> None:
            for target, source, size in runs:
                half = size // 2
                self._write(target + half, self._bytes(source + half, size - half))
            ended()

        if early:
            read()
        seconds = CALL_S + BYTE_S * sum(size for *_, size in runs)
        self.told(stream, Operation(seconds, begin, end, by=by))

    def _wait_for(self, stream: Stream, why: str) -> None:
        self._wait_until(self.mark(stream), why)

    def _wait_until(self, event: Moment, why: str) -> None:
        begun_s = self.time_s
        while not self.is_over(event):
            assert self.time_s < begun_s + STUCK_S, "an event that is never reached"
            self._run(self.time_s + 0.01)
        self.host_waits.append((why, self.time_s - begun_s))

    def _bytes(self, address: int, size: int) -> bytes:
        self._touch(address, size)
        return ctypes.string_at(address, size)

    def _write(self, address: int, data: bytes) -> None:
        self._touch(address, len(data))
        ctypes.memmove(address, data, len(data))

    def _touch(self, address: int, size: int) -> None:
        for at, length in self._unmapped:
            assert not (address < at + length and at < address + size), "unmapped memory"


def _within(address: int, size: int, places: Any) -> bool:
    return any(at <= address and address + size <= at + length for at, length in places)
