"""What a files tier has open: its directory, its segments and its index log, in step."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvladder.errors import ConfigError
from kvladder.tiers.base import Item, TierContext
from kvladder.tiers.blockheader import HEADER_BYTES, BlockHeader
from kvladder.tiers.disk import Disk
from kvladder.tiers.eraser import Eraser
from kvladder.tiers.filesdir import SEGMENTS_MAX, FilesDirectory, Meta, is_full
from kvladder.tiers.indexlog import Found, IndexLog
from kvladder.tiers.indexrecord import PUT
from kvladder.tiers.segments import Geometry, Segments

SEGMENTS_WANTED_MAX = SEGMENTS_MAX // 4
"""Segments are made larger rather than more than these, which leaves a tier room to grow."""


def config_error(path: Path, error: OSError) -> ConfigError:
    """What to tell somebody whose directory cannot be used."""
    if error.errno == errno.EROFS:
        return ConfigError(
            f"{path} is on a read-only file system", path="path", hint="expected a writable one"
        )
    if error.errno in {errno.EACCES, errno.EPERM}:
        return ConfigError(
            f"{path} is not writable: {error.strerror}",
            path="path",
            hint="give it to the user that runs the engine, mode 0700",
        )
    if is_full(error):
        return ConfigError(
            f"{path} has no room for one segment: {error.strerror}",
            path="path",
            hint="free some space, or set a smaller capacity or segment",
        )
    where = f" ({error.filename})" if error.filename else ""
    return ConfigError(
        f"{path} cannot be used: {error.strerror or error}{where}",
        path="path",
        hint="expected a directory on a local disk",
    )


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

    @classmethod
    def open(
        cls,
        disk: Disk,
        path: Path,
        context: TierContext,
        *,
        direct: bool | None,
        segment_bytes: int,
        slack_records: int,
    ) -> FileStore:
        """Take possession of ``path``, read the index log and preallocate the first segment.

        Raises
        ------
        ConfigError
            The path cannot be used as configured.
        """
        layout, space = context.layout, context.namespace
        directory = FilesDirectory(disk, path, space)
        log: IndexLog | None = None
        opened = False
        try:
            wanted = _wanted(context, segment_bytes)
            meta = directory.open(wanted)
            log = IndexLog(
                disk,
                directory.home,
                space,
                places_max=meta.capacity_blocks,
                slack_records=slack_records,
            )
            found = log.load()
            header = BlockHeader(space, layout.block_bytes, verify=context.verify)
            segments = Segments(
                disk,
                directory,
                Geometry(layout.slot_bytes, meta.segment_places, meta.capacity_blocks),
                header=header,
                arena=context.arena,
            )
            store = cls(directory, segments, log, found, Eraser(disk, segments, header))
            segments.take_stock()
            store.allocate([0])
            store._choose(direct)
            opened = True
        except OSError as error:
            raise config_error(path, error) from error
        finally:
            if not opened:
                if log is not None:
                    log.close()
                directory.close()
        return store

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
        self.log.reserve(self.segments.allocate(segments))

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


def _wanted(context: TierContext, segment_bytes: int) -> Meta:
    """How the files of a namespace that is new here are laid out."""
    stride = HEADER_BYTES + context.layout.slot_bytes
    capacity = context.capacity_blocks
    places = max(1, segment_bytes // stride, -(-capacity // SEGMENTS_WANTED_MAX))
    return Meta(
        namespace=context.namespace.hex(),
        block_bytes=context.layout.block_bytes,
        stride=stride,
        segment_places=places,
        capacity_blocks=capacity,
    )
