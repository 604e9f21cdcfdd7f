"""Where settings come from: a YAML file or a mapping, the environment, the engine.

What comes out is one tree of plain data in the long form, and for each place in it who set it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from kvladder.errors import ConfigError
from kvladder.schema import is_list, is_mapping, is_text, join, nearest, require_mapping, shown
from kvladder.tiers.files.examine import space
from kvladder.units import Size
from kvladder.yamlfile import DEPTH_MAX, load_yaml

Origin = Literal["default", "file", "given", "environment", "engine"]

PREFIX = "KVLADDER__"
FREE_SHARE = 0.8
"""How much of a file system's free space the short form takes."""
SHORT_KEYS = ("host", "files", "capacity")
_VARIABLE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(:-[^}]*)?\})?")


@dataclass
class Source:
    """Settings as plain data, and who set what."""

    raw: dict[str, Any] = field(repr=False)
    file: str = ""
    """Where they come from, if that is a file."""
    origins: dict[str, Origin] = field(default_factory=dict[str, Origin])
    """By path; a path that is missing was not set."""
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """The environment variable behind a path."""
    short: bool = False
    """Whether they were given in the short form."""
    notes: dict[str, str] = field(default_factory=dict[str, str])
    """How a default was found, by path."""

    def loose(self, path: str) -> bool:
        """Whether the value came from the environment, where everything is text."""
        return self.origins.get(path) == "environment"

    def explain(self, error: ConfigError) -> ConfigError:
        """``error``, naming who set the value: an environment variable, or the file."""
        variable = self.variables.get(error.path)
        if variable is not None:
            hint = f"{error.hint}; set by {variable}" if error.hint else f"set by {variable}"
            return ConfigError(error.message, path=error.path, hint=hint)
        if self.origins.get(error.path) == "engine":
            return error
        return within_file(self.file, error)


def within_file(file: str, error: ConfigError) -> ConfigError:
    """``error`` of settings that stand in ``file``, if there is one and it does not say so."""
    if not file or error.file or error.path.startswith((file, PREFIX)):
        return error
    return ConfigError(error.message, path=error.path, hint=error.hint, file=file)


def read(
    source: str | Path | Mapping[str, Any],
    *,
    env: Mapping[str, str],
    overrides: Mapping[str, Any] | None,
) -> Source:
    """Gather settings, later ones over earlier ones: ``source``, environment, ``overrides``.

    Parameters
    ----------
    source:
        The path of a YAML file, or what such a file holds.
    env:
        The environment: ``${NAME}`` and ``${NAME:-default}`` in text are replaced by it, and
        ``KVLADDER__ARENA__SIZE`` or ``KVLADDER__TIERS__<name>__CAPACITY`` set single values.
    overrides:
        What the engine passes: nested like the file, with ``tiers`` as a mapping by name.

    Raises
    ------
    ConfigError
        The file cannot be read or is not YAML, a variable is unset, an override names nothing.
    """
    file = "" if isinstance(source, Mapping) else str(source)
    try:
        return _read(source, Source({}, file), env, overrides)
    except ConfigError as error:
        raise within_file(file, error) from error.__cause__


def _read(
    source: str | Path | Mapping[str, Any],
    found: Source,
    env: Mapping[str, str],
    overrides: Mapping[str, Any] | None,
) -> Source:
    if isinstance(source, Mapping):
        origin: Origin = "given"
        plain: Any = _plain(source, "")
    else:
        origin = "file"
        plain = _plain(load_yaml(Path(source)), "")
    expanded = _substitute(plain, "", env, found)
    if not is_mapping(expanded) or not expanded:
        what = "empty" if not plain else "not a mapping"
        raise ConfigError(f"the configuration is {what}", hint="expected arena: and tiers:")
    _mark(expanded, "", origin, found)
    found.raw = _long_form(expanded, found)
    _open_control(found)
    for name in sorted(env):
        if name.startswith(PREFIX):
            _apply_variable(name, env[name], found)
            _open_control(found)
    if overrides:
        _apply(found.raw, _plain(overrides, ""), "", "engine", found)
        _open_control(found)
    return found


