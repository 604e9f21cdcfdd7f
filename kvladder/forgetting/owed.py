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
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    is_new: bool = True
    """True until its counts are in the ledger."""
    doubts: dict[str, Level] = field(default_factory=dict[str, Level])
    """Shared levels that were not asked yet which of these blocks they have."""
    media: dict[str, str] = field(default_factory=dict[str, str])
    """Media of detached levels that owe it, by the names of the levels in the receipt."""
    paid: set[str] = field(default_factory=set[str])
    """Levels that owed nothing more when they were detached."""


def why_owed(level: Level) -> str:
    """Return why a level still owes a purge; empty if it is done. With the lock held."""
    if level.client.absent:
        return f"left out: {level.client.why or 'it is not open'}"
    if not level.removals:
        return ""
    state = level.client.states["remove"]
    return "in progress" if state == "closed" else f"calls to remove fail: breaker {state}"
