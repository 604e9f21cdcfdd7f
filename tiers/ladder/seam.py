"""What is asked of a stack beside saving and loading, see ``Ladder``."""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.arena import Slot
from kvladder.events import EventBuffer
from kvladder.lock import BULK_STEP, STEP
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers.base import Clock, Shared
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.index import LevelIndex
from kvladder.tiers.ladder.level import Level


class Seam:
    """Answers of a stack about its levels."""

    host: HostLevel
    levels: list[Level]
    shared: Shared

    @property
    def clock(self) -> Clock:
        """The only one."""
        return self.shared.clock

    @property
    def events(self) -> EventBuffer:
        """What comes to a level and leaves one; the lock is held around its calls."""
        return self.shared.events

    @property
    def indexes(self) -> dict[str, LevelIndex]:
        """What each level holds, by name, hottest first."""
        below = {level.name: level.index for level in self.levels}
        return {self.host.name: self.host.index, **below}

    @property
    def media(self) -> dict[str, str]:
        """What each level is made of, by name, hottest first."""
        below = {level.name: level.tier.medium for level in self.levels}
        return {self.host.name: self.host.medium, **below}

    @property
    def capacities(self) -> dict[str, int]:
        """Blocks that each level has room for, by name, hottest first."""
        below = {level.name: level.capacity_blocks for level in self.levels}
        return {self.host.name: self.shared.arena.slots, **below}

    def lasting(self) -> dict[str, bool]:
        """The levels that outlive the engine, and whether each takes blocks now."""
        return {level.name: level.writable for level in self.levels if level.outlives}

    def lease(self, count: int) -> list[Slot]:
        """Up to ``count`` slots, evicting from host what levels below hold too."""
        slots: list[Slot] = []
        while (wanted := min(STEP, count - len(slots))) > 0:
            with self.shared.lock:
                part = self.host.room(wanted, PRIORITY_MAX)
            slots += part
            if len(part) < wanted:
                break
        return slots

    def give_back(self, slots: Sequence[Slot]) -> None:
        """These leased slots are not used any more."""
        for start in range(0, len(slots), BULK_STEP):
            with self.shared.lock:
                self.shared.arena.release(slots[start : start + BULK_STEP])
