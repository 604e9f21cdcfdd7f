"""The resolved configuration for people: every setting, what it comes to, and who set it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import msgspec

from kvladder.config.sources import Source
from kvladder.schema import cleared, is_secret, join
from kvladder.units import Size


class Row(NamedTuple):
    """One setting."""

    path: str
    value: str
    """As it would be written; secrets are masked."""
    means: str
    """What it comes to in blocks and tokens; empty where that says nothing or is not known."""
    origin: str
    """Who set it, ``default`` where nobody did."""


Meaning = Callable[[str, object], str]
"""What the value at a path comes to in blocks and tokens, or nothing."""


def rows(settings: msgspec.Struct, path: str, source: Source, meaning: Meaning) -> list[Row]:
    """Every setting in ``settings``, which stands at ``path``; a tier's options among its keys."""
    found: list[Row] = []
    for field in msgspec.structs.fields(settings):
        value: object = getattr(settings, field.name)
        where = join(path, field.encode_name)
        if isinstance(value, msgspec.Struct) and not is_secret(where):
            inner = path if field.name == "options" else where
            found.extend(rows(value, inner, source, meaning))
        elif field.name != "options":
            found.append(Row(where, text(where, value), meaning(where, value), who(where, source)))
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
    origin = source.origins.get(path, "default")
    variable = source.variables.get(path)
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
