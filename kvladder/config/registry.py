"""Finds classes by name: kvladder's own, those of other packages, and those a process registers.

A package adds a tier by an entry point in the group ``kvladder.tiers`` (or ``.policies``,
``.codecs``, ``.handlers``). Its module is imported when the name is first used. Codecs are also
found by id, to read blocks that other caches stored with other settings.

A built-in tier is declared by the module ``type`` of its folder, see ``TierType``: no list here
names it. An entry point or ``register`` may give a ``TierType`` in place of a tier's class, too.
"""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Final, Literal, cast

from kvladder import tiers
from kvladder.errors import ConfigError
from kvladder.gpu.sizing.base import ResourceHandler
from kvladder.keys import Namespace
from kvladder.layout import Layout
from kvladder.policy.eviction import EvictionPolicy
from kvladder.schema import nearest
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.base import Codec
from kvladder.tiers.type import TierType

Group = Literal["tiers", "policies", "codecs", "handlers"]


def _declared() -> dict[str, TierType]:
    """Return the types of the built-in tiers by name; imports neither a tier nor its library."""
    found: list[TierType] = []
    for folder in pkgutil.iter_modules(tiers.__path__, f"{tiers.__name__}."):
        module = f"{folder.name}.type"
        if folder.ispkg and find_spec(module) is not None:
            found.append(import_module(module).TYPE)
    return {one.name: one for one in found}


BUILT_IN_TIERS: Final[Mapping[str, TierType]] = _declared()
"""The types of the tiers in this distribution."""

BUILT_IN: Final[Mapping[Group, Mapping[str, str]]] = {
    "tiers": {name: one.make for name, one in BUILT_IN_TIERS.items()},
    "policies": {
        "prioritized-lru": "kvladder.policy.eviction:PrioritizedLRU",
        "adaptive": "kvladder.policy.adaptive:Adaptive",
    },
    "codecs": {
        "checksum": "kvladder.tiers.codecs.base:ChecksumCodec",
        "zstd": "kvladder.tiers.codecs.zstd:ZstdCodec",
        "fp8": "kvladder.tiers.codecs.fp8:Fp8Codec",
        "aes-gcm": "kvladder.tiers.codecs.aesgcm:AesGcmCodec",
    },
    "handlers": {
        "kv": "kvladder.gpu.sizing.groups:Layer",
        "state": "kvladder.gpu.sizing.handlers:State",
        "convolution": "kvladder.gpu.sizing.handlers:ConvState",
    },
}
"""Kvladder's own classes, found whether it is installed or run from its source tree."""

_EXTRAS: Final = {"fp8": "torch", "aes-gcm": "encryption"}
"""Extras that install the libraries of built-in codecs; a built-in tier's type names its own."""

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
        The name is already taken.
    """
    claimed = name in _found(group)
    if claimed or _registered.setdefault((group, name), thing) is not thing:
        what = f"{_KINDS[group][0]} {name!r} {'exists' if claimed else 'is registered'} already"
        raise ConfigError(what, hint="choose another name")


def names(group: Group) -> list[str]:
    """Return every name of a group, sorted; imports nothing."""
    return sorted({*_found(group), *(name for of, name in _registered if of == group)})


def load(group: Group, name: str, *, path: str = "") -> Any:
    """Return the class with this name; imported on first use.

    Parameters
    ----------
    path:
        The place of the name in the configuration, for errors.

    Raises
    ------
    ConfigError
        The name is unknown (the nearest is suggested), two packages claim it, its module cannot
        be imported, or it does not name a class of its kind.
    """
    thing: Any = _registered.get((group, name)) or _imported(group, name, path)
    if group == "tiers" and isinstance(thing, TierType):
        thing = _loaded(EntryPoint(name, thing.make, "kvladder.tiers"), thing, path)
    _, base = _KINDS[group]
    # the host level's name is listed, but the stack builds the level itself
    is_one = isinstance(thing, type) and issubclass(thing, base)
    if not is_one and (group, name) != HOST:
        raise ConfigError(f"{name!r}: expected a class derived from {base.__name__}", path=path)
    return cast("Any", thing)


def _imported(group: Group, name: str, path: str) -> Any:
    what = f"{_KINDS[group][0]} {name!r}"
    claims = _found(group).get(name)
    if claims is None:
        hint = nearest(name, names(group))
        raise ConfigError(f"unknown {what}", path=path, hint=hint)
    if len(claims) > 1:
        owners = ", ".join(map(_owner, claims))
        several = f"{what} comes from several packages: {owners}"
        raise ConfigError(several, path=path, hint="uninstall all but one")
    declared = BUILT_IN_TIERS.get(name) if group == "tiers" else None
    return _loaded(claims[0], declared, path, what)


def _loaded(point: EntryPoint, declared: TierType | None, path: str, what: str = "") -> Any:
    """Import the object that an entry point names, for the type that its tier has declared."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        hint = f"{_owner(point)} declares it as {point.value}"
        extra = _EXTRAS.get(point.name) if point.value == BUILT_IN["codecs"].get(point.name) else ""
        missing = declared.hint if declared else f"install kvladder[{extra}]" if extra else ""
        if missing and isinstance(error, ImportError):
            hint = missing
        what = what or f"tier type {point.name!r}"
        raise ConfigError(f"{what} cannot be loaded: {error}", path=path, hint=hint) from error


def tier_type(name: str) -> TierType | None:
    """Return what the tier of this name declares; None if it declares nothing, or is unknown."""
    if name in BUILT_IN_TIERS:
        return BUILT_IN_TIERS[name]
    thing: Any = _registered.get(("tiers", name))
    claims = _found("tiers").get(name, [])
    if thing is None and len(claims) == 1:
        with suppress(ImportError, AttributeError):  # ``load`` reports it
            thing = claims[0].load()
    return thing if isinstance(thing, TierType) else None


@cache
def _found(group: Group) -> Mapping[str, list[EntryPoint]]:
    """Return the entry points that claim each name: more than one is a conflict."""
    where = f"kvladder.{group}"
    found = {name: [EntryPoint(name, value, where)] for name, value in BUILT_IN[group].items()}
    for point in entry_points(group=where):
        claims = found.setdefault(point.name, [])
        # metadata of an older kvladder may list classes that have moved
        if _owner(point) != "kvladder" and point.value not in {claim.value for claim in claims}:
            claims.append(point)
    return {name: claims for name, claims in found.items() if claims}


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "kvladder"


_OWN = {1: "checksum", 2: "zstd", 4: "aes-gcm"}
"""Built-in codecs by id; for these ids, no other package's module is imported."""


def finder(layout: Layout, namespace: Namespace) -> Callable[[int], Codec | None]:
    """Return a function that finds a codec by id, for blocks that other caches stored.

    Codecs are made with their default options. Codecs that are lossy, or cannot be used here, are
    not found.
    """
    found: dict[int, Codec | None] = {}
    lock = threading.Lock()

    def find(wanted: int) -> Codec | None:
        with lock:  # a second caller waits for the import
            if wanted not in found:
                found[wanted] = _made(wanted, layout, namespace)
            return found[wanted]

    return find


def _made(wanted: int, layout: Layout, namespace: Namespace) -> Codec | None:
    for name in [_OWN[wanted]] if wanted in _OWN else names("codecs"):
        with suppress(Exception):  # not loadable, without its key or settings, or broken
            make = load("codecs", name)
            if make.id == wanted and not make.lossy:
                codec: Codec = make() if make.Options is None else make(make.Options())
                codec.open(layout, namespace)
                return codec
    return None
