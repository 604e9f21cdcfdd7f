"""Reads settings from their sources: a YAML file or a mapping, the environment, the engine.

The result is one tree of plain data in the long form, and the origin of each value in it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from kvladder.errors import ConfigError
from kvladder.schema import (
    DEPTH_MAX,
    is_list,
    is_mapping,
    is_text,
    join,
    load_yaml,
    nearest,
    parent,
    shown,
    value_at,
)
from kvladder.tiers.files.disk import space

Origin = Literal["default", "file", "given", "environment", "engine"]

PREFIX = "KVLADDER__"
FREE_SHARE = 0.8
"""Share of a file system's free space that the short form uses."""
SHORT_KEYS = ("host", "files", "capacity")
SHORT_SWITCHES = ("shadow", "otel")
SHORT_SECTIONS = {"control": "path", "http": "listen", "record": "path", "block": "size"}
"""Sections that one value may stand for, and the setting that it is."""
_VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(:-[^}]*)?\})?")


@dataclass
class Source:
    """Settings as plain data, and the origin of each."""

    origins: dict[str, tuple[Origin, str]]
    """Origin and variable by path; a path without an entry has that of its parent."""
    file: str = ""
    """The file that they come from, if any."""
    raw: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    short: dict[str, str] = field(default_factory=dict[str, str])
    """Path in the short form of each setting that was not set again since."""
    notes: dict[str, str] = field(default_factory=dict[str, str])
    """Explanation of a default, by path."""
    given: object = field(default=None, repr=False)
    """The content of the file or the mapping, before other sources."""
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """The settings by the engine."""

    def who(self, path: str) -> tuple[Origin, str]:
        """Return the origin of the value at a path, and its environment variable or ""."""
        while path and path not in self.origins:
            path = parent(path)
        return self.origins[path]

    def loose(self, path: str) -> bool:
        """Return whether the environment set the value at a path, so that it is text."""
        return self.who(path)[0] == "environment"

    def explain(self, error: ConfigError) -> ConfigError:
        """Return ``error`` with the origin of the value: an environment variable, or the file."""
        origin, variable = self.who(error.path)
        if variable:
            hint = f"{error.hint}; set by {variable}" if error.hint else f"set by {variable}"
            return type(error)(error.message, path=error.path, hint=hint)
        path = self.short.get(error.path, error.path)
        apart = origin == "engine" or error.file or path.startswith((self.file or PREFIX, PREFIX))
        file = error.file if apart else self.file
        return type(error)(error.message, path=path, hint=error.hint, file=file)

    @contextmanager
    def explained(self) -> Generator[None]:
        """Add the origin of the value to a ConfigError raised inside."""
        try:
            yield
        except ConfigError as error:
            raise self.explain(error) from error.__cause__

    def lay(self, keys: Sequence[str], value: Any, origin: Origin, variable: str = "") -> None:
        """Set one value over earlier ones; a tier is given by its name, wherever it stands."""
        holder: Any = self.raw
        path, last = "", len(keys) - 1
        for i, key in enumerate(keys):
            step = self._tier(key, variable) if path == "tiers" else key
            path = f"{path}[{step}]" if path == "tiers" else join(path, key)
            before = value_at(self.raw, path)
            # keys below a single value replace it; an empty section replaces nothing
            if i == last and (value != {} or before is None):
                holder[step] = value
                self._forget(path)
                self.origins[path] = origin, variable
            elif not isinstance(before, dict | list):
                holder[step] = {}
                self.origins |= {} if before is None else {path: (origin, variable)}
            holder = holder[step]

    def _forget(self, path: str) -> None:
        """Forget the origins of the values inside a path, and its own note and short form."""
        inside = (f"{path}.", f"{path}[")
        self.origins = {k: who for k, who in self.origins.items() if not k.startswith(inside)}
        self.notes.pop(path, None)
        self.short.pop(path, None)

    def _tier(self, name: str, variable: str) -> int:
        """Return the index of the tier with this name, as an environment variable spells it."""
        listed = self.raw.get("tiers")
        tiers = [tier if is_mapping(tier) else {} for tier in (listed if is_list(listed) else [])]
        names = [str(tier.get("name", tier.get("type", ""))) for tier in tiers]
        plain = [_same(name) for name in names]
        if _same(name) not in plain:
            where = variable or f"tiers.{name}"
            raise ConfigError(f"no tier is named {name!r}", path=where, hint=nearest(name, names))
        return plain.index(_same(name))


def _same(name: str) -> str:
    """Return a tier's name in a form that is the same for all spellings in variables."""
    return name.lower().replace("-", "_")


def read(
    source: str | Path | Mapping[str, Any],
    *,
    env: Mapping[str, str],
    overrides: Mapping[str, Any] | None,
    file: str = "",
) -> Source:
    """Read settings; later sources override earlier ones: ``source``, environment, ``overrides``.

    Parameters
    ----------
    source:
        The path of a YAML file, or the content of one as a mapping.
    env:
        The environment. It fills ``${NAME}`` and ``${NAME:-default}`` in text, and variables like
        ``KVLADDER__ARENA__SIZE`` or ``KVLADDER__TIERS__<name>__CAPACITY`` set single values.
    overrides:
        Settings by the engine: nested like the file, with ``tiers`` as a mapping by name.
    file:
        The file that a mapping was read from, for errors.

    Raises
    ------
    ConfigError
        The file cannot be read or is not YAML, a variable is unset, or an override names nothing.
    """
    file = file if isinstance(source, Mapping) else str(source)
    found = Source({"": ("file" if file else "given", "")}, file)
    with found.explained():
        given = source if isinstance(source, Mapping) else load_yaml(Path(source))
        found.given, found.overrides = given, overrides or {}
        _gather(found, given, env, overrides or {})
    return found


