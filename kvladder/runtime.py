"""The runtime: one loop thread that moves bytes, and the doors into it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from kvladder.errors import ClosedError

T = TypeVar("T")
logger = logging.getLogger("kvladder")


class SystemClock:
    """The machine's clocks; the loop's time is the same monotonic clock."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()  # the one place that reads the wall clock


class BlockingPool:
    """A few daemon threads for blocking calls: one that hangs does not keep the process alive."""

    def __init__(self, threads: int, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        while (job := self._work.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - handed to whoever awaits it
                    future.set_exception(error)
            del job, future, call

    async def run(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run ``function(*args)`` in a thread. Cancellation takes effect once it has ended."""
        done: Future[Any] = Future()
        self._work.put((done, lambda: function(*args)))
        future = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
            if not future.cancelled():
                future.exception()
            raise

    def close(self, *, timeout_s: float) -> None:
        """End the threads; one that hangs is left behind."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(timeout_s)


class Runtime:
    """Owns an event loop in a thread of its own. No global: each cache has one.

    The engine's thread comes in by ``post`` (never waits) or ``call`` (waits, for open and close).
    """

    def __init__(self, *, blocking_threads: int = 4) -> None:
        self._loop = asyncio.new_event_loop()
        self._pool = BlockingPool(blocking_threads, "kvladder-blocking")
        self._thread = threading.Thread(target=self._serve, name="kvladder-loop", daemon=True)
        self._closed = False
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

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

    async def run_blocking(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run a blocking function in a thread; the seam that a simulation replaces."""
        return await self._pool.run(function, *args)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Cancel what is left on the loop and end all threads; may be called again."""
        if self._closed:
            return
        self._closed = True
        stopping = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        with suppress(TimeoutError):
            stopping.result(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        self._pool.close(timeout_s=0.1)
        if self._thread.is_alive():
            logger.warning("the kvladder loop thread did not end in %g s: left behind", timeout_s)
        else:
            self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
