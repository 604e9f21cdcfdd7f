"""The configuration of a stack: read, checked, and explained.

Settings come from a YAML file or a mapping, the environment and the engine (see
:mod:`kvladder.config.sources`). A tier's own keys are those of its class's ``Options``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast, get_args

import msgspec

from kvladder.config import registry
from kvladder.config.settings import (
    CHECKSUM,
    CodecConfig,
    HostConfig,
    LevelConfig,
    LossyCodecConfig,
    QuotaConfig,
    Sections,
    TierSettings,
)
from kvladder.config.sources import SHORT_KEYS, Source, read
from kvladder.errors import ConfigError
from kvladder.gpu.sizing.groups import SIZES, is_size
from kvladder.layout import Layout
from kvladder.metrics import SECTIONS
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.tenants import Shares
from kvladder.schema import (
    cleared,
    convert,
    from_text,
    is_list,
    is_mapping,
    is_secret,
    join,
    keys_of,
    nearest,
    shown,
    value_at,
)
from kvladder.units import Share, Size, counted


class SettingRow(NamedTuple):
    """One setting, as ``describe`` shows it."""

    path: str
    value: str
    """The value as it would be written; secrets are masked."""
    means: str
    """The value in blocks and tokens; empty if that is not useful or not known."""
    origin: str
    """The source that set it, or ``default``."""


def rows(
    settings: msgspec.Struct,
    path: str,
    source: Source,
    means: Mapping[str, str],
    slots: int | None,
) -> list[SettingRow]:
    """Return every setting in ``settings``, which is at ``path``.

    ``means`` has meanings by path; ``slots`` is the number of slots that shares refer to.
    """
    found: list[SettingRow] = []
    for field in msgspec.structs.fields(settings):
        value: object = getattr(settings, field.name)
        where = join(path, field.encode_name)
        if isinstance(value, msgspec.Struct) and not is_secret(where):
            found += rows(value, where, source, means, slots)
            continue
        if value is None and bool in get_args(field.type):  # it is derived from other settings
            value = "auto"
        meaning = means.get(where, "")
        if isinstance(value, Share) and slots is not None:
            meaning = counted(value.of(slots), "block")
        found.append(SettingRow(where, text(where, value), meaning, who(where, source)))
    return found


def text(path: str, value: object) -> str:
    """Return a value as it would be written, without secrets."""
    if value is None or value in ("", ()):
        return "none"
    told = cleared(path, value)
    if isinstance(told, Size):
        return told.brief()
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in cast("list[object]", told))
    return str(told)


def who(path: str, source: Source) -> str:
    """Return the origin of the value at a path, or how its default was found."""
    note = source.notes.get(path)
    if note is not None:
        return f"default: {note}"
    if value_at(source.raw, path) is None:
        return "default"
    origin, variable = source.who(path)
    return f"{origin}: {variable}" if variable else origin


def table(title: str, lines: Iterable[SettingRow]) -> list[str]:
    """Return rows as aligned text below a title; only the last part of each path is shown."""
    cells = [(line.path, line.value, line.means, line.origin) for line in lines]
    widths = [max((len(row[i]) for row in cells), default=0) for i in range(3)]
    body = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True) if width)
        + f"  {row[3]}"
        for row in cells
    ]
    return [title, *body]


HOST: Final = "host"
SUMMARY_LINES_MAX: Final = 10


class StackConfig(Sections, frozen=True, kw_only=True):
    """A whole configuration, checked."""

    tiers: tuple[Any, ...]
    """The host level, then the levels below it, hottest first."""
    source: Source
    """The settings as they were read, with their origins."""

    def __post_init__(self) -> None:
        self._require_names()
        raw = self.source.raw
        if self.arena.size_bytes is None and not is_alone(raw):
            raise ConfigError("missing", path="arena.size", hint=f"expected {Size.EXPECTED}")
        for section in ("fetch", "export", "record", "shadow", "otel") if is_alone(raw) else ():
            # a variable may be set for all processes of a machine
            if not all(self.source.loose(join(section, key)) for key in raw.get(section) or ()):
                hint = "leave it out: without arena: and tiers: nothing leaves the device"
                raise ConfigError("has no effect here", path=section, hint=hint)
        memory = self.gpu.memory_bytes
        for where in ("gpu.fraction", "gpu.max_tokens"):
            given = value_at(raw, where)
            if memory is not None and given is not None:
                hint = f"leave it out, or leave out gpu.memory, {memory}, which sets the size alone"
                raise ConfigError(str(given), path=where, hint=hint)
        tokens = self.block.tokens
        if "gpu" in raw and isinstance(tokens, int) and not is_size(tokens):
            hint = f"expected {SIZES}, which pools on the device need, or auto"
            raise ConfigError(str(tokens), path="block.tokens", hint=hint)

    def _require_names(self) -> None:
        """Raise ConfigError unless each tier has its own name, and its own directory or server."""
        claims: dict[tuple[str, str], int] = {}
        for i, tier in enumerate(self.tiers):
            if tier.name in {"", *SECTIONS}:  # "" is the device in events
                hint = "choose another name"
                raise ConfigError(f"{tier.name!r} is reserved", path=f"tiers[{i}].name", hint=hint)
            own = [("name", tier.name)]
            # two levels would use each other's space, or remove each other's blocks
            own += getattr(getattr(tier, "options", None), "claims", ())
            for key, value in own:
                first = claims.setdefault((key, value), i)
                if first != i:
                    wrong = f"{value!r} is already the {key} of tiers[{first}]"
                    hint = f"give each tier a {key} of its own"
                    raise ConfigError(wrong, path=f"tiers[{i}].{key}", hint=hint)

    @property
    def host(self) -> HostConfig:
        """Level 0."""
        host: HostConfig = self.tiers[0]
        return host

    @property
    def levels(self) -> tuple[LevelConfig, ...]:
        """The levels below host, hottest first."""
        return self.tiers[1:]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Settings that are allowed but probably not intended, one sentence each."""
        return tuple(
            f"tiers[{i}].codecs: without checksum, blocks that {level.name} damaged are served"
            for i, level in enumerate(self.levels, start=1)
            if level.unchecked
        )

    @property
    def arena_bytes(self) -> int:
        """Bytes of all slots; 0 if there are only pools on the device."""
        return self.arena.size_bytes or 0

    def arena_slots(self, layout: Layout) -> int:
        """Return how many blocks the arena holds."""
        return self.arena_bytes // layout.slot_bytes

    def shares(self, level: TierSettings, blocks: int, block_bytes: int) -> Shares:
        """Return the limits on one salt's blocks, and on raised blocks, in a level."""
        own: object = getattr(level, "quota", None)
        tenant = own.tenant if isinstance(own, QuotaConfig) else None
        quota, limits = tenant or self.quota.tenant, self.limits
        return Shares(
            None if quota is None else quota.of(blocks, block_bytes),
            limits.raised.of(blocks, block_bytes),
            limits.raised_tenant.of(blocks, block_bytes),
        )

    def check(self, layout: Layout) -> None:
        """Raise ConfigError if blocks of this layout do not fit this configuration."""
        tokens = self.block.tokens
        if tokens not in {"auto", layout.block_tokens}:
            hint = f"expected {layout.block_tokens}, the engine's number, or auto"
            raise self._wrong("block.tokens", str(tokens), hint)
        if self.arena.size_bytes is not None and self.arena_slots(layout) < 1:
            hint = f"expected room for at least one block, {Size(layout.slot_bytes).brief()}"
            raise self._wrong("arena.size", str(self.arena.size_bytes), hint)
        for i, level in enumerate(self.levels, start=1):
            least = Size(level.make.block_bytes_min or 1)
            if layout.block_bytes < least:
                raise self._wrong(
                    f"tiers[{i}].type",
                    f"blocks of {Size(layout.block_bytes).about()} are too small for"
                    f" {level.type!r}: each is one request, and larger requests take no longer",
                    f"expected at least {least}: use more tokens per block, or another tier type",
                )
            blocks, batch = level.capacity_blocks(layout), level.make.batch_max
            if blocks < batch:
                least = Size(batch * level.block_bytes(layout) * level.engines)
                held = counted(blocks, "block")
                raise self._wrong(
                    f"tiers[{i}].capacity",
                    f"{level.capacity_bytes.brief()} holds {held}, less than one batch",
                    f"expected at least {least.brief()}, {counted(batch, 'block')} for each engine",
                )

    def _wrong(self, path: str, message: str, hint: str) -> ConfigError:
        return self.source.explain(ConfigError(message, path=path, hint=hint))

    def rows(self, layout: Layout | None = None) -> list[SettingRow]:
        """Return every setting with its value and its origin, in the order of the file."""
        slots = None if layout is None else self.arena_slots(layout)
        means = {} if layout is None else self._means(layout)
        alone = is_alone(self.source.raw)
        # an engine may have its own pool, and a pool may have no tiers
        silent = ("arena", "fetch", "export", "record", "shadow", "otel") if alone else ("gpu",)
        told = [one for one in keys_of(Sections) if one not in silent or one in self.source.raw]
        sections = [(name, getattr(self, name)) for name in told]
        tiers = [] if alone else [(f"tiers[{i}]", tier) for i, tier in enumerate(self.tiers)]
        found: list[SettingRow] = []
        for path, settings in [*sections, *tiers]:
            found += rows(settings, path, self.source, means, slots)
            if settings is self.host:
                where, size = f"{path}.capacity", text("", self.arena.size_bytes)
                found.append(SettingRow(where, size, means.get("arena.size", ""), "arena.size"))
        return found

    def _means(self, layout: Layout) -> dict[str, str]:
        """Return capacities and quotas in blocks and tokens, by path."""

        def blocks(count: int) -> str:
            is_server = self.block.size_bytes is not None
            return counted(count, "block") + (
                "" if is_server else f", {counted(count * layout.block_tokens, 'token')}"
            )

        found = {"arena.size": blocks(self.arena_slots(layout))}
        most = self.shares(self.host, self.arena_slots(layout), layout.slot_bytes)
        if most.tenant is not None:
            found["tiers[0].quota.tenant"] = f"{counted(most.tenant, 'block')} per salt"
        for i, level in enumerate(self.levels, start=1):
            part = f" for each of {level.engines} engines" if level.engines > 1 else ""
            found[f"tiers[{i}].capacity"] = blocks(level.capacity_blocks(layout)) + part
            most = self.shares(level, level.capacity_blocks(layout), level.block_bytes(layout))
            if most.tenant is not None:
                found[f"tiers[{i}].quota.tenant"] = f"{counted(most.tenant, 'block')} per salt"
            scratch = level.scratch_blocks(layout) * layout.slot_bytes
            if scratch:
                found[f"tiers[{i}].codecs"] = f"{Size(scratch).about()} of scratch"
        return found

    def summary(self, layout: Layout) -> list[str]:
        """Return at most ``SUMMARY_LINES_MAX`` lines: the size of a block, then the levels."""
        slot = Size(layout.slot_bytes)
        lines = [f"a block is {counted(layout.block_tokens, 'token')}, {slot.about()}"]
        for level in self.tiers:
            whole = level is self.host
            capacity = self.arena.size_bytes if whole else level.capacity_bytes
            blocks = self.arena_slots(layout) if whole else level.capacity_blocks(layout)
            when = "" if whole else f", when: {level.when}"
            is_usual = level.min_priority == PRIORITY_DEFAULT
            least = "" if is_usual else f", min_priority: {level.min_priority}"
            room = f"{Size(capacity or 0).brief()}, {counted(blocks, 'block')}"
            lines.append(f"{level.name}: {level.type}, {room}{when}{least}")
        if len(lines) > SUMMARY_LINES_MAX:
            more = len(lines) - SUMMARY_LINES_MAX + 1
            lines[-more:] = [f"and {more} more levels"]
        return lines

    def describe(self, layout: Layout | None = None) -> str:
        """Return the resolved stack as text: value, meaning and origin of each setting.

        Without a layout, no meanings in blocks and tokens are given. Secrets are masked.
        """
        warnings = ["", *(f"warning: {warning}" for warning in self.warnings)]
        return "\n".join([*self.listing(layout), *warnings]).rstrip()

    def listing(self, layout: Layout | None = None, *, defaults: bool = True) -> list[str]:
        """Return the lines of ``describe`` without warnings.

        With ``defaults=False``, settings that nothing has set are left out.
        """
        alone = is_alone(self.source.raw)
        lines = [f"stack of {counted(len(self.levels) + 1, 'level')}, hottest first"]
        if alone:
            lines = ["no tiers: blocks that leave the device are lost"]
        if layout is None:
            lines.append("the size of a block is unknown until an engine names its layout")
        else:
            lines.append(self._block(layout))
        found = [r for r in self.rows(layout) if defaults or r.origin != "default"]
        title = "settings" if defaults else "settings that are not defaults (--all shows all)"
        lines += ["", *table(title, (r for r in found if r.path[:6] != "tiers["))]
        for i, level in enumerate(() if alone else self.tiers):
            own = f"tiers[{i}]."
            listed = [r._replace(path=r.path[len(own) :]) for r in found if r.path.startswith(own)]
            lines += ["", *table(f"level {i}: {level.name} ({level.type})", listed)]
        return lines

    def _block(self, layout: Layout) -> str:
        """Return a line about the size of a block, and of its slot if that is larger."""
        size, slot = Size(layout.block_bytes), Size(layout.slot_bytes)
        exact = "" if str(size) == size.brief() else f" ({int(size)} bytes)"
        tokens = "" if self.block.size_bytes else f"{counted(layout.block_tokens, 'token')} = "
        room = "" if size == slot else f", in a slot of {slot.brief()}"
        return f"1 block = {tokens}{size.brief()}{exact}{room}"


