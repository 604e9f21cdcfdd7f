"""What a cache in virtual time runs on: clocks, a portal, and an arena without bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kvladder.arena import Arena, Slot
from kvladder.tiers.ladder.stack import Post

T = TypeVar("T")

VIEW_BYTES: Final = 64
"""Bytes of a block in virtual memory."""


class VirtualClock:
    """The two clocks of a virtual loop; wall time begins at 0, too."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now: Callable[[], float] = loop.time
        """Returns the loop's time in seconds."""
        self.wall: Callable[[], float] = loop.time
        """Returns the same."""


class VirtualPortal:
    """Replaces ``Runtime`` where the caller runs on the loop itself."""

    faults = 0
    """Number of faults; an error ends the replay."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.post: Post = loop.call_soon
        """Schedules a function on the loop."""

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Raise AssertionError: the caller is on the loop, and awaits."""
        work.close()
        raise AssertionError("on a loop, await")

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Do nothing: the caller owns the loop."""


class VirtualArena(Arena):
    """Slots that are counted as in any arena, and all have the same few bytes."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.huge = False
        self.huge_share = 0.0
        self.size_bytes = slots * slot_bytes
        self.address = 0
        self._fd = -1
        self._guarded = self._closing = self._kept = False
        self._buffer = memoryview(bytearray(VIEW_BYTES))
        self._memory = self._populating = None
        self._lock = threading.Lock()
        self._claims = [0] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._admitted = {}
        self._held_back = []

    def view(self, slot: Slot) -> memoryview:
        return self._buffer


async def run_inline(function: Callable[..., Any], /, *args: Any) -> Any:
    """Run a blocking function on the loop itself."""
    return function(*args)
