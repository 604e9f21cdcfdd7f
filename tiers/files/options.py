"""The settings of a files tier."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec

from kvladder.schema import Settings
from kvladder.units import Size


class FilesOptions(Settings, frozen=True, kw_only=True):
    """Options of a files tier."""

    path: str
    """Directory of the tier, created if only its last part is missing. Each process has a
    directory of its own in it."""
    direct: bool | None = None
    """True to bypass the page cache with O_DIRECT, None to do so if the file system allows it."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=64, description="a number from 1 to 64")] = 8
    """Number of concurrent calls to the disk."""
    segment: Size = Size(256 << 20)
    """Bytes preallocated at a time, at most a sixteenth of the capacity. More if there would be
    too many files otherwise."""
    engines: Annotated[int, msgspec.Meta(ge=1, le=64, description="a number from 1 to 64")] = 1
    """Number of engines that use the path at once; each may take an equal part of the capacity."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("the path is empty: expected a directory")
        if "\0" in self.path:
            raise ValueError("the path has a null character: expected a directory")
        if self.path == "~" or self.path.startswith("~/"):
            raise ValueError("~ is not expanded: write ${HOME}, or the whole path")

    @property
    def claims(self) -> list[tuple[str, str]]:
        """Settings, and values of them, that no other level of a stack may have."""
        return [("path", os.path.realpath(self.path))]