def load_config(
    source: str | Path | Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    file: str = "",
) -> StackConfig:
    """Read and check a configuration.

    Parameters
    ----------
    source:
        The path of a YAML file, or a mapping with the content of one. Both may use the long form
        or the short one: ``{host: 4 GiB, files: /path, capacity: 1 TiB}``.
    env:
        The environment; None takes the process's.
    overrides:
        Settings by the engine, nested like the file with ``tiers`` as a mapping by name. They
        override file and environment.
    file:
        The file that a mapping was read from, for errors.

    Raises
    ------
    ConfigError
        It is wrong; the message says where, what was found and what is expected.
    """
    environ = os.environ if env is None else env
    found = read(source, env=environ, overrides=overrides, file=file)
    with found.explained():
        return _built(found)


def _built(found: Source) -> StackConfig:
    """Return the settings in plain data, with the types of the classes that they name."""
    raw, known = found.raw, [*keys_of(Sections), "tiers"]
    for key in raw:
        if key not in known:
            hint = nearest(key, [*known, *(SHORT_KEYS if found.short else ())])
            raise ConfigError("unknown key", path=key, hint=hint)
    listed = {**raw, "tiers": [{"type": HOST}]} if is_alone(raw) else raw
    tiers = tuple.__class_getitem__(_tier_types(listed.get("tiers"), found))
    file = msgspec.defstruct("File", [("tiers", tiers)], bases=(Sections,), kw_only=True)
    settings = convert(listed, file, loose=found.loose)
    return StackConfig(source=found, **msgspec.structs.asdict(settings))


