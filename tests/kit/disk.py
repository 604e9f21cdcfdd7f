"""A disk that loses power, tears writes, fails and fills up, in memory and reproducibly."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, TypeVar

from kvladder.tiers.blocking import BlockingPool
from kvladder.tiers.files.disk import DIRECTORY_MODE, FILE_MODE, Disk

T = TypeVar("T")

SECTOR_BYTES = 512

Mode = Literal["keep", "drop", "tear", "reorder", "zero", "misdirect"]
"""The state of unsynced writes after a power loss.

keep: all of them are on the disk, as after the mere death of the process. drop: none of them.
tear: some sectors of each write. reorder: some writes, in any order. zero: names are kept, but
unsynced files have the content of their last sync, and new ones are empty. misdirect: all writes
are on the disk, but one write of each file went to another place in it.
"""
MODES: tuple[Mode, ...] = ("keep", "drop", "tear", "reorder", "zero", "misdirect")


class PowerCut(BaseException):
    """A power loss during a call: no code of the process can handle it."""


class _Write(NamedTuple):
    """A change of a file's content that was not synced."""

    offset: int
    data: bytes
    size: int
    """Size of the file afterwards."""


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    unsynced: list[_Write] = field(default_factory=list[_Write])
    mtime_ns: int = 0


class _Change(NamedTuple):
    """An unsynced change of names; without a file, the name is deleted."""

    path: str
    node: _File | None
    gone: str = ""
    """The name that a renamed file had before."""


