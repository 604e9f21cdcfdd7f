"""The disk port: the calls through which the files tier touches a file system."""

from __future__ import annotations

import fcntl
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from kvladder.tiers.files.examine import examine

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


Kind = Literal["file", "directory", "link", "other"]


class FileStat(NamedTuple):
    """What the tier asks about a path."""

    size: int
    mtime_ns: int
    kind: Kind
    owner: int
    mode: int
    """Permissions."""


_KINDS: dict[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
}


class Disk(ABC):
    """Blocking calls, each as thin as the system call it is named after.

    Every method raises OSError, may be called from any thread and may block for ever. There are
    two implementations: :class:`OsDisk`, and ``tests.kit.disk.FakeDisk``, which crashes.
    No link is followed that a path ends with.
    """

    @abstractmethod
    def open(self, path: Path, flags: int) -> int:
        """Open a file with ``os.O_*`` flags, and return its descriptor; mode 0600 if created."""

    @abstractmethod
    def close(self, fd: int) -> None:
        """Close a descriptor, and release the lock on it."""

    @abstractmethod
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers one after the other; bytes read, fewer at the end of the file."""

    @abstractmethod
    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """Write the buffers one after the other; bytes written, which may be fewer."""

    @abstractmethod
    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve space for a range, which reads as zeros; the file grows to its end."""

    @abstractmethod
    def truncate(self, fd: int, length: int) -> None:
        """Set the length of a file."""

    @abstractmethod
    def fsync(self, fd: int) -> None:
        """Make a file, or a directory's entries, survive a power cut."""

    @abstractmethod
    def lock(self, fd: int) -> bool:
        """Take the file's exclusive lock for as long as ``fd`` is open; False if another has it."""

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing what has it."""

    @abstractmethod
    def unlink(self, path: Path) -> None:
        """Remove a file."""

    @abstractmethod
    def mkdir(self, path: Path) -> None:
        """Make a directory, mode 0700."""

    @abstractmethod
    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""

    @abstractmethod
    def listdir(self, path: Path) -> list[str]:
        """The names in a directory, sorted."""

    @abstractmethod
    def stat(self, path: Path) -> FileStat:
        """Size, time of last change, kind and owner of what is at ``path``, a link too."""

    @abstractmethod
    def touch(self, path: Path) -> None:
        """Make now the time of last change."""

    def examine(
        self, path: Path, capacity_bytes: int, direct: bool | None, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        """See ``Tier.examine``; nothing to say of a disk that is none."""
        return {}


class OsDisk(Disk):
    """The operating system's."""

    def examine(
        self, path: Path, capacity_bytes: int, direct: bool | None, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        return examine(path, capacity_bytes, direct, warn)

    def open(self, path: Path, flags: int) -> int:
        # not blocked by a pipe that somebody put there
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def mkdir(self, path: Path) -> None:
        path.mkdir(DIRECTORY_MODE)

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    def listdir(self, path: Path) -> list[str]:
        return sorted(child.name for child in path.iterdir())

    def stat(self, path: Path) -> FileStat:
        found = path.lstat()
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "other")
        mode = stat.S_IMODE(found.st_mode)
        return FileStat(found.st_size, found.st_mtime_ns, kind, found.st_uid, mode)

    def touch(self, path: Path) -> None:
        os.utime(path, follow_symlinks=False)


def read_file(disk: Disk, path: Path, limit: int) -> bytes:
    """The first ``limit`` bytes of a file."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        buffer = bytearray(limit)
        return bytes(buffer[: disk.preadv(fd, [memoryview(buffer)], 0)])
    finally:
        disk.close(fd)


def write_all(disk: Disk, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data``, however many calls it takes."""
    rest = memoryview(data)
    while rest:
        written = disk.pwritev(fd, [rest], offset)
        if written == 0:
            raise OSError("the file system wrote nothing")
        rest = rest[written:]
        offset += written


def replace_file(disk: Disk, path: Path, data: bytes) -> None:
    """Write ``data`` aside and give it its name once it is on the disk: all of it or nothing."""
    aside = path.with_name(path.name + ".tmp")
    fd = disk.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, data, 0)
        disk.fsync(fd)
    finally:
        disk.close(fd)
    disk.rename(aside, path)
    sync_directory(disk, path.parent)


def sync_directory(disk: Disk, path: Path) -> None:
    """Make a directory's entries survive a power cut."""
    fd = disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.fsync(fd)
    finally:
        disk.close(fd)
