"""Names to classes: what comes with kvladder, what other packages add, what a process registers.

A package adds a tier by an entry point in the group ``kvladder.tiers`` (or ``.policies``,
``.codecs``, ``.connectors``); its module is imported when the name is first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Final, Literal

from kvladder.errors import ConfigError
from kvladder.schema import nearest

Group = Literal["tiers", "policies", "codecs", "connectors"]

BUILT_IN: Final[Mapping[Group, Mapping[str, str]]] = {
    "tiers": {
        "host": "kvladder.tiers.ladder.host:HostLevel",
        "files": "kvladder.tiers.files.tier:FilesTier",
        "memory": "kvladder.tiers.memory:MemoryTier",
        "redis": "kvladder.tiers.redis.tier:RedisTier",
    },
    "policies": {"prioritized-lru": "kvladder.policy.eviction:PrioritizedLRU"},
    "codecs": {
        "checksum": "kvladder.tiers.codecs.base:ChecksumCodec",
        "zstd": "kvladder.tiers.codecs.zstd:ZstdCodec",
        "fp8": "kvladder.tiers.codecs.fp8:Fp8Codec",
        "aes-gcm": "kvladder.tiers.codecs.aesgcm:AesGcmCodec",
    },
    "connectors": {
        "inline": "kvladder.connectors.inline:InlineConnector",
        "transformers": "kvladder.connectors.transformers.model:PooledModel",
        "vllm": "kvladder.connectors.vllm.connector:KVLadderConnector",
    },
}
"""The same names as the entry points in pyproject.toml, so that a tree runs uninstalled."""

_KINDS: Final[Mapping[Group, str]] = {
    "tiers": "tier type",
    "policies": "policy",
    "codecs": "codec",
    "connectors": "connector",
}
_registered: Final[dict[tuple[Group, str], Any]] = {}


def register(group: Group, name: str, thing: object) -> None:
    """Make ``thing`` known under ``name`` in this process.

    Raises
    ------
    ConfigError
        The name is taken by something else.
    """
    if name in BUILT_IN[group] or name in _found(group):
        raise ConfigError(f"{_KINDS[group]} {name!r} exists already", hint="choose another name")
    if _registered.setdefault((group, name), thing) is not thing:
        raise ConfigError(f"{_KINDS[group]} {name!r} is registered", hint="choose another name")


def names(group: Group) -> list[str]:
    """Every name of a group, sorted; nothing is imported."""
    mine = {name for of, name in _registered if of == group}
    return sorted({*BUILT_IN[group], *_found(group), *mine})


def load(group: Group, name: str, *, path: str = "") -> Any:
    """What ``name`` stands for; imported on first use.

    Parameters
    ----------
    path:
        Where in the configuration the name stands, for errors.

    Raises
    ------
    ConfigError
        There is no such name (the nearest is suggested), two packages claim it, or its module
        cannot be imported.
    """
    if (group, name) in _registered:
        return _registered[group, name]
    claims = _found(group).get(name, ())
    if len(claims) > 1:
        owners = ", ".join(_owner(claim) for claim in claims)
        raise ConfigError(
            f"{_KINDS[group]} {name!r} is claimed by {owners}", path=path, hint="uninstall one"
        )
    target = claims[0].value if claims else BUILT_IN[group].get(name)
    if target is None:
        raise ConfigError(
            f"unknown {_KINDS[group]} {name!r}", path=path, hint=nearest(name, names(group))
        )
    module, _, attribute = target.partition(":")
    try:
        found = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{_KINDS[group]} {name!r} cannot be loaded: {error}",
            path=path,
            hint=f"it is {target}, from {_owner(claims[0]) if claims else 'kvladder'}",
        ) from error
    return found


@cache
def _found(group: Group) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points of other packages by name; more than one where they disagree on its meaning."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=f"kvladder.{group}"):
        if _owner(point) != "kvladder":  # what it has of its own stands in BUILT_IN
            found.setdefault(point.name, {}).setdefault(point.value.replace(" ", ""), point)
    for name, claims in found.items():
        if name in BUILT_IN[group]:
            target = BUILT_IN[group][name]
            found[name] = {target: EntryPoint(name, target, f"kvladder.{group}")} | claims
    return MappingProxyType({name: tuple(claims.values()) for name, claims in found.items()})


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "kvladder"
