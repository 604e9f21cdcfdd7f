"""The disk port: the calls through which the files tier touches a file system."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
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


class Disk:
    """The operating system's: blocking calls, each as thin as the system call it is named after.

    Every method raises OSError, may be called from any thread and may block for ever. No link is
    followed that a path ends with. ``tests.kit.disk.FakeDisk`` replaces every call, and crashes.
    """

    def examine(
        self, path: Path, capacity_bytes: int, direct: bool | None, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        """See ``Tier.examine``."""
        return examine(path, capacity_bytes, direct, warn)

    def open(self, path: Path, flags: int) -> int:
        """Open a file with ``os.O_*`` flags, and return its descriptor; mode 0600 if created."""
        # not blocked by a pipe that somebody put there
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)

    def close(self, fd: int) -> None:
        """Close a descriptor, and release the lock on it."""
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers one after the other; bytes read, fewer at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """Write the buffers one after the other; bytes written, which may be fewer."""
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve space for a range, which reads as zeros; the file grows to its end."""
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        """Set the length of a file."""
        os.ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        """Make a file, or a directory's entries, survive a power cut."""
        os.fsync(fd)

    def lock(self, fd: int) -> bool:
        """Take the file's exclusive lock for as long as ``fd`` is open; False if another has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing what has it."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def mkdir(self, path: Path) -> None:
        """Make a directory, mode 0700."""
        path.mkdir(DIRECTORY_MODE)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def listdir(self, path: Path) -> list[str]:
        """The names in a directory, sorted."""
        return sorted(child.name for child in path.iterdir())

    def stat(self, path: Path) -> FileStat:
        """Size, time of last change, kind and owner of what is at ``path``, a link too."""
        found = path.lstat()
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "other")
        mode = stat.S_IMODE(found.st_mode)
        return FileStat(found.st_size, found.st_mtime_ns, kind, found.st_uid, mode)

    def touch(self, path: Path) -> None:
        """Make now the time of last change."""
        os.utime(path, follow_symlinks=False)


@contextmanager
def opened(disk: Disk, path: Path, flags: int) -> Generator[int]:
    """The descriptor of a file while something is done with it."""
    fd = disk.open(path, flags)
    try:
        yield fd
    finally:
        disk.close(fd)


def read_file(disk: Disk, path: Path, limit: int) -> bytes:
    """The first ``limit`` bytes of a file."""
    with opened(disk, path, os.O_RDONLY) as fd:
        buffer = bytearray(limit)
        return bytes(buffer[: disk.preadv(fd, [memoryview(buffer)], 0)])


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
    with opened(disk, aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
        write_all(disk, fd, data, 0)
        disk.fsync(fd)
    disk.rename(aside, path)
    sync_directory(disk, path.parent)


def sync_directory(disk: Disk, path: Path) -> None:
    """Make a directory's entries survive a power cut."""
    with opened(disk, path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        disk.fsync(fd)
