"""Changes single settings in the text of a YAML file, and keeps its comments; replaces files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from kvladder.errors import ConfigError
from kvladder.schema import is_list, is_mapping, parse_yaml

WHERE = "set"


def edited(text: str, path: str, value: str) -> str:
    """Return ``text`` with one setting changed or added.

    ``path`` has the keys of the file, with dots; a tier is given by its name: ``tiers.nvme.when``.
    ``value`` is YAML on one line.

    Raises
    ------
    ConfigError
        The path names nothing, or the value is not one of YAML.
    """
    try:
        wanted = parse_yaml(value)
    except yaml.YAMLError as error:
        raise _wrong(path, f"{value!r} is not YAML", "put text in quotes") from error
    if "\n" in value or not value.strip():
        raise _wrong(path, repr(value), "expected a value on one line")
    keys = path.split(".")
    if not all(keys):
        raise _wrong(path, "not a setting", "expected a path such as tiers.nvme.capacity")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    changed = _changed(text, root, keys, value, path)
    hint = "edit the file, and apply it whole"
    try:
        found = parse_yaml(changed)
    except yaml.YAMLError as error:
        raise _wrong(path, f"{value!r} cannot stand there", hint) from error
    if found != _with(parse_yaml(text), keys, wanted):
        raise _wrong(path, "an alias or a merge gives it its value", hint)
    return changed


def _wrong(path: str, what: str, hint: str) -> ConfigError:
    return ConfigError(what, path=f"{WHERE} {path}", hint=hint)


def _changed(text: str, node: Any, keys: list[str], value: str, path: str) -> str:
    key, *rest = keys
    if isinstance(node, yaml.SequenceNode):
        tiers = [one for one in node.value if _name_of(one) == key]
        if len(tiers) != 1 or not rest:
            names = ", ".join(filter(None, map(_name_of, node.value)))
            raise _wrong(path, f"no tier is named {key!r}", f"expected one of {names}")
        return _changed(text, tiers[0], rest, value, path)
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(path, f"{key!r} stands below a single value", "name a setting of the file")
    found = next((item for name, item in node.value if name.value == key), None)
    is_empty = isinstance(found, yaml.ScalarNode) and found.start_mark.index == found.end_mark.index
    if found is None or (is_empty and rest):
        if key == "tiers":
            raise _wrong(path, "the file has no list of tiers", "name a key that it has")
        new = value
        for name in reversed(rest):
            new = f"{{{name}: {new}}}"
        if found is None:
            return _added(text, node, f"{key}: {new}")
        return _replaced(text, found, f" {new}")
    if rest:
        return _changed(text, found, rest, value, path)
    if not isinstance(found, yaml.ScalarNode) and not found.flow_style:
        raise _wrong(path, "it has settings of its own", "name one of them")
    return _replaced(text, found, f" {value}" if is_empty else value)


def _name_of(node: Any) -> str:
    """Return the name of a tier: its ``name``, or else its type."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    said: dict[str, str] = {name.value: str(item.value) for name, item in pairs}
    return said.get("name", said.get("type", ""))


def _replaced(text: str, node: Any, new: str) -> str:
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]


def _added(text: str, node: Any, new: str) -> str:
    """Return ``text`` with a setting more in a mapping, as its first one."""
    if node.flow_style:
        at = node.start_mark.index + 1
        return text[:at] + new + (", " if node.value else "") + text[at:]
    first = node.value[0][0].start_mark
    at, column = int(first.index), int(first.column)
    return text[:at] + new + "\n" + " " * column + text[at:]


def _with(data: Any, keys: list[str], value: Any) -> Any:
    """Return plain data with the value at a path replaced."""
    key, *rest = keys
    if is_list(data):
        said = [one.get("name", one.get("type")) if is_mapping(one) else None for one in data]
        return [
            _with(one, rest, value) if n == key else one for one, n in zip(data, said, strict=True)
        ]
    own: dict[str, Any] = data or {}
    return {**own, key: _with(own.get(key), rest, value) if rest else value}


def replace_text(path: Path, text: str) -> None:
    """Replace a file by ``text``, all or nothing, also in a power cut; it keeps its mode.

    Raises
    ------
    ConfigError
        It cannot be written; it is as before.
    """
    real = path.resolve()
    aside = real.with_name(f".{real.name}.kvladder")
    try:
        mode = real.stat().st_mode & 0o777
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(real)
        folder = os.open(real.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        why = error.strerror or str(error)
        hint = "make the file and its folder writable for the engine, or leave out save"
        raise ConfigError(why, path=str(path), hint=hint) from error
