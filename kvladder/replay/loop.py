"""An event loop whose time jumps: waits of hours take no time."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable
from typing import Any, Final

RESOLUTION_S: Final = 1e-9
"""A timer is due if it is less than this many seconds in the future."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that never blocks and has no ready files; it passes the timeout to the loop."""

    turn: Callable[[float | None], None]

    def select(self, timeout: float | None = None) -> list[Any]:
        self.turn(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer as soon as no callback is ready.

    Callbacks run in the order in which they became ready, so equal runs are equal.
    """

    def __init__(self) -> None:
        self._now = 0.0
        selector = _JumpingSelector()
        selector.turn = self._turn
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def _turn(self, timeout: float | None) -> None:
        """Advance the time; called once per turn of the loop.

        ``timeout`` is 0 if a callback is ready, and None if none ever will be.
        """
        assert timeout is not None, "nothing will ever happen again"
        if timeout > 0:
            self._jump(timeout)

    def _jump(self, timeout: float) -> None:
        """Advance the time by ``timeout``, but always so far that a timer is due."""
        then = self._now + timeout
        if then == self._now or then + RESOLUTION_S == then:
            then = math.nextafter(then, math.inf)
        self._now = then
