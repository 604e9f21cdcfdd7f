"""A simulated loop for several processes, each of which can stop, crawl and die."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from contextvars import Context
from heapq import heappush
from typing import Any, TypeVar, TypeVarTuple

from kvladder.testing.sim import RESOLUTION_S, SimLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HERE: contextvars.ContextVar[Process | None] = contextvars.ContextVar("HERE", default=None)
"""The process that runs now; None for the network and the test itself."""


class Process:
    """One life of a program on a machine. Everything that it starts is run in its context.

    A restart is another process on the same machine.
    """

    def __init__(self, machine: str, loop: FleetLoop) -> None:
        self.machine = machine
        self.is_alive = True
        self.is_over = False
        """True once nothing of it runs any more."""
        self.is_stopped = False
        self.turns = 0
        """Number of times that code of it ran, or that another machine wrote into its memory."""
        self.resumed_s = -1.0
        """Loop time at which it last continued after a stop."""
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_max = 64
        self._loop = loop
        self._parked: list[Callable[[], object]] = []
        self._context = contextvars.copy_context()
        self._context.run(HERE.set, self)
        self._slow: asyncio.Handle | None = None

    @property
    def context(self) -> Context:
        """A new copy of the context in which the process's code runs."""
        return self._context.copy()

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function as this process does."""
        self.turns += 1
        return self.look(function, *arguments)

    def look(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function as this process does; the function changes nothing."""
        return self.context.run(function, *arguments)

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the process call a function soon: later while it is stopped, never if it is dead."""
        self._loop.call_soon(self._posted, function, arguments, context=self.context)

    def _posted(self, function: Callable[..., object], arguments: Sequence[Any]) -> None:
        if self.is_alive:
            function(*arguments)

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Its tasks that have not ended, in the order of their beginning."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return [*self._tasks]

    @property
    def timers(self) -> list[str]:
        """What it has set timers for that are not due yet."""
        found: list[Any] = [timer for timer in self._loop._scheduled if not timer.cancelled()]
        return sorted(repr(timer) for timer in found if timer._context.get(HERE) is self)

    def owns(self, task: asyncio.Task[Any]) -> None:
        """Count a new task as this process's; one that a dead process begins does nothing."""
        self._tasks.append(task)
        if not self.is_alive:
            task.cancel()
        if len(self._tasks) > self._tasks_max:
            self._tasks_max = 2 * len(self.tasks) + 64

    def park(self, resume: Callable[[], object]) -> None:
        """Keep a callback that is due until the process continues."""
        self._parked.append(resume)

    def stop(self) -> None:
        """Let the process do nothing, as SIGSTOP does."""
        self.is_stopped = True

    def go(self) -> None:
        """Let it continue: everything that became due meanwhile runs now."""
        self.is_stopped = False
        self.resumed_s = self._loop.time()
        parked, self._parked = self._parked, []
        for resume in parked:
            resume()

    def crawl(self, run_s: float, rest_s: float) -> None:
        """Run for ``run_s`` seconds and rest for ``rest_s``, in turns, until ``hurry``."""
        self.hurry()

        def turn() -> None:
            (self.go if self.is_stopped else self.stop)()
            wait_s = rest_s if self.is_stopped else run_s
            self._slow = self._loop.call_later(wait_s, turn, context=Context())

        turn()

    def hurry(self) -> None:
        """Run at full speed again, and do not stop."""
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self.is_stopped:
            self.go()

    def die(self) -> None:
        """End at once. What its tasks still do, as they are cancelled, has no effect outside.

        They are cancelled before anything else runs: a task that was to wake at this very instant
        does not continue.
        """
        self.is_alive = False
        for task in self.tasks:
            task.cancel()
        self.hurry()
        self._loop.run_until_complete(self._over())

    async def _over(self) -> None:
        for _ in range(100):
            left = self.tasks
            if not left:
                self.is_over = True  # now: a callback of this same turn may begin another task
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=0.5)
        raise AssertionError(f"{self.machine}: tasks do not end: {self.tasks}")


class ProcessTimer(asyncio.TimerHandle):
    """A timer of a process: late while the process is stopped, and never once it is over."""

    _callback: Callable[..., object]
    _args: Sequence[Any]
    _context: Context
    _loop: FleetLoop
    _scheduled: bool
    _when: float

    def __lt__(self, other: Any) -> bool:
        return self._when < other._when  # type: ignore[no-any-return]

    def _run(self) -> None:
        process = self._context.get(HERE)
        if process is None:
            super()._run()
        elif process.is_stopped:
            process.park(self._due_again)
        elif not process.is_over:
            process.turns += 1
            super()._run()

    def _due_again(self) -> None:
        self._loop.call_soon(self._late, context=self._context)

    def _late(self) -> None:
        if not self.cancelled():
            self._callback(*self._args)


class FleetLoop(SimLoop):
    """A simulated loop that knows which process each callback belongs to."""

    def __init__(self, seed: int = 0) -> None:
        self.net: Any = None
        self.errors: list[str] = []
        """Exceptions of callbacks, and those of tasks that no other task awaits."""
        super().__init__(seed)
        self.set_exception_handler(self._failed)

    def _failed(self, _: Any, context: dict[str, Any]) -> None:
        """Note an exception, unless it was raised in a process that is dead."""
        process = HERE.get()
        if (handle := context.get("handle")) is not None:
            process = handle._context.get(HERE)
        elif (task := context.get("task")) is not None:
            process = getattr(task, "process", None)
        if process is None or process.is_alive:
            self.errors.append(f"{context['message']}: {context.get('exception')!r}")

    def _make_task(self, _: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = super()._make_task(_, work, **options)
        if (process := HERE.get()) is not None:
            process.owns(task)
            task.process = process  # type: ignore[attr-defined]
        return task

    def _run_one(self) -> None:
        handle, future = self._chosen()
        if handle.cancelled():
            return
        process: Process | None = handle._context.get(HERE)  # type: ignore[attr-defined]
        if process is not None and process.is_over:
            return
        if process is not None and process.is_stopped:
            process.park(lambda: self._again(handle, future))
            return
        if process is not None:
            process.turns += 1
        handle._run()

    def _again(self, handle: asyncio.Handle, future: object) -> None:
        """Have a callback wait for its turn again; those of one future keep their order."""
        self._waiting.append((handle, future))

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        if self._now < when < self._now + RESOLUTION_S:  # else it would run too early
            when = self._now + RESOLUTION_S
        timer = ProcessTimer(when, callback, args, self, context)
        heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    async def create_connection(  # type: ignore[override]
        self, make: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Connect over the simulated network."""
        return await self.net.connect(make, host, port)
