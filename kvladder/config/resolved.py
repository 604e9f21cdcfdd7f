"""The resolved configuration for people: every setting, what it comes to, and who set it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import msgspec

from kvladder.config.sources import Source
from kvladder.schema import cleared, is_secret, join, value_at
from kvladder.units import Share, Size


class Row(NamedTuple):
    """One setting."""

    path: str
    value: str
    """As it would be written; secrets are masked."""
    means: str
    """What it comes to in blocks and tokens; empty where that says nothing or is not known."""
    origin: str
    """Who set it, ``default`` where nobody did."""


def rows(
    settings: msgspec.Struct,
    path: str,
    source: Source,
    means: Mapping[str, str],
    slots: int | None,
) -> list[Row]:
    """Every setting in ``settings``, which stands at ``path``.

    ``means`` tells what some come to, ``slots`` is the number that shares are taken of.
    """
    found: list[Row] = []
    for field in msgspec.structs.fields(settings):
        value: object = getattr(settings, field.name)
        where = join(path, field.encode_name)
        if isinstance(value, msgspec.Struct) and not is_secret(where):
            found += rows(value, where, source, means, slots)
            continue
        meaning = means.get(where, "")
        if isinstance(value, Share) and slots is not None:
            meaning = f"{value.of(slots)} blocks"
        found.append(Row(where, text(where, value), meaning, who(where, source)))
    return found


def text(path: str, value: object) -> str:
    """A value as it would be written, without secrets."""
    if value is None or value in ("", ()):
        return "none"
    told = cleared(path, value)
    if isinstance(told, Size):
        return f"{told} ({int(told)} bytes)"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in cast("list[object]", told))
    return str(told)


def who(path: str, source: Source) -> str:
    """Who set the value at a path, or how its default was found."""
    note = source.notes.get(path)
    if note is not None:
        return f"default: {note}"
    if value_at(source.raw, path) is None:
        return "default"
    origin, variable = source.who(path)
    return f"{origin}: {variable}" if variable else origin


def table(title: str, lines: Iterable[Row]) -> list[str]:
    """Rows as aligned text below a title; of a path only the last part is shown."""
    cells = [(line.path, line.value, line.means, line.origin) for line in lines]
    widths = [max((len(row[i]) for row in cells), default=0) for i in range(3)]
    body = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True) if width)
        + f"  {row[3]}"
        for row in cells
    ]
    return [title, *body]
