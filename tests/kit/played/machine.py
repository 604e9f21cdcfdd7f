"""A machine with devices: streams, events, threads and virtual time.

A stream's work happens in virtual time. It reads and writes one half of its bytes when it begins,
and the other half when it ends. Bytes not yet written are garbage, so a concurrent access to the
same bytes finds an invalid block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import torch

from tests.kit.played import rules
from tests.kit.played.rules import Rule, Violation

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
    """The copy engine that does it, if any; it does one operation at a time (``rules.ENGINES``)."""


@dataclass(eq=False)
class Moment:
    """A recorded place in a stream; ``at_s`` is when the device has reached it."""

    at_s: float | None = None


class Stream:
    """A stream of one device: ``torch.cuda.Stream``."""

    def __init__(self, machine: Machine, device: int, handle: int, priority: int = 0) -> None:
        self._machine = machine
        self.device = torch.device("cuda", device)
        self.cuda_stream = handle
        self.priority = priority
        self.todo: deque[Operation | Moment | tuple[Moment]] = deque()
        """Operations, events to reach, and, in tuples, events to wait for."""
        self.copied = 0
        """Number of the last operation that a copy engine did for it."""

    def moment(self) -> Moment:
        """Return the current end of the stream."""
        made = Moment()
        self.todo.append(made)
        return made

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self._machine) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self._machine.alive()
        if event.moment is not None:
            self.todo.append((event.moment,))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        self._machine.alive()
        self._machine.run_on(0.0)
        return not self.todo

    def synchronize(self) -> None:
        self._machine.wait_for(self.moment(), "stream")


class Event:
    """An event: ``torch.cuda.Event``. Each record captures another moment."""

    def __init__(
        self, machine: Machine, enable_timing: bool = False, blocking: bool = False
    ) -> None:
        self._machine = machine
        self._timing = enable_timing
        self._device: torch.device | None = None
        self.moment: Moment | None = None

    @property
    def at_s(self) -> float | None:
        """The time at which the device reached the last record."""
        return None if self.moment is None else self.moment.at_s

    def record(self, stream: Stream | None = None) -> None:
        self._machine.alive()
        stream = self._machine.current_stream() if stream is None else stream
        if self._device not in (None, stream.device):
            raise RuntimeError(f"the event is of {self._device}, the stream of {stream.device}")
        self._device, self.moment = stream.device, stream.moment()

    def wait(self, stream: Stream | None = None) -> None:
        (self._machine.current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        self._machine.alive()
        self._machine.run_on(0.0)
        return self.moment is None or self.moment.at_s is not None

    def synchronize(self) -> None:
        self._machine.alive()
        if self.moment is not None:
            self._machine.wait_for(self.moment, "event")

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds between two events."""
        both = (self, end)
        if not all(event._timing for event in both):
            raise ValueError(f"an event has no time: {rules.TIMING.text}")
        if any(event.moment is None or event.moment.at_s is None for event in both):
            raise RuntimeError(f"an event was not reached: {rules.TIMING.text}")
        if self._device != end._device:
            raise RuntimeError("events of two devices: CUDA_ERROR_INVALID_HANDLE")
        assert self.at_s is not None
        assert end.at_s is not None
        return (end.at_s - self.at_s) * 1e3


@dataclass
class Thread:
    """A thread as CUDA and torch see it."""

    device: int = 0
    """The device that it has selected in torch."""
    context: int | None = None
    """The device whose context is current."""
    streams: dict[int, Stream] = field(default_factory=dict[int, Stream])
    """Its current stream on each device, unless that is the default one."""
    pushed: list[int | None] = field(default_factory=list[int | None])
    """The contexts below the current one, the one that becomes current next last."""


