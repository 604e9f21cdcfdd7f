"""Segment files: fixed slots for blocks, preallocated a file at a time."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvladder.arena import Arena
from kvladder.layout import PAGE_BYTES, align
from kvladder.tiers.base import Item, Outcome
from kvladder.tiers.files.directory import FilesDirectory, Lent, is_full
from kvladder.tiers.files.disk import Disk, opened
from kvladder.tiers.files.header import HEADER_BYTES, BlockHeader, Told
from kvladder.tiers.files.meta import LOG_NAME, segment_name, segment_number

PIECE_BYTES = 2 << 20
"""About how much one call reads or writes: large enough for any device, small enough to share."""
SKIP_BYTES = 64 << 10
"""What a block leaves free of its slot is left out if it is this much: it costs a call."""
PIECE_BLOCKS_MAX = 128
"""Blocks per call: two buffers each, and IOV_MAX is 1024."""


class Geometry(NamedTuple):
    """How places become addresses."""

    slot_bytes: int
    segment_places: int
    capacity_blocks: int
    engines: int = 1
    """How many have a directory of this capacity below the tier's path."""

    @property
    def stride(self) -> int:
        """Bytes from one block's header to the next one's."""
        return HEADER_BYTES + self.slot_bytes

    def places(self, segment: int) -> int:
        """How many places a segment has; the last one may have fewer than the others."""
        first = segment * self.segment_places
        return max(0, min(self.segment_places, self.capacity_blocks - first))

    def size(self, segment: int) -> int:
        """Bytes of a segment."""
        return self.places(segment) * self.stride

    @property
    def budget_bytes(self) -> int:
        """Bytes of all segments below the tier's path: its capacity."""
        return self.capacity_blocks * self.stride * self.engines