class _Kind(_File):
    """What a name is that is not a file: only these two, also on a copied disk."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Kind:
        return self


_DIRECTORY = _Kind()
_LINK = _Kind()


class FakeDisk(Disk):
    """Keeps what the process sees and what would be left after a power cut apart.

    Not thread-safe: use it with :class:`InlinePool`. Writes become durable by ``fsync`` of the
    file, names by ``fsync`` of a directory.

    Parameters
    ----------
    roots:
        Directories that exist.
    capacity_bytes:
        Sum of the sizes of all files beyond which there is ENOSPC.
    direct:
        Whether O_DIRECT can be used.
    seed:
        Chooses what a crash leaves.
    """

    def __init__(
        self,
        *roots: Path,
        capacity_bytes: int | None = None,
        direct: bool = True,
        seed: int = 0,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.direct = direct
        self.calls = 0
        """Calls made so far, ``close`` apart."""
        self.crash_at: int | None = None
        """The call, counted from 1, that the power loss interrupts."""
        self.fail_at: int | None = None
        """The call, counted from 1, that fails with ``fail_errno``."""
        self.fail_errno = errno.EIO
        self.refuse: Callable[[str, str], int] = lambda _call, _path: 0
        """Given a call and a path, the errno it fails with, 0 for none."""
        self._random = Random(seed)
        self._names: dict[str, _File] = {str(root): _DIRECTORY for root in roots}
        self._roots = frozenset(self._names)
        self._durable_names = dict(self._names)
        self._changes: list[_Change] = []
        self._fds: dict[int, tuple[str, _File]] = {}
        self._locks: dict[int, str] = {}
        self._next_fd = 1000
        self._clock_ns = 0
        self._on = True
        self.owners: dict[Path, int] = {}
        """Owners of files that belong to other users."""
        self.modes: dict[Path, int] = {}
        """Permissions of files that others than this user may use."""

    def copied(self, seed: int) -> FakeDisk:
        """Return a disk with the same content that has its own life from now on."""
        copy = deepcopy(self)
        copy._random = Random(seed)
        return copy

    # ---- faults

    def cuts(self, number: int, work: Callable[[], object]) -> bool:
        """Run ``work`` with a power loss at call ``number``; return whether it got that far."""
        self.crash_at = self.calls + number
        try:
            work()
        except PowerCut:
            return True
        return False

    def crash(self, mode: Mode) -> None:
        """Cut the power and turn it on again; ``Mode`` describes the remaining state."""
        files = {id(f): f for f in (*self._names.values(), *self._durable_names.values())}
        for file in files.values():
            if file is not _DIRECTORY:
                file.content = bytearray(self._left_of(file, mode))
                file.durable = bytes(file.content)
                file.unsynced = []
        if mode in {"keep", "zero", "misdirect"}:
            self._durable_names = self._names
        elif mode in {"tear", "reorder"}:
            kept = self._random.randint(0, len(self._changes))
            for number, change in enumerate(self._changes):
                if (number < kept) if mode == "tear" else (self._random.random() < 0.5):
                    _apply(self._durable_names, change)
        self._drop_orphans()
        self._names = dict(self._durable_names)
        self._changes = []
        self.crash_at = self.fail_at = None
        self._fds.clear()
        self._locks.clear()
        self._on = True

    def _drop_orphans(self) -> None:
        """Forget names in deleted directories; a directory sorts before its entries."""
        for path in sorted(self._durable_names):
            if path not in self._roots and str(Path(path).parent) not in self._durable_names:
                del self._durable_names[path]

    def _left_of(self, file: _File, mode: Mode) -> bytes:
        if mode == "keep":
            return bytes(file.content)
        left = bytearray(file.durable)
        if mode in {"drop", "zero"}:
            return bytes(left)
        writes = [write for write in file.unsynced if write.data]
        astray = self._random.choice(writes) if writes and mode == "misdirect" else None
        for write in file.unsynced:
            if mode == "reorder" and self._random.random() < 0.5:
                continue
            _resize(left, write.size)
            offset = write.offset
            if write is astray:
                offset = self._random.randrange(0, max(1, write.size), SECTOR_BYTES)
            for start in range(0, len(write.data), SECTOR_BYTES):
                if mode == "tear" and self._random.random() < 0.5:
                    continue
                sector = write.data[start : start + SECTOR_BYTES]
                end = min(offset + start + len(sector), len(left))
                left[offset + start : end] = sector[: max(0, end - offset - start)]
        return bytes(left)

    def flip(self, path: Path, offset: int, mask: int = 1) -> None:
        """Flip bits of one stored byte."""
        self._names[str(path)].content[offset] ^= mask

    def content(self, path: Path) -> bytes:
        """Return the content of a file as the process sees it."""
        return bytes(self._names[str(path)].content)

    def put(self, path: Path, content: bytes) -> None:
        """Have a file there from the beginning."""
        self._names[str(path)] = self._durable_names[str(path)] = _File(
            bytearray(content), content, mtime_ns=self._tick()
        )

    def link(self, path: Path) -> None:
        """Have a symbolic link there, to nowhere in particular."""
        self._names[str(path)] = self._durable_names[str(path)] = _LINK

    def files(self) -> dict[str, int]:
        """The sizes of all files, by path."""
        return {
            path: len(file.content)
            for path, file in self._names.items()
            if file is not _DIRECTORY and file is not _LINK
        }

    @property
    def has_power(self) -> bool:
        """Return whether calls have an effect; they have none from ``crash_at`` until ``crash``."""
        return self._on

    @property
    def open_fds(self) -> int:
        """The number of open descriptors."""
        return len(self._fds)

    def _call(self, name: str, path: str) -> bool:
        """Count a call, fail it in its turn; return whether the power is lost during it."""
        if not self._on:
            raise PowerCut
        self.calls += 1
        if self.calls == self.fail_at:
            raise OSError(self.fail_errno, os.strerror(self.fail_errno), path)
        refused = self.refuse(name, path)
        if refused:
            raise OSError(refused, os.strerror(refused), path)
        if self.calls == self.crash_at:
            self._on = False
            if name != "pwritev":
                raise PowerCut
            return True
        return False

    def _tick(self) -> int:
        self._clock_ns += 1
        return self._clock_ns

    # ---- the port

    def examine(self, path: Path, *_: object) -> dict[str, str]:
        return {}

    def open(self, path: Path, flags: int) -> int:
        name = str(path)
        self._call("open", name)
        if flags & os.O_DIRECT and not self.direct:
            raise OSError(errno.EINVAL, "no O_DIRECT", name)
        file = self._names.get(name)
        if file is _LINK:
            raise OSError(errno.ELOOP, "a symbolic link", name)
        if file is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
            if str(path.parent) not in self._names:
                raise FileNotFoundError(errno.ENOENT, "no such directory", name)
            file = self._names[name] = _File(mtime_ns=self._tick())
            self._changes.append(_Change(name, file))
        elif flags & os.O_TRUNC and file is not _DIRECTORY:
            self._change(file, 0, b"", 0)
        self._next_fd += 1
        self._fds[self._next_fd] = (name, file)
        return self._next_fd

    def close(self, fd: int) -> None:
        if not self._on:
            raise PowerCut
        del self._fds[fd]
        self._locks.pop(fd, None)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        name, file = self._fds[fd]
        self._call("preadv", name)
        start = offset
        for buffer in buffers:
            data = file.content[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            offset += len(data)
        return offset - start

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        name, file = self._fds[fd]
        cut = self._call("pwritev", name)
        data = b"".join(buffers)
        if cut:
            data = data[: self._random.randrange(0, len(data) + 1, 8)]
        self._change(file, offset, data, max(len(file.content), offset + len(data)))
        if cut:
            raise PowerCut
        return len(data)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        name, file = self._fds[fd]
        self._call("fallocate", name)
        self._change(file, 0, b"", max(len(file.content), offset + length))

    def truncate(self, fd: int, length: int) -> None:
        name, file = self._fds[fd]
        self._call("truncate", name)
        self._change(file, 0, b"", length)

    def _change(self, file: _File, offset: int, data: bytes, size: int) -> None:
        used = sum(self.files().values()) - len(file.content)
        grows = size > len(file.content)
        if grows and self.capacity_bytes is not None and used + size > self.capacity_bytes:
            raise OSError(errno.ENOSPC, "no space left on the fake disk")
        _resize(file.content, size)
        file.content[offset : offset + len(data)] = data
        file.unsynced.append(_Write(offset, data, size))
        file.mtime_ns = self._tick()

    def fsync(self, fd: int) -> None:
        name, file = self._fds[fd]
        self._call("fsync", name)
        if file is _DIRECTORY:
            for change in self._changes:
                _apply(self._durable_names, change)
            self._changes = []
            return
        file.durable = bytes(file.content)
        file.unsynced = []

    def lock(self, fd: int) -> bool:
        name, _ = self._fds[fd]
        self._call("lock", name)
        if name in self._locks.values():
            return False
        self._locks[fd] = name
        return True

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename", str(source))
        self._require(source)
        self._commit(_Change(str(target), self._names[str(source)], str(source)))

    def unlink(self, path: Path) -> None:
        self._call("unlink", str(path))
        self._require(path)
        self._commit(_Change(str(path), None))

    def mkdir(self, path: Path) -> None:
        self._call("mkdir", str(path))
        if str(path) in self._names:
            raise FileExistsError(errno.EEXIST, "it exists", str(path))
        self._require(path.parent)
        self._commit(_Change(str(path), _DIRECTORY))

    def rmdir(self, path: Path) -> None:
        self._call("rmdir", str(path))
        self._require(path)
        if any(name.startswith(f"{path}/") for name in self._names):
            raise OSError(errno.ENOTEMPTY, "directory not empty", str(path))
        self._commit(_Change(str(path), None))

    def _commit(self, change: _Change) -> None:
        _apply(self._names, change)
        self._changes.append(change)

    def listdir(self, path: Path) -> list[str]:
        self._call("listdir", str(path))
        if self._require(path) is not _DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
        below = f"{path}/"
        names = (name[len(below) :] for name in self._names if name.startswith(below))
        return sorted(name for name in names if "/" not in name)

    def room(self, path: Path) -> tuple[int, int]:
        """Return the room below ``capacity_bytes``; measuring is no call that a crash counts."""
        size = 1 << 50 if self.capacity_bytes is None else self.capacity_bytes
        return max(size - sum(self.files().values()), 0), size

    def stat(self, path: Path) -> os.stat_result:
        self._call("stat", str(path))
        file = self._require(path)
        kind, mode = stat.S_IFREG, FILE_MODE
        if file is _DIRECTORY:
            kind, mode = stat.S_IFDIR, DIRECTORY_MODE
        elif file is _LINK:
            kind = stat.S_IFLNK
        mode, owner = kind | self.modes.get(path, mode), self.owners.get(path, os.geteuid())
        fields = (mode, 0, 0, 1, owner, 0, len(file.content), 0, 0, 0)
        return os.stat_result(fields, {"st_mtime_ns": file.mtime_ns})

    def touch(self, path: Path) -> None:
        self._call("touch", str(path))
        self._require(path).mtime_ns = self._tick()

    def _require(self, path: Path) -> _File:
        file = self._names.get(str(path))
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return file


def _apply(names: dict[str, _File], change: _Change) -> None:
    if change.gone and names.pop(change.gone, None) is None:
        return  # a rename of a file that never existed
    if change.node is None:
        names.pop(change.path, None)
    else:
        names[change.path] = change.node


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _ended(task: asyncio.Task[object]) -> None:
    if not task.cancelled():
        task.exception()


class InlinePool(BlockingPool):
    """Runs jobs at once, one after the other, on the loop itself: deterministic, no threads."""

    def __init__(self) -> None:
        super().__init__(0, "inline")
        self.closed = False

    async def run_all(self, calls: Sequence[Callable[[], T]], *, urgent: bool = False) -> list[T]:
        await asyncio.sleep(0)  # other tasks may run, or cancel, before and after
        try:
            results = [call() for call in calls]
        except PowerCut:
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(_ended)  # no caller may be left to ask a task in the background
            raise
        await asyncio.sleep(0)
        return results

    async def aclose(self, last: Callable[[], object], *, timeout_s: float) -> bool:
        self.closed = True
        last()
        return True
