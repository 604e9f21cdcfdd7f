"""Overwrites the bytes of forgotten blocks, and purges directories that no engine uses."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from kvladder.errors import Unavailable, refusal
from kvladder.keys import BlockKey, Namespace, salt_digest
from kvladder.layout import align
from kvladder.tiers.context import Progress
from kvladder.tiers.files.directory import FilesDirectory
from kvladder.tiers.files.disk import Disk, explained, require_safe, sync_directory, write_all
from kvladder.tiers.files.header import HEADER_BYTES
from kvladder.tiers.files.log import kept_of, tag_of
from kvladder.tiers.files.meta import DirectoryMeta, read_meta
from kvladder.tiers.files.rest import at_rest
from kvladder.tiers.files.segments import PIECE_BYTES, Segments
from kvladder.tiers.files.store import FileStore
from kvladder.tiers.label import LABEL_BYTES, LabelFields, told

STEP_PLACES = 256


class Remnant(NamedTuple):
    """Bytes at a place that belong to no block stored there."""

    place: int
    start: int
    """Offset of the first such byte from the header: 0, or the end of a block that stays."""


class Eraser:
    """Finds remnants and writes zeros over them. All methods block and raise OSError.

    Several threads may call them at once, each for places of its own. No block may be put there
    meanwhile.
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
        """Return the remnants of blocks of ``salt``, and all remnants of unknown owner.

        A salt of None stands for all salts. Undamaged blocks of other salts stay. The owner of
        bytes is unknown after a missing or damaged header, after the header of an unfinished
        write, and behind a block that does not fill its slot.

        ``tags`` holds, for each place, the tag of the stored block, or 0. Places that are ``sure``
        are not compared with their headers.
        """
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        found: list[Remnant] = []
        for place, block in self._headers(places, page):
            is_sure = sure is not None and bool(sure[place])
            start = 0
            if block is None:
                # the owner is unknown: erase it, unless nothing was ever written there
                rest = not is_sure and self._is_written(place, HEADER_BYTES)
                if not (tags[place] or rest or not _is_zero(page)):
                    continue
            else:
                # an undamaged block that is stored or of another salt stays; bytes behind it go
                is_stored = tags[place] == tag_of(block.key)
                stays = is_stored or salt not in {None, block.facts.salt}
                if stays and (is_sure or self._is_whole(place, block, is_stored=is_stored)):
                    start = HEADER_BYTES + align(block.length)
                    if not self._is_written(place, start):
                        continue
            found.append(Remnant(place, start))
        return found

    def survey(self, places: Iterable[int], salt: bytes | None) -> list[BlockKey]:
        """Return the blocks with a header at these places, of one salt or, for None, of all.

        An undamaged header is enough: a forgotten block counts until it is overwritten.
        """
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        found: list[BlockKey] = []
        for _, block in self._headers(places, page):
            if block is not None and salt in {None, block.facts.salt}:
                found.append(block.key)
        return found

    def _headers(
        self, places: Iterable[int], page: memoryview
    ) -> Iterator[tuple[int, LabelFields | None]]:
        """Read the header at each place of an allocated segment into ``page``, and yield it."""
        for place in places:
            try:
                self._read(place, 0, page)
            except FileNotFoundError:  # this segment was never allocated
                continue
            yield place, self._told(page)

    def _told(self, page: memoryview) -> LabelFields | None:
        """Return the label in a header; None if it is damaged or of another namespace."""
        block = told(page[:LABEL_BYTES])
        if block is None or block.namespace != self._space:
            return None
        return block if HEADER_BYTES + block.length <= self._stride else None

    def _is_whole(self, place: int, block: LabelFields, *, is_stored: bool) -> bool:
        """Return whether the bytes behind a header match its checksum.

        A block without a checksum counts as whole if it ``is_stored``.
        """
        if not block.checksum:
            return is_stored
        return block.is_of(self._pieces(place, HEADER_BYTES, HEADER_BYTES + block.length))

    def is_whole(self, place: int, key: BlockKey) -> bool:
        """Return whether a place has this block, and its bytes match the label."""
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        try:
            self._read(place, 0, page)
        except FileNotFoundError:
            return False
        block = self._told(page)
        if block is None or block.key != key:
            return False
        return self._is_whole(place, block, is_stored=True)

    def _is_written(self, place: int, start: int) -> bool:
        """Return whether a place has any byte other than zero from ``start`` on."""
        return not all(map(_is_zero, self._pieces(place, start, self._stride)))

    def _pieces(self, place: int, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of a place from ``start`` to ``end``, in one buffer that is reused.

        ``start`` must be aligned to pages.
        """
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
        """Write zeros over a remnant except its header, so that ``find`` finds unfinished ones."""
        fd, offset = self._segments.locate(remnant.place)
        for at in range(max(remnant.start, HEADER_BYTES), self._stride, PIECE_BYTES):
            write_all(self._disk, fd, self._zeros[: self._stride - at], offset + at)

    def finish(self, remnants: Sequence[Remnant]) -> None:
        """Make the wiped bytes survive a power cut, then write zeros over the headers, too.

        In this order, a purge that is interrupted leaves headers, and the next one finds the rest.
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
    """The result of purging one directory."""

    namespace: str
    removed: int
    """Number of removed blocks that the index named."""
    erased: int
    """Number of overwritten blocks, including blocks forgotten before."""


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

    After it returns, no power cut brings any of them back. If it fails, it may be called again.

    Parameters
    ----------
    disk:
        The port to the file system.
    path:
        The tier's path, with a directory for each namespace and process.
    space:
        Namespace of the blocks; None for every namespace there.
    salt:
        Cache salt of the blocks; None for all blocks, and to remove the files, too.
    progress:
        Called with the number of places checked so far, and of all places.
    others:
        Ids of processes that have already purged the directories that they own.

    Raises
    ------
    ConfigError
        A directory cannot be used, belongs to a running engine, or was written by another version
        of kvladder. Running engines and versions are checked before any block is removed.
    """
    try:
        with explained(path):
            try:
                require_safe(disk, path, directory=True)
            except FileNotFoundError:  # no block was ever stored there
                return []
            with at_rest(disk, path, space, others) as taken:
                return [_purge(disk, directory, salt, progress) for directory in taken]
    except Unavailable as error:
        raise refusal(error, required=False) from error


def survey_files(disk: Disk, path: Path, *, space: Namespace, salt: bytes | None) -> list[BlockKey]:
    """Return the blocks of a namespace, or of one salt in it, that lie below a path; blocking.

    ``salt`` is a digest. Changes nothing. Raises ConfigError as ``purge_files`` does.
    """
    found: list[BlockKey] = []
    try:
        with explained(path):
            try:
                require_safe(disk, path, directory=True)
            except FileNotFoundError:  # no block was ever stored there
                return []
            with at_rest(disk, path, space, ()) as taken:
                for directory in taken:
                    meta = read_meta(disk, directory.home)
                    assert isinstance(meta, DirectoryMeta), "META was valid a moment ago"
                    store = FileStore(disk, directory, meta)
                    with closing(store.segments):
                        eraser = Eraser(disk, store.segments, directory.space)
                        found += eraser.survey(range(store.segments.end), salt)
    except Unavailable as error:
        raise refusal(error, required=False) from error
    return found


def _purge(disk: Disk, directory: FilesDirectory, salt: str | None, progress: Progress) -> Purged:
    """Purge a directory that this process has taken."""
    meta = read_meta(disk, directory.home)
    assert isinstance(meta, DirectoryMeta), (
        "META was valid a moment ago, and this process owns the directory"
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
        sync_directory(disk, directory.home)  # also for segments that were removed before
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
    """Remove the blocks of a salt digest, or all, from the index log; return their number.

    The removal survives a power cut. A lost log names no blocks: then the headers name them.
    """
    with closing(store.log):
        store.load(anew=False)
        gone = [one for one in kept_of(store.found.records) if digest in {None, one.facts.salt}]
        if not store.found.lost:
            store.log.remove(gone)
            store.log.sync()
    for one in gone:
        store.found.tags[one.place] = 0
    return len(gone)
