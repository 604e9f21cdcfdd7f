"""Make settings.md and stack.schema.json in docs/reference: ``python .ci/settings.py``.

Both come from the structs that read a configuration: names, types, limits, defaults and what the
attributes' docstrings say. A test compares the files with them.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not an installed kvladder
from kvladder.config import registry
from kvladder.config.settings import (
    CodecConfig,
    HostConfig,
    LevelConfig,
    LossyCodecConfig,
    QuotaConfig,
    Sections,
)
from kvladder.config.sources import SHORT_SECTIONS, SHORT_SWITCHES
from kvladder.units import Duration, Portion, Share, Size

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGE, SCHEMA = FOLDER / "settings.md", FOLDER / "stack.schema.json"
MEASURES = {
    Size: "a size",
    Duration: "a duration",
    Share: "blocks, or a percentage of the arena",
    Portion: "a size, or a percentage of the capacity",
}
VARIABLE = {"$ref": "#/$defs/variable"}
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}

HEAD = """# All settings

`.ci/settings.py` makes this page from the classes that read a configuration. A test checks that it
is current. [Configuration](configuration.md) says more about each setting, and how values are
written. The [schema for editors](editors.md) has the same source.
"""


@cache
def said(owner: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of its attributes, on one line."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue  # a built-in class, or one made of another
        [node] = ast.parse(source).body
        body = node.body if isinstance(node, ast.ClassDef) else []
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = after.value if isinstance(after, ast.Expr) else None
                text = value.value if isinstance(value, ast.Constant) else ""
                found[field.target.id] = " ".join(str(text).split()).replace("``", "`")
    return found


def fields(owner: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, type, default and description of each setting of a struct."""
    own = getattr(owner, "make", None)
    texts = dict(said(owner))
    if own is not None and getattr(own, "Options", None):
        texts |= {f"own_{name}": text for name, text in said(own.Options).items()}
    for field in msgspec.structs.fields(owner):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield field.encode_name, field.type, default, texts.get(field.name, "")


def is_struct(kind: Any) -> bool:
    """Return whether a type is a section of its own."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# ---- the page


def words(kind: Any) -> str:
    """Return in words what a setting of this type accepts."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        metas = (one.description for one in inner[1:] if isinstance(one, msgspec.Meta))
        return next(filter(None, metas), "") or words(inner[0])
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(words(one) for one in inner if one is not types.NoneType)
    if origin is tuple:
        return f"a list, each {words(inner[0])}"
    if origin is dict:
        return f"keys with values, each {words(inner[1])}"
    return MEASURES[kind] if kind in MEASURES else WORDS[kind]


def shown(value: Any) -> str:
    """Return a default as people would write it."""
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None or value in ("", (), {}):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def cell(text: str) -> str:
    """Return text that cannot end a cell of a table."""
    return text.replace("|", "\\|")


