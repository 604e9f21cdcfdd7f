"""Purges those directories of a files tier that no engine uses."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvladder.arena import Arena
from kvladder.errors import ConfigError
from kvladder.keys import Namespace, salt_digest
from kvladder.layout import PAGE_BYTES
from kvladder.tiers.base import Item, Progress
from kvladder.tiers.files.directory import FilesDirectory, exclusive, owner
from kvladder.tiers.files.disk import Disk, sync_directory
from kvladder.tiers.files.erase import Eraser
from kvladder.tiers.files.header import HEADER_BYTES, BlockHeader
from kvladder.tiers.files.log import REMOVE, IndexLog, items_of
from kvladder.tiers.files.meta import (
    LOG_NAME,
    META_NAME,
    PREFIX_DIGITS,
    Meta,
    earlier_version,
    home_number,
    is_ours,
    read_meta,
    require_safe,
)
from kvladder.tiers.files.segments import Geometry, Segments
from kvladder.tiers.files.store import config_error

STEP_PLACES: Final = 256
LOG_BATCH: Final = 4096
LOG_SLACK_RECORDS: Final = 4096


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
        require_safe(disk, path, directory=True)
        with ExitStack() as held:
            work: list[_Purge] = []
            with exclusive(disk, path):
                for name in disk.listdir(path):
                    found = _owner(disk, path / name)
                    if found is None or space not in {None, found}:
                        continue
                    purge = _Purge(disk, path, found)
                    held.callback(purge.leave)
                    if purge.hold(path / name, others):
                        work.append(purge)
            return [purge.run(salt, progress) for purge in work]
    except FileNotFoundError:  # nothing was ever stored there
        return []
    except OSError as error:
        raise config_error(path, error) from error


def _owner(disk: Disk, home: Path) -> Namespace | None:
    """Whose files are in a directory; None where they are not ours."""
    ids = home_number(home.name)
    if ids is None:
        return None
    meta = read_meta(disk, home)
    if meta is None:
        earlier = earlier_version(disk, home)
        if earlier is not None:
            raise ConfigError(
                f"{home} was written by an earlier version of kvladder, in format {earlier}",
                path="path",
                hint="purge with that version, or remove the directory",
            )
        with suppress(NotADirectoryError):
            if {META_NAME, LOG_NAME}.intersection(disk.listdir(home)):
                raise ConfigError(
                    f"{home / META_NAME} is damaged: it does not tell whose blocks these are",
                    path="path",
                    hint="start the engine that wrote them, which mends it, and purge then",
                )
        return None
    is_named_so = meta.namespace[:PREFIX_DIGITS] == ids[0]
    return Namespace(bytes.fromhex(meta.namespace)) if is_named_so else None


class _Purge:
    """One purge of one directory."""

    def __init__(self, disk: Disk, path: Path, space: Namespace) -> None:
        self._disk = disk
        self._space = space
        self._directory = FilesDirectory(disk, path, space)
        self.leave = self._directory.leave

    def hold(self, home: Path, others: Collection[str]) -> bool:
        """Take the directory; False if one of ``others`` has it."""
        hint = "purge through its control socket, see the setting control, or stop it first"
        try:
            self._directory.hold(home, hint)
        except ConfigError:
            if others and owner(self._disk, home) in others:
                return False
            raise
        return True

    def run(self, salt: str | None, progress: Progress) -> Purged:
        """Purge the directory that was taken."""
        home = self._directory.home
        meta = read_meta(self._disk, home)
        assert meta is not None, "it was read a moment ago, and nobody else has the directory"
        for name in filter(is_ours, self._disk.listdir(home)):
            require_safe(self._disk, home / name, directory=False)
        digest = None if salt is None else salt_digest(self._space, salt)
        removed, tags = self._forget(meta, digest)
        erased = self._erase(meta, digest, tags, progress)
        if salt is None:
            with self._directory.exclusive():
                self._directory.delete()
        return Purged(self._space.hex(), removed, erased)

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
        gone: list[Item] = []
        try:
            found = log.load(anew=False)  # where it is lost, headers tell, here and at the start
            if not found.lost:
                items = items_of(memoryview(found.records))
                gone = [item for item in items if digest in {None, item.salt}]
                for start in range(0, len(gone), LOG_BATCH):
                    log.append(REMOVE, gone[start : start + LOG_BATCH])
                log.sync()
        finally:
            log.close()
        if digest is None:
            with suppress(FileNotFoundError):
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
                    left = eraser.find(places, digest, tags)
                    for remnant in left:
                        eraser.wipe(remnant)
                    eraser.finish(left)
                    erased += sum(remnant.start == 0 for remnant in left)
                    progress(places.stop, segments.end)
        return erased
