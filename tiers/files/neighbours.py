"""The fields of a namespace, kept beside its blocks, and what other namespaces hold there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from kvladder.errors import ConfigError
from kvladder.tiers.fields import ALIKE_MAX, changes, is_told, listed
from kvladder.tiers.files.directory import (
    FIELDS_NAME,
    Lease,
    home_number,
    leases,
    require_safe,
    sealed,
)
from kvladder.tiers.files.disk import Disk, read_file, replace_file
from kvladder.units import Size

MAGIC = "kvladder fields"
VERSION = 1
BYTES_MAX = 1 << 20
NEIGHBOURS_MAX = 64
"""Directories whose fields are read, those used last."""


class Neighbours(NamedTuple):
    """What other namespaces hold below a path."""

    namespaces: int
    bytes: int
    """Of their segments."""
    nearest: str
    """What differs from the nearest of them; empty if nothing is known of any."""
    is_alike: bool
    """Whether that one may be what this namespace was before a change."""


def keep_fields(
    disk: Disk, home: Path, fields: Mapping[str, str], say: Callable[[str], object]
) -> None:
    """Keep the fields of a namespace in its directory, all of them or none; a failure is said."""
    if not fields:
        return
    path = home / FIELDS_NAME
    line = json.dumps({"magic": MAGIC, "version": VERSION, "fields": dict(fields)}, sort_keys=True)
    data = sealed(line.encode())
    try:
        if _read(disk, path) == data:
            return
    except ValueError as error:
        say(f"{path} {error}: it is written anew")
    try:
        replace_file(disk, path, data)
    except OSError as error:
        why = error.strerror or type(error).__name__
        say(f"{path} cannot be written: {why}: later starts cannot say what has changed")


def neighbours(
    disk: Disk, home: Path, fields: Mapping[str, str], say: Callable[[str], object]
) -> Neighbours:
    """Look at the other namespaces beside ``home``; files that are damaged are said and ignored."""
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
    """By directory below a path, what differs from the one that was used last."""
    known = list(_known(disk, leases(disk, path), say))
    told: dict[str, str] = {}
    for lease, fields in known[1:]:
        if _prefix(lease.home) != _prefix(known[0][0].home):
            told[lease.home.name] = (
                f"{listed(changes(fields, known[0][1]))} since, see {known[0][0].home.name}"
            )
    return told


def told_of(found: Neighbours, *, cold: bool) -> dict[str, str]:
    """What of it stands in a tier's description."""
    told: dict[str, str] = {}
    if found.namespaces:
        word = "namespace" if found.namespaces == 1 else "namespaces"
        told["others"] = f"{found.namespaces} other {word}, {Size(found.bytes).about()}"
    if cold and found.nearest:
        told["changed" if found.is_alike else "differs"] = found.nearest
    return told


def _prefix(home: Path) -> str:
    ids = home_number(home.name)
    return ids[0] if ids else home.name


def _known(
    disk: Disk, found: list[Lease], say: Callable[[str], object]
) -> Iterator[tuple[Lease, dict[str, str]]]:
    """Directories of which the fields are known, that used last first."""
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
    """The file as it is, None if there is none; ValueError if it is not one of ours."""
    try:
        require_safe(disk, path, directory=False)
        data = read_file(disk, path, BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ConfigError as error:
        raise ValueError(f"is not used: {error.message}") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or type(error).__name__}") from error
    if data != sealed(data.partition(b"\n")[0]):
        raise ValueError("is damaged")
    return data


def _fields(data: bytes) -> dict[str, str] | None:
    """The fields in a whole file; None if a newer version wrote it."""
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
