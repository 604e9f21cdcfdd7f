"""When blocks end by their requests' wish: an alarm for the next one of all levels."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

from kvladder.lock import STEP
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.shelf import Shared


class Expiry:
    """Has levels forget blocks when the time that their requests gave them is over."""

    def __init__(self, levels: Sequence[HostLevel | Level], shared: Shared) -> None:
        self._levels = levels
        self._shared = shared
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Look at what is there now; on the loop thread, with the lock held."""
        next_s = min(level.index.next_end_s for level in self._levels)
        if self._timer is not None and self._timer.when() > next_s:
            self.cancel()
        if self._timer is None and next_s != inf:
            self._timer = asyncio.get_running_loop().call_at(next_s, self._ring)

    def cancel(self) -> None:
        """It does not go off."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        now_s = self._shared.clock.now()
        for level in self._levels:
            with self._shared.lock:
                level.expire(now_s, STEP)
        with self._shared.lock:
            self.set()
