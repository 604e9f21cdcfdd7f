"""A purge that a level still owes, and why it does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvladder.forgetting.receipt import Receipt
from kvladder.tiers.ladder.level import Level


@dataclass
class OpenPurge:
    """A purge that a level still owes."""

    receipt: Receipt
    levels: dict[str, Level]
    """Levels that may owe it, by their names in the receipt."""
    erased: dict[str, int]
    """Blocks that each of their tiers had purged before."""
    denied: dict[str, int]
    """Removals that each of their tiers had been denied before."""
    given_up: set[str] = field(default_factory=set[str])
    """Levels whose tiers may not do it: they try again when they are attached or opened anew."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all levels are done, or have given up."""
    is_new: bool = True
    """True until its counts are in the ledger."""
    doubts: dict[str, Level] = field(default_factory=dict[str, Level])
    """Shared levels that were not asked yet which of these blocks they have."""
    media: dict[str, str] = field(default_factory=dict[str, str])
    """Media of detached levels that owe it, by the names of the levels in the receipt."""
    paid: set[str] = field(default_factory=set[str])
    """Levels that owed nothing more when they were detached."""


def why_owed(level: Level, denied: int) -> tuple[str, bool]:
    """Return why a level still owes a purge, and whether it has given up. With the lock held.

    The reason is empty if it is done. ``denied`` is the number of removals that its tier had been
    denied before the purge.
    """
    if level.client.absent:
        return f"left out: {level.client.why or 'it is not open'}", False
    if level.removals:
        state = level.client.states["remove"]
        is_trying = state == "closed"
        return "in progress" if is_trying else f"calls to remove fail: breaker {state}", False
    if level.stats.denied > denied:
        return f"denied: {level.client.denied}", True
    return "", False