def is_alone(raw: Mapping[str, Any]) -> bool:
    """Return whether settings ask only for pools on the device, with nothing below them."""
    return "gpu" in raw and "arena" not in raw and "tiers" not in raw


def _tier_types(raw: Any, found: Source) -> tuple[Any, ...]:
    """Return the type of each tier's settings."""
    hint = "expected a list of tiers, hottest first, that begins with {type: host}"
    if not is_list(raw) or not raw:
        what = "an empty list" if is_list(raw) else shown("tiers", raw)
        raise ConfigError("missing" if raw is None else what, path="tiers", hint=hint)
    types: list[Any] = [HostConfig]
    for i, tier in enumerate(raw):
        path = f"tiers[{i}]"
        make = _named("tiers", tier, "type", path)
        if (tier["type"] == HOST) != (i == 0):
            wrong = "a second host level" if i else f"{tier['type']!r} instead of host"
            hint = "expected type host for the first tier, and for no other"
            raise ConfigError(wrong, path=f"{path}.type", hint=hint)
        if i:
            types.append(_level_type(make, tier, path, found))
    for key in {*raw[0]}.intersection(keys_of(LevelConfig)).difference(keys_of(HostConfig)):
        why = "is as large as the arena: set arena.size" if key == "capacity" else "has no such key"
        raise ConfigError("unknown key", path=f"tiers[0].{key}", hint=f"the host level {why}")
    return tuple(types)


