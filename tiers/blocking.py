"""What waits outside of an event loop: the machine's clocks, and threads for blocking calls."""

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
    """The machine's clocks; the loop's time is the same monotonic clock."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()  # the one place that reads the wall clock


class CallBatch(Generic[T]):
    """Calls for threads; ``ended``, on their loop, is set when the last has ended."""

    def __init__(self, calls: Sequence[Callable[[], T]]) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.left = len(calls)
        """How many have not ended; with the lock of the pool held, as the next two."""
        self.running = 0
        self.given_up = False
        """Whether nobody waits for them: what has not begun does nothing."""
        self._results: list[T | None] = [None] * len(calls)
        self._error: BaseException | None = None
        self.tasks = [partial(self._do, number, call) for number, call in enumerate(calls)]

    def _do(self, number: int, call: Callable[[], T]) -> None:
        try:
            if not self.given_up:
                self._results[number] = call()
        except StopIteration as error:  # which a coroutine cannot raise
            self._error = RuntimeError(repr(error))
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits it
            self._error = self._error or error

    def tell(self) -> None:
        """Set ``ended`` if all have. Nobody waits any more if the loop is closed."""
        if not self.left:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def results(self) -> list[T]:
        """What they returned, once all have ended; raises the first error."""
        if self._error is not None:
            raise self._error
        return cast("list[T]", self._results)


class _Waiting(NamedTuple):
    """A call that waits for a thread; the least begins first."""

    rank: int
    number: int
    """In the order in which they came."""
    batch: CallBatch[Any]
    task: Callable[[], object]
    """Raises nothing."""


_URGENT, _OTHER, _LAST = range(3)
"""Ranks: what is urgent, what is not, and what begins when all else has ended."""


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
        self._waiting: list[_Waiting] = []
        """A heap."""
        self._number = count()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._running = 0
        self._stuck = 0
        """Threads in calls that were given up."""
        self._closed = False

    async def run(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run ``function(*args)`` in a thread, as ``run_all`` does."""
        (result,) = await self.run_all([partial(function, *args)])
        return result

    async def run_all(self, calls: Sequence[Callable[[], T]], *, urgent: bool = False) -> list[T]:
        """The calls' results, in order. ``urgent`` ones are begun before those that are not.

        Ends when no call runs any more: if one raises, the rest still run, then the first error is
        raised; when cancelled, what was not begun is left out. ClosedError after ``close``.
        """
        if not calls:
            return []
        batch = CallBatch(calls)
        over = self.begin(batch, urgent=urgent)
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError:
            self._give_up(batch)
            while not over.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({over})
            raise
        return batch.results()

    def begin(self, batch: CallBatch[Any], *, urgent: bool) -> asyncio.Future[Any]:
        """Hand over a batch; the future is done when it is."""
        self.put(batch, batch.tasks, urgent=urgent)
        return batch.ended

    def put(
        self, batch: CallBatch[Any], tasks: Sequence[Callable[[], object]], *, urgent: bool
    ) -> None:
        """Have threads call these tasks of a batch, none of which raises."""
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
        """Nobody waits for this any longer: it is not begun, or its threads are replaced."""
        with self._wakeup:
            batch.given_up = True
            left_out = [one for one in self._waiting if one.batch is batch]
            self._waiting = [one for one in self._waiting if one.batch is not batch]
            heapify(self._waiting)
            batch.left -= len(left_out)
            self._stuck += batch.running
            self._staff()
        for one in left_out:  # they do nothing any more, but somebody may wait for their ends
            one.task()
        batch.tell()

    def _staff(self) -> None:
        """Begin threads if calls wait, none is free to take them, and there may be more."""
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
        """The next call of a thread; None if it is to end."""
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
        """Let what was begun end, then run ``last``; called once.

        False if that was not done after ``timeout_s`` and is left behind.
        """
        batch = CallBatch([last])
        with self._wakeup:
            self._closed = True
            self._put(batch, batch.tasks, _LAST)
            self._wakeup.notify_all()
        await asyncio.wait({batch.ended}, timeout=timeout_s)
        return batch.ended.done()

    def close(self, *, timeout_s: float) -> None:
        """End the threads; those that have not ended after so long are left behind."""
        end_s = time.monotonic() + timeout_s
        with self._wakeup:
            self._closed = True
            self._wakeup.notify_all()
            left = list(self._threads)
        for thread in left:
            thread.join(max(0.0, end_s - time.monotonic()))
