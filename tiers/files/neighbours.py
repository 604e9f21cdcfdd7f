"""Stores the fields of a namespace beside its blocks, and reports the other namespaces there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from kvladder.errors import ConfigError
from kvladder.tiers.fields import ALIKE_MAX, changes, is_told, listed
from kvladder.tiers.files.directory import Lease, home_number, leases
from kvladder.tiers.files.disk import Disk, read_file, replace_file, require_safe
from kvladder.tiers.files.meta import FIELDS_NAME, sealed
from kvladder.units import Size, counted

MAGIC = "kvladder fields"
VERSION = 1
BYTES_MAX = 1 << 20
NEIGHBOURS_MAX = 64
"""Most directories with fields to read; the most recently used ones are read."""


class Neighbours(NamedTuple):
    """The other namespaces below a path, and the most similar one of them."""

    namespaces: int
    bytes: int
    """Bytes of their segments."""
    nearest: str
    """Differences to the most similar namespace; empty if the fields of none are known."""
    is_alike: bool
    """True if that namespace may be this one before a change."""


def keep_fields(
    disk: Disk, home: Path, fields: Mapping[str, str], say: Callable[[str], object]
) -> None:
    """Store the fields of a namespace in its directory, all or nothing; ``say`` a failure."""
    if not fields:
        return
    path = home / FIELDS_NAME
    line = json.dumps({"magic": MAGIC, "version": VERSION, "fields": dict(fields)}, sort_keys=True)
    data = sealed(line.encode())
    try:
        if _read(disk, path) == data:
            return
    except ValueError as error:
        say(f"{path} {error}: it is rewritten")
    try:
        replace_file(disk, path, data)
    except OSError as error:
        why = error.strerror or type(error).__name__
        say(f"{path} cannot be written: {why}. Later starts cannot report changed fields")


def neighbours(
    disk: Disk, home: Path, fields: Mapping[str, str], say: Callable[[str], object]
) -> Neighbours:
    """Return what is known of the other namespaces beside ``home``; ``say`` damaged files."""
    mine = home_number(home.name)
    found = [one for one in leases(disk, home.parent) if home_number(one.home.name) != mine]
    others = [one for one in found if _prefix(one.home) != _prefix(home)]
    known = _known(disk, others, say) if fields else ()
    changed = [(changes(old, fields), lease.home.name) for lease, old in known]
    count, held = len({_prefix(one.home) for one in others}), sum(one.bytes for one in others)
    if not changed:
        return Neighbours(count, held, "", False)
    nearest, name = min(changed, key=lambda one: len(one[0]))
    text = f"{listed(nearest)} since {name}" if nearest else ""
    return Neighbours(count, held, text, len(nearest) <= ALIKE_MAX)


def compared(disk: Disk, path: Path, say: Callable[[str], object]) -> dict[str, str]:
    """Return, for each directory below a path, how it differs from the most recently used one."""
    known = list(_known(disk, leases(disk, path), say))
    told: dict[str, str] = {}
    for lease, fields in known[1:]:
        if _prefix(lease.home) != _prefix(known[0][0].home):
            told[lease.home.name] = (
                f"{listed(changes(fields, known[0][1]))} in {known[0][0].home.name}, used later"
            )
    return told


def told_of(found: Neighbours, *, cold: bool) -> dict[str, str]:
    """Return the entries for ``Tier.describe``; ``cold`` if the tier began without blocks."""
    told: dict[str, str] = {}
    if found.namespaces:
        others = counted(found.namespaces, "other namespace")
        told["others"] = f"{others}, {Size(found.bytes).about()}"
    if cold and found.nearest:
        told["changed" if found.is_alike else "differs"] = found.nearest
    return told


def _prefix(home: Path) -> str:
    ids = home_number(home.name)
    return ids[0] if ids else home.name


def _known(
    disk: Disk, found: list[Lease], say: Callable[[str], object]
) -> Iterator[tuple[Lease, dict[str, str]]]:
    """Yield the directories with known fields, the most recently used one first."""
    for lease in reversed(found[-NEIGHBOURS_MAX:]):
        path = lease.home / FIELDS_NAME
        try:
            data = _read(disk, path)
            fields = None if data is None else _fields(data)
        except ValueError as error:
            say(f"{path} {error}: it is ignored")
            continue
        if fields is not None:
            yield lease, fields


def _read(disk: Disk, path: Path) -> bytes | None:
    """Return the content of the file, or None if there is none.

    Raises
    ------
    ValueError
        The file is damaged, not safe to use, or cannot be read.
    """
    try:
        require_safe(disk, path, directory=False)
        data = read_file(disk, path, BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ConfigError as error:
        raise ValueError(f"is not safe to use: {error.message}") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or type(error).__name__}") from error
    if data != sealed(data.partition(b"\n")[0]):
        raise ValueError("is damaged")
    return data


def _fields(data: bytes) -> dict[str, str] | None:
    """Return the fields in an undamaged file; None if another version of kvladder wrote it."""
    try:
        found: object = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        found = None
    told = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    fields = told.get("fields")
    if told.get("magic") == MAGIC and told.get("version") != VERSION:
        return None
    if told.get("magic") != MAGIC or not is_told(fields):
        raise ValueError("is damaged")
    return cast("dict[str, str]", fields)
