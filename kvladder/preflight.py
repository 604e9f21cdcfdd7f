"""Checks the paths, servers and keys that a configuration names, before anything is opened."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import chain
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Final, NamedTuple, TypeVar

from packaging.requirements import Requirement

from kvladder.arena import memory_available
from kvladder.config.http import HttpConfig
from kvladder.config.registry import tier_type
from kvladder.config.settings import ExportConfig, LevelConfig
from kvladder.config.stack import StackConfig
from kvladder.control.ports import BoundPort
from kvladder.control.sockets import require_name
from kvladder.errors import ConfigError, TierError, Unavailable, blames_settings, refusal
from kvladder.layout import Layout
from kvladder.schema import within
from kvladder.secrets.file import exposed
from kvladder.tiers.base import Medium
from kvladder.tiers.codecs.base import Stage
from kvladder.traces.recording import require_place
from kvladder.units import Size

logger = logging.getLogger("kvladder")
T = TypeVar("T")
START_S: Final = 5.0
"""Seconds that a start waits for the tiers' warnings about their media."""
ANY = Layout(block_tokens=16, block_bytes=4096)
"""Any layout, to open codecs with: what else a codec needs does not depend on it."""
_ROOT = Path("/")


class Findings(NamedTuple):
    """Results of a preflight check."""

    facts: dict[str, Mapping[str, str]]
    """Facts by subject: the machine's libraries, the export, or a level's name."""
    warnings: list[str]
    """Problems that should be fixed but do not prevent a start."""
    errors: list[ConfigError]
    """Reasons why a cache would not open."""


def preflight(config: StackConfig) -> Findings:
    """Check the paths, servers, keys, addresses and libraries that ``config`` names.

    Creates and changes nothing there. Takes at most the sum of the servers' ``connect_timeout``.
    """
    with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop
        return thread.submit(_preflight, config).result()


def warn_at_start(config: StackConfig) -> None:
    """Log settings that are allowed but probably not intended, before a cache opens.

    The levels' tiers are examined in parallel threads. Warnings that take longer than ``START_S``
    are not logged. A tier that fails is not mentioned here: its start reports the failure.
    """
    told: list[list[str]] = []
    looks: list[Thread] = []
    for i, level in enumerate(config.levels, start=1):
        if level.make.examine is not Medium.examine:
            told.append([])
            target = partial(_warned, level, f"tiers[{i}]", told[-1])
            looks.append(Thread(target=target, name="kvladder-look", daemon=True))
            looks[-1].start()
    end_s = monotonic() + START_S
    for look in looks:
        look.join(max(0.0, end_s - monotonic()))
    own = *config.warnings, *_exposed(config), *_short_of_memory(config)
    for text in [*own, *chain.from_iterable(told)]:
        logger.warning("%s", text)


def _warned(level: LevelConfig, where: str, warnings: list[str]) -> None:
    with suppress(Exception):  # its start reports any failure
        look = level.make_tier().examine(
            level.capacity_bytes, lambda text: warnings.append(f"{where}: {text}")
        )
        asyncio.run(asyncio.wait_for(look, START_S))


def _preflight(config: StackConfig) -> Findings:
    found = Findings({}, [], [])
    extras = {("kvladder", "")}
    if config.events.publish is not None:
        extras.add(("kvladder", "events"))
        events = {f"events.{name}": getattr(config.events, name) for name in ("publish", "replay")}
        _try(found, config, "", lambda: _bindable(events, "events", found.warnings.append))
    if config.control.path is not None:
        path = Path(config.control.path)
        _try(found, config, "", lambda: _socket(path, found.warnings.append))
    if config.http.listen is not None:
        _try(found, config, "", lambda: _http(config.http, found.warnings.append))
    if config.record.path is not None:
        record = config.record
        _try(found, config, "", lambda: require_place(record.of(0)))
    if config.export.listen is not None:
        extras.add(("kvladder", "nixl"))
        told = _try(found, config, "", lambda: _exportable(config.export, found.warnings.append))
        if told:
            found.facts["export"] = told
    for i, level in enumerate(config.levels, start=1):
        where = f"tiers[{i}]"
        declared = tier_type(level.type)
        if declared is not None and not any(map(_is_there, declared.instead)):
            extras.add((declared.package, declared.extra))
        facts = _try(found, config, where, partial(_examined, level, where, found.warnings))
        for codec in level.make_codecs():
            if codec.stage == Stage.ENCRYPT:
                extras.add(("kvladder", "encryption"))
                opening = partial(codec.open, ANY, ANY.namespace())
                _try(found, config, f"{where}.codecs", opening)
        if facts:
            found.facts[level.name] = facts
    found.warnings.extend([*_exposed(config), *_short_of_memory(config)])
    found.facts["libraries"] = dict(_libraries(extras, found.errors))
    return found


def _exposed(config: StackConfig) -> Iterator[str]:
    yield from exposed(config.http.token_file, "http.token_file")
    yield from exposed(config.forget.key_file, "forget.key_file")
    for number, level in enumerate(config.levels, start=1):
        for codec in level.make_codecs():
            if codec.stage == Stage.ENCRYPT:  # one that others wrote may have no such option
                file = getattr(getattr(codec, "options", None), "key_file", "")
                yield from exposed(file, f"tiers[{number}].codecs")


