"""Names to classes: what comes with kvladder, what other packages add, what a process registers.

A package adds a tier by an entry point in the group ``kvladder.tiers`` (or ``.policies``,
``.codecs``, ``.handlers``); its module is imported when the name is first used. Codecs are found by
ids, too, for blocks that others have stored with other settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal, cast

from kvladder.errors import ConfigError
from kvladder.gpu.sizing.base import ResourceHandler
from kvladder.keys import Namespace
from kvladder.layout import Layout
from kvladder.policy.eviction import EvictionPolicy
from kvladder.schema import nearest
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.base import Codec

Group = Literal["tiers", "policies", "codecs", "handlers"]

BUILT_IN: Final[Mapping[Group, Mapping[str, str]]] = {
    "tiers": {
        "host": "kvladder.tiers.ladder.host:HostLevel",
        "files": "kvladder.tiers.files.tier:FilesTier",
        "memory": "kvladder.tiers.memory:MemoryTier",
        "mooncake": "kvladder.tiers.mooncake.tier:MooncakeTier",
        "nixl": "kvladder.tiers.nixl.tier:NixlTier",
        "object": "kvladder.tiers.object.tier:ObjectTier",
        "redis": "kvladder.tiers.redis.tier:RedisTier",
    },
    "policies": {"prioritized-lru": "kvladder.policy.eviction:PrioritizedLRU"},
    "codecs": {
        "checksum": "kvladder.tiers.codecs.base:ChecksumCodec",
        "zstd": "kvladder.tiers.codecs.zstd:ZstdCodec",
        "fp8": "kvladder.tiers.codecs.fp8:Fp8Codec",
        "aes-gcm": "kvladder.tiers.codecs.aesgcm:AesGcmCodec",
    },
    "handlers": {
        "kv": "kvladder.gpu.requests.groups:Layer",
        "state": "kvladder.gpu.sizing.handlers:State",
        "convolution": "kvladder.gpu.sizing.handlers:ConvState",
    },
}
"""What comes with kvladder, whether it is installed or run from its source tree."""

_KINDS: Final[Mapping[Group, tuple[str, type]]] = {
    "tiers": ("tier type", Tier),
    "policies": ("policy", EvictionPolicy),
    "codecs": ("codec", Codec),
    "handlers": ("handler", ResourceHandler),
}
HOST: Final = ("tiers", "host")
_registered: Final[dict[tuple[Group, str], Any]] = {}


def register(group: Group, name: str, thing: object) -> None:
    """Make ``thing`` known under ``name`` in this process.

    Raises
    ------
    ConfigError
        The name is taken by something else.
    """
    claimed = name in _found(group)
    if claimed or _registered.setdefault((group, name), thing) is not thing:
        what = f"{_KINDS[group][0]} {name!r} {'exists already' if claimed else 'is registered'}"
        raise ConfigError(what, hint="choose another name")


def names(group: Group) -> list[str]:
    """Every name of a group, sorted; nothing is imported."""
    return sorted({*_found(group), *(name for of, name in _registered if of == group)})


def load(group: Group, name: str, *, path: str = "") -> Any:
    """What ``name`` stands for; imported on first use.

    Parameters
    ----------
    path:
        Where in the configuration the name stands, for errors.

    Raises
    ------
    ConfigError
        There is no such name (the nearest is suggested), two packages claim it, its module cannot
        be imported, or what it stands for is no class of its kind.
    """
    thing: Any = _registered.get((group, name)) or _imported(group, name, path)
    _, base = _KINDS[group]
    # the host level has its name here, and is built by the stack itself
    is_one = isinstance(thing, type) and issubclass(thing, base)
    if not is_one and (group, name) != HOST:
        raise ConfigError(f"{name!r} is no {base.__name__}", path=path)
    return cast("Any", thing)


def _imported(group: Group, name: str, path: str) -> Any:
    what = f"{_KINDS[group][0]} {name!r}"
    claims = _found(group).get(name)
    if claims is None:
        hint = nearest(name, names(group))
        raise ConfigError(f"unknown {what}", path=path, hint=hint)
    if len(claims) > 1:
        owners = ", ".join(map(_owner, claims))
        raise ConfigError(f"{what} is claimed by {owners}", path=path, hint="uninstall one")
    try:
        return claims[0].load()
    except (ImportError, AttributeError) as error:
        hint = f"it is {claims[0].value}, from {_owner(claims[0])}"
        raise ConfigError(f"{what} cannot be loaded: {error}", path=path, hint=hint) from error


@cache
def _found(group: Group) -> Mapping[str, list[EntryPoint]]:
    """Who claims each name; more than one where they disagree on its meaning."""
    where = f"kvladder.{group}"
    found = {name: [EntryPoint(name, value, where)] for name, value in BUILT_IN[group].items()}
    for point in entry_points(group=where):
        claims = found.setdefault(point.name, [])
        # metadata of an older kvladder may name what has moved
        if _owner(point) != "kvladder" and point.value not in {claim.value for claim in claims}:
            claims.append(point)
    return {name: claims for name, claims in found.items() if claims}


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "kvladder"


_OWN = {1: "checksum", 2: "zstd", 4: "aes-gcm"}
"""By id, so that the modules of others are imported for their own ids only."""


def finder(layout: Layout, namespace: Namespace) -> Callable[[int], Codec | None]:
    """Finds codecs by id, made with their defaults: for blocks that others have stored.

    Codecs that are lossy, or cannot be used here, are not found.
    """
    found: dict[int, Codec | None] = {}
    lock = threading.Lock()

    def find(wanted: int) -> Codec | None:
        with lock:  # whoever asks second waits for the import
            if wanted not in found:
                found[wanted] = _made(wanted, layout, namespace)
            return found[wanted]

    return find


def _made(wanted: int, layout: Layout, namespace: Namespace) -> Codec | None:
    for name in [_OWN[wanted]] if wanted in _OWN else names("codecs"):
        with suppress(Exception):  # it cannot be loaded, lacks its key or its settings, or is ill
            make = load("codecs", name)
            if make.id == wanted and not make.lossy:
                codec: Codec = make() if make.Options is None else make(make.Options())
                codec.open(layout, namespace)
                return codec
    return None
