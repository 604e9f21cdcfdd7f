"""``kvladder stats``: prints the counters of a running cache, read at its control socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event
from typing import Any, Final, TypeVar

from kvladder.cli.output import Result, Results
from kvladder.cli.running.caches import RunningCache, caches
from kvladder.control.sockets import NobodyThere, NotAnswering
from kvladder.errors import ConfigError
from kvladder.metrics import SECTIONS
from kvladder.shadow.worth import as_text
from kvladder.tiers.ladder.calling.breaker import BREAKER_STATES
from kvladder.tiers.ladder.loading.misses import NO_LEVEL
from kvladder.units import Size, counted

T = TypeVar("T")
WATCH_S_MAX: Final = 86400
YEAR_DAYS: Final = 365.25
COLUMNS: Final = (
    "blocks", "capacity", "recovered", "queries", "hits", "stored", "evicted", "removed", "purged",
    "queued", "removals",
)  # fmt: skip


def stats(target: str, *, watch_s: float | None = None) -> Result | Results:
    """Print the counters of a running cache, read at its control socket.

    With --json, prints all counters: one object with a key per socket.

    Parameters
    ----------
    target:
        ask the cache of this control socket, http://HOST:PORT, or YAML file
    watch_s:
        refresh every N seconds until interrupted

    Raises
    ------
    ConfigError
        No cache runs there, or it does not answer.
    """
    if watch_s is not None and not 0 < watch_s <= WATCH_S_MAX:
        hint = f"expected more than 0 and at most {WATCH_S_MAX} seconds"
        raise ConfigError(f"{watch_s:g}", path="--watch", hint=hint)
    return _counts(target) if watch_s is None else _watched(target, watch_s)


def _watched(target: str, every_s: float) -> Results:
    with suppress(KeyboardInterrupt):
        while True:
            text, data = _counts(target)
            yield Result(f"{text}\n", data)
            Event().wait(every_s)


def _counts(target: str) -> Result:
    found = _each(target, lambda cache: cache.status()["stats"])
    tables = ("\n".join(_table(path, counts)) for path, counts in found.items())
    return Result("\n\n".join(tables), found)


def describe(target: str) -> Result:
    """Print the resolved configuration of a running cache.

    Parameters
    ----------
    target:
        ask the cache of this control socket, http://HOST:PORT, or YAML file
    """
    found = _each(target, RunningCache.describe)
    return Result("\n\n".join(f"{path}\n{text}" for path, text in found.items()), found)


def _each(target: str, ask: Callable[[RunningCache], T]) -> dict[str, T]:
    """Return the answer of each running cache, by where it was asked.

    Sockets left behind by killed processes are ignored, unless there are no others.
    """
    found: dict[str, T] = {}
    left: NotAnswering | None = None
    for cache in caches(target):
        try:
            found[cache.name] = ask(cache)
        except NobodyThere as error:
            left = error
    if not found and left is not None:
        raise left
    return found


def _table(path: str, counts: dict[str, Any]) -> Iterator[str]:
    arena = counts["arena"]
    yield f"{path}: {arena['free']} of {counted(arena['slots'], 'slot')} free"
    levels: dict[str, dict[str, Any]] = {
        name: level for name, level in counts.items() if "blocks" in level and name not in SECTIONS
    }
    rows = [["", *COLUMNS, "breaker"]]
    for name, level in levels.items():
        rows.append([name, *(str(level.get(column, "")) for column in COLUMNS), _breakers(level)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([f"{first:{widths[0]}}", *aligned])
    yield from _misses(counts.get("misses", {}).get("blocks", {}))
    yield from _wear(levels)
    for section in ("export", "record"):
        if section in counts:
            yield f"{section}: " + ", ".join(f"{name} {n}" for name, n in counts[section].items())
    shadow = counts.get("shadow", {})
    for name in shadow.get("hit_ratio", ()):
        yield f"shadow: {as_text(name, shadow)}"


def _misses(blocks: dict[str, dict[str, int]]) -> Iterator[str]:
    """Yield a line with the blocks that were not served by reason, most of them first."""
    found = [(n, reason, level) for level, each in blocks.items() for reason, n in each.items()]
    if found:
        parts = [
            f"{n} {reason}" + (f" ({level})" if level != NO_LEVEL else "")
            for n, reason, level in sorted(found, key=lambda one: (-one[0], one[1:]))
        ]
        yield "blocks not served: " + ", ".join(parts)


def _wear(levels: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield what each level below host writes in a day, and how long its medium lasts."""
    for name, level in levels.items():
        day, endurance = level.get("written_bytes_day", 0), level.get("endurance_bytes", 0)
        if day < 1:
            continue
        line = f"{name}: {Size(int(day)).about()} written a day"
        if endurance:
            line += f", {day / endurance:.2%} of {Size(endurance).brief()}"
            line += f": lasts {endurance / day / YEAR_DAYS:.1f} years"
        yield line


def _breakers(level: dict[str, Any]) -> str:
    """Return which kinds of calls of a level fail; an empty string if it has no breakers."""
    states: dict[str, int] = level.get("breakers", {})
    shut = [f"{BREAKER_STATES[state]}: {kind}" for kind, state in states.items() if state]
    return ", ".join(shut) if shut or not states else BREAKER_STATES[0]
