"""A files tier's directories: the processes that own them, and the capacity that they share."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import NamedTuple

import msgspec

from kvladder.errors import ConfigError
from kvladder.keys import Namespace
from kvladder.tiers.files.disk import (
    Disk,
    is_full,
    opened,
    read_file,
    replace_file,
    require_safe,
    sync_directory,
    write_all,
)
from kvladder.tiers.files.meta import (
    ASIDE,
    FIELDS_NAME,
    LOCK_NAME,
    LOG_NAME,
    META_NAME,
    DirectoryMeta,
    is_ours,
    read_meta,
    sealed,
    segment_file,
    segment_sizes,
)

PREFIX_DIGITS = 16
_HOME = re.compile(rf"([0-9a-f]{{{PREFIX_DIGITS}}})(?:\.([1-9][0-9]*))?")
LOCK_WAIT_S = 10.0
"""Longest wait in seconds for the path's lock; another process holds it while it drops segments."""
_LOCK_STEP_S = 0.005


def home_name(prefix: str, number: int) -> str:
    """Return the directory name of the ``number``-th process that uses one namespace at once."""
    return f"{prefix}.{number}" if number else prefix


def home_number(name: str) -> tuple[str, int] | None:
    """Return the namespace's prefix and the number in a directory's name; None for other names."""
    found = _HOME.fullmatch(name)
    return (found[1], int(found[2] or 0)) if found else None


class Lent(OSError):
    """Other processes use the rest of the capacity, so there is no room for another segment."""


class Lease(NamedTuple):
    """A directory of one namespace, as found on the disk."""

    home: Path
    bytes: int
    """Bytes of its segments."""
    used_ns: int
    """Time of its last use in nanoseconds since the epoch; 0 if unknown."""


def _locked(disk: Disk, home: Path) -> int | None:
    """Take a directory's lock; return its descriptor, or None if a living process holds it."""
    lock = home / LOCK_NAME
    with suppress(FileNotFoundError):
        require_safe(disk, lock, directory=False)
    fd = disk.open(lock, os.O_RDWR | os.O_CREAT)
    kept = False
    try:
        kept = disk.lock(fd)
    finally:
        if not kept:
            disk.close(fd)
    return fd if kept else None


@contextmanager
def exclusive(disk: Disk, path: Path) -> Generator[None]:
    """Hold the path's lock: meanwhile no other process takes directories or space below it."""
    tries = int(LOCK_WAIT_S / _LOCK_STEP_S)
    while (fd := _locked(disk, path)) is None:
        if (tries := tries - 1) <= 0:
            raise OSError(errno.EAGAIN, "another process keeps it locked", str(path / LOCK_NAME))
        Event().wait(_LOCK_STEP_S)
    try:
        yield
    finally:
        disk.close(fd)


