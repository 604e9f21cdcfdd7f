"""A simulated event loop: no real time, no threads, and a seed for every interleaving.

The same seed gives the same run each time. Waits of hours take no time. A wait that nothing will
ever end raises :class:`Deadlock` instead of hanging.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context
from heapq import heapify, heappop
from random import Random
from typing import Any, TypeVar, TypeVarTuple

from kvladder.replay.loop import RESOLUTION_S as RESOLUTION_S
from kvladder.replay.loop import VirtualLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TURNS_MAX = 10_000
"""Most turns of the loop at one instant; more mean that code polls without waiting."""
TURNS_TOTAL_MAX = 1_000_000
"""Most turns of the loop in a run; more mean that code polls for ever while time passes."""
TIMERS_KEPT = 100
"""With more timers than this, half of them cancelled, the cancelled ones are dropped."""
EPOCH_S = 1_800_000_000.0
"""Wall time at which a simulated loop begins, in seconds since the epoch."""


class SimulationError(AssertionError):
    """The simulated program can make no progress."""


class Deadlock(SimulationError):
    """Nothing is ready, no timer is set, and the program has not ended."""


class Livelock(SimulationError):
    """The loop made too many turns: some code polls instead of waiting."""


_SUSPENDED = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"))


def where(task: asyncio.Task[Any]) -> str:
    """Return a task's name and the lines at which it is suspended, the innermost last."""
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


class SimTask(asyncio.Task[T]):
    """A task whose hash is drawn from its loop's seed.

    Tasks are kept in sets, by ``asyncio.TaskGroup`` too. Hashes made of addresses would have the
    tasks of a set cancelled in another order in each run.
    """

    def __init__(self, work: Coroutine[Any, Any, T], drawn: int, **options: Any) -> None:
        self._drawn = drawn
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._drawn


class SimLoop(VirtualLoop):
    """An event loop whose time jumps to the next timer as soon as nothing is ready.

    Ready callbacks run in a random order drawn from ``seed``. This finds code that relies on the
    order of two ``call_soon``. Only the callbacks of one future keep their order, as asyncio
    promises. Threads and executors raise, and sockets never become ready.
    """

    _scheduled: list[asyncio.TimerHandle]
    _ready: deque[asyncio.Handle]
    """Timers that are due."""
    _stopping: bool
    _now: float
    _timer_cancelled_count: int

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._random = Random(seed)
        self._hashes = Random(f"{seed} hashes")
        self._turns = 0
        self._turns_total = 0
        self._waiting: list[tuple[asyncio.Handle, object]] = []
        self._thread = threading.get_ident()
        super().__init__()
        self.set_task_factory(self._make_task)

    def _make_task(self, _: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        return SimTask(work, self._hashes.getrandbits(32), loop=self, **options)

    def run_forever(self) -> None:
        self._turns = self._turns_total = 0
        super().run_forever()

    def _turn(self, timeout: float | None) -> None:
        if timeout is None:
            tasks = sorted(map(where, asyncio.all_tasks(self))) or ["no tasks"]
            raise Deadlock(f"nothing will ever happen again at {self._now:g} s:\n" + _lines(tasks))
        self._turns_total += 1
        if timeout > 0 and self._turns_total <= TURNS_TOTAL_MAX:
            self._jump(timeout)
            self._turns = 0
            return
        self._turns += 1
        if self._turns > TURNS_MAX or self._turns_total > TURNS_TOTAL_MAX:
            tasks = sorted(map(where, asyncio.all_tasks(self)))
            turns = f"{self._turns_total} turns, {self._turns} of them at {self._now:g} s"
            raise Livelock(f"{turns}:\n" + _lines(tasks))

    def pause(self, seconds: float) -> None:
        """Advance the time as if the process stood still: what is due meanwhile runs late."""
        self._now += seconds

    def _run_once(self) -> None:
        """Run the callbacks that are ready, in random order, then the timers that are due.

        Callbacks that these make ready are run in the next turn.
        """
        timers = self._scheduled
        if 2 * self._timer_cancelled_count > len(timers) > TIMERS_KEPT:
            timers = self._scheduled = [timer for timer in timers if not timer.cancelled()]
            heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0].cancelled():
            heappop(timers)
            self._timer_cancelled_count -= 1
        wait_s = None
        if self._waiting or self._ready or self._stopping:
            wait_s = 0.0
        elif timers:
            wait_s = max(0.0, timers[0].when() - self._now)
        self._turn(wait_s)
        due_s, count = self._now + RESOLUTION_S, len(self._waiting)
        while timers and timers[0].when() < due_s:
            due = heappop(timers)
            due._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(due)
        for _ in range(count):
            self._run_one()
        while self._ready:
            timer = self._ready.popleft()
            if not timer.cancelled():
                timer._run()

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
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
        if self._now < when < self._now + RESOLUTION_S:  # else it would run too early
            when = self._now + RESOLUTION_S
        return super().call_at(when, callback, *args, context=context)

    def _run_one(self) -> None:
        """Run one waiting callback."""
        handle, _ = self._chosen()
        if not handle.cancelled():
            handle._run()

    def _chosen(self) -> tuple[asyncio.Handle, object]:
        """Take a waiting callback, chosen at random, with its future; one future's run in order."""
        waiting = self._waiting
        chosen = self._random.randrange(len(waiting))
        future = waiting[chosen][1]
        if future is not None:
            for chosen, (_, of) in enumerate(waiting):  # noqa: B007
                if of is future:
                    break
        return waiting.pop(chosen)

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
    """Run ``work`` to its end on a new :class:`SimLoop` and return its result."""
    with asyncio.Runner(loop_factory=lambda: SimLoop(seed)) as runner:
        return runner.run(work)


class SimClock:
    """The two clocks of a simulated loop; also right on a real loop.

    ``epoch_s`` is the wall time when the loop's time is 0. Each simulated process may have its own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, epoch_s: float = EPOCH_S) -> None:
        self._loop = loop
        self._epoch_s = epoch_s

    def now(self) -> float:
        """Return the loop's time in seconds."""
        return self._loop.time()

    def wall(self) -> float:
        """Return the wall time: ``epoch_s`` plus the loop's time, in seconds since the epoch."""
        return self._epoch_s + self._loop.time()


class InlineBlocking:
    """Replaces ``run_blocking``: runs the function on the loop itself, without interruption.

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
    """Replaces a pool of threads: runs at most ``threads`` blocking functions at once, on the loop.

    A cancelled call that has not ended no longer counts: another call may take its thread. This is
    how ``kvladder.runtime.BlockingPool`` replaces stuck threads.
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
    """Return a blocking function's result; if it is a coroutine, await it as if in a thread.

    Cancellation does not interrupt the coroutine. It calls ``given_up`` at once, and takes effect
    when the coroutine has ended.
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
        if not ending.cancelled():
            ending.exception()  # mark it as retrieved: a given-up call's error has no reader
        raise


inline_blocking = InlineBlocking()
"""A ``run_blocking`` that runs the function after one turn of the loop."""