def _open_control(found: Source) -> None:
    """``control: PATH`` written out, so that what comes over it finds a section."""
    control = found.raw.get("control")
    if isinstance(control, str):
        found.raw["control"] = {"path": control}
        found.origins["control.path"] = found.origins["control"]
        found.variables.pop("control.path", None)
        if "control" in found.variables:
            found.variables["control.path"] = found.variables["control"]


def _plain(value: object, path: str, depth: int = 0) -> Any:
    """A copy made of dicts and lists only, so that overrides change nobody's data."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"nested deeper than {DEPTH_MAX} levels", path=path)
    if isinstance(value, Mapping):
        copied: dict[str, Any] = {}
        for key, item in cast("Mapping[object, object]", value).items():
            if not isinstance(key, str):
                raise ConfigError(f"key {key!r} is not text", path=path, hint="put it in quotes")
            copied[key] = _plain(item, join(path, key), depth + 1)
        return copied
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        return [_plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)]
    return value


def _substitute(value: Any, path: str, env: Mapping[str, str], found: Source) -> Any:
    """``value`` with every ``${NAME}`` in its texts replaced."""
    if is_mapping(value):
        return {k: _substitute(v, join(path, k), env, found) for k, v in value.items()}
    if is_list(value):
        return [_substitute(v, f"{path}[{i}]", env, found) for i, v in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value

    def one(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if match[0] == "$${":
            return "${"
        if name is None:
            raise ConfigError(
                "'${' without a name and '}'", path=path, hint="$${ writes a plain ${"
            )
        text = env.get(name)
        if default is not None:
            return text or default[2:]
        if text is None:
            hint = f"set it, or give a default: ${{{name}:-...}}"
            raise ConfigError(f"environment variable {name} is not set", path=path, hint=hint)
        return text

    found.origins[path] = "environment"
    return _VARIABLE.sub(one, value)


def _mark(value: Any, path: str, origin: Origin, found: Source) -> None:
    """Note who set ``value`` and all that is in it; what a variable filled in stays noted so."""
    if isinstance(value, str):
        _require_text(value, path)
    found.origins.setdefault(path, origin)
    if is_mapping(value):
        for key, item in value.items():
            _mark(item, join(path, key), origin, found)
    elif is_list(value):
        for i, item in enumerate(value):
            _mark(item, f"{path}[{i}]", origin, found)


def _require_text(text: str, path: str) -> None:
    """Digests, statistics and messages are UTF-8: refuse here what they could not hold."""
    if not is_text(text):
        raise ConfigError(shown(path, text), path=path, hint="expected UTF-8 text")


def _long_form(raw: dict[str, Any], found: Source) -> dict[str, Any]:
    """``{host: 4 GiB, files: /path, capacity: 1 TiB}`` written out; any other form as it is."""
    if raw.keys().isdisjoint(SHORT_KEYS):
        return raw
    found.short = True
    for key in ("arena", "tiers"):
        if key in raw:
            raise ConfigError(
                "the short form and the long form are mixed",
                path=key,
                hint="host:, files: "
                "and capacity: stand for arena: and tiers:; use one or the other",
            )
    rest = {key: item for key, item in raw.items() if key not in SHORT_KEYS}
    if "host" not in raw:
        raise ConfigError("missing", path="host", hint=f"expected {Size.EXPECTED}")
    tiers: list[dict[str, Any]] = [{"type": "host"}]
    moved = {"arena.size": "host"}
    _require_size(raw, "host")
    if "files" in raw:
        directory = raw["files"]
        if not isinstance(directory, str) or not directory or "\0" in directory:
            raise ConfigError(shown("files", directory), path="files", hint="expected a directory")
        capacity = raw.get("capacity")
        if capacity is None:
            capacity = room(Path(directory))
            found.notes["tiers[1].capacity"] = (
                f"{FREE_SHARE:.0%} of the space on the file system of {directory}"
            )
        else:
            _require_size(raw, "capacity")
            moved["tiers[1].capacity"] = "capacity"
        found.notes["tiers[1].when"] = "short form"
        tiers.append({"type": "files", "path": directory, "capacity": capacity, "when": "commit"})
        moved["tiers[1].path"] = "files"
        moved["tiers[1].type"] = "files"
    elif "capacity" in raw:
        raise ConfigError("unknown key", path="capacity", hint="it goes with files:")
    for new, old in moved.items():
        found.origins[new] = found.origins[old]
    return {**rest, "arena": {"size": raw["host"]}, "tiers": tiers}


def _require_size(raw: dict[str, Any], key: str) -> None:
    try:
        Size.parse(raw[key])
    except ValueError as error:
        hint = str(error) if str(error).startswith("unknown") else f"expected {error}"
        raise ConfigError(shown(key, raw[key]), path=key, hint=hint) from None


def room(directory: Path) -> int:
    """Bytes that the short form takes there: a share of what is free or is in ``directory``.

    What the directory holds already counts as room, so that a restart keeps the capacity.
    """
    try:
        free, held = space(directory)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(
            f"{directory}: {why}", path="files", hint="expected a directory"
        ) from error
    return max(1, int((free + held) * FREE_SHARE))


def _apply_variable(name: str, text: str, found: Source) -> None:
    keys = name.removeprefix(PREFIX).lower().split("__")
    if not all(keys):
        raise ConfigError("names no setting", path=name, hint="like KVLADDER__ARENA__SIZE")
    _require_text(text, name)
    tree: Any = text
    for key in reversed(keys):
        tree = {key: tree}
    path = _apply(found.raw, tree, "", "environment", found, variable=name)
    found.variables[path] = name


def _apply(
    raw: dict[str, Any],
    over: dict[str, Any],
    path: str,
    origin: Origin,
    found: Source,
    *,
    variable: str = "",
) -> str:
    """Lay ``over`` over ``raw``; returns the path of the value that was set last."""
    last = path
    for key, value in over.items():
        where = join(path, key)
        if not is_mapping(value):
            _set(raw, key, value, where, origin, found)
            last = where
        elif where == "tiers":
            last = _apply_tiers(raw, value, origin, found, variable=variable)
        else:
            if raw.get(key) is None:
                raw[key] = {}
            if not is_mapping(raw[key]):
                hint = f"it has no {'.'.join(value)}"
                raise ConfigError("is a single value", path=variable or where, hint=hint)
            last = _apply(raw[key], value, where, origin, found, variable=variable)
    return last


def _set(
    raw: dict[str, Any], key: str, value: object, path: str, origin: Origin, found: Source
) -> None:
    """Set one value, and forget who set it and its parts before."""
    raw[key] = value
    for old in list(found.origins):
        if old == path or old.startswith((f"{path}.", f"{path}[")):
            del found.origins[old]
    found.notes.pop(path, None)
    found.variables.pop(path, None)
    _mark(value, path, origin, found)


def _apply_tiers(
    raw: dict[str, Any], over: dict[str, Any], origin: Origin, found: Source, *, variable: str
) -> str:
    """Lay settings by tier name over the list of tiers."""
    last = "tiers"
    listed: Any = raw.get("tiers")
    tiers = [tier if is_mapping(tier) else {} for tier in (listed if is_list(listed) else [])]
    names = [str(tier.get("name", tier.get("type", ""))) for tier in tiers]
    plain = [_same(name) for name in names]
    for name, settings in over.items():
        where = variable or f"tiers.{name}"
        if _same(name) not in plain:
            raise ConfigError(f"no tier is named {name!r}", path=where, hint=nearest(name, names))
        index = plain.index(_same(name))
        inner = require_mapping(settings, where)
        last = _apply(tiers[index], inner, f"tiers[{index}]", origin, found, variable=variable)
    return last


def _same(name: str) -> str:
    """What of a tier's name counts where an environment variable names it."""
    return name.lower().replace("-", "_")
