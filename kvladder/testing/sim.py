"""A simulated event loop: no real time, no threads, every interleaving has a seed.

What runs here runs the same way each time it is given the same seed, waits of hours take no time,
and a wait that nobody will ever end is an error instead of a hang.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context
from random import Random
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TURNS_MAX = 10_000
"""Turns of the loop at one instant after which somebody must be polling."""
TURNS_TOTAL_MAX = 1_000_000
"""Turns of the loop after which whoever polls, with time going by, polls for ever."""
RESOLUTION_S = 1e-9
"""The loop takes a timer as due if it is less than this in the future."""
EPOCH_S = 1_800_000_000.0
"""What the wall clock shows when a simulated loop begins, in seconds since the epoch."""


class SimulationError(AssertionError):
    """The simulated program can make no progress."""


class Deadlock(SimulationError):
    """Nothing is ready, no timer is set, and the program has not ended."""


class Livelock(SimulationError):
    """The loop turns and turns while time stands still: somebody polls instead of waiting."""


_SUSPENDED = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"))


def where(task: asyncio.Task[Any]) -> str:
    """The name of a task and the lines at which it is suspended, the innermost last."""
    places: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        then = None
        for frame_name, await_name in _SUSPENDED:
            frame = getattr(awaited, frame_name, None)
            if frame is not None:
                code = frame.f_code
                places.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
                then = getattr(awaited, await_name)
        awaited = then
    return f"{task.get_name()}: " + (" > ".join(places) or "not started")


class _Selector(selectors.SelectSelector):
    """Never blocks and never sees a file become ready; passes the time on to the loop."""

    turn: Callable[[float | None], None]

    def select(self, timeout: float | None = None) -> list[Any]:
        self.turn(timeout)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer as soon as nothing is ready.

    Callbacks that are ready run in an order drawn from ``seed``: what relies on the order of two
    ``call_soon`` is found out. (The order is kept only among the callbacks of one future, which
    asyncio promises.) Threads and executors raise, and sockets never become ready.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._random = Random(seed)
        self._now = 0.0
        self._turns = 0
        self._turns_total = 0
        self._waiting: list[tuple[asyncio.Handle, object]] = []
        self._thread = threading.get_ident()
        selector = _Selector()
        selector.turn = self._turn
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def run_forever(self) -> None:
        self._turns = self._turns_total = 0
        super().run_forever()

    def _turn(self, timeout: float | None) -> None:
        """Once per turn: ``timeout`` is 0 if something is ready, None if nothing ever will be."""
        if timeout is None:
            tasks = sorted(map(where, asyncio.all_tasks(self))) or ["no task at all"]
            raise Deadlock(f"nothing will ever happen again at {self._now:g} s:\n" + _lines(tasks))
        self._turns_total += 1
        if timeout > 0 and self._turns_total <= TURNS_TOTAL_MAX:
            then = self._now + timeout
            if then == self._now or then + RESOLUTION_S == then:  # a timer is due only if passed
                then = math.nextafter(then, math.inf)
            self._now = then
            self._turns = 0
            return
        self._turns += 1
        if self._turns > TURNS_MAX or self._turns_total > TURNS_TOTAL_MAX:
            tasks = sorted(map(where, asyncio.all_tasks(self)))
            turns = f"{self._turns_total} turns, {self._turns} of them at {self._now:g} s"
            raise Livelock(f"{turns}:\n" + _lines(tasks))

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        super().call_soon(self._run_one)
        handle = asyncio.Handle(callback, args, self, context)
        future = args[0] if args and asyncio.isfuture(args[0]) else None
        self._waiting.append((handle, future))
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if self._now < when < self._now + RESOLUTION_S:  # or it would be due before its time
            when = self._now + RESOLUTION_S
        return super().call_at(when, callback, *args, context=context)

    def _run_one(self) -> None:
        """Run one of the callbacks that wait: whichever, but those of one future in order."""
        chosen = self._random.randrange(len(self._waiting))
        future = self._waiting[chosen][1]
        if future is not None:
            chosen = next(i for i, (_, of) in enumerate(self._waiting) if of is future)
        handle, _ = self._waiting.pop(chosen)
        if not handle.cancelled():
            handle._run()

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError("another thread calls into a simulated loop")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        raise RuntimeError(f"{func!r} asks for a thread in a simulated loop: use run_blocking")


def _lines(texts: list[str]) -> str:
    return "\n".join(f"  {text}" for text in texts)


def sim_run(work: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run ``work`` to its end on a :class:`SimLoop` of its own."""
    with asyncio.Runner(loop_factory=lambda: SimLoop(seed)) as runner:
        return runner.run(work)


class SimClock:
    """The two clocks of a simulated loop; also right on a real one.

    ``epoch_s`` is the wall time at which the loop began: two processes need not agree on it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, epoch_s: float = EPOCH_S) -> None:
        self._loop = loop
        self._epoch_s = epoch_s

    def now(self) -> float:
        """The loop's time in seconds."""
        return self._loop.time()

    def wall(self) -> float:
        """Seconds since the epoch: the loop began at ``epoch_s``."""
        return self._epoch_s + self._loop.time()


class InlineBlocking:
    """Stands in for ``run_blocking``: the function runs on the loop, at once and as a whole.

    Parameters
    ----------
    random, mean_s:
        Wait a random time of this mean, in seconds, before the function runs.
    """

    def __init__(self, random: Random | None = None, mean_s: float = 0.0) -> None:
        self._random = random or Random(0)
        self._mean_s = mean_s

    async def __call__(self, function: Callable[..., Any], /, *args: Any) -> Any:
        wait_s = self._random.expovariate(1 / self._mean_s) if self._mean_s else 0.0
        await asyncio.sleep(wait_s)
        return await _blocking(function(*args), lambda: None)


class SimThreads:
    """Stands in for a few threads that run blocking functions, one each, on the loop.

    A thread whose call was cancelled and has not ended is replaced by another one, as
    ``kvladder.runtime.BlockingPool`` does.
    """

    def __init__(self, threads: int) -> None:
        self._free = asyncio.Semaphore(threads)

    async def __call__(self, function: Callable[..., Any], /, *args: Any) -> Any:
        await self._free.acquire()
        held = [self._free]

        def free() -> None:
            while held:
                held.pop().release()

        try:
            return await _blocking(function(*args), free)
        finally:
            free()


async def _blocking(result: Any, given_up: Callable[[], None]) -> Any:
    """What a blocking function returned; a coroutine takes its time as a thread would.

    That is cancelled once it has ended; ``given_up`` is called when it should be.
    """
    if not hasattr(result, "__await__"):
        return result
    ending: asyncio.Future[Any] = asyncio.ensure_future(result)
    try:
        return await asyncio.shield(ending)
    except asyncio.CancelledError:
        given_up()
        while not ending.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({ending})
        raise


inline_blocking = InlineBlocking()
"""Runs a blocking function after one turn of the loop."""
