"""The fields from which a namespace is computed, as text for people, and how two sets differ.

They are stored beside the blocks, so that a cache that finds no blocks can say what has changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvladder.schema import is_list, is_mapping, is_secret, masked

FIELDS_MAX: Final = 4096
"""Most fields; if there are more, one digest stands for all of them."""
BYTES_MAX: Final = 1 << 18
"""Most bytes of names and values together; above this, digests stand for the values."""
VALUE_MAX: Final = 120
"""Most characters of a value; a digest stands for a longer one."""
NAME_MAX: Final = 200
"""Most characters of a name; a digest stands for a longer one."""
DEPTH_MAX: Final = 8
"""Depth to which JSON values are split into fields of their own."""
SHOWN_MAX: Final = 4
"""Number of differences that ``listed`` names; it counts the others."""
ALIKE_MAX: Final = 12
"""Most changes between versions of one model; more changes mean another model."""
_DIGEST: Final = "digest "
_HEX: Final = re.compile(r"[0-9a-f]{32,}")


def told(fields: Mapping[str, str], *, salt: str = "") -> dict[str, str]:
    """Return the fields of a namespace, split at their JSON leaves, bounded, without secrets."""
    found = {_name(name): _leaf(name, value) for name, value in _leaves(fields)} | _salted(salt)
    if _is_bounded(found):
        return found
    found = {_name(name): _digest(value) for name, value in fields.items()} | _salted(salt)
    if _is_bounded(found):
        return found
    return {"all fields": _digest(json.dumps(dict(fields), sort_keys=True)), **_salted(salt)}


def is_told(fields: object) -> bool:
    """Return whether this can be a result of ``told``; needed because a file may hold anything."""
    if not is_mapping(fields):
        return False
    parts: Iterator[object] = (part for item in fields.items() for part in item)
    return all(isinstance(part, str) for part in parts) and _is_bounded(fields)


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the changes from ``old`` to ``new``, one text each, the most informative first."""
    before, after = _values(old, new), _values(new, old)
    names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]

    def rank(name: str) -> tuple[bool, int, str]:
        values = (before.get(name, ""), after.get(name, ""))
        return any(value.startswith(_DIGEST) for value in values), name.count("."), name

    said: dict[str, str] = {}
    for name in sorted(names, key=rank):
        texts = before.get(name), after.get(name)
        # a model's configuration may come several times, under other names
        said.setdefault(_change(name.rpartition(".")[2], *texts), _change(name, *texts))
    return [*said.values()]


def listed(changed: Sequence[str]) -> str:
    """Return the first few of ``changes`` as text, with the number of the others."""
    left = len(changed) - SHOWN_MAX
    return ", ".join([*changed[:SHOWN_MAX], *([f"and {left} more"] if left > 0 else [])])


def _values(fields: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Return the fields; join those for which ``other`` has one value, e.g. ``{factor: 2}``."""
    found: dict[str, str] = {}
    inner: dict[str, list[str]] = {}
    for name, value in fields.items():
        above = next((one for one in _above(name) if one in other and one not in fields), None)
        if above is None:
            found[name] = value
        else:
            inner.setdefault(above, []).append(f"{name[len(above) + 1 :]}: {value}")
    return found | {name: _short(f"{{{', '.join(sorted(one))}}}") for name, one in inner.items()}


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _change(name: str, before: str | None, after: str | None) -> str:
    if before is None:
        return f"{name} added{_shown(after)}"
    if after is None:
        return f"{name} removed{_shown(before)}"
    if before.startswith(_DIGEST) or after.startswith(_DIGEST):
        return f"{name} changed"
    return f"{name} changed from {before or 'nothing'} to {after or 'nothing'}"


def _shown(value: str | None) -> str:
    return "" if value is None or value.startswith(_DIGEST) else f" ({value or 'empty'})"


def _leaves(fields: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        plain: object = value
        if value[:1] in ("{", "["):
            try:
                plain = json.loads(value)
            except (ValueError, RecursionError):
                plain = value
        yield from _parts(name, plain, 0)


def _parts(name: str, value: object, depth: int) -> Iterator[tuple[str, object]]:
    """Yield the leaves of a JSON value; ``[kind, {...}]`` stands for an object of a class."""
    if is_list(value) and len(value) == 2 and isinstance(value[0], str) and is_mapping(value[1]):
        yield name, value[0]
        value = value[1]
    if is_mapping(value) and value and depth < DEPTH_MAX:
        for key, inner in value.items():
            yield from _parts(f"{name}.{key}", inner, depth + 1)
        return
    yield name, value


def _name(name: str) -> str:
    return name if len(name) <= NAME_MAX else _digest(name)


def _leaf(name: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    is_number = value is None or isinstance(value, bool | int | float)
    if is_secret(name) and text and not is_number:
        return _digest(text)
    return _short(masked(text))


def _short(text: str) -> str:
    return _digest(text) if len(text) > VALUE_MAX or _HEX.fullmatch(text) else text


def _digest(text: object) -> str:
    """Return a short digest, long enough to notice a change."""
    data = str(text).encode("utf-8", "surrogatepass")
    return _DIGEST + hashlib.blake2b(data, digest_size=4, person=b"kvladder fields").hexdigest()


def _salted(salt: str) -> dict[str, str]:
    return {"block.salt": _digest(salt) if salt else ""}


def _is_bounded(fields: Mapping[str, str]) -> bool:
    size = sum(
        len(part.encode("utf-8", "surrogatepass")) for item in fields.items() for part in item
    )
    return len(fields) <= FIELDS_MAX and size <= BYTES_MAX
