"""The disk port: the calls through which the files tier touches a file system."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvladder.errors import ConfigError, Unavailable, blames_settings
from kvladder.tiers import forks
from kvladder.units import Size

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symbolic link"}
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Disk:
    """The operating system's file calls; most methods only make the system call of their name.

    Methods raise OSError, may be called from any thread, and may block for ever. If a path ends in
    a symbolic link, it is not followed. ``tests.kit.disk.FakeDisk`` replaces every call, and
    simulates crashes.
    """

    def examine(
        self, path: Path, capacity_bytes: int, direct: bool | None, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        """Return facts about a files tier's directory, for people; leaves the disk unchanged.

        Raises
        ------
        ConfigError
            The path cannot be a directory, or ``direct`` is True and there is no direct I/O.
        Unavailable
            The directory cannot be used now.
        """
        try:
            target = path if path.exists() else path.parent
            if not target.is_dir():
                wrong = "is not a directory" if target.exists() else "does not exist"
                hint = "expected a directory, or a new name in an existing directory"
                raise ConfigError(f"{target} {wrong}", path="path", hint=hint)
            if not os.access(target, os.R_OK | os.W_OK | os.X_OK):
                hint = f"expected a directory that user {os.geteuid()} may read and write"
                raise Unavailable(f"access to {target} is denied", path="path", hint=hint)
            free, held = space(path)
            takes = _takes_direct(target)
        except OSError as error:
            raise _explanation(path, error) from error
        if direct and takes is False:
            hint = "leave it out, or choose another file system"
            raise ConfigError("this file system has no direct I/O", path="direct", hint=hint)
        if capacity_bytes > free + held:
            warn(
                f"capacity is {Size(capacity_bytes).about()}, but {path} has room for only"
                f" {Size(free + held).about()}: blocks that do not fit are not stored"
            )
        return {
            "directory": f"{path.absolute()}{'' if path.exists() else ' (will be created)'}",
            "free": f"{Size(free).about()}, and {Size(held).about()} in files there",
            "direct I/O": "no" if direct is False or not takes else "yes",
        }

    def open(self, path: Path, flags: int) -> int:
        """Open a file with ``os.O_*`` flags and return its descriptor; mode 0600 if created."""
        # O_NONBLOCK: if the file is a pipe, opening it must not hang
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)

    def close(self, fd: int) -> None:
        """Close a descriptor, and release the lock on it."""
        forks.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in order; return the number of bytes read, fewer at the file's end."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """Write the buffers in order; return the number of bytes written, which may be fewer."""
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve space for a range, which reads as zeros; the file grows to the range's end."""
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        """Set the length of a file."""
        os.ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        """Make a file, or a directory's entries, survive a power cut."""
        os.fsync(fd)

    def lock(self, fd: int) -> bool:
        """Take the file's exclusive lock until ``fd`` is closed; return whether it was free.

        Forked children do not inherit the lock.
        """
        forks.own(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing any file of the new name."""
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
        """Return the names in a directory, sorted."""
        return sorted(child.name for child in path.iterdir())

    def stat(self, path: Path) -> os.stat_result:
        """Return the status of ``path``; of the link itself if it is one."""
        return path.lstat()

    def room(self, path: Path) -> tuple[int, int]:
        """Return the free bytes of the file system of ``path``, and its size in bytes."""
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize

    def touch(self, path: Path) -> None:
        """Set the time of last change to now."""
        os.utime(path, follow_symlinks=False)


def is_full(error: OSError) -> bool:
    """Return whether the error means that the disk, or the user's quota, is full."""
    return error.errno in _NO_SPACE


@contextmanager
def explained(path: Path) -> Generator[None]:
    """Turn an OSError into one that says what is wrong with a tier's directory, and what to do.

    Raises
    ------
    ConfigError
        The path is wrong.
    Unavailable
        The disk fails, is full, or denies access. It may work later.
    """
    try:
        yield
    except OSError as error:
        raise _explanation(path, error) from error


def _explanation(path: Path, error: OSError) -> ConfigError | Unavailable:
    where = f" ({error.filename})" if error.filename else ""
    what = f"cannot be used: {error.strerror or error}{where}"
    hint = "expected a directory on a local disk"
    if blames_settings(error):
        return ConfigError(f"{path} {what}", path="path", hint=hint)
    if error.errno == errno.EROFS:
        what, hint = "is on a read-only file system", "mount it writable"
    elif error.errno in {errno.EACCES, errno.EPERM}:
        what = f"is not writable: {error.strerror}"
        hint = "expected a directory of the user that runs the engine, with mode 0700"
    elif is_full(error):
        what = f"has no room for one segment: {error.strerror}"
        hint = "free some space, or set a smaller capacity or segment"
    elif error.errno == errno.EIO:
        hint = "see the kernel's log: the disk may be failing"
    return Unavailable(f"{path} {what}", path="path", hint=hint)


def require_safe(disk: Disk, path: Path, *, directory: bool) -> None:
    """Raise ConfigError if another user can have put, or can put, other things at ``path``.

    A safe path is no symbolic link, belongs to this user, and is not writable for others. Raises
    FileNotFoundError if nothing is there.
    """
    found = disk.stat(path)
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "special file")
    wanted = "directory" if directory else "file"
    if kind == "symbolic link":
        hint = "use the target of the link instead" if directory else "remove the link"
        raise ConfigError(f"{path} is a symbolic link", path="path", hint=hint)
    if kind != wanted:
        raise ConfigError(f"{path} is a {kind}", path="path", hint=f"expected a {wanted}")
    below = ", or set path to a directory below it, with mode 0700" if directory else ""
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, and this process is user {os.geteuid()}",
            path="path",
            hint=f"chown it{below}",
        )
    if found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: other users may write to it",
            path="path",
            hint=f"chmod go-w{below}",
        )


