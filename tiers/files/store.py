"""What a files tier has open: its directory, its segments and its index log, in step."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvladder.errors import ConfigError
from kvladder.keys import SALT_BYTES, BlockKey
from kvladder.tiers.base import NO_SLOT, Item, TierContext
from kvladder.tiers.files.directory import FilesDirectory, Lent, is_full
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.erase import Eraser
from kvladder.tiers.files.header import HEADER_BYTES, BlockHeader, Told
from kvladder.tiers.files.log import PUT, REMOVE, Found, IndexLog, items_of
from kvladder.tiers.files.meta import SEGMENTS_MAX, Meta, write_meta
from kvladder.tiers.files.segments import Geometry, Segments

if TYPE_CHECKING:
    from kvladder.tiers.files.tier import FilesOptions

SEGMENTS_MIN = 16
"""A segment is at most this part of the capacity: another model's first block takes a whole one."""
LOG_BATCH = 4096
SEGMENTS_WANTED_MAX = SEGMENTS_MAX // 4
"""Segments are made larger rather than more than these, which leaves a tier room to grow."""


def config_error(path: Path, error: OSError) -> ConfigError:
    """What to tell somebody whose directory cannot be used."""
    where = f" ({error.filename})" if error.filename else ""
    what = f"cannot be used: {error.strerror or error}{where}"
    hint = "expected a directory on a local disk"
    if error.errno == errno.EROFS:
        what, hint = "is on a read-only file system", "expected a writable one"
    elif error.errno in {errno.EACCES, errno.EPERM}:
        what = f"is not writable: {error.strerror}"
        hint = "give it to the user that runs the engine, mode 0700"
    elif is_full(error):
        what = f"has no room for one segment: {error.strerror}"
        hint = "free some space, or set a smaller capacity or segment"
    return ConfigError(f"{path} {what}", path="path", hint=hint)


class FileStore:
    """The open files of one namespace. Made by ``open``; all methods block and raise OSError."""

    def __init__(
        self,
        directory: FilesDirectory,
        segments: Segments,
        log: IndexLog,
        found: Found,
        eraser: Eraser,
    ) -> None:
        self.directory = directory
        self.segments = segments
        self.eraser = eraser
        self.log = log
        self.tags = found.tags
        """By place: some bytes of the key that is stored there, 0 if none is."""
        self.recovered = found.records
        """The records of what was found, until they have been told."""
        self.forgot = False
        """Whether some of these are of places that are gone: they have no tag."""
        self.lost = found.lost
        """Whether the log is lost, and ``restore`` comes before anything else."""

    @classmethod
    def open(
        cls,
        disk: Disk,
        options: FilesOptions,
        context: TierContext,
        *,
        slack_records: int,
        segments_min: int,
    ) -> FileStore:
        """Take a directory below the path, read its index log, preallocate the first segment.

        Raises
        ------
        ConfigError
            The path cannot be used as configured.
        """
        layout, space, path = context.layout, context.namespace, Path(options.path)
        directory = FilesDirectory(disk, path, space)
        store: FileStore | None = None
        log: IndexLog | None = None
        opened = False
        try:
            directory.make()
            header = BlockHeader(space, layout.block_bytes, verify=context.verify)
            with directory.exclusive():
                wanted = _wanted(context, options.segment, segments_min)
                geometry = Geometry(
                    layout.slot_bytes,
                    wanted.segment_places,
                    wanted.capacity_blocks,
                    options.engines,
                )
                segments = Segments(disk, directory, geometry, header=header, arena=context.arena)
                meta = directory.open(wanted)
                if meta is None:
                    guess = segments.guess_places() or wanted.segment_places
                    meta = msgspec.structs.replace(wanted, segment_places=guess)
                if not meta.holds(wanted):
                    directory.clear()
                    meta = wanted
                segments.geometry = geometry._replace(segment_places=meta.segment_places)
                segments.take_stock()
                write_meta(disk, directory.home, meta)
            places = meta.capacity_blocks
            log = IndexLog(
                disk, directory.home, space, places_max=places, slack_records=slack_records
            )
            found = log.load(anew=segments.end == 0)
            store = FileStore(directory, segments, log, found, Eraser(disk, segments, header))
            store._start(options.direct)
            opened = True
        except OSError as error:
            raise config_error(path, error) from error
        finally:
            if not opened:
                if store is not None:
                    store.segments.close()
                if log is not None:
                    log.close()
                directory.close()
        assert store is not None
        return store

    def _start(self, direct: bool | None) -> None:
        """Forget what is at places that are gone, get room, and see how the disk is used."""
        if not self.lost:
            self._forget_missing()
        with suppress(Lent):  # there may be room later
            self.segments.allocate([0])
        if not self.lost:
            self._reserve()
        self._choose(direct)

    def _reserve(self) -> None:
        """Preallocate room in the log for all places; on a full disk others give way to it."""
        while True:
            try:
                self.log.reserve(self.segments.count)
                return
            except OSError as error:
                if not is_full(error):
                    raise
                with self.directory.exclusive():
                    if not self.directory.drop_oldest():
                        raise

    def _forget_missing(self) -> None:
        """Segments may have given way while nobody had the directory, or be cut off."""
        if self.segments.whole and not any(self.tags[self.segments.end :]):
            return
        gone = [
            item
            for item in items_of(memoryview(self.recovered))
            if not self.segments.there(item.place)
        ]
        for start in range(0, len(gone), LOG_BATCH):
            self.log.append(REMOVE, gone[start : start + LOG_BATCH])
        for item in gone:
            self.tags[item.place] = 0
        self.forgot = bool(gone)

    def restore(self, told: Sequence[Told]) -> None:
        """Begin the log anew with what the blocks' headers told."""
        newest: dict[BlockKey, Told] = {}
        for one in sorted(told, key=attrgetter("sequence")):
            newest.pop(one.key, None)
            newest[one.key] = one
        last = max((one.sequence for one in told), default=0)
        self.log.write(list(map(_item_of, newest.values())), last)
        self.log.close()
        found = self.log.load()
        self.tags, self.recovered, self.lost = found.tags, found.records, False
        self._reserve()

    def _choose(self, direct: bool | None) -> None:
        """Go around the page cache if that is wanted and possible."""
        possible = direct is not False and self.segments.probe_direct()
        if direct and not possible:
            raise ConfigError(
                f"{self.directory.path} is on a file system without O_DIRECT",
                path="direct",
                hint="leave direct out, or use another disk",
            )
        self.segments.direct = possible

    def allocate(self, segments: Sequence[int]) -> None:
        """Preallocate segments, and room in the log for the blocks in them."""
        self.segments.allocate(segments)
        self._reserve()

    def close(self) -> None:
        """Flush, close everything and let the next process in; nothing is under way."""
        for step in (self.log.flush, self.segments.close, self.log.close, self.directory.close):
            with suppress(OSError):  # what is not on the disk yet is forgotten after a power cut
                step()


