"""Segment files: fixed slots for blocks, preallocated one file at a time."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvladder.layout import PAGE_BYTES, align
from kvladder.tiers.files.directory import FilesDirectory, Lent
from kvladder.tiers.files.disk import Disk, is_full, opened
from kvladder.tiers.files.header import HEADER_BYTES, Header, read_header, write_header
from kvladder.tiers.files.meta import DirectoryMeta, segment_file, segment_sizes
from kvladder.tiers.label import LABEL_BYTES, Read, Write

B = TypeVar("B", Read, Write)

PIECE_BYTES = 2 << 20
"""Most bytes per call, if not one block has more: enough for full speed, few enough to share."""
SKIP_BYTES = 64 << 10
"""Fewest unused bytes at a slot's end that are skipped; skipping ends the run, at the cost of a
further call."""
PIECE_BLOCKS_MAX = 128
"""Most blocks per call: each needs two buffers, and IOV_MAX is 1024."""


class Segments:
    """Reads and writes runs of blocks at adjacent places, header and payload in one call.

    All methods block and raise OSError. Except ``find`` and ``close``, they may run in several
    threads at once, each on places of its own.

    Parameters
    ----------
    directory:
        The directory with the files in its ``home``. To make room, it drops segments not in use.
    meta:
        Layout of the files, which maps places to addresses.
    budget_bytes:
        Most bytes of all segments below the tier's path: its capacity.
    """

    def __init__(
        self, disk: Disk, directory: FilesDirectory, meta: DirectoryMeta, *, budget_bytes: int = 0
    ) -> None:
        self.meta = meta
        self.direct = False
        self._disk = disk
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._slot_bytes = meta.stride - HEADER_BYTES
        self._sizes: dict[int, int] = {}
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._short = array("I")
        """For each place: number of slot pages in use, or 0 if all are or it is not known."""

    # ---- space

    def resize(self, meta: DirectoryMeta, budget_bytes: int) -> None:
        """Have the layout ``meta``, which differs in its capacity, and the files that it needs.

        Writes META. Segments above the capacity are truncated or removed; no call may use their
        places.
        """
        with self._lock, self._directory.exclusive():
            self._directory.write(meta)
            before = self.meta, self._budget_bytes
            self.meta, self._budget_bytes = meta, budget_bytes
            missing = meta.capacity_blocks - len(self._short)
            if self._short and missing > 0:
                self._short = self._short + array("I", [0]) * missing  # others may be reading it
            for segment in [one for one in self._sizes if meta.size(one) == 0]:
                fd = self._fds.pop(segment, None)
                if fd is not None:
                    self._disk.close(fd)
            try:
                self.find()
            except BaseException:
                self.meta, self._budget_bytes = before
                raise

    def find(self) -> None:
        """Find the existing segments, and truncate or remove those above the capacity."""
        home, sizes = self._directory.home, dict[int, int]()
        for segment, size in segment_sizes(self._disk, home).items():
            limit = self.meta.size(segment)
            if limit == 0:
                self._disk.unlink(segment_file(home, segment))
                continue
            if size > limit:
                with opened(self._disk, segment_file(home, segment), os.O_RDWR) as fd:
                    self._disk.truncate(fd, limit)
                    self._disk.fsync(fd)  # a purge does not see the bytes that a power cut returns
            sizes[segment] = min(size, limit)
        self._sizes = sizes

    def there(self, places: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return which places have space on the disk."""
        counts = np.zeros(self.meta.capacity_blocks // self.meta.segment_places + 1, np.int64)
        for segment, size in self._sizes.items():
            counts[segment] = size // self.meta.stride
        segments, numbers = np.divmod(places, self.meta.segment_places)
        there: npt.NDArray[np.bool_] = numbers < counts[segments]
        return there

    @property
    def end(self) -> int:
        """One more than the highest place that has space on the disk."""
        last = max(self._sizes, default=0)
        places = self._sizes.get(last, 0) // self.meta.stride
        return last * self.meta.segment_places + places

    @property
    def count(self) -> int:
        """Number of places that have space on the disk."""
        return sum(size // self.meta.stride for size in self._sizes.values())

    def missing(self, writes: Iterable[Write]) -> list[int]:
        """Return the segments that these writes need and that are not preallocated yet."""
        segments = {write.place // self.meta.segment_places for write in writes}
        return sorted(s for s in segments if self._sizes.get(s, 0) < self.meta.size(s))

    def make_room(self, more_bytes: int = 0) -> None:
        """Drop segments that no process uses until this tier's segments fit into the budget.

        Call it in the directory's ``exclusive``.

        Raises
        ------
        Lent
            They do not fit: the other segments are in use.
        """
        total = sum(self._sizes.values()) + more_bytes
        if not self._directory.make_room(total, self._budget_bytes):
            raise Lent(errno.ENOSPC, "other processes use the rest of the capacity")

    def allocate(self, segments: Sequence[int]) -> None:
        """Preallocate segments; if there is no room, first drop segments that no process uses.

        A segment that cannot grow keeps the size that it had before.

        Raises
        ------
        Lent
            Other processes use the rest of the capacity.
        OSError
            ENOSPC if the disk is still full.
        """
        with self._lock, self._directory.exclusive():
            for segment in segments:
                size, wanted = self._sizes.get(segment, 0), self.meta.size(segment)
                if size < wanted:
                    self.make_room(wanted - size)
                    self._grow(segment, size, wanted)

    def _grow(self, segment: int, size: int, wanted: int) -> None:
        path = segment_file(self._directory.home, segment)
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

    def probe_direct(self, log: Path) -> bool:
        """Return whether O_DIRECT works with our alignment: try it on a segment or the log."""
        there = min((segment for segment, size in self._sizes.items() if size), default=None)
        path = log if there is None else segment_file(self._directory.home, there)
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        try:
            with opened(self._disk, path, os.O_RDWR | os.O_DIRECT) as fd:
                return self._disk.preadv(fd, [page], HEADER_BYTES) == HEADER_BYTES
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
                return False
            raise

    # ---- blocks

    def runs(self, blocks: Sequence[B], parts: int) -> Iterator[list[B]]:
        """Yield the blocks in runs of adjacent places, in ``parts`` runs or more if possible.

        A run lies within one segment and has at most ``PIECE_BYTES``, or one block. The first runs
        are shorter, so that the disk gets work early. A block that does not fill its slot is the
        last of its run.
        """
        share = min(PIECE_BYTES, len(blocks) * self._slot_bytes // parts)
        most = min(PIECE_BLOCKS_MAX, max(1, share // self._slot_bytes))
        short = max(1, most // 4)
        run: list[B] = []
        next_place = -1
        begun = 0
        for block in sorted(blocks, key=lambda block: block.place):
            place = block.place
            if run and (
                place != next_place
                or len(run) == (short if begun < parts else most)
                or place % self.meta.segment_places == 0
                or self._used(place - 1) < self._slot_bytes
            ):
                yield run
                run = []
                begun += 1
            run.append(block)
            next_place = place + 1
        if run:
            yield run

    def expect(self, writes: Iterable[Write]) -> None:
        """Note how much of its slot each block fills; ``runs`` needs this before a write."""
        for write in writes:
            used = align(write.length)
            pages = used // PAGE_BYTES if self._slot_bytes - used >= SKIP_BYTES else 0
            if pages and not self._short:
                self._short = array("I", [0]) * self.meta.capacity_blocks
            if self._short:
                self._short[write.place] = pages

    def _used(self, place: int) -> int:
        """Return how many bytes of the slot at ``place`` must be read or written."""
        pages = self._short[place] if self._short else 0
        return pages * PAGE_BYTES or self._slot_bytes

    def write(self, run: Sequence[Write], sequence: int) -> None:
        """Store blocks at adjacent places, with sequence numbers from ``sequence`` upwards."""
        fd, offset = self.locate(run[0].place)
        buffers = self._buffers("write", run)
        for number, write in enumerate(run):
            write_header(buffers[2 * number], write.label(), write.place, sequence + number)
        done = 0
        while done < len(run):
            start = offset + done * self.meta.stride
            whole = self._whole(run[done:], self._disk.pwritev(fd, buffers[2 * done :], start))
            if whole == 0:
                raise OSError(errno.EIO, "only part of a block was written")
            done += whole

    def read(self, run: Sequence[Read]) -> list[bool | OSError]:
        """Fill the slots of blocks at adjacent places.

        Returns, for each block, whether it passes ``Read.check``, or the error of its read.
        """
        try:
            fd, offset = self.locate(run[0].place)
        except FileNotFoundError:
            return [False] * len(run)
        except OSError as error:
            return [error] * len(run)
        results: list[bool | OSError] = []
        step = len(run)
        while (done := len(results)) < len(run):
            part = run[done : done + step]
            buffers = self._buffers("read", part)
            try:
                moved = self._disk.preadv(fd, buffers, offset + done * self.meta.stride)
            except OSError as error:
                if step == 1:
                    results.append(error)
                step = 1  # read one by one to find the block that fails
                continue
            whole = self._whole(part, moved)
            for read, page in zip(part[:whole], buffers[::2], strict=False):
                read.came(page[:LABEL_BYTES], self._used(read.place))
                results.append(read.check())
            if whole == 0:  # the file ends here
                part[0].came(b"", 0)
                results.append(part[0].check())
        return results

    def _buffers(self, use: str, run: Sequence[B]) -> list[memoryview]:
        """Return two buffers for each block: a header page, and the used part of its slot.

        The header pages belong to this thread and are zero after the header.
        """
        pages: memoryview | None = getattr(self._scratch, use, None)
        if pages is None:
            pages = memoryview(mmap.mmap(-1, PIECE_BLOCKS_MAX * HEADER_BYTES))
            setattr(self._scratch, use, pages)
        buffers: list[memoryview] = []
        for number, block in enumerate(run):
            buffers.append(pages[number * HEADER_BYTES : (number + 1) * HEADER_BYTES])
            buffers.append(block.view[: self._used(block.place)])
        return buffers

    def _whole(self, run: Sequence[B], moved: int) -> int:
        """Return how many leading blocks of ``run`` are complete after ``moved`` bytes."""
        missing = self._slot_bytes - self._used(run[-1].place)
        complete = moved == len(run) * self.meta.stride - missing
        return len(run) if complete else moved // self.meta.stride

    def headers(self, places: Iterable[int], late: Callable[[], bool]) -> list[Header] | None:
        """Return the valid headers of blocks that belong to these places; None if ``late()``."""
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        found: list[Header] = []
        for place in places:
            if late():
                return None
            with suppress(OSError):  # an unreadable header is skipped, and its block is lost
                fd, offset = self.locate(place)
                if self._disk.preadv(fd, [page], offset) == HEADER_BYTES:
                    header = read_header(page)
                    wanted = place, self._directory.space
                    if header is not None and (header.place, header.told.namespace) == wanted:
                        found.append(header)
        return found

    def locate(self, place: int) -> tuple[int, int]:
        """Return the descriptor and the offset of a place's header."""
        segment, number = divmod(place, self.meta.segment_places)
        fd = self._fds.get(segment)
        if fd is None:
            with self._lock:
                fd = self._fds.get(segment)
                if fd is None:
                    flags = os.O_RDWR | (os.O_DIRECT if self.direct else 0)
                    path = segment_file(self._directory.home, segment)
                    fd = self._fds[segment] = self._disk.open(path, flags)
        return fd, number * self.meta.stride

    def close(self) -> None:
        """Close the files. No call may be running."""
        while self._fds:
            self._disk.close(self._fds.popitem()[1])