def _short_of_memory(config: StackConfig) -> Iterator[str]:
    available = 0
    with suppress(OSError):  # not every system reports it
        available = memory_available(_ROOT)
    if 0 < available < config.arena_bytes:
        yield (
            f"arena.size is {config.arena.size_bytes}, but this machine has only"
            f" {Size(available).about()} of memory available"
        )


def _try(found: Findings, config: StackConfig, where: str, look: Callable[[], T]) -> T | None:
    try:
        return look()
    except ConfigError as error:
        found.errors.append(config.source.explain(within(where, error) if where else error))
    return None


def _examined(level: LevelConfig, where: str, warnings: list[str]) -> Mapping[str, str]:
    def warn(text: str) -> None:
        warnings.append(f"{where}: {text}")

    try:
        return asyncio.run(level.make_tier().examine(level.capacity_bytes, warn))
    except TierError as error:
        if level.required:
            raise refusal(error) from error
        if isinstance(error, Unavailable):
            warn(f"{error}: the cache would start without this level, and try again")
        else:
            warn(f"the tier cannot be examined: {error}")
        return {}


def _bindable(
    addresses: Mapping[str, str | None], extra: str, warn: Callable[[str], object]
) -> None:
    """Raise ConfigError if these addresses, by setting, can never be bound; warn if in use."""
    try:
        import zmq
    except ImportError as error:
        hint, where = f"install kvladder[{extra}]", next(iter(addresses))
        raise ConfigError(f"needs pyzmq: {error}", path=where, hint=hint) from error
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        for where, address in addresses.items():
            if address is None:
                continue
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    hint = "expected an address such as 'tcp://*:5557'"
                    raise ConfigError(f"{address}: {error}", path=where, hint=hint) from error
                warn(f"{where}: {address} is already in use, perhaps by a running engine")


def _exportable(config: ExportConfig, warn: Callable[[str], object]) -> Mapping[str, str]:
    """Return the caches in its roster; raise ConfigError if it cannot serve clients."""
    _bindable({"export.listen": f"tcp://{config.listen}"}, "nixl", warn)
    from kvladder.tiers.nixl.curve import read_keys
    from kvladder.tiers.nixl.roster import listed

    try:
        public = read_keys(config.keys).public.decode()
        if not config.roster:
            return {}
        return {"announced": ", ".join(asyncio.run(listed(config.roster, [public]))) or "none"}
    except ConfigError as error:
        raise within("export", error) from error
    except TierError as error:
        warn(f"export.roster: {error}")
        return {}


def _socket(path: Path, warn: Callable[[str], object]) -> None:
    """Raise ConfigError if there can be no control socket; warn if there can be none now."""
    then = "the cache would start without a control socket, and try again"
    try:
        require_name(path)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            warn(f"control.path: {path.parent} cannot be written: {then}")
    except OSError as error:
        if blames_settings(error):
            raise ConfigError(f"{path}: {error.strerror}", path="control.path") from error
        warn(f"control.path: {path}: {error.strerror}: {then}")


def _http(config: HttpConfig, warn: Callable[[str], object]) -> None:
    """Raise ConfigError if the token cannot be read; warn if the port cannot be bound now."""
    _ = config.secret
    try:
        BoundPort(config.of(0)).close()
    except Unavailable as error:
        warn(f"http.listen: {error}: the cache would start without its HTTP port, and try again")


def _is_there(distribution: str) -> bool:
    with suppress(PackageNotFoundError):
        return bool(version(distribution))
    return False


def _libraries(
    extras: Iterable[tuple[str, str]], errors: list[ConfigError]
) -> Iterator[tuple[str, str]]:
    """Yield the versions of libraries that extras of packages require; add an error for each that
    does not fit.
    """
    by_package: dict[str, set[str]] = {}
    for package, extra in sorted(extras):
        by_package.setdefault(package, {""}).add(extra)
    for package, some in by_package.items():
        yield from _required(package, some, errors)


def _required(
    package: str, extras: Iterable[str], errors: list[ConfigError]
) -> Iterator[tuple[str, str]]:
    try:
        yield package, version(package)
        wanted = [Requirement(text) for text in requires(package) or ()]
    except PackageNotFoundError:  # it runs from its source tree
        return
    for one in wanted:
        extra = next(
            (e for e in extras if not one.marker or one.marker.evaluate({"extra": e})), None
        )
        if extra is None:
            continue
        try:
            has = version(one.name)
        except PackageNotFoundError:
            what = f"install {package}[{extra}]" if one.marker else f"reinstall {package}"
            errors.append(ConfigError("is not installed", path=one.name, hint=what))
            continue
        if not one.specifier.contains(has, prereleases=True):
            hint = f"expected {one.specifier}"
            errors.append(ConfigError(f"version {has} is installed", path=one.name, hint=hint))
        yield one.name, has
