"""Threads for blocking I/O: a batch is split over them, and reads go before writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import count
from queue import PriorityQueue
from typing import Any, Generic, TypeVar, cast

from kvladder.errors import ClosedError

T = TypeVar("T")
_URGENT, _OTHER, _END = range(3)


class IoPool:
    """Daemon threads, so that a call that hangs in the kernel does not keep the process alive.

    Parameters
    ----------
    threads:
        How many.
    name:
        Prefix of the threads' names.
    """

    def __init__(self, threads: int, name: str = "kvladder-files") -> None:
        self._name = name
        self._closed = False
        self._tasks = PriorityQueue[tuple[int, int, Callable[[], None] | None]]()
        """By urgency, then in the order in which they came; None ends a thread."""
        self._number = count()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        while (task := self._tasks.get()[-1]) is not None:
            task()
            del task  # it keeps views of slots alive

    def enqueue(self, tasks: Sequence[Callable[[], None]], *, urgent: bool) -> None:
        """Have the threads call ``tasks``, none of which raises. ClosedError after ``aclose``."""
        if self._closed:
            raise ClosedError("the pool is closed")
        for task in tasks:
            self._tasks.put((_URGENT if urgent else _OTHER, next(self._number), task))

    async def run(self, jobs: Sequence[Callable[[], T]], *, urgent: bool = False) -> list[T]:
        """The jobs' results, in order. ``urgent`` ones are begun before those that are not.

        Ends when no job runs any more: if one raises, the rest still run, then the first error is
        raised; when cancelled, what was not begun is left out. ClosedError after ``aclose``.
        """
        if not jobs:
            return []
        batch = _Batch(jobs)
        await _ended(self._begin(batch, urgent=urgent), batch)
        return batch.results()

    def _begin(self, batch: _Batch[Any], *, urgent: bool) -> asyncio.Future[Any]:
        """Hand over a batch; the future is done when it is."""
        self.enqueue(batch.tasks, urgent=urgent)
        return batch.done

    async def aclose(self, last: Callable[[], None], *, timeout_s: float) -> bool:
        """Let what was begun end, then run ``last``, which raises nothing; called once.

        False if that was not done after ``timeout_s`` and is left behind.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            for thread in self._threads:
                thread.join()
            last()
            _settle_on(loop, ended)

        self._closed = True
        for _ in self._threads:
            self._tasks.put((_END, next(self._number), None))
        threading.Thread(target=end, name=f"{self._name}-end", daemon=True).start()
        await asyncio.wait({ended}, timeout=timeout_s)
        return ended.done()


class BufferedPool(IoPool):
    """The same threads behind aiofiles: for file systems that do not allow O_DIRECT."""

    def _begin(self, batch: _Batch[Any], *, urgent: bool) -> asyncio.Future[Any]:
        from aiofiles.os import wrap

        lane = _Lane(self, urgent=urgent)
        return asyncio.gather(*(wrap(task)(executor=lane) for task in batch.tasks))


class _Lane(Executor):
    """One of a pool's two queues, as the executor that aiofiles takes."""

    def __init__(self, pool: IoPool, *, urgent: bool) -> None:
        self._pool = pool
        self._urgent = urgent

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self._pool.enqueue([lambda: future.set_result(fn(*args, **kwargs))], urgent=self._urgent)
        return future


class _Batch(Generic[T]):
    """Jobs on their way through the threads; ``done`` is set when the last has ended."""

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.stopped = False
        """Whether what was not begun is to be left out."""
        self._lock = threading.Lock()
        self._left = len(jobs)
        self._results: list[T | None] = [None] * len(jobs)
        self._error: BaseException | None = None
        self.tasks = [self._task(index, job) for index, job in enumerate(jobs)]

    def _task(self, index: int, job: Callable[[], T]) -> Callable[[], None]:
        def task() -> None:
            try:
                if not self.stopped:
                    self._results[index] = job()
            except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the batch
                self._error = self._error or error
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if last:
                _settle_on(self._loop, self.done)

        return task

    def results(self) -> list[T]:
        """The jobs' results once all have ended; raises the first error."""
        if self._error is not None:
            raise self._error
        return cast("list[T]", self._results)


async def _ended(future: asyncio.Future[Any], batch: _Batch[Any]) -> None:
    """Wait for ``future``; a cancellation stops the batch and takes effect once it is done."""
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        batch.stopped = True
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        raise


def _settle_on(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Set ``future`` from a thread, unless its loop is closed and nobody waits any more."""

    def settle() -> None:
        if not future.done():
            future.set_result(None)

    with suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)