class PutBatch:
    """A batch on its way to the disk, as jobs for several threads.

    Whoever writes the last of it appends all of it to the log: a block is published after its
    bytes are complete. If a job is left out, nothing is published.
    """

    def __init__(self, store: FileStore, items: Sequence[Item], parts: int) -> None:
        self._store = store
        self._items = items
        self._lock = threading.Lock()
        self.kept = [False] * len(items)
        """Which items are stored and published, once all jobs have run."""
        self.failures: list[OSError] = []
        self.jobs: list[Callable[[], None]] = []
        number = store.log.number(len(items))
        store.segments.expect(items)
        for run in store.segments.runs(items, range(len(items)), parts):
            self.jobs.append(partial(self._write, run, number))
            number += len(run)
        self._left = len(self.jobs)

    def _write(self, run: Sequence[int], number: int) -> None:
        failure: OSError | None = None
        try:
            self._store.segments.write([self._items[index] for index in run], number)
        except OSError as error:
            failure = error
        with self._lock:
            if failure is not None:
                self.failures.append(failure)
            for index in run:
                self.kept[index] = failure is None
            self._left -= 1
            last = self._left == 0
        if last:
            self._publish()

    def _publish(self) -> None:
        stored = [item for item, ok in zip(self._items, self.kept, strict=True) if ok]
        try:
            if any(map(is_full, self.failures)):
                self.kept = [False] * len(self._items)
            else:
                self._store.log.append(PUT, stored)
        except OSError as error:
            self.failures.append(error)
            self.kept = [False] * len(self._items)


def _wanted(context: TierContext, segment_bytes: int, segments_min: int) -> Meta:
    """How the files of a namespace that is new here are laid out."""
    stride = HEADER_BYTES + context.layout.slot_bytes
    capacity = context.capacity_blocks
    most = max(1, min(segment_bytes // stride, capacity // segments_min))
    return Meta(
        namespace=context.namespace.hex(),
        block_bytes=context.layout.block_bytes,
        stride=stride,
        segment_places=max(most, -(-capacity // SEGMENTS_WANTED_MAX)),
        capacity_blocks=capacity,
    )


def _item_of(told: Told) -> Item:
    end_s = None if told.expires_wall_s == inf else told.expires_wall_s
    return Item(
        told.key,
        told.place,
        NO_SLOT,
        told.priority,
        told.floor,
        end_s,
        b"" if told.salt == bytes(SALT_BYTES) else told.salt,
        told.terms,
    )
