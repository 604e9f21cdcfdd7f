"""A task that has to go on whatever happens in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PAUSE_S = 1.0
"""From the end of a task that died to its next start."""


async def supervised(
    work: Callable[[], Awaitable[None]], died: Callable[[BaseException], object]
) -> None:
    """Do ``work``, and begin anew each time it dies of an error, which ``died`` is told.

    Ends when it is cancelled or ``work`` returns.
    """
    while True:
        try:
            await work()
        except GeneratorExit:  # the loop is gone
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            died(error)
        else:
            return
        await asyncio.sleep(PAUSE_S)
