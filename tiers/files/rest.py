"""Directories that no process owns, for commands: shows what they hold, and takes them."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvladder.errors import ConfigError
from kvladder.keys import Namespace
from kvladder.tiers.files.directory import (
    PREFIX_DIGITS,
    FilesDirectory,
    exclusive,
    held_by,
    home_number,
    leases,
)
from kvladder.tiers.files.disk import Disk, require_safe
from kvladder.tiers.files.meta import LOCK_NAME, LOG_NAME, META_NAME, read_meta
from kvladder.units import Size


def look(disk: Disk, path: Path) -> dict[str, str]:
    """Return what each directory below a path holds and which process owns it; create nothing.

    Raises
    ------
    ConfigError
        Other users may write to the path.
    """
    facts: dict[str, str] = {}
    with suppress(OSError):  # no engine has used the path yet
        require_safe(disk, path, directory=True)
        disk.stat(path / LOCK_NAME)
        with exclusive(disk, path):
            for lease in sorted(leases(disk, path)):
                holds = Size(lease.bytes).about() if lease.bytes else "nothing"
                who = held_by(disk, lease.home)
                said = "not in use" if who is None else f"in use by process {who}"
                facts[lease.home.name] = f"{holds}, {said}"
    return facts


@contextmanager
def at_rest(
    disk: Disk, path: Path, space: Namespace | None, others: Collection[str]
) -> Generator[list[FilesDirectory]]:
    """Take and yield the directories of one namespace, or of all, that no process owns.

    Directories that a process of ``others`` owns are left out. All are released at the end.

    Raises
    ------
    ConfigError
        A process not in ``others`` owns a directory, or a directory's namespace is not known.
    """
    taken: list[FilesDirectory] = []
    with ExitStack() as held:
        with exclusive(disk, path):
            for name in disk.listdir(path):
                found = _namespace_of(disk, path / name)
                if found is None or space not in {None, found}:
                    continue
                directory = FilesDirectory(disk, path, found)
                held.callback(directory.leave)
                if directory.hold(path / name, others):
                    taken.append(directory)
        yield taken


def _namespace_of(disk: Disk, home: Path) -> Namespace | None:
    """Return the namespace of the files in a directory; None if they are not kvladder's.

    Raises
    ------
    ConfigError
        META is damaged, or is of another version of kvladder.
    """
    ids = home_number(home.name)
    if ids is None:
        return None
    meta = read_meta(disk, home)
    if isinstance(meta, int):
        raise ConfigError(
            f"{home} was written by an earlier version of kvladder, in format {meta}",
            path="path",
            hint="purge with that version, or remove the directory",
        )
    if meta is None:
        with suppress(NotADirectoryError):
            if {META_NAME, LOG_NAME}.intersection(disk.listdir(home)):
                raise ConfigError(
                    f"{home / META_NAME} is damaged: the namespace of its blocks is unknown",
                    path="path",
                    hint="start the engine that wrote the blocks: it repairs the file; then purge",
                )
        return None
    is_named_so = meta.namespace[:PREFIX_DIGITS] == ids[0]
    return Namespace(bytes.fromhex(meta.namespace)) if is_named_so else None
