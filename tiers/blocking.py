"""What waits outside of an event loop: the machine's clocks, and threads for blocking calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvladder.errors import ClosedError


class SystemClock:
    """The machine's clocks; the loop's time is the same monotonic clock."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()  # the one place that reads the wall clock


class _Job:
    """A call for a thread, and the future on its loop that is set when it has ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Any] = self._loop.create_future()
        self.call = call
        self.given_up = False
        """Whether nobody waits for what it returns, although it has not ended."""

    def run(self) -> None:
        """Call it, and set the future, unless its loop is closed and nobody waits any more."""
        result: Any = None
        failure: BaseException | None = None
        try:
            result = self.call()
        except StopIteration as error:  # which a future cannot hold
            failure = RuntimeError(repr(error))
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits it
            failure = error
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, result, failure)

    def _settle(self, result: Any, failure: BaseException | None) -> None:
        if failure is None:
            self.ended.set_result(result)
        else:
            self.ended.set_exception(failure)


class BlockingPool:
    """A few daemon threads for blocking calls, begun when they are needed.

    A call that hangs keeps neither the process alive nor, once it is given up, the others waiting:
    another thread takes the place of its thread until it ends. Whoever calls bounds how many calls
    are given up and have not ended.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._max = threads
        self._name = name
        self._wakeup = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._stuck = 0
        """Threads in calls that were given up."""
        self._closed = False

    async def run(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run ``function(*args)`` in a thread. Cancellation takes effect once it has ended.

        Raises ClosedError after ``close``.
        """
        job = _Job(lambda: function(*args))
        with self._wakeup:
            if self._closed:
                raise ClosedError("the threads have ended")
            self._waiting.append(job)
            self._wakeup.notify()
            self._staff()
        try:
            return await asyncio.shield(job.ended)
        except asyncio.CancelledError:
            self._give_up(job)
            while not job.ended.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({job.ended})
            if not job.ended.cancelled():
                job.ended.exception()
            raise

    def _give_up(self, job: _Job) -> None:
        """Nobody waits for this job any longer: it is not begun, or its thread is replaced."""
        with self._wakeup:
            if job in self._waiting:
                self._waiting.remove(job)
                job.ended.cancel()
            elif not job.ended.done():
                job.given_up = True
                self._stuck += 1
                self._staff()

    def _staff(self) -> None:
        """Begin a thread if jobs wait, none is free to take them, and there may be more."""
        if len(self._waiting) > self._idle and len(self._threads) - self._stuck < self._max:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._wakeup:
                self._stuck -= job.given_up
            del job  # it may keep views of slots alive

    def _next(self) -> _Job | None:
        """The next job of a thread; None if it is to end."""
        with self._wakeup:
            while len(self._threads) - self._stuck <= self._max:
                if self._waiting:
                    return self._waiting.popleft()
                if self._closed:
                    break
                self._idle += 1
                self._wakeup.wait()
                self._idle -= 1
            self._threads.discard(threading.current_thread())
            return None

    def close(self, *, timeout_s: float) -> None:
        """End the threads; those that have not ended after so long are left behind."""
        end_s = time.monotonic() + timeout_s
        with self._wakeup:
            self._closed = True
            self._wakeup.notify_all()
            left = list(self._threads)
        for thread in left:
            thread.join(max(0.0, end_s - time.monotonic()))
