"""What a files tier has open: its directory, its segments and its index log, in step."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.directory import DirectoryMeta, FilesDirectory, Lent
from kvladder.tiers.files.disk import Disk, explained, is_full
from kvladder.tiers.files.header import Header
from kvladder.tiers.files.log import IndexLog, kept_of
from kvladder.tiers.files.neighbours import keep_fields
from kvladder.tiers.files.segments import Segments
from kvladder.tiers.label import RecoveredBlock

if TYPE_CHECKING:
    from kvladder.tiers.files.tier import FilesOptions

SEGMENTS_MIN = 16
"""A segment is at most this part of the capacity: another model's first block takes a whole one."""
LOG_SLACK_RECORDS = 4096


class FileStore:
    """The open files of a directory that this process has; all methods block and raise OSError.

    Parameters
    ----------
    budget_bytes:
        Of all segments below the tier's path.
    slack_records:
        How many dead records the index log may have before it is compacted.
    """

    def __init__(
        self,
        disk: Disk,
        directory: FilesDirectory,
        meta: DirectoryMeta,
        *,
        budget_bytes: int = 0,
        slack_records: int = LOG_SLACK_RECORDS,
    ) -> None:
        self.directory = directory
        self.segments = Segments(disk, directory, meta, budget_bytes=budget_bytes)
        self.log = IndexLog(
            disk,
            directory.home,
            directory.space,
            places_max=meta.capacity_blocks,
            slack_records=slack_records,
        )
        self.segments.find()

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

        On a full disk, the blocks that are already there are served.

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
                budget_bytes = meta.capacity_blocks * meta.stride * options.engines
                store = cls(
                    disk, directory, meta, budget_bytes=budget_bytes, slack_records=slack_records
                )
                undo.callback(store.close)
                with suppress(Lent):  # there may be room later
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
            undo.pop_all()
        return store

    @contextmanager
    def _tolerant(self, is_enough: bool = True) -> Generator[None]:
        """Go on without room on a full disk if there are blocks to serve without it."""
        try:
            yield
        except OSError as error:
            if not (is_full(error) and is_enough and self.segments.count):
                raise

    def load(self, *, anew: bool) -> None:
        """Read the index log, and forget what is at places that are gone.

        Segments may have given way while nobody had the directory, or be cut off.
        """
        found = self.log.load(anew=anew)
        there = self.segments.there(found.records["place"])
        gone = kept_of(found.records[~there])
        if gone:
            self.log.remove(gone)
        for one in gone:
            found.tags[one.place] = 0
        self.found = found._replace(records=found.records[there])
        """If it is lost, ``restore`` comes before anything else."""

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

    def restore(self, headers: Sequence[Header]) -> None:
        """Begin the log anew with what the blocks' headers told."""
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
        """Go around the page cache if that is wanted and possible."""
        possible = direct is not False and self.segments.probe_direct(self.log.path)
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
