"""What a files tier's directory holds: names, META, and what it may not be."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import msgspec
from xxhash import xxh3_64_hexdigest

from kvladder.errors import ConfigError
from kvladder.tiers.files.disk import Disk, read_file, replace_file

MAGIC = "kvladder files"
VERSION = 2
PREFIX_DIGITS = 16
SEGMENTS_MAX = 512
"""Each is an open file, and a process may often have no more than 1024."""
META_BYTES_MAX = 1 << 16
META_NAME = "META"
LOG_NAME = "index.log"
LOCK_NAME = "LOCK"

ASIDE = {f"{META_NAME}.tmp", f"{LOG_NAME}.tmp"}
"""What is written aside before it gets its name."""
_HOME = re.compile(rf"([0-9a-f]{{{PREFIX_DIGITS}}})(?:\.([1-9][0-9]*))?")
_SEGMENT = re.compile(r"seg-([0-9]{5})")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def home_name(prefix: str, number: int) -> str:
    """The directory of the ``number``-th of several processes that use one namespace at once."""
    return f"{prefix}.{number}" if number else prefix


def home_number(name: str) -> tuple[str, int] | None:
    """The namespace's prefix and the number that a directory's name stands for, or None."""
    found = _HOME.fullmatch(name)
    return (found[1], int(found[2] or 0)) if found else None


def segment_name(segment: int) -> str:
    """The file name of a segment."""
    return f"seg-{segment:05d}"


def segment_number(name: str) -> int | None:
    """The segment that a file name stands for, or None."""
    found = _SEGMENT.fullmatch(name)
    return int(found[1]) if found else None


def is_ours(name: str) -> bool:
    """Whether a file of this name in a namespace's directory is one that the tier writes."""
    return segment_number(name) is not None or name in {LOG_NAME, META_NAME, LOCK_NAME, *ASIDE}


def require_safe(disk: Disk, path: Path, *, directory: bool) -> None:
    """Raise ConfigError unless nobody else can have put, or can put, other things at ``path``.

    What is there has to be no link, this user's, and for others not to write to. Raises
    FileNotFoundError if there is nothing.
    """
    found = disk.stat(path)
    wanted = "directory" if directory else "file"
    if found.kind == "link":
        hint = "none is followed: " + ("name what it points to" if directory else "remove it")
        raise ConfigError(f"{path} is a symbolic link", path="path", hint=hint)
    if found.kind != wanted:
        what = "a special file" if found.kind == "other" else f"a {found.kind}"
        raise ConfigError(f"{path} is {what}", path="path", hint=f"expected a {wanted}")
    below = ", or name a directory below it that is made with mode 0700" if directory else ""
    if found.owner != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {found.owner}, and this process is user {os.geteuid()}",
            path="path",
            hint=f"chown it{below}",
        )
    if found.mode & _OTHERS_WRITE:
        raise ConfigError(
            f"{path} has mode {found.mode:04o}: others may write to it",
            path="path",
            hint=f"chmod go-w{below}",
        )


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """META: what a namespace's other files contain. A line of JSON, so that people can read it."""

    magic: str = MAGIC
    version: int = VERSION
    namespace: str
    block_bytes: int
    stride: int
    """Bytes from one block's header to the next one's."""
    segment_places: int
    capacity_blocks: int

    def holds(self, wanted: Meta) -> bool:
        """Whether files of this shape can hold what is wanted; not if they were far too many."""
        ours = (self.namespace, self.block_bytes, self.stride)
        fitting = wanted.capacity_blocks <= self.segment_places * SEGMENTS_MAX
        return ours == (wanted.namespace, wanted.block_bytes, wanted.stride) and fitting


class _Version(msgspec.Struct):
    """What every version of META begins with."""

    magic: str
    version: int


def sealed(line: bytes) -> bytes:
    """A line and, below it, the digest that tells whether it is whole, in every version."""
    return b"%s\n%s\n" % (line, xxh3_64_hexdigest(line).encode())


def write_meta(disk: Disk, home: Path, meta: Meta) -> None:
    """Have META say this: all of it or nothing, also after a power cut."""
    replace_file(disk, home / META_NAME, sealed(msgspec.json.encode(meta)))


def _written(disk: Disk, home: Path) -> tuple[int, bytes] | None:
    """The version of a namespace's META and its line, or None where it is not whole or not ours."""
    try:
        data = read_file(disk, home / META_NAME, META_BYTES_MAX)
        line = data.partition(b"\n")[0]
        if data != sealed(line):
            return None
        found = msgspec.json.decode(line, type=_Version)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
    return (found.version, line) if found.magic == MAGIC else None


def earlier_version(disk: Disk, home: Path) -> int | None:
    """The version that wrote a namespace's files, if it is one that this one does not read."""
    found = _written(disk, home)
    return found[0] if found is not None and found[0] < VERSION else None


def read_meta(disk: Disk, home: Path) -> Meta | None:
    """META of a namespace as it is, or None where it is damaged, missing, not ours or outdated.

    Raises
    ------
    ConfigError
        A newer version wrote it.
    """
    found = _written(disk, home)
    if found is None or found[0] < VERSION:
        return None
    version, line = found
    if version > VERSION:
        raise ConfigError(
            f"{home / META_NAME} is of format {version}, which is newer than {VERSION}",
            path="path",
            hint="use the version of kvladder that wrote it, or another path",
        )
    try:
        return msgspec.json.decode(line, type=Meta)
    except msgspec.DecodeError:
        return None
