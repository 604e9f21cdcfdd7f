"""Offload rules: which blocks a level takes, and when it writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN

When = Literal["evict", "commit", "never"]
Admit = Literal["all", "adaptive"]


@dataclass(frozen=True, slots=True)
class OffloadRule:
    """Conditions under which a level takes a block.

    Parameters
    ----------
    min_priority:
        Inclusive threshold, 0..100. It is compared with the block's *floor*, the lowest priority
        among the block and its ancestors. So a level holds a contiguous part of each prefix: it
        never takes a block below a refused parent, which no prefix could reach.
    when:
        ``evict`` writes back when the block leaves the level above. ``commit`` writes through as
        soon as its content is complete. ``never`` leaves all writing to the caches that share it.
    min_hits:
        Number of reuses after which a block is taken; 0 takes every block.
    ttl_s:
        Seconds after which the level forgets the block; None means never.
    admit:
        ``adaptive`` leaves out blocks that are unlikely to be read again, to save writes; see
        ``kvladder.policy.admission``. ``all`` takes every block that the above allows.
    """

    min_priority: int = PRIORITY_DEFAULT
    when: When = "evict"
    min_hits: int = 0
    ttl_s: float | None = None
    admit: Admit = "all"

    def __post_init__(self) -> None:
        assert PRIORITY_MIN <= self.min_priority <= PRIORITY_MAX, self.min_priority
        assert self.min_hits >= 0, self.min_hits
        assert self.ttl_s is None or self.ttl_s > 0, self.ttl_s
        assert self.admit == "all" or self.when == "evict", self.when

    def admits(self, floor: int, hits: int) -> bool:
        """Return whether the level takes a block with this prefix floor and hit count."""
        is_due = floor >= self.min_priority and hits >= self.min_hits
        return is_due and self.when != "never"