class FilesDirectory:
    """The directory of one namespace and one process, below the tier's path.

    ``open`` takes a directory of the namespace that no living process owns, if possible one with
    blocks, and keeps its lock. The lock is released when the process ends, in whatever way. All
    directories below the path share one capacity. ``exclusive`` guards that capacity, and the
    taking of directories. Methods block; use one thread at a time. Call ``make`` and ``open``
    first, ``close`` last.

    Parameters
    ----------
    disk:
        The port to the file system.
    path:
        The tier's directory, which other namespaces and processes use, too.
    space:
        Namespace of the files in ``home``.
    """

    def __init__(self, disk: Disk, path: Path, space: Namespace) -> None:
        self.path = path
        self.space = space
        self._disk = disk
        self._prefix = space.hex()[:PREFIX_DIGITS]
        self.home = path / self._prefix
        """Directory that this process owns, after ``open`` or ``hold``."""
        self.has_meta = False
        """True if META was there already, with a layout that fits."""
        self.earlier: int | None = None
        """Earlier format of its files, if they could not be read and were removed."""
        self._lock_fd: int | None = None

    # ---- owners

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the lock of the path, as the function ``exclusive`` does."""
        return exclusive(self._disk, self.path)

    def open(self, wanted: DirectoryMeta) -> DirectoryMeta:
        """Take a directory and return the layout of its files; call it in ``exclusive``.

        If META is lost or damaged, the files are assumed to have the layout ``wanted``. Files of a
        layout that does not fit, or of an earlier version, are removed.

        Raises
        ------
        ConfigError
            Others may write to the directory, or a newer version of kvladder wrote it.
        OSError
            Anything else.
        """
        self._take()
        self.require_ours()
        for name in ASIDE.intersection(self._disk.listdir(self.home)):
            self._disk.unlink(self.home / name)  # an earlier process did not finish writing it
        found = read_meta(self._disk, self.home)
        self.has_meta = isinstance(found, DirectoryMeta) and found.holds(wanted)
        if isinstance(found, DirectoryMeta) and self.has_meta:
            return msgspec.structs.replace(wanted, segment_places=found.segment_places)
        if isinstance(found, int):
            self.earlier = found
        if found is not None:
            self._delete_files(self.home)
        return wanted

    def write(self, meta: DirectoryMeta) -> None:
        """Write META, all or nothing, also in a power cut."""
        replace_file(self._disk, self.home / META_NAME, sealed(msgspec.json.encode(meta)))

    def require_ours(self) -> None:
        """Raise ConfigError unless the tier's files belong to this user alone."""
        for name in filter(is_ours, self._disk.listdir(self.home)):
            if name != FIELDS_NAME:  # no block depends on it, and its reader checks it
                require_safe(self._disk, self.home / name, directory=False)

    def make(self) -> None:
        """Create the path if only its last part is missing, and check that it is safe to use.

        Raises
        ------
        ConfigError
            Its parent does not exist, or other users may write to it.
        """
        with suppress(FileExistsError):
            try:
                self._disk.mkdir(self.path)
            except FileNotFoundError:
                raise ConfigError(
                    f"{self.path} cannot be created: {self.path.parent} does not exist",
                    path="path",
                    hint="create the parent directory, or mount its disk",
                ) from None
        require_safe(self._disk, self.path, directory=True)

    def _take(self) -> None:
        """Take the directory with the most bytes that no process owns, or create a new one."""
        found: list[tuple[int, int]] = []
        for prefix, number in filter(None, map(home_number, self._disk.listdir(self.path))):
            if prefix == self._prefix:
                home = self.path / home_name(prefix, number)
                require_safe(self._disk, home, directory=True)
                found.append((-sum(segment_sizes(self._disk, home).values()), number))
        for _, number in sorted(found):
            if self._lock(self.path / home_name(self._prefix, number)):
                return
        numbers = {number for _, number in found}
        number = next(n for n in range(len(numbers) + 1) if n not in numbers)
        home = self.path / home_name(self._prefix, number)
        self._disk.mkdir(home)
        is_mine = self._lock(home)
        assert is_mine, "another process locked a new directory during exclusive"
        sync_directory(self._disk, self.path)

    def hold(self, home: Path, others: Collection[str]) -> bool:
        """Take one directory, in ``exclusive``; return False if one of ``others`` owns it.

        Raises
        ------
        ConfigError
            Another process owns it, or it is not safe to use.
        """
        require_safe(self._disk, home, directory=True)
        if self._lock(home):
            return True
        process = owner(self._disk, home)
        if process in others:
            return False
        raise ConfigError(
            f"{home} is in use by process {process}",
            path="path",
            hint="purge through its control socket (setting control), or stop that process first",
        )

    def _lock(self, home: Path) -> bool:
        """Take a directory's lock and write this process's id into it.

        Returns False if another process owns the directory.
        """
        fd = _locked(self._disk, home)
        if fd is None:
            return False
        self.home, self._lock_fd = home, fd
        name = b"%d\n" % os.getpid()
        try:  # overwrite, then cut off the rest of the old id: a full disk has room for that
            write_all(self._disk, fd, name, 0)
            self._disk.truncate(fd, len(name))
        except OSError as error:
            if not is_full(error):
                raise
        return True

    def leave(self) -> None:
        """Release the directory; may be called again."""
        if self._lock_fd is not None:
            fd, self._lock_fd = self._lock_fd, None
            self._disk.close(fd)

    def close(self) -> None:
        """Record that the namespace was in use until now, and release the directory."""
        if self._lock_fd is not None:
            with suppress(OSError):  # the directory may be gone
                self._disk.touch(self.home / META_NAME)
            self.leave()

    # ---- the capacity that all directories share; in ``exclusive``

    def delete(self) -> None:
        """Remove the tier's files, and the directory if no other files are in it."""
        self._delete(self.home)
        sync_directory(self._disk, self.path)

    def make_room(self, own_bytes: int, budget_bytes: int) -> bool:
        """Drop segments not in use until ``own_bytes`` and the others' bytes fit into the budget.

        Returns whether they fit. If not, all other segments are in use.
        """
        while own_bytes + sum(lease.bytes for lease in self._others()) > budget_bytes:
            if not self.drop_oldest():
                return False
        return True

    def drop_oldest(self) -> bool:
        """Drop the last segment of the least recently used directory that no process owns.

        Returns False if there is no such directory.
        """
        for lease in self._others():
            fd = _locked(self._disk, lease.home)
            if fd is None:
                continue
            try:
                segments = segment_sizes(self._disk, lease.home)
                if segments:
                    self._disk.unlink(segment_file(lease.home, max(segments)))
                if len(segments) <= 1:
                    self._delete(lease.home)
                return True
            finally:
                self._disk.close(fd)
        return False

    def _others(self) -> list[Lease]:
        """Return the other directories of all namespaces, least recently used first."""
        found = leases(self._disk, self.path, self._prefix)
        return [lease for lease in found if lease.home != self.home]

    def _delete(self, home: Path) -> None:
        self._delete_files(home)
        with suppress(FileNotFoundError):
            self._disk.unlink(home / LOCK_NAME)
        with suppress(OSError):  # files of others are in it and stay
            self._disk.rmdir(home)

    def _delete_files(self, home: Path) -> None:
        """Remove the tier's files in ``home``, except the lock.

        META names the owner of the other files, so it is removed after their removal is on disk.
        """
        names = self._disk.listdir(home)
        for name in filter(is_ours, names):
            if name not in {META_NAME, LOCK_NAME, FIELDS_NAME}:
                self._disk.unlink(home / name)
        if FIELDS_NAME in names:
            with suppress(OSError):  # it may be a directory, put there by a user
                self._disk.unlink(home / FIELDS_NAME)
        if META_NAME in names:
            sync_directory(self._disk, home)
            self._disk.unlink(home / META_NAME)


