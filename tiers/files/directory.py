"""The directory of a files tier: which process has which part of it, and the space they share."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import NamedTuple

import msgspec

from kvladder.errors import ConfigError
from kvladder.keys import Namespace
from kvladder.tiers.files.disk import Disk, opened, read_file, sync_directory, write_all
from kvladder.tiers.files.meta import (
    ASIDE,
    LOCK_NAME,
    LOG_NAME,
    META_NAME,
    PREFIX_DIGITS,
    Meta,
    earlier_version,
    home_name,
    home_number,
    is_ours,
    read_meta,
    require_safe,
    segment_number,
)
from kvladder.units import Size

LEASES_MAX = 256
"""Directories of one namespace, each of another process."""
LOCK_WAIT_S = 10.0
"""How long others may keep the path's lock: for as long as it takes to give segments up."""
_LOCK_STEP_S = 0.005
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class Lent(OSError):
    """Other processes have all of the capacity: there is no room for another segment."""


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, has no room."""
    return error.errno in _NO_SPACE


@contextmanager
def exclusive(disk: Disk, path: Path) -> Generator[None]:
    """Keep other processes from taking directories and space below a path, for a moment."""
    lock = path / LOCK_NAME
    with suppress(FileNotFoundError):
        require_safe(disk, lock, directory=False)
    with opened(disk, lock, os.O_RDWR | os.O_CREAT) as fd:
        tries = int(LOCK_WAIT_S / _LOCK_STEP_S)
        while not disk.lock(fd):
            tries -= 1
            if tries <= 0:
                raise OSError(errno.EAGAIN, "another process keeps it locked", str(lock))
            Event().wait(_LOCK_STEP_S)
        yield


class Lease(NamedTuple):
    """A directory of one namespace, as it was found."""

    home: Path
    bytes: int
    """Of its segments."""
    owner: str | None
    """The process that has it; None if none has."""


class FilesDirectory:
    """One namespace's files, in a directory of their own below the tier's path.

    Whoever opens it takes the next such directory that no living process has, one with blocks
    first, and keeps its lock: the end of the process, however it comes, frees it. What all
    directories below the path take together is bounded; ``exclusive`` guards that, and who takes
    which. Blocking; for one thread at a time. ``open`` is called first, ``close`` last.

    Parameters
    ----------
    disk:
        The port to the file system.
    path:
        The tier's directory, which other namespaces and processes use too.
    space:
        Whose files ``home`` holds.
    """

    def __init__(self, disk: Disk, path: Path, space: Namespace) -> None:
        self.path = path
        self._disk = disk
        self._space = space
        self._prefix = space.hex()[:PREFIX_DIGITS]
        self.home = path / self._prefix
        """The directory that was taken, once it was."""
        self.earlier: int | None = None
        """Of which format its files were, if they could not be read and were removed."""
        self._lock_fd: int | None = None

    # ---- who has which

    def exclusive(self) -> AbstractContextManager[None]:
        """``exclusive`` of the path."""
        return exclusive(self._disk, self.path)

    def open(self, wanted: Meta) -> Meta | None:
        """Take a directory and say how its files are laid out; in ``exclusive``.

        None if that is not known: META is lost or damaged, and the blocks' headers have to tell.

        Raises
        ------
        ConfigError
            The directory cannot be used, or was written by a newer version.
        OSError
            Anything else.
        """
        self._take()
        names = self._disk.listdir(self.home)
        for name in filter(is_ours, names):
            require_safe(self._disk, self.home / name, directory=False)
        for name in ASIDE.intersection(names):  # an earlier process did not finish it
            self._disk.unlink(self.home / name)
        meta = read_meta(self._disk, self.home)
        if meta is None:
            self.earlier = earlier_version(self._disk, self.home)
            if self.earlier is not None:
                self.clear()
                return wanted
            return None if any(segment_number(name) is not None for name in names) else wanted
        if not meta.holds(wanted):
            return meta
        return msgspec.structs.replace(wanted, segment_places=meta.segment_places)

    def clear(self) -> None:
        """Remove the files of the directory that was taken."""
        self._delete_files(self.home)

    def make(self) -> None:
        """Have the path there, this user's alone; its last part is made if it is missing."""
        with suppress(FileNotFoundError):
            require_safe(self._disk, self.path, directory=True)
            return
        try:
            self._disk.stat(self.path.parent)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path} cannot be made: {self.path.parent} does not exist either",
                path="path",
                hint="make it first, or mount the disk that it belongs to",
            ) from None
        with suppress(FileExistsError):  # another process was faster
            self._disk.mkdir(self.path)
        require_safe(self._disk, self.path, directory=True)

    def _take(self) -> None:
        """Have a directory that nobody has: the one with most in it, or a new one."""
        taken: dict[int, tuple[int, int]] = {}
        numbers = self._numbers()
        try:
            for number in numbers:
                home = self.path / home_name(self._prefix, number)
                require_safe(self._disk, home, directory=True)
                fd = self._lock(home)
                if fd is not None:
                    taken[number] = fd, 0
                    taken[number] = fd, _segment_bytes(self._disk, home)
            if not taken:
                number = next(n for n in range(len(numbers) + 1) if n not in numbers)
                if number >= LEASES_MAX:
                    raise ConfigError(
                        f"{self.path} is in use by {number} processes",
                        path="path",
                        hint="give others another path",
                    )
                home = self.path / home_name(self._prefix, number)
                self._disk.mkdir(home)
                fd = self._lock(home)
                assert fd is not None, "whoever looks for one does so in exclusive"
                taken[number] = fd, 0
                sync_directory(self._disk, self.path)
            chosen = max(taken, key=lambda number: (taken[number][1], -number))
            self.home = self.path / home_name(self._prefix, chosen)
            self._lock_fd = taken.pop(chosen)[0]
            self._name_owner()
        finally:
            for fd, _ in taken.values():
                self._disk.close(fd)

    def _numbers(self) -> list[int]:
        """Of the namespace's directories."""
        found = map(home_number, self._disk.listdir(self.path))
        return sorted(one[1] for one in found if one is not None and one[0] == self._prefix)

    def _lock(self, home: Path) -> int | None:
        """A directory's lock as a descriptor that keeps it, or None if a living process has it."""
        lock = home / LOCK_NAME
        with suppress(FileNotFoundError):
            require_safe(self._disk, lock, directory=False)
        fd = self._disk.open(lock, os.O_RDWR | os.O_CREAT)
        kept = False
        try:
            kept = self._disk.lock(fd)
        finally:
            if not kept:
                self._disk.close(fd)
        return fd if kept else None

    def hold(self, home: Path, hint: str) -> None:
        """Take one directory, while no process has it; in ``exclusive``.

        ``hint`` is what a ConfigError says to do if one has.
        """
        require_safe(self._disk, home, directory=True)
        fd = self._lock(home)
        if fd is None:
            who = f"{home} is in use by process {owner(self._disk, home)}"
            raise ConfigError(who, path="path", hint=hint)
        self.home, self._lock_fd = home, fd
        self._name_owner()

    def _name_owner(self) -> None:
        assert self._lock_fd is not None
        self._disk.truncate(self._lock_fd, 0)
        write_all(self._disk, self._lock_fd, b"%d\n" % os.getpid(), 0)

    def leave(self) -> None:
        """Let the next process have it; may be called again."""
        if self._lock_fd is not None:
            fd, self._lock_fd = self._lock_fd, None
            self._disk.close(fd)

    def close(self) -> None:
        """Note that the namespace was in use until now, and let the next process have it."""
        if self._lock_fd is not None:
            with suppress(OSError):  # the directory may be gone
                self._disk.touch(self.home / META_NAME)
            self.leave()

    # ---- the space that all share; in ``exclusive``

    def delete(self) -> None:
        """Remove the directory and what the tier wrote into it."""
        self._delete(self.home)
        sync_directory(self._disk, self.path)

    def make_room(self, own_bytes: int, budget_bytes: int) -> bool:
        """Have segments that nobody uses give way until ``own_bytes`` fit beside the others'.

        False if they do not: what is left is in use.
        """
        while own_bytes + sum(lease.bytes for lease in self._others()) > budget_bytes:
            if not self.drop_oldest():
                return False
        return True

    def drop_oldest(self) -> bool:
        """Drop the last segment of what no process has, least recently used first.

        False if there is nothing to drop.
        """
        for lease in self._others():
            fd = self._lock(lease.home)
            if fd is None:
                continue
            try:
                last = max(filter(_is_segment, self._disk.listdir(lease.home)), default=None)
                if last is not None:
                    self._disk.unlink(lease.home / last)
                if not any(map(_is_segment, self._disk.listdir(lease.home))):
                    self._delete(lease.home)
                return True
            finally:
                self._disk.close(fd)
        return False

    def _others(self) -> list[Lease]:
        """The other directories of this and of other namespaces, least recently used first.

        Those of a newer version are left alone: what belongs to them is not known.
        """
        found: list[tuple[int, Lease]] = []
        for name in self._disk.listdir(self.path):
            home, ids = self.path / name, home_number(name)
            if home == self.home or ids is None:
                continue
            with suppress(FileNotFoundError, NotADirectoryError, ConfigError):
                require_safe(self._disk, home, directory=True)
                if read_meta(self._disk, home) is not None:
                    used_ns = self._disk.stat(home / META_NAME).mtime_ns
                elif ids[0] == self._prefix or LOG_NAME in self._disk.listdir(home):
                    used_ns = 0  # META is damaged
                else:
                    continue
                found.append((used_ns, Lease(home, _segment_bytes(self._disk, home), None)))
        return [lease for _, lease in sorted(found)]

    def _delete(self, home: Path) -> None:
        self._delete_files(home)
        with suppress(FileNotFoundError):
            self._disk.unlink(home / LOCK_NAME)
        with suppress(OSError):  # something that is not ours is in there: it stays
            self._disk.rmdir(home)

    def _delete_files(self, home: Path) -> None:
        """Remove what this tier wrote into ``home``, but for its lock.

        META, which says whose the rest is, goes once the rest has gone for good.
        """
        names = self._disk.listdir(home)
        for name in filter(is_ours, names):
            if name not in {META_NAME, LOCK_NAME}:
                self._disk.unlink(home / name)
        if META_NAME in names:
            sync_directory(self._disk, home)
            self._disk.unlink(home / META_NAME)