class Segments:
    """Reads and writes runs of blocks at adjacent places, header and payload in one call.

    All methods block and, but for ``take_stock`` and ``close``, may run in several threads at
    once, each on places of its own. They raise OSError.

    Parameters
    ----------
    arena:
        Where the items' slots are.
    directory:
        Whose ``home`` the files are in; what no process uses gives way.
    """

    def __init__(
        self,
        disk: Disk,
        directory: FilesDirectory,
        geometry: Geometry,
        *,
        header: BlockHeader,
        arena: Arena,
    ) -> None:
        self.geometry = geometry
        self.direct = False
        self._disk = disk
        self._directory = directory
        self._header = header
        self._arena = arena
        self._sizes: dict[int, int] = {}
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._short = array("I")
        """By place: pages of a slot that are in use, 0 if all are or that is not known."""

    # ---- space

    def _files(self) -> Iterator[tuple[int, Path, int]]:
        """The segments that are there: number, file and bytes."""
        for name in self._disk.listdir(self._directory.home):
            segment, path = segment_number(name), self._directory.home / name
            if segment is not None:
                yield segment, path, self._disk.stat(path).size

    def find(self) -> None:
        """Find the segments that are there."""
        found = {segment: size for segment, _, size in self._files()}
        self._sizes = {segment: n for segment, n in found.items() if self.geometry.size(segment)}

    def take_stock(self) -> None:
        """Find the segments that are there, and cut off what is above the capacity.

        In the directory's ``exclusive``.
        """
        for segment, path, size in list(self._files()):
            limit = self.geometry.size(segment)
            if limit == 0:
                self._disk.unlink(path)
                continue
            if size > limit:
                with opened(self._disk, path, os.O_RDWR) as fd:
                    self._disk.truncate(fd, limit)
            self._sizes[segment] = min(size, limit)
        self._directory.make_room(self._total(), self.geometry.budget_bytes)

    def guess_places(self) -> int:
        """Places per segment, as headers tell where a segment's first block lies; 0 if none does.

        Where there is only one segment, its length tells. Before ``take_stock``.
        """
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        guess = 0
        for segment, path, size in self._files():
            if segment == 0:
                guess = size // self.geometry.stride
                continue
            with opened(self._disk, path, os.O_RDONLY) as fd:
                whole = self._disk.preadv(fd, [page], 0) == HEADER_BYTES
            told = self._header.told(page) if whole else None
            if told is not None and told.place % segment == 0:
                return told.place // segment
        return guess

    def headers(self, places: Sequence[int], late: Callable[[], bool]) -> list[Told] | None:
        """What the headers at these places tell of blocks that belong there; None if ``late``."""
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        found: list[Told] = []
        for place in places:
            if late():
                return None
            with suppress(OSError):  # then it is not known what lies there
                fd, offset = self.locate(place)
                if self._disk.preadv(fd, [page], offset) == HEADER_BYTES:
                    told = self._header.told(page)
                    if told is not None and told.place == place:
                        found.append(told)
        return found

    def there(self, place: int) -> bool:
        """Whether a place has space on the disk."""
        segment, number = divmod(place, self.geometry.segment_places)
        return number < self._sizes.get(segment, 0) // self.geometry.stride

    @property
    def whole(self) -> bool:
        """Whether every segment that is there has all of its places, and none is missing."""
        sizes = [self._sizes.get(segment, 0) for segment in range(len(self._sizes))]
        return all(size == self.geometry.size(segment) for segment, size in enumerate(sizes))

    @property
    def end(self) -> int:
        """All places that have space on the disk are below it."""
        last = max(self._sizes, default=0)
        places = self._sizes.get(last, 0) // self.geometry.stride
        return last * self.geometry.segment_places + places

    @property
    def count(self) -> int:
        """How many places have space on the disk."""
        return sum(size // self.geometry.stride for size in self._sizes.values())

    def _total(self) -> int:
        return sum(self._sizes.values())

    def missing(self, items: Sequence[Item]) -> list[int]:
        """Segments that some of these places need and that are not preallocated yet."""
        segments = {item.place // self.geometry.segment_places for item in items}
        return sorted(s for s in segments if self._sizes.get(s, 0) < self.geometry.size(s))

    def allocate(self, segments: Sequence[int]) -> None:
        """Preallocate segments.

        What no process uses gives way first. ENOSPC if there is still no room, ``Lent`` if that is
        because other processes have it: what was there before stays as it was.
        """
        with self._lock, self._directory.exclusive():
            for segment in segments:
                size, wanted = self._sizes.get(segment, 0), self.geometry.size(segment)
                if size < wanted:
                    total = self._total() - size + wanted
                    if not self._directory.make_room(total, self.geometry.budget_bytes):
                        raise Lent(errno.ENOSPC, "other processes have the rest of the capacity")
                    self._grow(segment, size, wanted)

    def _grow(self, segment: int, size: int, wanted: int) -> None:
        path = self._directory.home / segment_name(segment)
        with opened(self._disk, path, os.O_RDWR | os.O_CREAT) as fd:
            while True:
                try:
                    self._disk.fallocate(fd, size, wanted - size)
                    break
                except OSError as error:
                    if is_full(error) and self._directory.drop_oldest():
                        continue
                    with suppress(OSError):
                        if size == 0:
                            self._disk.unlink(path)
                        else:
                            self._disk.truncate(fd, size)
                    raise
        self._sizes[segment] = wanted

    def probe_direct(self) -> bool:
        """Whether the file system allows O_DIRECT with our alignment: by a segment, or the log."""
        there = [segment for segment, size in sorted(self._sizes.items()) if size]
        path = self._directory.home / (segment_name(there[0]) if there else LOG_NAME)
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        try:
            with opened(self._disk, path, os.O_RDWR | os.O_DIRECT) as fd:
                return self._disk.preadv(fd, [page], HEADER_BYTES) == HEADER_BYTES
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
                return False
            raise

    # ---- blocks

    def runs(
        self, items: Sequence[Item], indices: Sequence[int], parts: int
    ) -> Iterator[list[int]]:
        """``indices`` into ``items``, grouped into runs of adjacent places, ``parts`` or more.

        A run is within one segment and at most ``PIECE_BYTES`` or one block long; the first ones
        are shorter, so that the disk has something to do early. A block that does not fill its
        slot is the last of its run.
        """
        share = min(PIECE_BYTES, len(indices) * self.geometry.slot_bytes // parts)
        blocks = min(PIECE_BLOCKS_MAX, max(1, share // self.geometry.slot_bytes))
        short = max(1, blocks // 4)
        run: list[int] = []
        next_place = -1
        begun = 0
        for index in sorted(indices, key=lambda index: items[index].place):
            place = items[index].place
            if run and (
                place != next_place
                or len(run) == (short if begun < parts else blocks)
                or place % self.geometry.segment_places == 0
                or self._used(place - 1) < self.geometry.slot_bytes
            ):
                yield run
                run = []
                begun += 1
            run.append(index)
            next_place = place + 1
        if run:
            yield run

    def expect(self, items: Sequence[Item]) -> None:
        """These are about to be written: ``runs`` has to know how much of a slot each fills."""
        slot_bytes = self.geometry.slot_bytes
        for item in items:
            used = align(item.length or slot_bytes)
            pages = used // PAGE_BYTES if slot_bytes - used >= SKIP_BYTES else 0
            if pages and not self._short:
                self._short = array("I", [0]) * self.geometry.capacity_blocks
            if self._short:
                self._short[item.place] = pages

    def _used(self, place: int) -> int:
        """How many bytes of the slot at ``place`` have to be read or written."""
        pages = self._short[place] if self._short else 0
        return pages * PAGE_BYTES or self.geometry.slot_bytes

    def write(self, run: Sequence[Item], sequence: int) -> None:
        """Store blocks at adjacent places; their sequence numbers are ``sequence`` and on."""
        fd, offset = self.locate(run[0].place)
        pages = self._pages("write")
        buffers: list[memoryview] = []
        for number, item in enumerate(run):
            page = pages[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
            view = self._arena.view(item.slot)
            self._header.write(page, item, sequence + number, view)
            buffers += (page, view[: self._used(item.place)])
        done = 0
        while done < len(run):
            start = offset + done * self.geometry.stride
            whole = self._whole(run[done:], self._disk.pwritev(fd, buffers[2 * done :], start))
            if whole == 0:
                raise OSError(errno.EIO, "a block was written in part only")
            done += whole

    def read(self, run: Sequence[Item]) -> tuple[list[Outcome], OSError | None]:
        """Fill the slots of blocks at adjacent places; what came of each, and the last error."""
        outcomes: list[Outcome] = []
        failure: OSError | None = None
        try:
            fd, offset = self.locate(run[0].place)
        except FileNotFoundError:
            return [Outcome.STALE] * len(run), None
        except OSError as error:
            return [Outcome.FAILED] * len(run), error
        step = len(run)
        while (done := len(outcomes)) < len(run):
            part = run[done : done + step]
            try:
                whole = self._read_part(fd, part, offset + done * self.geometry.stride)
            except OSError as error:
                failure = error
                if step == 1:
                    outcomes.append(Outcome.FAILED)
                step = 1  # find out which of them it is
                continue
            pages = self._pages("read")
            for number, item in enumerate(part[:whole]):
                page = pages[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
                outcomes.append(self._header.check(page, item, self._arena.view(item.slot)))
            if whole == 0:  # the file ends here
                outcomes.append(Outcome.CORRUPT)
        return outcomes, failure

    def _read_part(self, fd: int, run: Sequence[Item], offset: int) -> int:
        """How many leading blocks of ``run`` were read wholly."""
        pages = self._pages("read")
        buffers: list[memoryview] = []
        for number, item in enumerate(run):
            buffers.append(pages[number * HEADER_BYTES : (number + 1) * HEADER_BYTES])
            buffers.append(self._arena.view(item.slot)[: self._used(item.place)])
        return self._whole(run, self._disk.preadv(fd, buffers, offset))

    def _whole(self, run: Sequence[Item], moved: int) -> int:
        """How many leading blocks of ``run`` are in the first ``moved`` bytes of it."""
        missing = self.geometry.slot_bytes - self._used(run[-1].place)
        complete = moved == len(run) * self.geometry.stride - missing
        return len(run) if complete else moved // self.geometry.stride

    def locate(self, place: int) -> tuple[int, int]:
        """Descriptor and offset of a place's header."""
        segment, number = divmod(place, self.geometry.segment_places)
        fd = self._fds.get(segment)
        if fd is None:
            with self._lock:
                fd = self._fds.get(segment)
                if fd is None:
                    flags = os.O_RDWR | (os.O_DIRECT if self.direct else 0)
                    path = self._directory.home / segment_name(segment)
                    fd = self._fds[segment] = self._disk.open(path, flags)
        return fd, number * self.geometry.stride

    def _pages(self, use: str) -> memoryview:
        """Header pages of this thread's own: aligned; those for writing zero but for the fields."""
        pages: memoryview | None = getattr(self._scratch, use, None)
        if pages is None:
            pages = memoryview(mmap.mmap(-1, PIECE_BLOCKS_MAX * HEADER_BYTES))
            setattr(self._scratch, use, pages)
        return pages

    def close(self) -> None:
        """Close the files; no call is under way."""
        while self._fds:
            self._disk.close(self._fds.popitem()[1])
