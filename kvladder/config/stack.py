"""The configuration of a stack: read, checked, and explained.

Settings come from a YAML file or a mapping, the environment and the engine (see
:mod:`kvladder.config.sources`); a tier's own keys are those of its class's ``Options``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvladder.config import registry, resolved
from kvladder.config.codecs import read_codecs
from kvladder.config.resolved import Row
from kvladder.config.settings import (
    ArenaConfig,
    BlockConfig,
    ControlConfig,
    EventsConfig,
    FetchConfig,
    GpuConfig,
    HostConfig,
    LevelConfig,
    ModelConfig,
    Sections,
    TierSettings,
)
from kvladder.config.sources import SHORT_KEYS, Source, read
from kvladder.errors import ConfigError
from kvladder.gpu.requests.groups import SIZES, is_size
from kvladder.layout import Layout
from kvladder.metrics import SECTIONS
from kvladder.policy.eviction import EvictionPolicy
from kvladder.schema import convert, is_list, join, keys_of, require_known, require_mapping, shown
from kvladder.tiers.base import Tier
from kvladder.units import Share, Size

HOST: Final = "host"
SUMMARY_LINES_MAX: Final = 10
RESERVED_NAMES: Final = set(SECTIONS)
"""Not for tiers: what stands beside them in the statistics."""
_OF_LEVEL = re.compile(r"tiers\[([0-9]+)\]\.(capacity|codecs)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class StackConfig:
    """A whole configuration, checked."""

    model: ModelConfig
    block: BlockConfig
    gpu: GpuConfig
    arena: ArenaConfig
    fetch: FetchConfig
    events: EventsConfig
    control: ControlConfig
    host: HostConfig
    levels: tuple[LevelConfig, ...]
    """Those below host, hottest first."""
    warnings: tuple[str, ...]
    """What is allowed and probably not meant, one sentence each."""
    source: Source = field(repr=False)  # it has the secrets as they were given
    """Who set what."""

    def arena_slots(self, layout: Layout) -> int:
        """How many blocks the arena holds."""
        return self.arena.size_bytes // layout.slot_bytes

    def check(self, layout: Layout) -> None:
        """Raise ConfigError if blocks of this layout do not fit what is configured."""
        tokens = self.block.tokens
        if tokens not in {"auto", layout.block_tokens}:
            hint = f"the engine's blocks have {layout.block_tokens} tokens: that, or auto"
            raise self._wrong("block.tokens", str(tokens), hint)
        if self.arena_slots(layout) < 1:
            hint = f"expected room for at least one block, {layout.slot_bytes} bytes"
            raise self._wrong("arena.size", str(self.arena.size_bytes), hint)
        for i, level in enumerate(self.levels, start=1):
            blocks, batch = level.capacity_blocks(layout), level.batch_max()
            if blocks < batch:
                least = Size(batch * level.block_bytes(layout) * level.engines)
                raise self._wrong(
                    f"tiers[{i}].capacity",
                    f"{level.capacity_bytes} are {blocks} blocks, less than one batch",
                    f"expected at least {least}, {batch} blocks for each engine",
                )

    def _wrong(self, path: str, message: str, hint: str) -> ConfigError:
        return self.source.explain(ConfigError(message, path=path, hint=hint))

    def rows(self, layout: Layout | None = None) -> list[Row]:
        """Every setting with its value and who set it, in the order of the file."""

        def means(slots: int) -> str:
            assert layout is not None
            return f"{slots} blocks, {slots * layout.block_tokens} tokens"

        def meaning(path: str, value: object) -> str:
            if layout is None:
                return ""
            if path == "arena.size":
                return means(self.arena_slots(layout))
            if isinstance(value, Share):
                return f"{value.of(self.arena_slots(layout))} blocks"
            found = _OF_LEVEL.fullmatch(path)
            if found is None:
                return ""
            level = self.levels[int(found[1]) - 1]
            if found[2] == "capacity":
                part = f" for each of {level.engines} engines" if level.engines > 1 else ""
                return means(level.capacity_blocks(layout)) + part
            scratch = Size(level.scratch_blocks(layout) * layout.slot_bytes)
            return f"{scratch.about()} of scratch" if scratch else ""

        found: list[Row] = []
        for name in keys_of(Sections):
            if name == "gpu" and name not in self.source.raw:
                continue  # the engine brings its own pool
            found += resolved.rows(getattr(self, name), name, self.source, meaning)
        size = self.arena.size_bytes
        room = Row(
            "tiers[0].capacity",
            resolved.text("capacity", size),
            meaning("arena.size", size),
            "arena.size",
        )
        found += [*resolved.rows(self.host, "tiers[0]", self.source, meaning), room]
        for i, level in enumerate(self.levels, start=1):
            found += resolved.rows(level, f"tiers[{i}]", self.source, meaning)
        return found

    def summary(self, layout: Layout) -> list[str]:
        """What it comes to in at most ``SUMMARY_LINES_MAX`` lines: the blocks, then the levels."""

        def says(level: TierSettings, capacity: Size, blocks: int) -> str:
            rule = level.rule
            found = [level.type, str(capacity), f"{blocks} blocks"]
            if isinstance(level, LevelConfig):
                found.append(f"when: {rule.when}")
            if rule.min_priority:
                found.append(f"min_priority: {rule.min_priority}")
            return f"{level.name}: {', '.join(found)}"

        slot = Size(layout.slot_bytes)
        lines = [
            f"a block is {layout.block_tokens} tokens, {slot.about()}",
            says(self.host, self.arena.size_bytes, self.arena_slots(layout)),
            *(
                says(level, level.capacity_bytes, level.capacity_blocks(layout))
                for level in self.levels
            ),
        ]
        if len(lines) > SUMMARY_LINES_MAX:
            more = len(lines) - SUMMARY_LINES_MAX + 1
            lines[-more:] = [f"and {more} levels more"]
        return lines

    def describe(self, layout: Layout | None = None) -> str:
        """The resolved stack as text: per setting its value, what it comes to, who set it.

        Without a layout nothing is said in blocks and tokens. Secrets are masked.
        """
        lines = [f"stack of {len(self.levels) + 1} levels, hottest first"]
        if layout is None:
            lines.append("a block's size is not known before an engine names its layout")
        else:
            slot = Size(layout.slot_bytes)
            lines.append(
                f"1 block = {layout.block_tokens} tokens = {layout.block_bytes} bytes"
                f" in a slot of {slot.about()}"
            )
        found = self.rows(layout)
        lines += ["", *resolved.table("settings", (r for r in found if r.path[:6] != "tiers["))]
        for i, level in enumerate((self.host, *self.levels)):
            own = f"tiers[{i}]."
            listed = [r._replace(path=r.path[len(own) :]) for r in found if r.path.startswith(own)]
            lines += ["", *resolved.table(f"level {i}: {level.name} ({level.type})", listed)]
        lines += ["", *(f"warning: {warning}" for warning in self.warnings)]
        return "\n".join(lines).rstrip()


def load_config(
    source: str | Path | Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> StackConfig:
    """Read and check a configuration.

    Parameters
    ----------
    source:
        The path of a YAML file, or a mapping with what such a file holds; either in the long form
        or in the short one: ``{host: 4 GiB, files: /path, capacity: 1 TiB}``.
    env:
        The environment; None takes the process's.
    overrides:
        What the engine knows better, nested like the file with ``tiers`` as a mapping by name;
        stronger than file and environment.

    Raises
    ------
    ConfigError
        Anything is wrong with it; says where, what was found and what is expected.
    """
    found = read(source, env=os.environ if env is None else env, overrides=overrides)
    try:
        return _build(found)
    except ConfigError as error:
        raise found.explain(error) from error.__cause__


def _build(found: Source) -> StackConfig:
    raw = found.raw
    also = SHORT_KEYS if found.short else ()
    require_known(raw, [*keys_of(Sections), "tiers"], "", also=also)
    rest = {key: value for key, value in raw.items() if key != "tiers"}
    top = convert(rest, Sections, "", loose=found.loose)
    if not top.fetch.budget:
        raise ConfigError(str(top.fetch.budget), path="fetch.budget", hint="expected more than 0")
    if top.gpu.memory_bytes is not None:
        for key in ("fraction", "max_tokens"):
            if rest.get("gpu", {}).get(key) is not None:
                hint = f"gpu.memory, {top.gpu.memory_bytes}, says it all: leave out one of the two"
                raise ConfigError(f"{rest['gpu'][key]}", path=f"gpu.{key}", hint=hint)
    tokens = top.block.tokens
    if "gpu" in raw and isinstance(tokens, int) and not is_size(tokens):
        hint = f"expected {SIZES}, as pools on the device have, or auto"
        raise ConfigError(str(tokens), path="block.tokens", hint=hint)
    events = top.events
    if events.replay is not None and events.publish is None:
        raise ConfigError(events.replay, path="events.replay", hint="needs events.publish, too")
    if events.publish is not None and not events.max:
        raise ConfigError("0", path="events.max", hint="events are published: expected 1 or more")
    warnings: list[str] = []
    host, levels = _tiers(raw.get("tiers"), found, warnings)
    return StackConfig(
        model=top.model,
        block=top.block,
        gpu=top.gpu,
        arena=top.arena,
        fetch=top.fetch,
        events=top.events,
        control=top.control,
        host=host,
        levels=tuple(levels),
        warnings=tuple(warnings),
        source=found,
    )


def _tiers(raw: object, found: Source, warnings: list[str]) -> tuple[HostConfig, list[LevelConfig]]:
    hint = "expected a list of tiers, hottest first, that begins with {type: host}"
    if raw is None:
        raise ConfigError("missing", path="tiers", hint=hint)
    if not is_list(raw) or not raw:
        what = "an empty list" if is_list(raw) else shown("tiers", raw)
        raise ConfigError(what, path="tiers", hint=hint)
    entries: list[dict[str, Any]] = []
    for i, entry in enumerate(raw):
        tier = dict(require_mapping(entry, f"tiers[{i}]"))
        kind = tier.get("type")
        if not isinstance(kind, str):
            what = "missing" if kind is None else shown("type", kind)
            known = ", ".join(registry.names("tiers"))
            raise ConfigError(what, path=f"tiers[{i}].type", hint=f"expected one of: {known}")
        entries.append({"name": kind, **tier})
    for i, tier in enumerate(entries):
        if (tier["type"] == HOST) != (i == 0):
            where = f"tiers[{i}].type" if i else "tiers[0].type"
            wrong = "a second host level" if i else f"{tier['type']!r}, not host"
            registry.load("tiers", tier["type"], path=where)  # a misspelling is the better error
            raise ConfigError(wrong, path=where, hint="the first tier is the only one of type host")
    _require_names(entries)
    host = convert(_host_keys(entries[0]), HostConfig, "tiers[0]", loose=found.loose)
    _require_policy(host.policy, "tiers[0]")
    levels = [
        _level(tier, f"tiers[{i}]", found, warnings) for i, tier in enumerate(entries[1:], start=1)
    ]
    return host, levels


def _require_names(entries: list[dict[str, Any]]) -> None:
    seen: dict[str, int] = {}
    for i, tier in enumerate(entries):
        name, path = tier["name"], f"tiers[{i}].name"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            hint = "expected letters, digits, - and _, beginning with a letter or digit"
            raise ConfigError(shown(path, name), path=path, hint=hint)
        if name in RESERVED_NAMES:
            raise ConfigError(f"{name!r} is taken", path=path, hint="choose another name")
        if name in seen:
            hint = "give each tier a name of its own"
            raise ConfigError(f"{name!r} is the name of tiers[{seen[name]}]", path=path, hint=hint)
        seen[name] = i


def _host_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """Refuse, with the reason, what only levels below host have."""
    if "capacity" in raw:
        hint = "the host level is as large as the arena: set arena.size"
        raise ConfigError("unknown key", path="tiers[0].capacity", hint=hint)
    for key in keys_of(LevelConfig):
        if key in raw and key not in keys_of(HostConfig):
            hint = "the host level has none: its blocks lie in the arena"
            raise ConfigError("unknown key", path=f"tiers[0].{key}", hint=hint)
    return raw


def _level(raw: dict[str, Any], path: str, found: Source, warnings: list[str]) -> LevelConfig:
    """A level below host: the common keys, and those of its tier's ``Options``."""
    make = registry.load("tiers", raw["type"], path=f"{path}.type")
    if not (isinstance(make, type) and issubclass(make, Tier)):
        raise ConfigError(f"{raw['type']!r} is not a Tier", path=f"{path}.type")
    common = [key for key in keys_of(LevelConfig) if key != "options"]
    wanted: type[msgspec.Struct] | None = getattr(make, "Options", None)
    own = keys_of(wanted) if wanted else []
    require_known(raw, [*common, *own], path)
    options = None
    if wanted is not None:
        given = {key: value for key, value in raw.items() if key in own}
        options = convert(given, wanted, path, loose=found.loose)
    codecs = read_codecs(raw.get("codecs"), make, path, found.loose)
    level = convert(
        {key: value for key, value in raw.items() if key in common and key != "codecs"},
        LevelConfig,
        path,
        loose=found.loose,
        preset={"options": options, "codecs": codecs},
    )
    _require_policy(level.policy, path)
    if not level.queue:
        raise ConfigError(str(level.queue), path=f"{path}.queue", hint="expected more than 0")
    if level.breaker.retry_s > level.breaker.retry_max_s:
        hint = f"expected at least breaker.retry, {level.breaker.retry_s}"
        where = f"{path}.breaker.retry_max"
        raise ConfigError(str(level.breaker.retry_max_s), path=where, hint=hint)
    if (make.checks or make.notes) and not any(codec.checks for codec in level.make_codecs()):
        warnings.append(
            f"{join(path, 'codecs')}: without checksum, blocks that {level.name} damaged are served"
        )
    return level


def _require_policy(name: str, path: str) -> None:
    policy = registry.load("policies", name, path=f"{path}.policy")
    if not (isinstance(policy, type) and issubclass(policy, EvictionPolicy)):
        raise ConfigError(f"{name!r} is not an EvictionPolicy", path=f"{path}.policy")
