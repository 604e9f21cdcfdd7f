"""Reads YAML and plain data as typed settings; errors say where, what and what instead."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

import msgspec
import yaml

from kvladder.errors import ConfigError
from kvladder.units import Duration, Portion, Share, Size

DEPTH_MAX = 16
"""Deepest nesting of settings."""
NODES_MAX = 10_000
"""Largest number of values in settings, aliases counted as often as they are repeated."""


class _Loader(yaml.SafeLoader):
    """Reads YAML. Every error has a position, and a repeated key is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._weights: dict[yaml.Node, int] = {}
        """Number of values in each node, repetitions by aliases included."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose as usual, but refuse nesting and sizes that Python could not handle."""
        if self._depth > DEPTH_MAX:
            mark = cast("Any", self).peek_event().start_mark
            problem = f"nested deeper than {DEPTH_MAX} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node not in self._weights:
            inner: Any = () if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                inner = chain.from_iterable(inner)
            # a node that contains itself has no weight yet, and cannot be constructed
            self._weights[node] = 1 + sum(self._weights.get(part, 1) for part in inner)
            if self._weights[node] > NODES_MAX:
                problem = f"more than {NODES_MAX} values, including those that aliases repeat"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Construct as usual, but raise an error for dates and for invalid or huge numbers."""
        try:
            value: object = cast("Any", super()).construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            value = None
        else:
            if not isinstance(value, date) and not _is_huge(value):
                return value
        kind = node.tag.rpartition(":")[2]
        problem = f"read as {_KINDS.get(kind, kind)}: if text is meant, put it in quotes"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_KINDS = {"timestamp": "a date", "int": "a number", "float": "a number"}


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and value.bit_length() > 64


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem="a key is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str) -> object:
    """Return the plain data in ``text``; raises yaml.YAMLError if it is not valid."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def load_yaml(path: Path) -> object:
    """Return the plain data in a file; raises ConfigError, with the line, if it is not valid."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(why, path=str(path), hint="expected a readable YAML file") from error
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", path=str(path), hint="expected a YAML file") from None
    return parsed(text, str(path))


def parsed(text: str, path: str) -> object:
    """Return the plain data in the text of a file; raises ConfigError as ``load_yaml`` does."""
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        # Not str(error): it quotes the line, which may hold a secret, as may a quoted word.
        problem = getattr(error, "problem", None) or "not YAML"
        problem = re.sub(r"'(?!<)[^']{2,}'", "'...'", problem)
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else path
        raise ConfigError(problem, path=where, hint="expected valid YAML") from None


T = TypeVar("T")
Loose = Callable[[str], bool]

MASK = "***"
_SECRET_WORDS = {
    "credential", "credentials", "key", "passphrase", "passwd", "password", "salt", "secret",
    "token",
}  # fmt: skip
_USER = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://).*@", re.DOTALL)
_QUERY = re.compile(r"([?&][^=&\s]*(?:password|secret|token|key)[^=&\s]*=)[^&]*", re.IGNORECASE)
_PROBLEM = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", re.DOTALL)
"""Parts of a message of msgspec: the problem and its path."""
_KEY = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+")


def join(path: str, key: str) -> str:
    """Return the path of ``key`` in the mapping at ``path``."""
    return f"{path}.{key}" if path else key


def parent(path: str) -> str:
    """Return the path of the mapping or list that contains ``path``."""
    return path[: max(path.rfind("."), path.rfind("["), 0)]


def within(path: str, error: ConfigError) -> ConfigError:
    """Return ``error`` with its path moved below ``path``, which the raising code did not know."""
    where = join(path, error.path) if error.path else path
    return ConfigError(error.message, path=where, hint=error.hint)


def is_secret(path: str) -> bool:
    """Return whether the last name of a path marks its value as secret."""
    name = path.rpartition(".")[2].partition("[")[0]
    return not _SECRET_WORDS.isdisjoint(re.split(r"[_\W]+", name.lower()))


def masked(text: str) -> str:
    """Return ``text`` with users and secrets in URLs masked; may mask more than needed."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))


