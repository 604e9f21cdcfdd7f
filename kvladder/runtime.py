"""The runtime: one loop thread that moves bytes, and the ways for other threads to reach it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from kvladder.errors import ClosedError
from kvladder.notices import Notices
from kvladder.tiers.blocking import BlockingPool as BlockingPool
from kvladder.tiers.blocking import SystemClock as SystemClock
from kvladder.tiers.context import Blocking

T = TypeVar("T")
THREADS = 4
"""Number of threads for the blocking calls of one user, e.g. of one tier."""
logger = logging.getLogger("kvladder")


class Runtime:
    """Owns an event loop in its own thread. Nothing is global: each cache has one runtime.

    The engine's thread uses ``post``, which never waits, and ``call``, which waits (for open and
    close). ``name`` is that of its thread.
    """

    def __init__(self, name: str = "kvladder-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._handle)
        self._notices = Notices(SystemClock().now)
        self.faults = 0
        """Number of errors that stopped the loop (it was restarted) or that no code awaited."""
        self._pools: dict[str, BlockingPool] = {}
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closed:
            try:
                self._loop.run_forever()
                error: BaseException = RuntimeError("the loop was stopped")
            except BaseException as raised:  # noqa: BLE001 - SystemExit in a task, for one
                error = raised
            if not self._closed:
                self._fault(f"the event loop was restarted after {error!r}", error)

    def _handle(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report an exception of a callback, or of a task that is not awaited."""
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
        future = self.begin(work)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the loop; the future is its result, and cancels it.

        Raises
        ------
        ClosedError
            The runtime is closed.
        """
        if self._closed:
            work.close()
            raise ClosedError("the runtime is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def threads(self, name: str) -> Blocking:
        """Return a function that runs blocking calls in its own few threads, named ``name``.

        A later user of the same name, such as a level that is attached again, gets the same ones.
        """
        if name not in self._pools:
            self._pools[name] = BlockingPool(THREADS, f"kvladder-{name}")
        return self._pools[name].run

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Cancel the tasks on the loop and end all threads; may be called again.

        Waits up to ``timeout_s`` for the tasks, and again for the thread. A thread that has not
        ended by then is abandoned; it does not keep the process alive.
        """
        if self._closed:
            return
        stopping = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        with suppress(TimeoutError):
            stopping.result(timeout_s)
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        for pool in self._pools.values():
            pool.close(timeout_s=0.1)
        if self._thread.is_alive():
            logger.warning("the kvladder loop thread did not end in %g s: abandoned", timeout_s)
        else:
            self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
