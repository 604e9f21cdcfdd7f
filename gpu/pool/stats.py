"""Exact counts of what a device pool did, per pool and per request."""

from __future__ import annotations

from dataclasses import asdict, dataclass


def _rate(reused: int, missed: int) -> float:
    return reused / (reused + missed) if reused + missed else 0.0


@dataclass(slots=True)
class PoolStats:
    """Counters of a pool since it was made, in blocks."""

    allocated: int = 0
    """Slots handed out."""
    reused: int = 0
    """Whole blocks of prompts that were served from the cache."""
    missed: int = 0
    """Blocks of prompts that were not; one of which a part was served counts here."""
    partial: int = 0
    """Blocks of prompts of which a part was served."""
    stored: int = 0
    """Blocks that became reusable."""
    duplicates: int = 0
    """Blocks that were complete when an equal one was already reusable."""
    evicted: int = 0
    """Blocks that left the device to make room."""
    offloaded: int = 0
    """Of those, the ones that a tier took or already held."""
    onboarded: int = 0
    """Blocks that came back from a tier."""
    lost: int = 0
    """Blocks whose copy to or from a tier failed."""

    def served(self, request: RequestStats) -> None:
        """Count what a prompt found."""
        self.reused += request.reused
        self.missed += request.missed
        self.partial += request.partial_tokens > 0

    @property
    def hit_rate(self) -> float:
        """Reused blocks among all blocks of prompts; 0 before there are any."""
        return _rate(self.reused, self.missed)

    def as_dict(self) -> dict[str, int]:
        """All counters by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request's prompt found when it began, in blocks."""

    reused: int
    """Whole blocks served from the cache."""
    missed: int
    """The others, each of which gets a slot of its own."""
    onboarded: int = 0
    """Of the reused ones, those that came from a tier."""
    partial_tokens: int = 0
    """Tokens served of the block behind the whole ones."""

    @property
    def hit_rate(self) -> float:
        """Reused blocks among all blocks of the prompt."""
        return _rate(self.reused, self.missed)