def cleared(path: str, value: object) -> object:
    """Return ``value`` as plain data, with the secrets at every depth masked."""
    if value is None or value in ("", ()):
        return value
    if is_secret(path):
        return MASK
    if isinstance(value, msgspec.Struct) and type(value).__str__ is msgspec.Struct.__str__:
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {key: cleared(join(path, str(key)), item) for key, item in items}
    if isinstance(value, list | tuple):
        return [cleared(path, item) for item in cast("Sequence[object]", value)]
    told = str(value)
    hidden = masked(told)
    return value if hidden == told else hidden


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of sections and options: frozen, keyword only, no unknown keys, no secrets in its repr.

    The name of a field decides whether it is secret, as in ``describe``.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(k, cleared(k, value)) for k, value in msgspec.structs.asdict(self).items()]


HOST: Final = r"(\[[0-9a-fA-F:.%a-z]+\]|[^\s:/\[\]]+)"
Address = Annotated[
    str,
    msgspec.Meta(pattern=rf"\A{HOST}:\d{{1,5}}\Z", description="host:port, such as 0.0.0.0:7700"),
]


def is_text(text: str) -> bool:
    """Return whether ``text`` can be written as UTF-8, that is, has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(path: str, value: object) -> str:
    """Return a wrong value for an error message; secrets are masked, only scalars spelled out."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    if is_secret(path):
        return MASK
    if value is None or isinstance(value, bool):  # as YAML spells them
        return "null" if value is None else str(value).lower()
    return masked(repr(value))


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint: the known name that was probably meant, or all of them."""
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"expected one of: {', '.join(known)}" if known else "expected nothing here"


def keys_of(struct: type[msgspec.Struct]) -> list[str]:
    """Return the keys that a struct is read from, in order."""
    return [field.encode_name for field in msgspec.structs.fields(struct)]


def is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether ``value`` is a mapping of plain data; the reader has checked its keys."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether ``value`` is a list of plain data."""
    return isinstance(value, list)


def convert(raw: object, wanted: type[T], path: str = "", *, loose: Loose = lambda _: False) -> T:
    """Return plain data as a value of type ``wanted``.

    Parameters
    ----------
    raw:
        Mappings, lists and single values. Repairs are made in place: an empty section becomes a
        mapping, and ``loose`` text becomes the value that it stands for.
    wanted:
        A msgspec struct; its fields may be structs, too.
    path:
        Path of ``raw``, for errors.
    loose:
        Returns whether the text at a path may stand for a number, a truth value or YAML. True
        only for values of environment variables.

    Raises
    ------
    ConfigError
        A key is unknown or missing, or a value is wrong.
    """
    raw = {} if raw is None else raw
    mended: set[str] = set()
    while True:
        try:
            return msgspec.convert(raw, wanted, dec_hook=_parse)
        except msgspec.ValidationError as error:
            wrong = _explained(error, raw, wanted)
            known = error.__cause__ or wrong.path in mended  # right type, wrong value
            if known or not _mend(raw, wrong.path, wanted, loose):
                raise within(path, wrong) from error.__cause__
            mended.add(wrong.path)


def _parse(wanted: type, value: object) -> object:
    if issubclass(wanted, Size | Duration | Share | Portion):
        return wanted.parse(value)
    raise NotImplementedError("not a type that settings can have")


def _mend(raw: object, path: str, wanted: Any, loose: Loose) -> bool:
    """Replace a wrong value by the value that it stands for; return False if there is none."""
    holder, last = value_at(raw, parent(path)), _STEP.findall(path)[-1:]
    if not last or not (is_mapping(holder) or is_list(holder)):
        return False
    value = _part(holder, last[0])
    key: Any = int(last[0]) if is_list(holder) else last[0]
    if value is None and _struct(type_at(wanted, path)):
        holder[key] = {}
    elif isinstance(value, str) and loose(path):
        holder[key] = from_text(value, type_at(wanted, path))
    else:
        return False
    return True


