"""Overwrites what forgotten blocks left in segment files: nothing of theirs stays on the disk."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvladder.keys import SALT_BYTES
from kvladder.layout import align
from kvladder.tiers.blockheader import HEADER_BYTES, BlockHeader
from kvladder.tiers.disk import Disk, write_all
from kvladder.tiers.indexrecord import tag_of
from kvladder.tiers.segments import PIECE_BYTES, Segments


class Remnant(NamedTuple):
    """Bytes at a place that are of no block that is stored there."""

    place: int
    start: int
    """Where they begin, counted from the header: 0, or behind a block that fills a part only."""


class Eraser:
    """Finds remnants and writes zeros over them. All methods block and raise OSError.

    They may run in several threads at once, each on places of its own, while nothing is put there.
    """

    def __init__(self, disk: Disk, segments: Segments, header: BlockHeader) -> None:
        self._disk = disk
        self._segments = segments
        self._header = header
        self._zeros = memoryview(mmap.mmap(-1, PIECE_BYTES))

    def find(
        self,
        places: Iterable[int],
        salt: bytes | None,
        tags: Sequence[int],
        *,
        thorough: bool = False,
    ) -> list[Remnant]:
        """Remnants of blocks of ``salt``, None for all, and those of which it is not known whose.

        ``tags`` are, by place, of the blocks that are stored, 0 where none is. What a whole header
        says of another salt stays; nothing is known of bytes without a header, e.g. behind a
        block that does not fill its slot. Where there is nothing in place of a header, what is
        behind it is looked at if ``thorough``: after a power cut there may be something.
        """
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        found: list[Remnant] = []
        for place in places:
            try:
                self._read(place, 0, page)
            except FileNotFoundError:  # a segment between others was never needed
                continue
            told = self._header.told(page)
            if told is None:
                if not tags[place] and (
                    not _is_zero(page) or (thorough and self._is_written(place, HEADER_BYTES))
                ):
                    found.append(Remnant(place, 0))
                continue
            if tags[place] != tag_of(told.key):
                if salt is None or told.salt == salt.ljust(SALT_BYTES, b"\0"):
                    found.append(Remnant(place, 0))
                continue
            start = HEADER_BYTES + align(told.length)
            if self._is_written(place, start):
                found.append(Remnant(place, start))
        return found

    def _is_written(self, place: int, start: int) -> bool:
        """Whether there is anything at a place from ``start`` on."""
        stride = self._segments.geometry.stride
        if start >= stride:
            return False
        piece = memoryview(mmap.mmap(-1, min(PIECE_BYTES, stride - start)))
        for at in range(start, stride, len(piece)):
            part = piece[: stride - at]
            self._read(place, at, part)
            if not _is_zero(part):
                return True
        return False

    def _read(self, place: int, start: int, into: memoryview) -> None:
        fd, offset = self._segments.locate(place)
        got = self._disk.preadv(fd, [into], offset + start)
        into[got:] = bytes(len(into) - got)

    def wipe(self, remnant: Remnant) -> None:
        """Write zeros over it, but for a header: as long as that stands, the rest is found."""
        fd, offset = self._segments.locate(remnant.place)
        stride = self._segments.geometry.stride
        for at in range(max(remnant.start, HEADER_BYTES), stride, PIECE_BYTES):
            write_all(self._disk, fd, self._zeros[: stride - at], offset + at)

    def finish(self, remnants: Sequence[Remnant]) -> None:
        """Have what was wiped survive a power cut, then write zeros over the headers, too.

        In this order, so that whoever is cut short leaves a header that tells the next of the rest.
        """
        self._sync(remnants)
        whole = [remnant for remnant in remnants if remnant.start == 0]
        for remnant in whole:
            fd, offset = self._segments.locate(remnant.place)
            write_all(self._disk, fd, self._zeros[:HEADER_BYTES], offset)
        self._sync(whole)

    def _sync(self, remnants: Sequence[Remnant]) -> None:
        for fd in sorted({self._segments.locate(remnant.place)[0] for remnant in remnants}):
            self._disk.fsync(fd)


def _is_zero(data: memoryview) -> bool:
    return bytes(data).count(0) == len(data)
