"""Virtual time and memory: an event loop whose clock jumps, and an arena without bytes."""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kvladder.arena import Arena, Slot
from kvladder.tiers.ladder.stack import Post

T = TypeVar("T")

RESOLUTION_S: Final = 1e-9
"""A timer is due if it is less than this many seconds in the future."""
VIEW_BYTES: Final = 64
"""Bytes of a block in virtual memory."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that never blocks and has no ready files; it passes the timeout on."""

    jump: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen again"
        if timeout > 0:
            self.jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer as soon as no callback is ready.

    Callbacks run in the order in which they became ready, so equal runs are equal.
    """

    def __init__(self) -> None:
        self._now = 0.0
        selector = _JumpingSelector()
        selector.jump = self._jump
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float) -> None:
        then = self._now + timeout
        if then == self._now or then + RESOLUTION_S == then:  # else no timer would be due
            then = math.nextafter(then, math.inf)
        self._now = then


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
