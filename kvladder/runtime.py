"""The runtime: one loop thread that moves bytes, and the doors into it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from kvladder.errors import ClosedError
from kvladder.notices import Notices
from kvladder.tiers.base import Blocking

T = TypeVar("T")
THREADS = 4
"""For the blocking calls of one user, e.g. of one tier."""
logger = logging.getLogger("kvladder")


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


class Runtime:
    """Owns an event loop in a thread of its own. No global: each cache has one.

    The engine's thread comes in by ``post`` (never waits) or ``call`` (waits, for open and close).
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._handle)
        self._notices = Notices(SystemClock().now)
        self.faults = 0
        """Errors that reached the loop itself: it would have ended, or they were nobody's."""
        self._pools: list[BlockingPool] = []
        self._thread = threading.Thread(target=self._serve, name="kvladder-loop", daemon=True)
        self._closed = False
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closed:
            try:
                self._loop.run_forever()
                error: BaseException = RuntimeError("it was stopped")
            except BaseException as raised:  # noqa: BLE001 - SystemExit in a task, for one
                error = raised
            if not self._closed:
                self._fault(f"the event loop goes on after {error!r}", error)

    def _handle(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What asyncio would log: an exception of a callback, or of a task that nobody awaits."""
        error = context.get("exception")
        self._fault(f"{context['message']}: {error!r}" if error else context["message"], error)

    def _fault(self, what: str, error: BaseException | None) -> None:
        if self._closed:
            return
        self.faults += 1
        self._notices.say("loop", what)
        logger.debug("%s", what, exc_info=error)

    def post(self, function: Callable[..., object], /, *args: Any) -> None:
        """Have the loop thread call ``function(*args)`` soon; dropped after ``close``."""
        if threading.current_thread() is self._thread:
            self._loop.call_soon(function, *args)
            return
        with suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(function, *args)

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run ``work`` on the loop and wait for it; TimeoutError after ``timeout_s``."""
        if self._closed:
            work.close()
            raise ClosedError("the runtime is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def threads(self, name: str) -> Blocking:
        """Runs blocking functions in a few threads of this name, which others do not share."""
        pool = BlockingPool(THREADS, f"kvladder-{name}")
        self._pools.append(pool)
        return pool.run

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Cancel what is left on the loop and end all threads; may be called again.

        Waits up to ``timeout_s`` for the tasks and as long for the thread; what has not ended by
        then is left behind, and does not keep the process alive.
        """
        if self._closed:
            return
        stopping = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        with suppress(TimeoutError):
            stopping.result(timeout_s)
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        for pool in self._pools:
            pool.close(timeout_s=0.1)
        if self._thread.is_alive():
            logger.warning("the kvladder loop thread did not end in %g s: left behind", timeout_s)
        else:
            self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