def rows(owner: Any, prefix: str = "", without: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a line of a table for each setting, those of sections within included."""
    for name, kind, default, text in fields(owner):
        if name in without:
            continue
        if is_struct(kind):
            yield from rows(kind, f"{prefix}{name}.")
        elif name == "codecs":
            yield f"| `codecs` | a list of [codecs](#codecs) | `[checksum]` | {cell(text)} |"
        else:
            cells = f"`{prefix}{name}`", cell(words(kind)), cell(shown(default)), cell(text)
            yield f"| {' | '.join(cells)} |"


def table(title: str, text: str, lines: list[str]) -> list[str]:
    """Return a section of the page with a table."""
    head = ["| setting | value | default | meaning |", "|---|---|---|---|"]
    return ["", title, "", text, *(["", *head, *lines] if lines else [])]


def level(name: str) -> Any:
    """Return the struct with the settings of a level of a built-in tier."""
    make = registry.load("tiers", name)
    has_quota = "quota" in [name for name, *_ in fields(make.Options)] if made(make) else False
    more = {} if has_quota else {"quota": (QuotaConfig, QuotaConfig())}
    return LevelConfig.of(make, **more)


def made(make: Any) -> bool:
    """Return whether a class has settings of its own."""
    return bool(getattr(make, "Options", None))


def codec(name: str) -> Any:
    """Return the struct with the settings of a built-in codec."""
    make = registry.load("codecs", name)
    return (LossyCodecConfig if make.lossy else CodecConfig).of(make)


def first_line(thing: Any) -> str:
    """Return the first sentence of a docstring."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split()).replace("``", "`")


def page() -> str:
    """Return the page."""
    lines = [HEAD.rstrip()]
    for name, kind, *_ in fields(Sections):
        lines += table(f"## {name}", first_line(kind), [*rows(kind, f"{name}.")])
    below = tuple(name for name, *_ in fields(HostConfig))
    lines += table("## Every tier", "Settings of each level, host included.", [*rows(HostConfig)])
    text = "Settings of each level below host."
    lines += table("## Every tier below host", text, [*rows(LevelConfig, without=below)])
    for name in sorted(registry.BUILT_IN["tiers"].keys() - {"host"}):
        make = registry.load("tiers", name)
        own = [*rows(make.Options)] if made(make) else []
        lines += table(f"## Tier `{name}`", first_line(make), own)
    text = (
        "An entry of `codecs` is a codec's name, or a mapping of `name` and the codec's settings."
    )
    lines += ["", "## Codecs", "", text]
    for name in sorted(registry.BUILT_IN["codecs"]):
        config = codec(name)
        own = [*rows(config, without=("name",))]
        lines += table(f"### Codec `{name}`", first_line(config.make), own)
    return "\n".join(lines) + "\n"


# ---- the schema


def pattern(text: str) -> str:
    """Return a regular expression as JSON Schema has it."""
    return text.replace(r"\A", "^").replace(r"\Z", "$")


def schema(kind: Any) -> dict[str, Any]:
    """Return the schema of a value of this type; variables of the environment may replace it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found = schema(inner[0])
        target = found["anyOf"][0] if "anyOf" in found else found
        for meta in inner[1:]:
            target |= {LIMITS[key]: getattr(meta, key) for key in LIMITS if limit(meta, key)}
            if meta.pattern is not None:
                found = {"anyOf": [{"type": "string", "pattern": pattern(meta.pattern)}, VARIABLE]}
            if meta.min_length is not None:
                target["minLength"] = meta.min_length
        return found
    if origin is Literal:
        return {"anyOf": [{"enum": list(inner)}, VARIABLE]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema(one) for one in inner]}
    if origin is tuple:
        return {"anyOf": [{"type": "array", "items": schema(inner[0])}, VARIABLE]}
    if origin is dict:
        return {"anyOf": [{"type": "object", "additionalProperties": schema(inner[1])}, VARIABLE]}
    if kind in MEASURES:
        return {"type": ["integer", "string"], "description": kind.EXPECTED}
    if kind is types.NoneType:
        return {"type": "null"}
    if is_struct(kind):
        return section(kind)
    if kind is str:
        return {"type": "string"}
    return {"anyOf": [{"type": JSON_TYPES[kind]}, VARIABLE]}


def limit(meta: msgspec.Meta, key: str) -> bool:
    """Return whether a type has this limit."""
    return getattr(meta, key) is not None


def section(owner: Any, **fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a struct; ``fixed`` replaces the schemas of some of its keys."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, kind, default, text in fields(owner):
        properties[name] = dict(fixed[name]) if name in fixed else schema(kind)
        if text:
            properties[name]["description"] = text
        if default is msgspec.NODEFAULT:
            required.append(name)
    found = {"type": ["object", "null"], "properties": properties, "additionalProperties": False}
    return found | ({"required": required} if required else {})


def chosen(key: str, name: str, then: str) -> dict[str, Any]:
    """Return a rule: where ``key`` is ``name``, another schema holds."""
    when = {"type": "object", "properties": {key: {"const": name}}, "required": [key]}
    return {"if": when, "then": {"$ref": f"#/$defs/{then}"}}


def whole() -> dict[str, Any]:
    """Return the schema of a file."""
    tiers = sorted(registry.BUILT_IN["tiers"])
    codecs = sorted(registry.BUILT_IN["codecs"])
    chain = {"type": "array", "items": {"$ref": "#/$defs/codec"}}
    definitions: dict[str, Any] = {
        "variable": {"type": "string", "pattern": r"\$\{", "description": "${NAME} or ${NAME:-}"},
        "tier-host": section(HostConfig, type={"const": "host"}),
    }
    for name in tiers:
        if name != "host":
            found = section(level(name), type={"const": name}, codecs=chain)
            definitions[f"tier-{name}"] = found
    for name in codecs:
        definitions[f"codec-{name}"] = section(codec(name), name={"const": name})
    known = [{"const": name} for name in codecs]
    definitions["codec"] = {
        "anyOf": [*known, {"type": "string"}, {"type": "object", "required": ["name"]}],
        "allOf": [chosen("name", name, f"codec-{name}") for name in codecs],
    }
    definitions["tier"] = {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"anyOf": [{"enum": tiers}, {"type": "string"}]}},
        "allOf": [chosen("type", name, f"tier-{name}") for name in tiers],
    }
    file = section(Sections)
    properties = file["properties"]
    for name in SHORT_SECTIONS:  # each may be written as its one common setting
        short = properties[name].pop("description", "")
        properties[name] = {"anyOf": [properties[name], {"type": ["string", "integer"]}]}
        properties[name] |= {"description": short} if short else {}
    for switch in SHORT_SWITCHES:
        properties[switch]["type"] += ["boolean", "string"]
    measure = schema(Size)
    properties |= {
        "tiers": {
            "type": "array",
            "description": "The levels, hottest first; the first one is host.",
            "items": {"$ref": "#/$defs/tier"},
            "minItems": 1,
        },
        "host": measure | {"description": "Size of the arena, in the short form of a file."},
        "files": {"type": "string", "description": "A directory, in the short form of a file."},
        "capacity": measure | {"description": "Size of that directory, in the short form."},
    }
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "kvladder stack"}
    return head | {"type": "object"} | file | {"type": "object", "$defs": definitions}


def render() -> dict[Path, str]:
    """Return the content of each file."""
    return {PAGE: page(), SCHEMA: json.dumps(whole(), indent=1, ensure_ascii=False) + "\n"}


def main() -> int:
    """Write the files."""
    for path, text in render().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