@contextmanager
def opened(disk: Disk, path: Path, flags: int) -> Generator[int]:
    """Open a file, yield its descriptor, and close it afterwards."""
    fd = disk.open(path, flags)
    try:
        yield fd
    finally:
        disk.close(fd)


def read_file(disk: Disk, path: Path, limit: int) -> bytes:
    """Return the first ``limit`` bytes of a file."""
    with opened(disk, path, os.O_RDONLY) as fd:
        buffer = bytearray(limit)
        return bytes(buffer[: disk.preadv(fd, [memoryview(buffer)], 0)])


def write_all(disk: Disk, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data``, in several calls if needed."""
    rest = memoryview(data)
    while rest:
        written = disk.pwritev(fd, [rest], offset)
        if written == 0:
            raise OSError("the file system wrote nothing")
        rest = rest[written:]
        offset += written


def replace_file(disk: Disk, path: Path, data: bytes) -> None:
    """Replace a file by ``data``, all or nothing: write it aside, sync it, then rename it."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with opened(disk, aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
            write_all(disk, fd, data, 0)
            disk.fsync(fd)
        disk.rename(aside, path)
    except OSError:
        with suppress(OSError):
            disk.unlink(aside)
        raise
    sync_directory(disk, path.parent)


def sync_directory(disk: Disk, path: Path) -> None:
    """Make a directory's entries survive a power cut."""
    with opened(disk, path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        disk.fsync(fd)


def space(directory: Path) -> tuple[int, int]:
    """Return the free bytes on the file system of ``directory``, and the bytes in the directory.

    The directory need not exist. Raises OSError if its file system does not answer.
    """
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    info = os.statvfs(existing)
    held = sum(
        (Path(folder) / name).lstat().st_blocks * 512
        for folder, _, names in os.walk(directory)
        for name in names
    )
    return info.f_bavail * info.f_frsize, held


def _takes_direct(directory: Path) -> bool:
    """Return whether files in ``directory`` can be opened with O_DIRECT."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".kvladder-") as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True
