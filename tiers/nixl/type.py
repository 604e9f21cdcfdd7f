"""The type of the NIXL tier."""

from __future__ import annotations

from kvladder.tiers.type import TierType

TYPE = TierType(
    name="nixl",
    make="kvladder.tiers.nixl.tier:NixlTier",
    summary="other kvladder caches, over TCP",
    survives="as long as those live",
    docs="how-to/nixl.md",
    extra="nixl",
    libraries=("nixl", "pyzmq"),
    isolates=True,
)
