"""The open files of a files tier: directory, segments and index log, kept consistent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path

import msgspec

from kvladder.errors import ConfigError, TierError
from kvladder.keys import BlockKey
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.directory import FilesDirectory, Lent
from kvladder.tiers.files.disk import Disk, explained, is_full
from kvladder.tiers.files.header import Header
from kvladder.tiers.files.log import IndexLog, kept_of
from kvladder.tiers.files.meta import SEGMENTS_MAX, DirectoryMeta
from kvladder.tiers.files.neighbours import keep_fields
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.segments import Segments
from kvladder.tiers.label import RecoveredBlock, Write

SEGMENTS_MIN = 16
"""Fewest segments per capacity: the first block of another model takes a whole segment."""
LOG_SLACK_RECORDS = 4096


class FileStore:
    """The open files of a directory that this process owns; all methods block and raise OSError.

    Parameters
    ----------
    engines:
        Number of engines that share the tier's path; their segments have as many capacities.
    slack_records:
        Number of dead records that the index log may always have; compaction begins above it.
    """

    def __init__(
        self,
        disk: Disk,
        directory: FilesDirectory,
        meta: DirectoryMeta,
        *,
        engines: int = 1,
        slack_records: int = LOG_SLACK_RECORDS,
    ) -> None:
        self._disk = disk
        self.directory = directory
        self._engines = engines
        budget_bytes = meta.capacity_blocks * meta.stride * engines
        self.segments = Segments(disk, directory, meta, budget_bytes=budget_bytes)
        self.log = IndexLog(
            disk,
            directory.home,
            directory.space,
            places_max=meta.capacity_blocks,
            slack_records=slack_records,
        )
        self.segments.find()
        self.room: tuple[int, int] | None = None
        """Free bytes and size of the file system, as last measured; None if that failed."""

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
        """Take a directory below the path, read its index log, and preallocate the first segment.

        On a full disk, the store still serves the blocks that are already there.

        Raises
        ------
        ConfigError
            The path is wrong.
        Unavailable
            The disk cannot be used now.
        """
        path = Path(options.path)
        directory = FilesDirectory(disk, path, context.namespace)
        with explained(path), ExitStack() as undo:
            undo.callback(directory.close)
            directory.make()
            with directory.exclusive():
                meta = directory.open(DirectoryMeta.new(context, options.segment, segments_min))
                store = cls(
                    disk, directory, meta, engines=options.engines, slack_records=slack_records
                )
                undo.callback(store.close)
                with suppress(Lent):  # other processes may give up segments later
                    store.segments.make_room()
                with store._tolerant(directory.has_meta):
                    directory.write(meta)
            keep_fields(disk, directory.home, context.fields, context.say)
            store.load(anew=store.segments.end == 0)
            with suppress(Lent), store._tolerant():
                store.segments.allocate([0])
            if not store.found.lost:
                with store._tolerant():
                    store._reserve()
            store._choose(options.direct)
            store.measure()
            undo.pop_all()
        return store

    @contextmanager
    def _tolerant(self, is_enough: bool = True) -> Generator[None]:
        """Ignore a full disk if ``is_enough`` and there are segments to serve blocks from."""
        try:
            yield
        except OSError as error:
            if not (is_full(error) and is_enough and self.segments.count):
                raise

    def load(self, *, anew: bool) -> None:
        """Read the index log, and forget blocks at places that no longer exist.

        Other processes may have removed segments while no process owned the directory, and a
        smaller capacity truncates segments.
        """
        found = self.log.load(anew=anew)
        there = self.segments.there(found.records["place"])
        gone = kept_of(found.records[~there])
        if gone:
            self.log.remove(gone)
        for one in gone:
            found.tags[one.place] = 0
        self.found = found._replace(records=found.records[there])
        """Contents of the log. If it is lost, call ``restore`` before anything else."""

    def _reserve(self) -> None:
        """Preallocate log space for all places; on a full disk, drop segments not in use."""
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

    def restore(self, headers: Sequence[Header]) -> None:
        """Write a new log from the blocks' headers; of several with one key, the newest counts."""
        newest: dict[BlockKey, RecoveredBlock] = {}
        for header in sorted(headers, key=attrgetter("sequence")):
            newest.pop(header.told.key, None)
            newest[header.told.key] = RecoveredBlock(
                header.told.key, header.place, header.told.facts
            )
        self.log.write(list(newest.values()), max((one.sequence for one in headers), default=0))
        self.log.close()
        self.load(anew=True)
        with self._tolerant():
            self._reserve()

    def _choose(self, direct: bool | None) -> None:
        """Use O_DIRECT if it is wanted and possible.

        Raises
        ------
        ConfigError
            ``direct`` is True, and the file system does not allow O_DIRECT.
        """
        possible = direct is not False and self.segments.probe_direct(self.log.path)
        if direct and not possible:
            raise ConfigError(
                f"{self.directory.path} is on a file system without O_DIRECT",
                path="direct",
                hint="leave direct out, or use another disk",
            )
        self.segments.direct = possible

    def allocate(self, segments: Sequence[int]) -> None:
        """Preallocate segments, and log space for the blocks in them."""
        self.segments.allocate(segments)
        self._reserve()

    def resize(self, capacity_blocks: int) -> None:
        """Have another capacity; places at or above it are given up.

        Raises
        ------
        TierError
            The files would need too many segments.
        OSError
            The disk cannot be used now.
        """
        meta = msgspec.structs.replace(self.segments.meta, capacity_blocks=capacity_blocks)
        if not self.segments.meta.holds(meta):
            most = meta.segment_places * SEGMENTS_MAX
            what = f"its {SEGMENTS_MAX} files of {meta.segment_places} blocks hold at most {most}"
            raise TierError(f"{what} blocks: start with the new capacity", temporary=False)
        self.segments.resize(meta, capacity_blocks * meta.stride * self._engines)
        self.log.resize(capacity_blocks)
        self._reserve()

    def measure(self) -> None:
        """Measure the room on the file system."""
        with suppress(OSError):
            self.room = self._disk.room(self.directory.home)

    def close(self) -> None:
        """Flush the log, close all files, and release the directory. No call may be running."""
        for step in (self.log.flush, self.segments.close, self.log.close, self.directory.close):
            with suppress(OSError):  # unflushed records are lost only in a power cut
                step()


class PutBatch:
    """Writes a batch to the disk, as jobs for several threads.

    The job that ends last appends the whole batch to the log, so a block is published after its
    bytes are complete. If a job is skipped, no block of the batch is published.
    """

    def __init__(self, store: FileStore, writes: Sequence[Write], parts: int) -> None:
        self._store = store
        self._writes = writes
        self._lock = threading.Lock()
        self._written: set[int] = set()
        self.kept: set[int] = set()
        """Places of the blocks that are stored and published, once all jobs have run."""
        self.failures: list[OSError] = []
        self.jobs: list[Callable[[], None]] = []
        number = store.log.number(len(writes))
        store.segments.expect(writes)
        for run in store.segments.runs(writes, parts):
            self.jobs.append(partial(self._write, run, number))
            number += len(run)
        self._left = len(self.jobs)

    def _write(self, run: Sequence[Write], number: int) -> None:
        try:
            self._store.segments.write(run, number)
            self._written.update([write.place for write in run])
        except OSError as error:
            self.failures.append(error)
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        # On a full disk nothing of the batch counts, so that the level is told and makes room.
        if is_last and not any(map(is_full, self.failures)):
            try:
                self._store.log.put([one for one in self._writes if one.place in self._written])
                self.kept = self._written
            except OSError as error:
                self.failures.append(error)
        if is_last:
            self._store.measure()
