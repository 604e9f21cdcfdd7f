"""The codecs of a level: read from a configuration, checked, and found again by their ids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from kvladder.config import registry
from kvladder.config.settings import CodecConfig
from kvladder.errors import ConfigError
from kvladder.keys import Namespace
from kvladder.layout import Layout
from kvladder.schema import Loose, convert, keys_of, require_known, shown
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.base import ChecksumCodec, Codec, Stage
from kvladder.tiers.codecs.chain import CHAIN_MAX

CHECKSUM = "checksum"


class _Named(msgspec.Struct):
    """What may stand in the list: names, and mappings with a name and settings."""

    codecs: tuple[str | dict[str, Any], ...]


def read_codecs(raw: object, tier: type[Tier], path: str, loose: Loose) -> tuple[CodecConfig, ...]:
    """The codecs that ``raw`` lists, in the order in which they are applied.

    Parameters
    ----------
    raw:
        A list of names and of mappings with a name; None takes the default: a checksum.
    tier:
        Whose level it is.
    path:
        Where the level stands.

    Raises
    ------
    ConfigError
        A codec is unknown or named twice, its settings are wrong, the tier cannot have it, or
        the order makes no sense.
    """
    if raw is None:
        return (CodecConfig(name=CHECKSUM),) if tier.checks or tier.notes else ()
    listed = convert({"codecs": raw}, _Named, path, loose=loose).codecs
    path = f"{path}.codecs"
    if len(listed) > CHAIN_MAX:
        raise ConfigError(f"{len(listed)} codecs", path=path, hint=f"at most {CHAIN_MAX}")
    found: list[CodecConfig] = []
    before: list[type[Codec]] = []
    for i, entry in enumerate(listed):
        where = f"{path}[{i}]"
        given = {"name": entry} if isinstance(entry, str) else entry
        make = _codec(given, where)
        if not tier.notes and not (tier.checks and make is ChecksumCodec):
            hint = "this tier stores blocks as they are"
            raise ConfigError(f"{make.name!r} has no effect here", path=where, hint=hint)
        _require_order(make, before, where)
        before.append(make)
        found.append(_configured(make, given, where, loose))
    return tuple(found)


def _codec(given: Mapping[str, Any], path: str) -> type[Codec]:
    name = given.get("name")
    if not isinstance(name, str):
        what = "missing" if name is None else shown("name", name)
        known = ", ".join(registry.names("codecs"))
        raise ConfigError(what, path=f"{path}.name", hint=f"expected one of: {known}")
    make: object = registry.load("codecs", name, path=path)
    if not (isinstance(make, type) and issubclass(make, Codec)):
        raise ConfigError(f"{name!r} is not a Codec", path=path)
    return make


def _require_order(make: type[Codec], before: list[type[Codec]], path: str) -> None:
    if make in before:
        raise ConfigError(f"{make.name!r} twice", path=path, hint="name it once")
    later = next((codec for codec in before if codec.stage > make.stage), None)
    if later is not None:
        raise ConfigError(
            f"{make.name!r} stands after {later.name!r}",
            path=path,
            hint=_WHY_LAST if later.stage == Stage.CHECK else _WHY_BEFORE[make.stage],
        )


_WHY_LAST = "a checksum covers what crosses the edge: it comes last"
_WHY_BEFORE = {
    Stage.REDUCE: "it has to see the numbers as the engine wrote them: it comes first",
    Stage.COMPRESS: "what is encrypted does not shrink: compression comes before",
}


def _configured(
    make: type[Codec], given: Mapping[str, Any], path: str, loose: Loose
) -> CodecConfig:
    """A codec with its settings, which stand beside its name."""
    own = keys_of(make.Options) if make.Options else []
    common = ["name", "allow_lossy"] if make.lossy else ["name"]
    require_known(given, [*common, *own], path)
    config = convert(
        {key: value for key, value in given.items() if key in common},
        CodecConfig,
        path,
        loose=loose,
        preset={"options": None},
    )
    if make.lossy and not config.allow_lossy:
        raise ConfigError(
            f"{make.name!r} changes the numbers that the engine reads",
            path=path,
            hint=f"if that is meant, write {{name: {make.name}, allow_lossy: true}}",
        )
    if make.Options is None:
        return config
    options = {key: value for key, value in given.items() if key in own}
    return msgspec.structs.replace(
        config, options=convert(options, make.Options, path, loose=loose)
    )


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
    for name in [_OWN[wanted]] if wanted in _OWN else registry.names("codecs"):
        with suppress(Exception):  # it cannot be loaded, lacks its key or its settings, or is ill
            make = _codec({"name": name}, "")
            if make.id == wanted and not make.lossy:
                options = None if make.Options is None else make.Options()
                codec = CodecConfig(name=name, options=options).make()
                codec.open(layout, namespace)
                return codec
    return None
