"""The type of the host level; the stack itself makes that level."""

from __future__ import annotations

from kvladder.tiers.type import TierType

TYPE = TierType(
    name="host",
    make="kvladder.tiers.ladder.host:HostLevel",
    summary="slots of the arena, pinned where a GPU is",
    survives="no",
)