class Machine:
    """The host and its devices. The thread that makes it is the engine's, on ``device``."""

    def __init__(self, *, devices: int = 2, device: int = 1, seed: int = 0) -> None:
        self.devices = devices
        self.device = device
        self.random = Random(seed)
        self.time_s = 0.0
        self.contexts = {device}
        """Devices with a context of this process."""
        self.host_waits: list[tuple[str, float]] = []
        """Waits of the engine's thread, each with its reason and its seconds."""
        self.failing = ""
        """The error of all calls from now on."""
        self.pending = ""
        """The error that the runtime keeps for the next launch of a kernel."""
        self.violations: list[Violation] = []
        self._handles = iter(range(0x7000, 1 << 62, 16))
        self._defaults = [Stream(self, number, 0) for number in range(devices)]
        self._hidden: list[Stream] = []
        self.engine = Stream(self, device, next(self._handles))
        """The stream that the engine has made current in its thread."""
        self.lines = [self.engine]
        """The engine's stream, and the streams made since."""
        self._acting: object = None
        self._threads: dict[object, Thread] = {}
        self._background: list[Iterator[None]] = []
        self._copying: dict[str, Operation] = {}
        """What each copy engine does now."""
        self._copied = 0
        self._threads[threading.get_ident()] = Thread(device, device, {device: self.engine})

    # ---- threads

    @property
    def thread(self) -> Thread:
        """The calling thread; a step in the background has one of its own."""
        key = threading.get_ident() if self._acting is None else self._acting
        return self._threads.setdefault(key, Thread())

    def use(self, device: int) -> None:
        """Use a device in the calling thread: the runtime makes its context current."""
        self.contexts.add(device)
        self.thread.context = device

    def current_stream(self, device: int | None = None) -> Stream:
        """Return the calling thread's stream on a device; on the selected one by default."""
        number = self.thread.device if device is None else device
        return self.thread.streams.get(number, self._defaults[number])

    def stream_of(self, handle: int) -> Stream:
        """Return a stream by its handle; 0 is the default stream of the current context."""
        if not handle:
            context = self.thread.context
            assert context is not None
            return self._defaults[context]
        return next(line for line in self.lines if line.cuda_stream == handle)

    def new_stream(self, device: int, priority: int = 0) -> Stream:
        self.alive()
        self.contexts.add(device)
        made = Stream(self, device, next(self._handles), priority)
        self.lines.append(made)
        return made

    def background(self, steps: Iterator[None]) -> Callable[[], None]:
        """Take the steps of a thread; return a function that joins it."""
        self._background.append(steps)

        def join() -> None:
            while steps in self._background:
                self.step_background()

        return join

    def work_in_background(self) -> None:
        """Let the background threads finish their work."""
        while self._background:
            self.step_background()

    def step_background(self) -> None:
        """Let each thread in the background do a step."""
        for steps in list(self._background):
            before, self._acting = self._acting, steps
            try:
                next(steps)
            except StopIteration:
                self._background.remove(steps)
                self._threads.pop(steps, None)
            finally:
                self._acting = before

    # ---- work

    def alive(self) -> None:
        """Raise the error that all calls return since a fault."""
        if self.failing:
            raise RuntimeError(self.failing)

    def launch(self, stream: Stream, operation: Operation) -> None:
        """Queue a kernel; raise the error that an earlier call left."""
        self.alive()
        if self.pending:
            error, self.pending = self.pending, ""
            raise RuntimeError(error)
        stream.todo.append(operation)

    def violate(self, rule: Rule, found: str) -> Violation:
        """Return a violation to raise; the device fails from now on."""
        self.violations.append(Violation(rule, found))
        self.failing = self.failing or f"CUDA error: {found}"
        return self.violations[-1]

    def reset(self) -> None:
        """Forget all work in flight and all errors, so that a test with a fault can end."""
        for line in [*self._all()]:
            line.todo.clear()
        self._copying.clear()
        self.failing = self.pending = ""
        self.violations.clear()

    def after(self, moments: list[Moment], work: Callable[[], None]) -> None:
        """Do something once the devices have reached several moments."""
        hidden = Stream(self, self.device, -1)
        hidden.todo.extend((moment,) for moment in moments)
        hidden.todo.append(Operation(0.0, work, lambda: None))
        self._hidden.append(hidden)

    # ---- time

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
        while any(line.todo for line in self._all()):
            assert self.time_s < end_s, "streams that wait for each other"
            self._run(self.time_s + 1.0)

    def wait_for(self, moment: Moment, why: str) -> None:
        """Let the host wait until a moment is reached."""
        begun_s = self.time_s
        self._run(self.time_s)
        while moment.at_s is None:
            self.alive()
            assert self.time_s < begun_s + STUCK_S, "an event that is never reached"
            self._run(self.time_s + 0.01)
        if self._acting is None:
            self.host_waits.append((why, self.time_s - begun_s))

    def _all(self) -> Iterator[Stream]:
        self._hidden = [line for line in self._hidden if line.todo]
        yield from self._defaults
        yield from self.lines
        yield from self._hidden

    def _run(self, until_s: float) -> None:
        while True:
            while any(self._go_on(line) for line in self._all()):
                pass
            ends = [
                head.begun_s + head.seconds
                for line in self._all()
                if line.todo
                and isinstance(head := line.todo[0], Operation)
                and head.begun_s is not None
            ]
            if not ends or min(ends) > until_s:
                self.time_s = max(self.time_s, until_s)
                return
            self.time_s = max(self.time_s, min(ends))

    def _go_on(self, line: Stream) -> bool:
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
        if line.todo and line.todo[0] is head:
            line.todo.popleft()
        return True

    def _has_turn(self, line: Stream, operation: Operation) -> bool:
        """Return whether an operation may begin; if it is a copy, reserve its copy engine.

        Streams take turns.
        """
        if not operation.by:
            return True
        others = (other for other in self._all() if other.copied < line.copied and other.todo)
        heads = (other.todo[0] for other in others)
        if operation.by in self._copying or any(
            isinstance(head, Operation) and head.by == operation.by for head in heads
        ):
            return False
        self._copying[operation.by] = operation
        self._copied += 1
        line.copied = self._copied
        return True
