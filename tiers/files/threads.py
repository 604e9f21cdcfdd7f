"""Threads for file systems that do not allow O_DIRECT."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from kvladder.tiers.blocking import BlockingPool, CallBatch

T = TypeVar("T")


class BufferedPool(BlockingPool):
    """A ``BlockingPool`` behind aiofiles."""

    def begin(self, batch: CallBatch[Any], *, urgent: bool) -> asyncio.Future[Any]:
        from aiofiles.os import wrap

        lane = _Lane(lambda task: self.put(batch, [task], urgent=urgent))
        return asyncio.gather(*(wrap(task)(executor=lane) for task in batch.tasks))


class _Lane(Executor):
    """An executor for aiofiles that queues the calls of one batch in a pool."""

    def __init__(self, put: Callable[[Callable[[], None]], None]) -> None:
        self._put = put

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self._put(lambda: future.set_result(fn(*args, **kwargs)))
        return future
