"""The type of the object store tier."""

from __future__ import annotations

from kvladder.tiers.type import TierType

TYPE = TierType(
    name="object",
    make="kvladder.tiers.object.tier:ObjectTier",
    summary="a bucket of S3, or a folder, that engines share",
    survives="yes, as long as the store keeps it",
    docs="how-to/object.md",
    extra="object",
    libraries=("obstore",),
)