def from_text(text: str, wanted: Any) -> object:
    """Return the meaning of a variable's text: a single value of the type, else YAML."""
    with suppress(msgspec.ValidationError):
        return cast("object", msgspec.convert(text, wanted, strict=False, dec_hook=_parse))
    with suppress(yaml.YAMLError):
        return parse_yaml(text)
    return text


def value_at(raw: object, path: str) -> Any:
    """Return the value at a path in plain data; None if there is none."""
    for step in _STEP.findall(path):
        raw = _part(raw, step)
    return raw


def _part(raw: object, step: str) -> Any:
    if is_list(raw):
        return raw[int(step)] if step.isdecimal() and int(step) < len(raw) else None
    return raw.get(step) if is_mapping(raw) else None


def type_at(wanted: Any, path: str) -> Any:
    """Return the type at a path below ``wanted``; None if it is not known."""
    for step in _STEP.findall(path):
        inner, struct = get_args(wanted), _struct(wanted)
        if struct is not None:
            fields = msgspec.structs.fields(struct)
            wanted = next((field.type for field in fields if field.encode_name == step), None)
        elif step.isdecimal() and inner:
            wanted = inner[0] if ... in inner or int(step) >= len(inner) else inner[int(step)]
        else:
            wanted = None
    return wanted


def _struct(wanted: Any) -> type[msgspec.Struct] | None:
    """Return the struct in a type, alone or in a union with None; None if there is none."""
    parts = get_args(wanted) if get_origin(wanted) in {Union, types.UnionType} else (wanted,)
    structs = (one for one in parts if isinstance(one, type) and issubclass(one, msgspec.Struct))
    return next(structs, None)


def _explained(error: msgspec.ValidationError, raw: object, wanted: Any) -> ConfigError:
    """Return msgspec's error about plain data as a ConfigError: where, what, what instead."""
    found = _PROBLEM.fullmatch(str(error))
    assert found is not None, error
    problem, path = found[1], (found[2] or "").partition("[...]")[0]
    if isinstance(error.__cause__, ConfigError):  # from a __post_init__
        return within(path, error.__cause__)
    here = type_at(wanted, path)
    struct = _struct(here)
    key = _KEY.fullmatch(problem)
    # msgspec reports a missing or unknown key by its name and the path of its mapping
    if key is not None:
        where = join(path, key[2])
        if key[1] == "contains unknown":
            hint = nearest(key[2], keys_of(struct)) if struct else ""
            return ConfigError("unknown key", path=where, hint=hint)
        hint = f"expected {_expected(type_at(wanted, where)) or 'a value'}"
        return ConfigError("missing", path=where, hint=hint)
    # each key is valid but the mapping as a whole is not: its __post_init__ says why
    if error.__cause__ is not None and struct is not None:
        return ConfigError(masked(problem), path=path)
    value = value_at(raw, path)
    return ConfigError(shown(path, value), path=path, hint=_instead(value, here, problem))


def _instead(value: object, wanted: Any, problem: str) -> str:
    """Return what to write instead of a wrong value; ``problem`` is msgspec's description."""
    if wanted is str and isinstance(value, bool | int | float):
        return "expected text: put it in quotes"
    if problem.startswith("unknown unit") or "without a unit" in problem:
        return problem
    account = problem.replace("`", "").removeprefix("Expected ").partition(", got")[0]
    choices = [choice for choice in get_args(wanted) if isinstance(choice, str)]
    near = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    also = f", did you mean {near[0]!r}?" if near else ""
    return f"expected {_expected(wanted) or account}{also}"


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _expected(wanted: Any) -> str:
    """Return in words what a type accepts; empty if msgspec's own description has to do."""
    if isinstance(wanted, type):
        words = "keys with values" if _struct(wanted) else _WORDS.get(wanted, "")
        return getattr(wanted, "EXPECTED", words)
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        said = (m.description for m in inner[1:] if isinstance(m, msgspec.Meta))
        return next(said, None) or _expected(inner[0])
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is Union or origin is types.UnionType:
        parts = [_expected(part) for part in inner if part is not types.NoneType]
        return " or ".join(parts) if all(parts) else ""
    if origin is tuple and ... in inner:
        each = _expected(inner[0])
        return each and f"a list, each {each}"
    return ""
