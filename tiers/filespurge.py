"""Purges a files tier's directory while no engine uses it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from kvladder.arena import Arena
from kvladder.keys import Namespace, salt_digest
from kvladder.layout import PAGE_BYTES
from kvladder.tiers.base import Progress
from kvladder.tiers.blockheader import HEADER_BYTES, BlockHeader
from kvladder.tiers.disk import Disk, sync_directory
from kvladder.tiers.eraser import Eraser
from kvladder.tiers.filesdir import LOG_NAME, FilesDirectory, Meta, homes, read_meta
from kvladder.tiers.filestore import config_error
from kvladder.tiers.indexlog import IndexLog
from kvladder.tiers.indexrecord import REMOVE, items_of
from kvladder.tiers.segments import Geometry, Segments

STEP_PLACES: Final = 256
LOG_BATCH: Final = 4096
LOG_SLACK_RECORDS: Final = 4096


class Purged(NamedTuple):
    """What came of a purge of one namespace."""

    namespace: str
    removed: int
    """Blocks that the index named."""
    erased: int
    """Blocks that were overwritten, those that were forgotten before among them."""


def purge_files(
    disk: Disk, path: Path, *, space: Namespace | None, salt: str | None, progress: Progress
) -> list[Purged]:
    """Remove blocks from a directory for good, and write zeros over their bytes; blocking.

    When it returns, no power cut brings anything back. If it does not, it can be called again.

    Parameters
    ----------
    disk:
        The port to the file system.
    path:
        The tier's directory.
    space:
        Whose blocks; None for every namespace that is there.
    salt:
        Those of requests with this cache salt; None for all, and for the files themselves.
    progress:
        Told how many places have been looked at, of how many.

    Raises
    ------
    ConfigError
        The directory cannot be used, is a running engine's, or was written by a newer version.
    """
    purged: list[Purged] = []
    try:
        for home in homes(disk, path):
            found = _owner(disk, home)
            if found is not None and space in {None, found}:
                purged.append(_Purge(disk, path, found).run(salt, progress))
    except FileNotFoundError:  # nothing was ever stored there
        return purged
    except OSError as error:
        raise config_error(path, error) from error
    return purged


def _owner(disk: Disk, home: Path) -> Namespace | None:
    """Whose files are in a folder; None where they are not ours."""
    meta = read_meta(disk, home)
    try:
        space = Namespace(bytes.fromhex("" if meta is None else meta.namespace))
    except ValueError:
        return None
    return space if FilesDirectory(disk, home.parent, space).home == home else None


class _Purge:
    """One purge of one namespace."""

    def __init__(self, disk: Disk, path: Path, space: Namespace) -> None:
        self._disk = disk
        self._space = space
        self._directory = FilesDirectory(disk, path, space)

    def run(self, salt: str | None, progress: Progress) -> Purged:
        """Take the directory's lock and do it."""
        hint = "purge through its control socket, see the setting control, or stop it first"
        try:
            self._directory.take_lock(hint)
            meta = read_meta(self._disk, self._directory.home)
            if meta is None:  # gone meanwhile
                return Purged(self._space.hex(), 0, 0)
            digest = None if salt is None else salt_digest(self._space, salt)
            removed, tags = self._forget(meta, digest)
            erased = self._erase(meta, digest, tags, progress)
            if salt is None:
                self._directory.delete()
            return Purged(self._space.hex(), removed, erased)
        finally:
            self._directory.leave()

    def _forget(self, meta: Meta, digest: bytes | None) -> tuple[int, list[int]]:
        """Have the index log name them no more, for good; how many, and the tags of the rest."""
        home = self._directory.home
        log = IndexLog(
            self._disk,
            home,
            self._space,
            places_max=meta.capacity_blocks,
            slack_records=LOG_SLACK_RECORDS,
        )
        try:
            found = log.load()
            items = items_of(memoryview(found.records))
            gone = [item for item in items if digest in {None, item.salt}]
            for start in range(0, len(gone), LOG_BATCH):
                log.append(REMOVE, gone[start : start + LOG_BATCH])
            log.sync()
        finally:
            log.close()
        if digest is None:
            self._disk.unlink(home / LOG_NAME)
            sync_directory(self._disk, home)
        tags = list(found.tags)
        for item in gone:
            tags[item.place] = 0
        return len(gone), tags

    def _erase(self, meta: Meta, digest: bytes | None, tags: list[int], progress: Progress) -> int:
        """Write zeros over what they left; how many blocks that were."""
        header = BlockHeader(self._space, meta.block_bytes, verify=True)
        geometry = Geometry(meta.stride - HEADER_BYTES, meta.segment_places, meta.capacity_blocks)
        erased = 0
        with closing(Arena.create(1, PAGE_BYTES)) as arena:  # nothing is read into it
            segments = Segments(self._disk, self._directory, geometry, header=header, arena=arena)
            eraser = Eraser(self._disk, segments, header)
            with closing(segments):
                segments.find()
                for start in range(0, segments.end, STEP_PLACES):
                    places = range(start, min(start + STEP_PLACES, segments.end))
                    left = eraser.find(places, digest, tags, thorough=True)
                    for remnant in left:
                        eraser.wipe(remnant)
                    eraser.finish(left)
                    erased += sum(remnant.start == 0 for remnant in left)
                    progress(places.stop, segments.end)
        return erased
