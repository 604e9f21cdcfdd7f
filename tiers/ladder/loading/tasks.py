"""Tasks of loads on the loop thread, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvladder.metrics import LevelStats
from kvladder.tiers.ladder.base_level import Shared


class LoadTasks:
    """Keeps the tasks that read and ask for fetches. One that fails ends nothing but itself.

    Everything runs on the loop thread without the stack's lock. Other threads ``post`` ``begin``
    there, and may look at ``closed``.

    Parameters
    ----------
    stats:
        Where failures are counted.
    ended:
        Is called after a failure, which may have freed slots.
    """

    def __init__(self, shared: Shared, stats: LevelStats, ended: Callable[[], None]) -> None:
        self._shared = shared
        self._stats = stats
        self._ended = ended
        self._tasks: set[asyncio.Task[object]] = set()
        self.closed = False
        """True from the first ``stop``: no task begins any more."""

    def begin(self, work: Callable[[], Coroutine[Any, Any, object]], name: str) -> None:
        """Start a task, unless they were stopped."""
        if self.closed:
            return
        task = asyncio.get_running_loop().create_task(work(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stats.task_failures += 1
            what = f"task {task.get_name()} failed with {error!r}: its blocks count as misses"
            self._shared.notices.say("loader task", what)
            self._ended()

    def stop(self) -> None:
        """Cancel all tasks; no other one begins."""
        self.closed = True
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        """Stop the tasks, and wait until they have ended."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)
