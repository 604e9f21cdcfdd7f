"""What a level takes: thresholds, admission and when it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN

When = Literal["evict", "commit", "never"]


@dataclass(frozen=True, slots=True)
class OffloadRule:
    """When a level takes a block.

    Parameters
    ----------
    min_priority:
        Inclusive threshold, 0..100. It is compared with the block's *floor*, the lowest priority
        among the block and its ancestors, so what a level holds of a prefix is contiguous: a block
        whose parent was refused would be unreachable.
    when:
        ``evict`` writes back when the block leaves the level above; ``commit`` writes through as
        soon as its content is complete; ``never`` leaves all writing to others who share it.
    min_hits:
        How often a block must have been used again before it is taken; 0 takes every block.
    ttl_s:
        Seconds after which the level forgets the block; None means never.
    """

    min_priority: int = PRIORITY_DEFAULT
    when: When = "evict"
    min_hits: int = 0
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        assert PRIORITY_MIN <= self.min_priority <= PRIORITY_MAX, self.min_priority
        assert self.min_hits >= 0, self.min_hits
        assert self.ttl_s is None or self.ttl_s > 0, self.ttl_s

    def admits(self, floor: int, hits: int) -> bool:
        """Whether a block of this prefix floor and hit count is taken."""
        is_due = floor >= self.min_priority and hits >= self.min_hits
        return is_due and self.when != "never"
