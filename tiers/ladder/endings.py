"""How blocks end by their requests' terms: when their time is over, or all of a salt at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from math import inf

from kvladder.lock import STEP
from kvladder.tiers.base import EVERYTHING, Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level


class Alarm:
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


def purge(
    levels: Sequence[HostLevel | Level],
    shared: Shared,
    salt: bytes,
    *,
    recall: Callable[[bytes], None],
) -> Iterator[dict[str, int]]:
    """Forget every block of a salt, in steps: see ``TierStack.purge``.

    Meanwhile levels take nothing of this salt, so what moves between them cannot slip through.
    ``recall`` has what is under way get nowhere.
    """
    counts = {level.name: 0 for level in levels}
    with shared.lock:
        shared.purging[salt] += 1
        for level in levels:
            if isinstance(level, Level):
                level.forget_later(salt)
                if level.tier.shared:  # also what others put
                    level.purge(salt)
    try:
        recall(salt)
        for level in levels:
            start = 0
            while start < level.index.places:
                with shared.lock:
                    salted, start = level.index.salted(salt, start)
                    counts[level.name] += level.remove(salted)
                yield dict(counts)
        yield counts
    finally:
        recall(salt)  # what came up while it was still below
        with shared.lock:
            for level in levels:
                if isinstance(level, Level) and level.tier.erases:
                    level.purge(salt)
            shared.purging[salt] -= 1
            if not shared.purging[salt]:
                del shared.purging[salt]


def sweep(
    levels: Sequence[HostLevel | Level],
    shared: Shared,
    *,
    recall: Callable[[], Iterator[None]],
) -> Generator[None]:
    """Forget all that these levels hold, in steps: see ``TierStack.reset``.

    Meanwhile no level takes anything. ``recall`` has what is under way get nowhere, in steps.
    """
    with shared.lock:
        shared.purging[EVERYTHING] += 1
        for level in levels:
            if isinstance(level, Level):
                level.forget_later(None)
    try:
        yield from recall()
        for level in levels:
            if isinstance(level, Level):
                yield from level.recall_all()
            for start in range(0, level.index.places, STEP):
                with shared.lock:
                    level.remove(level.index.held(start, start + STEP))
                yield
    finally:
        with shared.lock:
            shared.purging[EVERYTHING] -= 1
            if not shared.purging[EVERYTHING]:
                del shared.purging[EVERYTHING]


def clear(
    levels: Sequence[HostLevel | Level],
    shared: Shared,
    *,
    recall: Callable[[], Iterator[None]],
    erase: bool,
) -> Iterator[None]:
    """Forget all blocks of a namespace, in steps: see ``TierStack.clear``."""
    below = [level for level in levels if isinstance(level, Level)]
    with shared.lock:
        for level in below:
            if level.tier.shared:  # also what others put; it is not asked until then
                level.purge(None)
    yield from sweep(levels, shared, recall=recall)
    with shared.lock:
        for level in below:
            if erase and level.tier.erases:
                level.purge(None)
