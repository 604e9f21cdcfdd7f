"""Cancellation of a coroutine at each of its suspensions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any

SUSPENSIONS_MAX = 1000


class _Counted:
    """Awaits ``work`` and cancels the running task at its ``at``-th suspension."""

    def __init__(self, work: Coroutine[Any, Any, Any], at: int, *, late: bool) -> None:
        self._work = work
        self._left = at
        self._late = late
        self.reached = False

    def __await__(self) -> Generator[Any, None, Any]:
        task = asyncio.current_task()
        assert task is not None
        inner = self._work.__await__()
        resume = partial(next, inner)
        while True:
            try:
                awaited = resume()
            except StopIteration as end:
                return end.value
            self._left -= 1
            if self._left == 0:
                self.reached = True
                if self._late and asyncio.isfuture(awaited):
                    awaited.add_done_callback(lambda _: task.cancel())
                else:
                    task.get_loop().call_soon(task.cancel)
            try:
                yield awaited
                resume = partial(inner.send, None)
            except BaseException as error:  # noqa: BLE001 - is for the work to handle
                resume = partial(inner.throw, error)


async def cancel_at(work: Coroutine[Any, Any, Any], suspension: int, *, late: bool = False) -> bool:
    """Run ``work`` and cancel it at its ``suspension``-th suspension, counted from 1.

    With ``late``, cancel it when the awaited result has just arrived, before ``work`` can take it.
    Returns whether there were that many suspensions. ``work`` has ended in either case. Any error
    that it raised is raised here, except the cancellation.

    Use it in a loop: ``for n in count(1): if not await cancel_at(call(), n): break``.
    """
    assert 1 <= suspension <= SUSPENSIONS_MAX, "too many suspensions: the work may poll"
    counted = _Counted(work, suspension, late=late)

    async def awaiting() -> None:
        await counted

    task = asyncio.create_task(awaiting())
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return counted.reached
