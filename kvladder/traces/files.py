"""The files of a recording: lines are appended, and old files give way to new ones."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvladder.tiers.files.disk import Disk, write_all


class TraceFiles:
    """Writes lines to ``path`` and keeps at most ``files`` files of ``size_bytes`` each.

    A full file is renamed to ``path.1``, the one before to ``path.2``, and so on; the oldest is
    removed. A file of an earlier recording is renamed as well. After an error of the disk, the
    next call tries again; a file never keeps a part of a line followed by another line. Methods
    raise OSError, and one thread at a time calls them.
    """

    def __init__(
        self, path: Path, *, size_bytes: int, files: int, disk: Disk | None = None
    ) -> None:
        self.path = path
        self._size_bytes = size_bytes
        self._files = files
        self._disk = Disk() if disk is None else disk
        self._fd = -1
        self._at = 0
        """Length of the current file up to its last whole line."""

    def write(self, line: bytes) -> bool:
        """Append a line with its newline; return False if it is longer than a file may be."""
        if len(line) > self._size_bytes:
            return False
        if self._fd >= 0 and self._at + len(line) > self._size_bytes:
            self.close()
        if self._fd < 0:
            self._begin()
        try:
            write_all(self._disk, self._fd, line, self._at)
        except OSError:
            with suppress(OSError):  # else the next line overwrites what was written of this one
                self._disk.truncate(self._fd, self._at)
            raise
        self._at += len(line)
        return True

    def _named(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _exists(self, path: Path) -> bool:
        try:
            return bool(self._disk.stat(path))
        except FileNotFoundError:
            return False

    def _begin(self) -> None:
        """Begin a new file; the others get the next number."""
        if self._exists(self.path):
            kept = self._files - 1
            for number in range(kept, -1, -1):
                here = self._named(number)
                if not self._exists(here):
                    continue
                if number >= kept:
                    self._disk.unlink(here)
                else:
                    self._disk.rename(here, self._named(number + 1))
        self._at = 0
        self._fd = self._disk.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def close(self) -> None:
        """Close the current file; the next line begins a new one. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._disk.close(fd)
