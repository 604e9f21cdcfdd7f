"""The files in a directory of the tier: their names, and META, which says how they are laid out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
from xxhash import xxh3_64_hexdigest

from kvladder.errors import ConfigError
from kvladder.tiers import label
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.disk import Disk, read_file
from kvladder.tiers.files.header import HEADER_BYTES

MAGIC = "kvladder files"
VERSION = 2 + label.VERSION  # rises with it, as old labels cannot be read then
SEGMENTS_MAX = 512
"""Most segments: each is an open file, and a process may often have only 1024."""
SEGMENTS_WANTED_MAX = SEGMENTS_MAX // 4
"""Most segments for a new capacity; larger segments instead of more leave room to grow."""
META_BYTES_MAX = 1 << 16
META_NAME = "META"
LOG_NAME = "index.log"
LOCK_NAME = "LOCK"
FIELDS_NAME = "FIELDS"
"""File with the fields from which the namespace is computed, for people. No block needs it."""
STATE_NAMES = {"own": "POLICY", "host": "POLICY-HOST"}  # what eviction policies have learned
ASIDE = {f"{name}.tmp" for name in (META_NAME, LOG_NAME, FIELDS_NAME, *STATE_NAMES.values())}
"""Names under which files are written before they are renamed."""
_SEGMENT = re.compile(r"seg-([0-9]{5})")
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Space = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_DAMAGED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def segment_number(name: str) -> int | None:
    """Return the number of the segment with this file name; None for other names."""
    found = _SEGMENT.fullmatch(name)
    return int(found[1]) if found else None


def segment_file(home: Path, number: int) -> Path:
    """Return the path of a segment's file."""
    return home / f"seg-{number:05d}"


def segment_sizes(disk: Disk, home: Path) -> dict[int, int]:
    """Return the bytes of each segment in a directory, by number."""
    numbers = {name: segment_number(name) for name in disk.listdir(home)}
    return {n: disk.stat(home / name).st_size for name, n in numbers.items() if n is not None}


def is_ours(name: str) -> bool:
    """Return whether the tier writes a file of this name into a namespace's directory."""
    ours = LOG_NAME, META_NAME, LOCK_NAME, FIELDS_NAME, *STATE_NAMES.values(), *ASIDE
    return segment_number(name) is not None or name in ours


class DirectoryMeta(msgspec.Struct, frozen=True, kw_only=True):
    """META: the layout of a namespace's other files; one line of JSON, readable for people."""

    magic: str = MAGIC
    version: int = VERSION
    namespace: Space
    block_bytes: Count
    stride: Count
    """Bytes from one block's header to the next header."""
    segment_places: Count
    capacity_blocks: Count

    @classmethod
    def new(cls, context: TierContext, segment_bytes: int, segments_min: int) -> DirectoryMeta:
        """Return the layout of the files of a namespace that is new in this path."""
        stride = HEADER_BYTES + context.layout.slot_bytes
        capacity = context.capacity_blocks
        most = max(1, min(segment_bytes // stride, capacity // segments_min))
        return cls(
            namespace=context.namespace.hex(),
            block_bytes=context.layout.block_bytes,
            stride=stride,
            segment_places=max(most, -(-capacity // SEGMENTS_WANTED_MAX)),
            capacity_blocks=capacity,
        )

    def holds(self, wanted: DirectoryMeta) -> bool:
        """Return whether files of this layout can hold the blocks of ``wanted``.

        They cannot if this would take more than ``SEGMENTS_MAX`` segments.
        """
        ours = (self.namespace, self.block_bytes, self.stride)
        fitting = wanted.capacity_blocks <= self.segment_places * SEGMENTS_MAX
        return ours == (wanted.namespace, wanted.block_bytes, wanted.stride) and fitting

    def size(self, segment: int) -> int:
        """Return the bytes of a segment; the last one may have fewer places than the others."""
        first = segment * self.segment_places
        return max(0, min(self.segment_places, self.capacity_blocks - first)) * self.stride


class _Version(msgspec.Struct):
    """The fields that META has in every version."""

    magic: str
    version: int


def sealed(line: bytes) -> bytes:
    """Return a line with its digest on the next line, which shows damage; same in all versions."""
    return b"%s\n%s\n" % (line, xxh3_64_hexdigest(line).encode())


def read_meta(disk: Disk, home: Path) -> DirectoryMeta | int | None:
    """Return the META of a directory, or None if it is damaged, missing or not kvladder's.

    If an earlier version of kvladder wrote it, return only the number of its format.

    Raises
    ------
    ConfigError
        A newer version of kvladder wrote it.
    """
    path = home / META_NAME
    try:
        data = read_file(disk, path, META_BYTES_MAX)
        line = data.partition(b"\n")[0]
        if data != sealed(line):
            return None
        found = msgspec.json.decode(line, type=_Version)
        if found.magic != MAGIC:
            return None
        require_known(path, found.version, VERSION)
        if found.version < VERSION:
            return found.version
        return msgspec.json.decode(line, type=DirectoryMeta)
    except (*_DAMAGED, FileNotFoundError, NotADirectoryError):
        return None


def require_known(path: Path, version: int, newest: int) -> None:
    """Raise ConfigError if a file's version is newer than the newest one known here."""
    if version > newest:
        raise ConfigError(
            f"{path} has format {version}: expected {newest} or older",
            path="path",
            hint="use the version of kvladder that wrote it, or another path",
        )
