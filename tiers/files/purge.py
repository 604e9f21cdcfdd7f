"""Overwrites what forgotten blocks left, and purges directories that no engine uses."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from kvladder.errors import Unavailable, refusal
from kvladder.keys import Namespace, salt_digest
from kvladder.layout import align
from kvladder.tiers.context import Progress
from kvladder.tiers.files.directory import (
    DirectoryMeta,
    FilesDirectory,
    at_rest,
    read_meta,
    require_safe,
)
from kvladder.tiers.files.disk import Disk, explained, sync_directory, write_all
from kvladder.tiers.files.header import HEADER_BYTES
from kvladder.tiers.files.log import kept_of, tag_of
from kvladder.tiers.files.segments import PIECE_BYTES, Segments
from kvladder.tiers.files.store import FileStore
from kvladder.tiers.label import LABEL_BYTES, LabelFields, told

STEP_PLACES = 256


class Remnant(NamedTuple):
    """Bytes at a place that are of no block that is stored there."""

    place: int
    start: int
    """Where they begin, counted from the header: 0, or behind a block that fills a part only."""


class Eraser:
    """Finds remnants and writes zeros over them. All methods block and raise OSError.

    They may run in several threads at once, each on places of its own, while nothing is put there.
    """

    def __init__(self, disk: Disk, segments: Segments, space: Namespace) -> None:
        self._disk = disk
        self._segments = segments
        self._space = space
        self._stride = segments.meta.stride
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
            block = self._told(page)
            is_sure = sure is not None and bool(sure[place])
            start = 0
            if block is None:
                # nobody knows whose it is: it goes, unless nothing was ever written there
                rest = not is_sure and self._is_written(place, HEADER_BYTES)
                if not (tags[place] or rest or not _is_zero(page)):
                    continue
            else:
                # what is stored, or another salt's, stays if it is whole; what lies behind it goes
                is_stored = tags[place] == tag_of(block.key)
                stays = is_stored or salt not in {None, block.facts.salt}
                if stays and (is_sure or self._is_whole(place, block, is_stored=is_stored)):
                    start = HEADER_BYTES + align(block.length)
                    if not self._is_written(place, start):
                        continue
            found.append(Remnant(place, start))
        return found

    def _told(self, page: memoryview) -> LabelFields | None:
        """What is stored behind a header; None if that is damaged, or no block of ours."""
        block = told(page[:LABEL_BYTES])
        if block is None or block.namespace != self._space:
            return None
        return block if HEADER_BYTES + block.length <= self._stride else None

    def _is_whole(self, place: int, block: LabelFields, *, is_stored: bool) -> bool:
        """Whether the bytes behind a header are those that it was written with.

        Of a block without a checksum that cannot be told: it is believed if it ``is_stored``.
        """
        if not block.checksum:
            return is_stored
        return block.is_of(self._pieces(place, HEADER_BYTES, HEADER_BYTES + block.length))

    def _is_written(self, place: int, start: int) -> bool:
        """Whether there is anything at a place from ``start`` on."""
        return not all(map(_is_zero, self._pieces(place, start, self._stride)))

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
        for at in range(max(remnant.start, HEADER_BYTES), self._stride, PIECE_BYTES):
            write_all(self._disk, fd, self._zeros[: self._stride - at], offset + at)

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


class Purged(NamedTuple):
    """What came of a purge of one directory."""

    namespace: str
    removed: int
    """Blocks that the index named."""
    erased: int
    """Blocks that were overwritten, those that were forgotten before among them."""


def purge_files(
    disk: Disk,
    path: Path,
    *,
    space: Namespace | None,
    salt: str | None,
    progress: Progress,
    others: Collection[str] = (),
) -> list[Purged]:
    """Remove blocks from a path for good, and write zeros over their bytes; blocking.

    When it returns, no power cut brings anything back. If it does not, it can be called again.

    Parameters
    ----------
    disk:
        The port to the file system.
    path:
        The tier's path, with a directory for each namespace and process.
    space:
        Whose blocks; None for every namespace that is there.
    salt:
        Those of requests with this cache salt; None for all, and for the files themselves.
    progress:
        Told how many places have been looked at, of how many.
    others:
        Processes, by their ids, that have purged the directories that they have.

    Raises
    ------
    ConfigError
        A directory cannot be used, is a running engine's, or was written by a newer version; then
        nothing has been done.
    """
    try:
        with explained(path):
            try:
                require_safe(disk, path, directory=True)
            except FileNotFoundError:  # nothing was ever stored there
                return []
            with at_rest(disk, path, space, others) as taken:
                return [_purge(disk, directory, salt, progress) for directory in taken]
    except Unavailable as error:
        raise refusal(error, required=False) from error


def _purge(disk: Disk, directory: FilesDirectory, salt: str | None, progress: Progress) -> Purged:
    """Purge a directory that was taken."""
    meta = read_meta(disk, directory.home)
    assert isinstance(meta, DirectoryMeta), (
        "it was read a moment ago, and nobody else has the directory"
    )
    directory.require_ours()
    digest = None if salt is None else salt_digest(directory.space, salt)
    store = FileStore(disk, directory, meta)
    erased = 0
    with closing(store.segments):
        removed = _forget(store, digest)
        if salt is None:
            with suppress(FileNotFoundError):
                disk.unlink(store.log.path)
            sync_directory(disk, directory.home)
        eraser, end = Eraser(disk, store.segments, directory.space), store.segments.end
        for start in range(0, end, STEP_PLACES):
            places = range(start, min(start + STEP_PLACES, end))
            left = eraser.find(places, digest, store.found.tags)
            for remnant in left:
                eraser.wipe(remnant)
            eraser.finish(left)
            erased += sum(remnant.start == 0 for remnant in left)
            progress(places.stop, end)
    if salt is None:
        with directory.exclusive():
            directory.delete()
    return Purged(directory.space.hex(), removed, erased)


def _forget(store: FileStore, digest: bytes | None) -> int:
    """Have the index log name them no more, for good; where it is lost, headers tell."""
    with closing(store.log):
        store.load(anew=False)
        gone = [one for one in kept_of(store.found.records) if digest in {None, one.facts.salt}]
        if not store.found.lost:
            store.log.remove(gone)
            store.log.sync()
    for one in gone:
        store.found.tags[one.place] = 0
    return len(gone)
