"""What is to leave a level's tier beyond its index: what others put there, and what lies there."""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.errors import TierError
from kvladder.metrics import LevelStats
from kvladder.tiers.base import Shared, Tier
from kvladder.tiers.gate import Gate

PURGE_TIMEOUT_S = 600.0


class Purges:
    """Salts, None for everything, whose blocks a tier is to remove or erase, one after the other.

    A shared tier is purged before anything else is done with it, and is not asked until then. One
    that keeps the bytes of what it forgot erases them step by step, once all is forgotten, between
    the writes. What fails is still to be done. ``add`` is called with the stack's lock held.
    """

    def __init__(self, tier: Tier, gate: Gate, stats: LevelStats, shared: Shared) -> None:
        self._tier = tier
        self._gate = gate
        self._stats = stats
        self._shared = shared
        self.paused = False
        """Whether erasing has to wait for what is more urgent."""
        self._waiting: list[bytes | None] = []
        self._start = 0
        """From which place on the first of them is still to be erased."""

    def __len__(self) -> int:
        return len(self._waiting)

    def due(self, *, quiet: bool) -> bool:
        """Whether there is something to do; erasing waits until no call is left that may write."""
        return bool(self._waiting) and (self._tier.shared or (quiet and not self.paused))

    def add(self, salt: bytes | None) -> None:
        """Begin with this salt after those that wait."""
        self._waiting.append(salt)

    async def step(self) -> None:
        """Do what is to be done next; a writer calls neither ``put`` nor ``remove`` meanwhile."""
        salt, start = self._waiting[0], self._start
        done, following = 0, None

        async def purging() -> Sequence[bool]:
            nonlocal done, following
            if self._tier.shared:
                done = int(await self._tier.purge(salt, lambda _done, _total: None))
            else:
                done, following = await self._tier.erase(salt, start)
                if following is not None and following <= start:
                    raise TierError(f"erasing goes on at place {following} after {start}")
            return ()

        timeout_s = PURGE_TIMEOUT_S if self._tier.shared else None
        answer = await self._gate.call("remove", purging, lambda: None, timeout_s=timeout_s)
        if answer.results is None:
            return
        with self._shared.lock:
            self._stats.purged += done
            self._start = following or 0
            if following is None:
                del self._waiting[0]
