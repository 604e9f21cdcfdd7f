"""A simulated loop for several processes, each of which can stop, crawl and die."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from kvladder.testing.sim import SimLoop

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
        return self.context.run(function, *arguments)

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the process call a function soon: later while it is stopped, never if it is dead."""
        if self.is_alive:
            self._loop.call_soon(function, *arguments, context=self.context)

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Its tasks that have not ended, in the order of their beginning."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return [*self._tasks]

    def owns(self, task: asyncio.Task[Any]) -> None:
        """Count a new task as this process's."""
        self._tasks.append(task)
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
        """End at once. What its tasks still do, as they are cancelled, has no effect outside."""
        self.is_alive = False
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
        else:
            handle._run()

    def _again(self, handle: asyncio.Handle, future: object) -> None:
        """Have a callback wait for its turn again; those of one future keep their order."""
        asyncio.SelectorEventLoop.call_soon(self, self._run_one)
        self._waiting.append((handle, future))

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handles: list[asyncio.TimerHandle] = []

        def due() -> None:
            process = HERE.get()
            if process is None or not (process.is_stopped or process.is_over):
                callback(*args)
            elif process.is_stopped:
                process.park(due_again)

        def due_again() -> None:
            self.call_soon(late, context=handles[0]._context)  # type: ignore[attr-defined]

        def late() -> None:
            if not handles[0].cancelled():
                callback(*args)

        handles.append(super().call_at(when, due, context=context))
        return handles[0]

    async def create_connection(  # type: ignore[override]
        self, make: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        """Connect over the simulated network."""
        return await self.net.connect(make, host, port)
