"""Purges of a level's tier, what was removed while it was not open, and what it has to sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvladder.keys import BlockKey
from kvladder.metrics import LevelStats
from kvladder.tiers.label import RecoveredBlock
from kvladder.tiers.ladder.calling.client import TierClient

Filter = Callable[[Sequence[RecoveredBlock]], Sequence[bool]]
"""Returns for each recovered block whether the level may hold it."""


class PurgeQueue:
    """Queues salts, None for everything: a tier removes or erases their blocks, one salt at a time.

    A shared tier is purged at once. Another one erases when all removals have ended: not while
    ``busy`` says that removals, or calls that may write, are left. After removals by a user a
    durable tier also has to sync, or a power cut would bring their blocks back. The stack's lock is
    held around every call.
    """

    def __init__(self, client: TierClient, stats: LevelStats, *, busy: Callable[[], bool]) -> None:
        self._client = client
        self._stats = stats
        self._busy = busy
        self._todo: list[tuple[bytes | None, int]] = []
        """Salts, each with the place at which its purge continues."""
        self._erases_later = False
        self.missed: set[BlockKey | bytes | None] = set()
        """Removals while the tier was not open: keys, salts, or None for everything."""
        self.filters: list[Filter] = []
        """Purges while the tier was not open, of blocks that could not be named then."""
        self.doubts = 0
        """Number of purges that have still to look which of their blocks a shared tier has."""
        self.removals = 0
        """Number of times that a user removed blocks."""
        self._synced = 0
        """How many of these survive a power cut."""

    def __len__(self) -> int:
        return len(self._todo) + self.doubts + self._is_unsynced

    def filter(self, keeps: Filter) -> None:
        """Have the level not hold those blocks that ``keeps`` refuses, if the tier is not open."""
        if self._client.absent:
            self.filters.append(keeps)

    def opened(self) -> None:
        """Forget what was removed while the tier was not open: it has recovered its blocks."""
        self.missed.clear()
        self.filters.clear()

    def condemn(self, *removed: BlockKey | bytes | None) -> None:
        """Note what a user removes: keys, salts, or None for everything.

        The tier has to sync after it. If it is not open now, the level does not hold such blocks
        when the tier opens and recovers them.
        """
        self.removals += bool(removed)
        if self._client.absent:
            self.missed.update(removed)

    def salts(self) -> list[bytes | None]:
        """Return the salts that are queued."""
        return [salt for salt, _ in self._todo]

    def add(self, salt: bytes | None) -> None:
        """Queue a purge of a salt."""
        self._todo.append((salt, 0))

    def later(self, *, later: bool) -> None:
        """Set whether erasing has to wait for more urgent work."""
        self._erases_later = later

    @property
    def next(self) -> tuple[bytes | None, int] | None:
        """The purge that may run now and the place where it continues, or None."""
        is_due = self._client.tier.shared or not (self._erases_later or self._busy())
        return self._todo[0] if self._todo and is_due else None

    @property
    def _is_unsynced(self) -> bool:
        return self.owes_sync(self.removals)

    def owes_sync(self, removals: int) -> bool:
        """Return whether the tier has still to sync the first ``removals``."""
        tier = self._client.tier
        return tier.durable and not tier.shared and self._synced < removals

    @property
    def sync_due(self) -> bool:
        """True if the tier has to sync now: all removals by users have reached it."""
        return self._is_unsynced and not self._busy()

    def synced(self, removals: int) -> None:
        """Note that the tier has synced, when users had removed blocks so many times."""
        self._synced = removals

    def done(self, blocks: int, following: int | None) -> None:
        """End a step of the first purge, in which ``blocks`` were purged.

        It continues at ``following``, or is over if that is None. Do not call it for a step that
        failed: that purge stays queued.
        """
        self._stats.purged += blocks
        salt, _ = self._todo[0]
        self._todo[:1] = [] if following is None else [(salt, following)]
