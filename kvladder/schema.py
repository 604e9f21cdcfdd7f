"""From plain data to typed settings, with errors that say where, what and what instead."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, cast, get_args, get_origin

import msgspec
import yaml

from kvladder.errors import ConfigError
from kvladder.units import Duration, Share, Size
from kvladder.yamlfile import parse_yaml

S = TypeVar("S", bound=msgspec.Struct)
Loose = Callable[[str], bool]
"""Whether the value at a path came as text, from the environment, whatever its type is."""

MASK = "***"
_SECRET_WORDS = {
    "credential", "credentials", "key", "passphrase", "passwd", "password", "salt", "secret",
    "token",
}  # fmt: skip
_USER = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://).*@", re.DOTALL)
_QUERY = re.compile(r"([?&][^=&\s]*(?:password|secret|token|key)[^=&\s]*=)[^&]*", re.IGNORECASE)
_WHERE = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)


def join(path: str, key: str) -> str:
    """The path of ``key`` in the mapping at ``path``."""
    return f"{path}.{key}" if path else key


def within(path: str, error: ConfigError) -> ConfigError:
    """``error`` of something that does not know that it stands at ``path``."""
    where = join(path, error.path) if error.path else path
    return ConfigError(error.message, path=where, hint=error.hint)


def is_secret(path: str) -> bool:
    """Whether the last name of a path says that its value must not be shown."""
    name = path.rpartition(".")[2].partition("[")[0]
    return not _SECRET_WORDS.isdisjoint(re.split(r"[_\W]+", name.lower()))


def masked(text: str) -> str:
    """``text`` without what a URL in it tells about its user, and rather too much masked."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(rf"\1{MASK}@", text))


def cleared(path: str, value: object) -> object:
    """``value`` as plain data, with every secret in it masked at whatever depth it lies."""
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
    """Base of every section and of options: frozen, named, nothing unknown, no secret in its repr.

    What a secret is says the name of a field, as in ``describe``.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(k, cleared(k, value)) for k, value in msgspec.structs.asdict(self).items()]


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: not bytes of another encoding, nor half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(path: str, value: object) -> str:
    """A wrong value for an error message: secrets are masked, only scalars are spelled out."""
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
    """A hint: the known name that was probably meant, or all of them."""
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"expected one of: {', '.join(known)}" if known else "expected nothing here"


def keys_of(struct: type[msgspec.Struct]) -> list[str]:
    """The keys that a struct is read from, in order."""
    return [field.encode_name for field in msgspec.structs.fields(struct)]


def require_known(
    raw: Mapping[str, object], known: Sequence[str], path: str, *, also: Sequence[str] = ()
) -> None:
    """Raise ConfigError if ``raw`` has a key that is not among ``known``; ``also`` are hints."""
    for key in raw:
        if key not in known:
            hint = nearest(key, [*known, *also])
            raise ConfigError("unknown key", path=join(path, key), hint=hint)


def is_mapping(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether ``value`` is a mapping of plain data; the reader has checked its keys."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether ``value`` is a list of plain data."""
    return isinstance(value, list)


def require_mapping(raw: object, path: str) -> dict[str, Any]:
    """``raw`` if it is a mapping, else a ConfigError; None counts as an empty one."""
    if raw is None:
        return {}
    if not is_mapping(raw):
        kind = "a list" if is_list(raw) else f"a single value ({type(raw).__name__})"
        raise ConfigError(kind, path=path, hint="expected keys with values")
    return raw


