"""The type of the memory tier."""

from __future__ import annotations

from kvladder.tiers.type import TierType

TYPE = TierType(
    name="memory",
    make="kvladder.tiers.memory.tier:MemoryTier",
    summary="ordinary process memory; the reference for tier authors",
    survives="no",
)
