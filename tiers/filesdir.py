"""The directory of a files tier: its lock, its namespaces, and the space that they share."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from kvladder.errors import ConfigError
from kvladder.keys import Namespace
from kvladder.tiers.disk import Disk, read_file, replace_file, sync_directory, write_all

MAGIC = "kvladder files"
VERSION = 1
PREFIX_DIGITS = 16
SEGMENTS_MAX = 512
"""Each is an open file, and a process may often have no more than 1024."""
META_BYTES_MAX = 1 << 16
LOG_NAME = "index.log"

_NAMESPACE = re.compile(f"[0-9a-f]{{{PREFIX_DIGITS}}}")
_SEGMENT = re.compile(r"seg-([0-9]{5})")
_ASIDE = {"META.tmp", f"{LOG_NAME}.tmp"}
_OTHERS = {LOG_NAME, *_ASIDE}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, has no room."""
    return error.errno in _NO_SPACE


def segment_name(segment: int) -> str:
    """The file name of a segment."""
    return f"seg-{segment:05d}"


def segment_number(name: str) -> int | None:
    """The segment that a file name stands for, or None."""
    found = _SEGMENT.fullmatch(name)
    return int(found[1]) if found else None


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The META file: what a namespace's other files contain. JSON, so that people can read it."""

    magic: str = MAGIC
    version: int = VERSION
    namespace: str
    block_bytes: int
    stride: int
    """Bytes from one block's header to the next one's."""
    segment_places: int
    capacity_blocks: int


class _Version(msgspec.Struct):
    """What every version of META begins with."""

    magic: str
    version: int


def read_meta(disk: Disk, home: Path) -> Meta | None:
    """META of a namespace as it is, or None where it is damaged or missing.

    Raises
    ------
    ConfigError
        A newer version wrote it.
    """
    path = home / "META"
    try:
        data = read_file(disk, path, META_BYTES_MAX)
        version = msgspec.json.decode(data, type=_Version)
        if version.magic == MAGIC and version.version > VERSION:
            raise ConfigError(
                f"{path} is of format {version.version}, which is newer than {VERSION}",
                path="path",
                hint="use the version of kvladder that wrote it, or another path",
            )
        meta = msgspec.json.decode(data, type=Meta)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return meta if meta.magic == MAGIC else None


def homes(disk: Disk, path: Path) -> list[Path]:
    """What in a tier's directory is named like a namespace."""
    return [path / name for name in disk.listdir(path) if _NAMESPACE.fullmatch(name)]