def convert(
    raw: object,
    struct: type[S],
    path: str,
    *,
    loose: Loose,
    preset: Mapping[str, object] | None = None,
) -> S:
    """The settings of type ``struct`` that ``raw`` gives.

    Parameters
    ----------
    raw:
        A mapping of plain data.
    struct:
        A msgspec struct; a field that is a struct itself is a nested mapping.
    path:
        Where ``raw`` is, for errors.
    loose:
        For which paths text is taken as the field's type.
    preset:
        Fields that are not read from ``raw``, by attribute name.

    Raises
    ------
    ConfigError
        A key is unknown or missing, or a value is wrong.
    """
    given = require_mapping(raw, path)
    values: dict[str, object] = dict(preset or {})
    fields = [field for field in _fields(struct) if field.name not in values]
    require_known(given, [field.encode_name for field in fields], path)
    for field in fields:
        key, where = field.encode_name, join(path, field.encode_name)
        wanted: Any = field.type
        if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
            values[field.name] = convert(given.get(key), wanted, where, loose=loose)
        elif key in given:
            values[field.name] = _leaf(given[key], wanted, where, loose=loose(where))
        elif field.required:
            hint = f"expected {_expected(wanted) or 'a value'}"
            raise ConfigError("missing", path=where, hint=hint)
    try:
        return struct(**values)
    except ConfigError as error:  # from the __post_init__ of a plug-in's options, as is the next
        raise within(path, error) from error
    except ValueError as error:
        raise ConfigError(masked(str(error)), path=path) from error


@cache
def _fields(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of a struct: asking costs more than all the rest of a short mapping."""
    return msgspec.structs.fields(struct)


def _leaf(value: object, wanted: Any, path: str, *, loose: bool) -> object:
    try:
        return msgspec.convert(value, wanted, dec_hook=_parse)
    except msgspec.ValidationError as error:
        if loose and isinstance(value, str):
            with_type = _from_text(value, wanted)
            if with_type is not None:
                return with_type
        raise _wrong(value, wanted, path, str(error)) from None


def _from_text(text: str, wanted: Any) -> object | None:
    """What the text of an environment variable means as ``wanted``; None if nothing."""
    for candidate in (text, _yaml(text)):
        with suppress(msgspec.ValidationError):
            found: object = msgspec.convert(candidate, wanted, strict=False, dec_hook=_parse)
            return found
    return None


def _yaml(text: str) -> object:
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text


def _parse(wanted: type, value: object) -> object:
    if issubclass(wanted, Size | Duration | Share):
        return wanted.parse(value)
    raise NotImplementedError("not a type that settings can have")


def _wrong(value: object, wanted: Any, path: str, problem: str) -> ConfigError:
    """The error for a leaf; ``problem`` is msgspec's account of it."""
    found = _WHERE.fullmatch(problem)
    assert found is not None, problem
    message, below = found[1], found[2] or ""
    expected = _expected(wanted)
    item = re.fullmatch(r"\[(\d+)\]", below)
    if item is not None and expected is not None and is_list(value):
        return _wrong(value[int(item[1])], get_args(wanted)[0], path + below, message)
    if wanted is str and isinstance(value, bool | int | float):
        hint = "expected text: put it in quotes"
    elif message.startswith("unknown unit"):
        hint = message
    elif expected is not None:
        hint = f"expected {expected}"
        choices = [choice for choice in _choices(wanted) if isinstance(choice, str)]
        near = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
        hint += f", did you mean {near[0]!r}?" if near else ""
    else:
        hint = message.replace("`", "").replace("Expected", "expected", 1)
        hint = hint.partition(", got")[0]
    return ConfigError(shown(path, value), path=path + below, hint=hint)


def _choices(wanted: Any) -> tuple[object, ...]:
    return get_args(wanted) if get_origin(wanted) is Literal else ()


def _expected(wanted: Any) -> str | None:
    """What a type takes, in words, or None where msgspec's own account has to do."""
    origin = get_origin(wanted)
    if origin is Annotated:
        meta = next((m for m in get_args(wanted)[1:] if isinstance(m, msgspec.Meta)), None)
        return (meta and meta.description) or _expected(get_args(wanted)[0])
    if origin is Literal:
        return " or ".join(repr(choice) for choice in get_args(wanted))
    if origin is Union or origin is types.UnionType:
        parts = [_expected(part) for part in get_args(wanted) if part is not types.NoneType]
        return " or ".join(part for part in parts if part) if all(parts) else None
    if origin is tuple:
        each = _expected(get_args(wanted)[0])
        return each and f"a list, each {each}"
    plain = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    if wanted in plain:
        return plain[wanted]
    if isinstance(wanted, type) and issubclass(wanted, Size | Duration | Share):
        return wanted.EXPECTED
    return None