def _named(group: registry.Group, entry: Any, key: str, path: str) -> Any:
    """Return the class that an entry names."""
    if not is_mapping(entry):
        raise ConfigError(shown(path, entry), path=path, hint="expected keys with values")
    name = entry.get(key)
    if not isinstance(name, str):
        empty = "has no value; YAML also reads null and ~ as none" if key in entry else "missing"
        what = empty if name is None else shown(key, name)
        hint = f"expected one of: {', '.join(registry.names(group))}"
        raise ConfigError(what, path=f"{path}.{key}", hint=hint)
    return registry.load(group, name, path=f"{path}.{key}")


def _level_type(make: Any, raw: dict[str, Any], path: str, found: Source) -> type[LevelConfig]:
    """Return the settings type of a level below host, with its tier's and codecs' own fields."""
    codecs = raw.get("codecs")
    if isinstance(codecs, str) and found.loose(f"{path}.codecs"):
        raw["codecs"] = codecs = from_text(codecs, tuple)
    if not is_list(codecs):  # missing, or wrong: ``convert`` reports it
        default = (tuple[CodecConfig, ...], (CHECKSUM,))
        return LevelConfig.of(make, f"{path}.type", codecs=default, **_quota(make))
    raw["codecs"] = [{"name": one} if isinstance(one, str) else one for one in codecs]
    types: list[Any] = []
    for i, one in enumerate(raw["codecs"]):
        where = f"{path}.codecs[{i}]"
        codec = _named("codecs", one, "name", where)
        kind = LossyCodecConfig if codec.lossy else CodecConfig
        types.append(kind.of(codec, f"{where}.name"))
    chain = tuple.__class_getitem__(tuple(types))
    return LevelConfig.of(make, f"{path}.type", codecs=(chain, ()), **_quota(make))


def _quota(make: Any) -> dict[str, tuple[Any, Any]]:
    """Return the level's quota field, or none if its tier has its own ``quota``."""
    own = getattr(make, "Options", None)
    is_own = own is not None and "quota" in keys_of(own)
    return {} if is_own else {"quota": (QuotaConfig, QuotaConfig())}
