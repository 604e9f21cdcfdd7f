"""Checks every block of directories that no engine uses, and drops those that are damaged."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from kvladder.errors import ConfigError, Unavailable, refusal
from kvladder.tiers.files.directory import FilesDirectory
from kvladder.tiers.files.disk import Disk, explained, require_safe
from kvladder.tiers.files.log import kept_of
from kvladder.tiers.files.meta import DirectoryMeta, read_meta
from kvladder.tiers.files.purge import Eraser
from kvladder.tiers.files.rest import at_rest
from kvladder.tiers.files.store import FileStore
from kvladder.tiers.label import RecoveredBlock

STEP_BYTES = 8 << 20
"""Most bytes that are read between two results, except for one larger block."""


class Scrubbed(NamedTuple):
    """Progress of a scrub, and what its last step found."""

    namespace: str
    checked: int
    """Blocks of this step."""
    bytes: int
    """Bytes that this step read."""
    damaged: int
    """Blocks of this step that were damaged; they are no longer in the index log."""
    done: int
    """Blocks of all directories so far, from the first one on."""
    total: int


def scrub_files(
    disk: Disk, path: Path, *, start: int = 0, others: Collection[str] = ()
) -> Generator[Scrubbed]:
    """Check the blocks below a path step by step, and drop the damaged ones; blocking.

    The directories belong to the caller until the iteration is over or closed. A block without a
    checksum counts as good if its label is.

    Parameters
    ----------
    disk:
        The port to the file system.
    path:
        The tier's path, with a directory for each namespace and process.
    start:
        Number of blocks to pass over: ``Scrubbed.done`` of an earlier scrub.
    others:
        Ids of processes that check the directories that they own.

    Raises
    ------
    ConfigError
        A directory cannot be used, belongs to a running engine, or was written by another version
        of kvladder.
    """
    try:
        with explained(path):
            try:
                require_safe(disk, path, directory=True)
            except FileNotFoundError:  # no block was ever stored there
                return
            with at_rest(disk, path, None, others) as taken:
                yield from _scrubbed(disk, sorted(taken, key=lambda one: one.home), start)
    except Unavailable as error:
        raise refusal(error, required=False) from error


def _scrubbed(disk: Disk, taken: Sequence[FilesDirectory], start: int) -> Iterator[Scrubbed]:
    sizes = [_count(disk, directory) for directory in taken]
    total, done = sum(sizes), 0
    for directory, size in zip(taken, sizes, strict=True):
        skipped = min(size, max(0, start - done))
        done += skipped
        for checked, read, damaged in _scrub(disk, directory, skipped):
            done += checked
            space = directory.space.hex()
            yield Scrubbed(space, checked, read, damaged, done, max(total, done))


def _store(disk: Disk, directory: FilesDirectory) -> FileStore:
    meta = read_meta(disk, directory.home)
    assert isinstance(meta, DirectoryMeta), (
        "META was valid a moment ago, and this process owns the directory"
    )
    directory.require_ours()
    store = FileStore(disk, directory, meta)
    store.load(anew=False)
    return store


def _count(disk: Disk, directory: FilesDirectory) -> int:
    store = _store(disk, directory)
    with closing(store.segments), closing(store.log):
        if store.found.lost and store.segments.end:
            what = f"the index log of {directory.home} is lost"
            hint = "start the engine, which finds the blocks by their headers; then check again"
            raise ConfigError(what, path="path", hint=hint)
        return len(store.found.records)


def _scrub(disk: Disk, directory: FilesDirectory, skipped: int) -> Iterator[tuple[int, int, int]]:
    """Check the blocks of one directory in the order of their places, without the first few."""
    store = _store(disk, directory)
    with closing(store.segments), closing(store.log):
        eraser = Eraser(disk, store.segments, directory.space)
        blocks = sorted(kept_of(store.found.records), key=lambda one: one.place)[skipped:]
        step = max(1, STEP_BYTES // store.segments.meta.stride)
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            bad = [one for one in part if not eraser.is_whole(one.place, one.key)]
            _drop(store, bad)
            yield len(part), len(part) * store.segments.meta.stride, len(bad)


def _drop(store: FileStore, bad: Sequence[RecoveredBlock]) -> None:
    """Take damaged blocks out of the index log, so that no engine finds them."""
    if bad:
        store.log.remove(bad)
        store.log.sync()
