"""Overwrites what forgotten blocks left in segment files: nothing of theirs stays on the disk."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvladder.keys import SALT_BYTES
from kvladder.layout import align
from kvladder.tiers.files.disk import Disk, write_all
from kvladder.tiers.files.header import HEADER_BYTES, BlockHeader, Told, digest_of
from kvladder.tiers.files.log import tag_of
from kvladder.tiers.files.segments import PIECE_BYTES, Segments


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
        sure: Sequence[int] | None = None,
    ) -> list[Remnant]:
        """Remnants of blocks of ``salt``, None for all, and those of which it is not known whose.

        ``tags`` are, by place, of the blocks that are stored, 0 where none is. What belongs to
        another salt stays if it is whole. Whose bytes others are nobody knows: behind no header, a
        damaged one, or one that a write left that was cut short, and behind a block that does not
        fill its slot. Places that are ``sure`` need not be compared with their headers.
        """
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        found: list[Remnant] = []
        for place in places:
            try:
                self._read(place, 0, page)
            except FileNotFoundError:  # a segment between others was never needed
                continue
            told = self._header.told(page)
            is_sure = sure is not None and bool(sure[place])
            start = 0
            if told is None:
                rest = not is_sure and self._is_written(place, HEADER_BYTES)
                if not (tags[place] or rest or not _is_zero(page)):
                    continue
            else:
                is_stored = tags[place] == tag_of(told.key)
                is_other = salt is not None and told.salt != salt.ljust(SALT_BYTES, b"\0")
                stays = is_stored or is_other
                if stays and (is_sure or self._is_whole(place, told, is_stored=is_stored)):
                    start = HEADER_BYTES + align(told.length)
                    if not self._is_written(place, start):
                        continue
            found.append(Remnant(place, start))
        return found

    def _is_whole(self, place: int, told: Told, *, is_stored: bool) -> bool:
        """Whether the bytes behind a header are those that it was written with.

        Of a block without a checksum that cannot be told: it is believed if it ``is_stored``.
        """
        if not told.digest:
            return is_stored
        pieces = self._pieces(place, HEADER_BYTES, HEADER_BYTES + told.length)
        return digest_of(pieces) == told.digest

    def _is_written(self, place: int, start: int) -> bool:
        """Whether there is anything at a place from ``start`` on."""
        pieces = self._pieces(place, start, self._segments.geometry.stride)
        return not all(map(_is_zero, pieces))

    def _pieces(self, place: int, start: int, end: int) -> Iterator[memoryview]:
        """The bytes of a place from ``start``, which is aligned, to ``end``; each is read anew."""
        if start < end:
            piece = memoryview(mmap.mmap(-1, min(PIECE_BYTES, align(end - start))))
            for at in range(start, end, len(piece)):
                self._read(place, at, piece[: align(end - at)])
                yield piece[: end - at]

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