def _gather(
    found: Source, given: object, env: Mapping[str, str], overrides: Mapping[str, Any]
) -> None:
    raw = _plain(given, "", found, env)
    if not is_mapping(raw) or not raw:
        what = "not a mapping" if raw else "empty"
        raise ConfigError(f"the configuration is {what}", hint="expected arena: and tiers:")
    found.raw = raw if raw.keys().isdisjoint(SHORT_KEYS) else _written_out(raw, found)
    for name in sorted(env):
        keys = name.removeprefix(PREFIX).lower().split("__")
        if name.startswith(PREFIX) and not all(keys):
            hint = "expected a name such as KVLADDER__ARENA__SIZE"
            raise ConfigError("names no setting", path=name, hint=hint)
        if name.startswith(PREFIX):
            found.lay(keys, _text(env[name], name), "environment", name)
    for path, value in _leaves(_plain(overrides, "", found)):
        found.lay(path, value, "engine")
    for section, key in SHORT_SECTIONS.items():
        if isinstance(found.raw.get(section), str | int):
            found.raw[section] = {key: found.raw[section]}
    for section in SHORT_SWITCHES:
        if isinstance(found.raw.get(section), bool | str):
            found.raw[section] = {"enabled": found.raw[section]}


def _plain(
    value: object, path: str, found: Source, env: Mapping[str, str] | None = None, depth: int = 0
) -> Any:
    """Return a copy of dicts, lists and UTF-8 text only; ``env``, if given, fills the text."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"nested deeper than {DEPTH_MAX} levels", path=path)
    if isinstance(value, Mapping):
        copied: dict[str, Any] = {}
        for key, item in cast("Mapping[object, object]", value).items():
            if not isinstance(key, str):
                raise ConfigError(f"key {key!r} is not text", path=path, hint="put it in quotes")
            copied[key] = _plain(item, join(path, key), found, env, depth + 1)
        return copied
    if isinstance(value, list | tuple):
        items = enumerate(cast("list[object]", value))
        return [_plain(item, f"{path}[{i}]", found, env, depth + 1) for i, item in items]
    if isinstance(value, str):
        if env is not None and "${" in value:
            value = _filled(value, path, env)
            found.origins[path] = "environment", ""
        return _text(value, path)
    return value


def _text(text: str, path: str) -> str:
    """Return ``text`` if it is UTF-8: digests, statistics and messages can hold nothing else."""
    if not is_text(text):
        raise ConfigError(shown(path, text), path=path, hint="expected UTF-8 text")
    return text


def _filled(text: str, path: str, env: Mapping[str, str]) -> str:
    """Return ``text`` with every ``${NAME}`` in it replaced."""

    def one(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if match[0] == "$${":
            return "${"
        if name is None:
            hint = "write $${ for a literal ${"
            raise ConfigError("'${' without a name and '}'", path=path, hint=hint)
        found = env.get(name)
        if default is not None:
            return found or default[2:]
        if found is None:
            hint = f"set it, or give a default: ${{{name}:-...}}"
            raise ConfigError(f"environment variable {name} is not set", path=path, hint=hint)
        return found

    return _VARIABLE.sub(one, text)


def _leaves(
    tree: dict[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[Sequence[str], Any]]:
    """Yield each value to set, and the keys that lead to it; an empty section is a value."""
    for key, value in tree.items():
        if is_mapping(value) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _written_out(given: dict[str, Any], found: Source) -> dict[str, Any]:
    """Return ``{host: 4 GiB, files: /path, capacity: 1 TiB}`` in the long form."""
    for key in ("arena", "tiers"):
        if key in given:
            hint = "host:, files: and capacity: replace arena: and tiers:; use only one form"
            raise ConfigError("the short form and the long form are mixed", path=key, hint=hint)
    tiers: list[dict[str, Any]] = [{"type": "host"}]
    found.short["arena.size"] = "host"
    if "files" in given:
        path = given["files"]
        if not isinstance(path, str) or not path or "\0" in path:
            raise ConfigError(shown("files", path), path="files", hint="expected a directory")
        tiers.append({"type": "files", "path": path, "when": "commit"})
        found.short |= {"tiers[1].path": "files", "tiers[1].capacity": "capacity"}
        found.notes["tiers[1].when"] = "short form"
        tiers[1]["capacity"] = given.get("capacity")
        if tiers[1]["capacity"] is None:
            tiers[1]["capacity"] = _room(Path(path))
            share = f"{FREE_SHARE:.0%} of the space on the file system of {path}"
            found.notes["tiers[1].capacity"] = share
    elif "capacity" in given:
        raise ConfigError("unknown key", path="capacity", hint="it needs files:, too")
    found.origins |= {new: found.who(old) for new, old in found.short.items()}
    rest = {key: item for key, item in given.items() if key not in SHORT_KEYS}
    arena = {"size": given["host"]} if "host" in given else {}
    return {**rest, "arena": arena, "tiers": tiers}


def _room(directory: Path) -> int:
    """Return the bytes that the short form uses in ``directory``: a share of free and used space.

    Space used in the directory counts as available, so that a restart keeps the capacity.
    """
    try:
        free, held = space(directory)
    except OSError as error:
        why = error.strerror or type(error).__name__
        hint = "expected a directory"
        raise ConfigError(f"{directory}: {why}", path="files", hint=hint) from error
    return max(1, int((free + held) * FREE_SHARE))
