"""The type of the Mooncake tier."""

from __future__ import annotations

from kvladder.tiers.type import TierType

TYPE = TierType(
    name="mooncake",
    make="kvladder.tiers.mooncake.tier:MooncakeTier",
    summary="a Mooncake Store that engines share, over TCP",
    survives="as long as its nodes live",
    docs="how-to/mooncake.md",
    extra="mooncake",
    libraries=("mooncake-transfer-engine-non-cuda",),
    instead=("mooncake-transfer-engine",),
    isolates=True,
)