def owner(disk: Disk, home: Path) -> str:
    """The process that wrote itself into the lock file, or what ended before it could."""
    text = read_file(disk, home / LOCK_NAME, 32).decode("ascii", "replace").strip()
    return text if text.isdigit() else "unknown"


def leases(disk: Disk, path: Path) -> list[Lease]:
    """The namespaces' directories below a path that are ours, and who has them."""
    found: list[Lease] = []
    for name in disk.listdir(path):
        home = path / name
        with suppress(FileNotFoundError, NotADirectoryError):
            if home_number(name) is not None and read_meta(disk, home) is not None:
                found.append(Lease(home, _segment_bytes(disk, home), _held_by(disk, home)))
    return found


def look(disk: Disk, path: Path) -> dict[str, str]:
    """What each directory below a path holds, and who has it; nothing is made there.

    Raises
    ------
    ConfigError
        The path is not this user's alone.
    """
    try:
        require_safe(disk, path, directory=True)
        disk.stat(path / LOCK_NAME)
        with exclusive(disk, path):
            found = leases(disk, path)
    except OSError:  # no engine was there yet
        return {}
    facts: dict[str, str] = {}
    for lease in found:
        holds = Size(lease.bytes).about() if lease.bytes else "nothing"
        who = "no process has it" if lease.owner is None else f"process {lease.owner} has it"
        facts[lease.home.name] = f"{holds}, {who}"
    return facts


def _held_by(disk: Disk, home: Path) -> str | None:
    with suppress(FileNotFoundError), opened(disk, home / LOCK_NAME, os.O_RDWR) as fd:
        return None if disk.lock(fd) else owner(disk, home)
    return None


def _segment_bytes(disk: Disk, home: Path) -> int:
    return sum(disk.stat(home / name).size for name in filter(_is_segment, disk.listdir(home)))


def _is_segment(name: str) -> bool:
    return segment_number(name) is not None
