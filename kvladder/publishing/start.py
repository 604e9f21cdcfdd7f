"""Logs a cache's namespace at start, and what the levels found under it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvladder.keys import Namespace
from kvladder.tiers.ladder.level import Level
from kvladder.units import Size

logger = logging.getLogger("kvladder")

SHOWN_DIGITS: Final = 16
"""Digits of a namespace that are logged, as in the names of its directories."""


def say_start(space: Namespace, levels: Iterable[Level], block_bytes: int) -> None:
    """Log one line: what each durable or shared level has under this namespace.

    It is a warning if a level found nothing because something has changed.
    """
    parts: list[str] = []
    cold = False
    for level in levels:
        if level.client.absent:
            parts.append(f"{level.name}: not open yet")
        elif level.tier.durable:
            told = level.client.describe()
            cold = cold or "changed" in told
            parts.append(f"{level.name}: {_found(level, told, block_bytes)}")
        elif level.tier.shared:
            parts.append(f"{level.name}: shared, asked for each request")
    say = logger.warning if cold else logger.info
    say("%s", "; ".join([f"namespace {space.hex()[:SHOWN_DIGITS]}", *parts]))


def _found(level: Level, told: dict[str, str], block_bytes: int) -> str:
    """Return what was found and where, or why nothing was found."""
    count = level.stats.recovered
    text = f"{count} blocks ({Size(count * block_bytes).about()}) found" if count else "no blocks"
    if "path" in told and "directory" in told:
        text += f" in {Path(told['path']) / told['directory']}"
    if "others" in told:
        text += f", beside {told['others']}"
    if not count and "changed" in told:
        text += f"; cold: {told['changed']}"
    elif not count and "differs" in told:
        text += f"; the most similar namespace differs: {told['differs']}"
    return text