def leases(disk: Disk, path: Path, prefix: str = "") -> list[Lease]:
    """Return kvladder's directories below a path, least recently used first.

    Directories of a newer version are left out, since their files are not known here. Directories
    without a META of this version count only if they have an index log, or if they belong to the
    namespace with this ``prefix``.
    """
    found: list[Lease] = []
    for name in disk.listdir(path):
        home, ids = path / name, home_number(name)
        if ids is None:
            continue
        with suppress(FileNotFoundError, NotADirectoryError, ConfigError):
            require_safe(disk, home, directory=True)
            used_ns = 0
            if isinstance(read_meta(disk, home), DirectoryMeta):
                used_ns = disk.stat(home / META_NAME).st_mtime_ns
            elif ids[0] != prefix and LOG_NAME not in disk.listdir(home):
                continue
            found.append(Lease(home, sum(segment_sizes(disk, home).values()), used_ns))
    return sorted(found, key=lambda lease: (lease.used_ns, lease.home))


def owner(disk: Disk, home: Path) -> str:
    """Return the id of the last process that took the directory, or "unknown"."""
    text = read_file(disk, home / LOCK_NAME, 32).decode("ascii", "replace").strip()
    return text if text.isdigit() else "unknown"


def held_by(disk: Disk, home: Path) -> str | None:
    """Return the id of the process that owns a directory, or None; call it in ``exclusive``."""
    with suppress(FileNotFoundError), opened(disk, home / LOCK_NAME, os.O_RDWR) as fd:
        return None if disk.lock(fd) else owner(disk, home)
    return None
