"""The type of the files tier."""

from __future__ import annotations

from kvladder.tiers.type import TierType

TYPE = TierType(
    name="files",
    make="kvladder.tiers.files.tier:FilesTier",
    summary="preallocated segment files, O_DIRECT, checksums, an index log",
    survives="yes, and a crash",
    libraries=("aiofiles",),
)
