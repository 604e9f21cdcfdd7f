"""The machine's clocks, and a pool of threads for blocking calls off the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar, cast

from kvladder.errors import ClosedError

T = TypeVar("T")


class SystemClock:
    """The machine's clocks; the event loop's time is the same monotonic clock."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return time.time()  # the one place that reads the wall clock

    def cpu(self) -> float:
        """Return processor seconds of the calling thread."""
        return time.thread_time()


class CallBatch(Generic[T]):
    """A batch of calls for threads; ``ended`` is set, on the caller's loop, when all have ended."""

    def __init__(self, calls: Sequence[Callable[[], T]]) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.left = len(calls)
        """Number of calls that have not ended. The pool's lock guards this and the next two."""
        self.running = 0
        self.given_up = False
        """True if no caller waits for the batch any more: calls not begun yet do nothing."""
        self._results: list[T | None] = [None] * len(calls)
        self._error: BaseException | None = None
        self._calls = calls

    @property
    def tasks(self) -> list[Callable[[], None]]:
        """The calls in a form that raises nothing.

        The batch keeps none of them: results would then stay until cycles are collected.
        """
        return [partial(self._do, number, call) for number, call in enumerate(self._calls)]

    def _do(self, number: int, call: Callable[[], T]) -> None:
        try:
            if not self.given_up:
                self._results[number] = call()
        except StopIteration as error:  # which a coroutine cannot raise
            self._error = RuntimeError(repr(error))
        except BaseException as error:  # noqa: BLE001 - handed to the caller that awaits it
            self._error = self._error or error

    def tell(self) -> None:
        """Set ``ended`` if all calls have ended; any thread may call it."""
        if not self.left:
            with suppress(RuntimeError):  # the loop is closed, so no task waits any more
                self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def results(self) -> list[T]:
        """Return the results of all calls, or raise the first error; once, when all have ended."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return cast("list[T]", self._results)
        finally:
            del error  # its traceback has this frame


class _Waiting(NamedTuple):
    """A call that waits for a thread; the smallest tuple begins first."""

    rank: int
    number: int
    """Position in the order of arrival."""
    batch: CallBatch[Any]
    task: Callable[[], object]
    """The call, in a form that raises nothing."""


_URGENT, _OTHER, _LAST = range(3)
"""Ranks: urgent calls, other calls, and the last call, which begins when all others have ended."""


class BlockingPool:
    """A few daemon threads for blocking calls, started when they are needed.

    A call that hangs does not keep the process alive. Once such a call is abandoned, another thread
    replaces its thread until the call ends, so that other calls do not wait. The caller must limit
    the number of abandoned calls.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._max = threads
        self._name = name
        self._wakeup = threading.Condition()
        self._waiting: list[_Waiting] = []
        """Calls that wait for a thread, as a heap."""
        self._number = count()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._running = 0
        self._stuck = 0
        """Number of threads that are still in abandoned calls."""
        self._closed = False

    async def run(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run ``function(*args)`` in a thread, as ``run_all`` does, and return its result."""
        (result,) = await self.run_all([partial(function, *args)])
        return result

    async def run_all(self, calls: Sequence[Callable[[], T]], *, urgent: bool = False) -> list[T]:
        """Run the calls in threads and return their results, in order; ``urgent`` ones come first.

        Returns when no call runs any more. If a call raises, the rest still run, then the first
        error is raised. After a cancellation, the calls not begun yet are skipped.

        Raises
        ------
        ClosedError
            The pool was closed before.
        """
        if not calls:
            return []
        batch = CallBatch(calls)
        over = self.begin(batch, urgent=urgent)
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError:
            self._give_up(batch)
            while not over.done():  # calls that run may still write into slots
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({over})
            raise
        return batch.results()

    def begin(self, batch: CallBatch[Any], *, urgent: bool) -> asyncio.Future[Any]:
        """Queue a batch; return a future that is done when all its calls have ended."""
        self.put(batch, batch.tasks, urgent=urgent)
        return batch.ended

    def put(
        self, batch: CallBatch[Any], tasks: Sequence[Callable[[], object]], *, urgent: bool
    ) -> None:
        """Queue these tasks of a batch for the threads. A task must not raise."""
        with self._wakeup:
            if self._closed:
                raise ClosedError("the threads have ended")
            self._put(batch, tasks, _URGENT if urgent else _OTHER)

    def _put(self, batch: CallBatch[Any], tasks: Sequence[Callable[[], object]], rank: int) -> None:
        for task in tasks:
            heappush(self._waiting, _Waiting(rank, next(self._number), batch, task))
        self._wakeup.notify(len(tasks))
        self._staff()

    def _give_up(self, batch: CallBatch[Any]) -> None:
        """Abandon a batch: skip its calls not begun yet, replace the threads of the others."""
        with self._wakeup:
            batch.given_up = True
            left_out = [one for one in self._waiting if one.batch is batch]
            self._waiting = [one for one in self._waiting if one.batch is not batch]
            heapify(self._waiting)
            batch.left -= len(left_out)
            self._stuck += batch.running
            self._staff()
        for one in left_out:  # their calls are skipped, but aiofiles may wait for their futures
            one.task()
        batch.tell()

    def _staff(self) -> None:
        """Start threads if calls wait, no thread is idle, and the limit is not reached."""
        wanted = len(self._waiting) - self._idle
        for _ in range(min(wanted, self._max + self._stuck - len(self._threads))):
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _serve(self) -> None:
        while (one := self._next()) is not None:
            one.task()
            with self._wakeup:
                self._running -= 1
                self._stuck -= one.batch.given_up
                one.batch.running -= 1
                one.batch.left -= 1
            one.batch.tell()
            del one  # it may keep views of slots alive

    def _next(self) -> _Waiting | None:
        """Wait for the next call of this thread and return it; None if the thread must end."""
        with self._wakeup:
            while len(self._threads) - self._stuck <= self._max:
                if self._waiting and (self._waiting[0].rank < _LAST or not self._running):
                    one = heappop(self._waiting)
                    self._running += 1
                    one.batch.running += 1
                    self._stuck += one.batch.given_up
                    return one
                if self._closed:
                    break
                self._idle += 1
                self._wakeup.wait()
                self._idle -= 1
            self._threads.discard(threading.current_thread())
            return None

    async def aclose(self, last: Callable[[], object], *, timeout_s: float) -> bool:
        """Accept no more calls, finish the pending ones, then run ``last``; called once.

        Returns whether ``last`` has ended within ``timeout_s``. Otherwise it is left behind.
        """
        batch = CallBatch([last])
        with self._wakeup:
            self._closed = True
            self._put(batch, batch.tasks, _LAST)
            self._wakeup.notify_all()
        await asyncio.wait({batch.ended}, timeout=timeout_s)
        return batch.ended.done()

    def close(self, *, timeout_s: float) -> None:
        """End the threads; leave behind those that have not ended after ``timeout_s``."""
        end_s = time.monotonic() + timeout_s
        with self._wakeup:
            self._closed = True
            self._wakeup.notify_all()
            left = list(self._threads)
        for thread in left:
            thread.join(max(0.0, end_s - time.monotonic()))