class FilesDirectory:
    """One namespace's files in a directory that belongs to one process at a time.

    Blocking; for one thread at a time. ``open`` is called first, ``close`` last.

    Parameters
    ----------
    disk:
        The port to the file system.
    path:
        The tier's directory, which other namespaces use too, one after the other.
    space:
        Whose files ``home`` holds.
    """

    def __init__(self, disk: Disk, path: Path, space: Namespace) -> None:
        self.path = path
        self.home = path / space.hex()[:PREFIX_DIGITS]
        self._disk = disk
        self._space = space
        self._lock_fd: int | None = None

    def open(self, wanted: Meta) -> Meta:
        """Take the lock and say how the namespace's files are laid out: as they are, or as wanted.

        Raises
        ------
        ConfigError
            The directory cannot be used, is another process's, or was written by a newer version.
        OSError
            Anything else.
        """
        self._make(self.path)
        self.take_lock()
        if not self._exists(self.home):
            self._disk.mkdir(self.home)
            sync_directory(self._disk, self.path)
        meta = self._read_meta(wanted)
        if meta is None:
            self._delete_files(self.home)
            meta = wanted
        else:
            meta = msgspec.structs.replace(wanted, segment_places=meta.segment_places)
        self._sweep()
        replace_file(self._disk, self.home / "META", msgspec.json.encode(meta))
        return meta

    def _make(self, path: Path) -> None:
        try:
            found = self._disk.stat(path)
        except FileNotFoundError:
            if not self._exists(path.parent):
                raise ConfigError(
                    f"{path} cannot be made: {path.parent} does not exist either",
                    path="path",
                    hint="make it first, or mount the disk that it belongs to",
                ) from None
            self._disk.mkdir(path)
            return
        if not found.is_directory:
            raise ConfigError(f"{path} is a file", path="path", hint="expected a directory")

    def _exists(self, path: Path) -> bool:
        try:
            self._disk.stat(path)
        except FileNotFoundError:
            return False
        return True

    def leave(self) -> None:
        """Let the next process in; may be called again."""
        if self._lock_fd is not None:
            fd, self._lock_fd = self._lock_fd, None
            self._disk.close(fd)

    def delete(self) -> None:
        """Remove the namespace's files."""
        self._delete_files(self.home)
        with suppress(OSError):  # something that is not ours is in there: it stays
            self._disk.rmdir(self.home)
        sync_directory(self._disk, self.path)

    def take_lock(self, hint: str = "one process at a time; give each its own path") -> None:
        """Keep others out; ``hint`` is what a ConfigError says to do if one is in there."""
        self._lock_fd = self._disk.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT)
        if not self._disk.lock(self._lock_fd):
            self._disk.close(self._lock_fd)
            self._lock_fd = None
            raise ConfigError(
                f"{self.path} is in use by process {self._owner()}",
                path="path",
                hint=hint,
            )
        self._disk.truncate(self._lock_fd, 0)
        write_all(self._disk, self._lock_fd, b"%d\n" % os.getpid(), 0)

    def _owner(self) -> str:
        """The process that wrote itself into the lock file, or what ended before it could."""
        text = read_file(self._disk, self.path / "LOCK", 32).decode("ascii", "replace").strip()
        return text if text.isdigit() else "unknown"

    def _read_meta(self, wanted: Meta) -> Meta | None:
        """META as it is, or None where what is there is of no use: damaged, or in tiny files."""
        meta = read_meta(self._disk, self.home)
        if meta is None or wanted.capacity_blocks > meta.segment_places * SEGMENTS_MAX:
            return None
        same = (meta.namespace, meta.block_bytes, meta.stride)
        if same != (wanted.namespace, wanted.block_bytes, wanted.stride):
            return None
        return meta

    def _sweep(self) -> None:
        """Remove what an earlier process wrote aside and did not finish."""
        for name in self._disk.listdir(self.home):
            if name in _ASIDE:
                self._disk.unlink(self.home / name)

    def _delete_files(self, home: Path) -> None:
        """Remove what this tier wrote into ``home``.

        META, which says whose the rest is, goes once the rest has gone for good.
        """
        names = self._disk.listdir(home)
        for name in names:
            if segment_number(name) is not None or name in _OTHERS:
                self._disk.unlink(home / name)
        if "META" in names:
            sync_directory(self._disk, home)
            self._disk.unlink(home / "META")

    # ---- the space that all namespaces share

    def make_room(self, own_bytes: int, budget_bytes: int) -> None:
        """Drop other namespaces, least recently used first, until ``own_bytes`` fit beside them."""
        while own_bytes + sum(size for _, size in self._others()) > budget_bytes:
            if not self.drop_oldest():
                return

    def drop_oldest(self) -> bool:
        """Drop the least recently used of the other namespaces; False if there is none."""
        others = self._others()
        if not others:
            return False
        home = others[0][0]
        self._delete_files(home)
        with suppress(OSError):  # something that is not ours is in there: it stays
            self._disk.rmdir(home)
        return True

    def _others(self) -> list[tuple[Path, int]]:
        """The other namespaces with the bytes of their segments, least recently used first.

        Those of a newer version are left alone: what belongs to them is not known.
        """
        found: list[tuple[int, Path, int]] = []
        for name in self._disk.listdir(self.path):
            home = self.path / name
            if home == self.home or not _NAMESPACE.fullmatch(name):
                continue
            with suppress(FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
                data = read_file(self._disk, home / "META", META_BYTES_MAX)
                version = msgspec.json.decode(data, type=_Version)
                if version.magic == MAGIC and version.version <= VERSION:
                    used_ns = self._disk.stat(home / "META").mtime_ns
                    found.append((used_ns, home, self._segment_bytes(home)))
        return [(home, size) for _, home, size in sorted(found)]

    def _segment_bytes(self, home: Path) -> int:
        return sum(
            self._disk.stat(home / name).size
            for name in self._disk.listdir(home)
            if segment_number(name) is not None
        )

    def close(self) -> None:
        """Note that the namespace was in use until now, and let the next process in."""
        if self._lock_fd is not None:
            with suppress(OSError):  # the directory may be gone
                self._disk.touch(self.home / "META")
            self.leave()
