"""``kvladder evict``: evicts blocks of a running cache by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any, Final

from kvladder.cli.output import Result
from kvladder.cli.running.caches import RunningCache, caches
from kvladder.cli.running.inspect import require_key
from kvladder.errors import ConfigError
from kvladder.runtime import SystemClock
from kvladder.units import Portion, counted

KEYS_MAX: Final = 128
STEP: Final = 1024
POLL_S: Final = 0.05
WAIT_S: Final = 60.0


def evict(
    target: str,
    keys: tuple[str, ...] = (),
    *,
    level: str,
    amount: str | None = None,
    wait_s: float = WAIT_S,
    token_file: Path | None = None,
) -> Result:
    """Evict blocks of a running cache from one level: by key, or an amount of the next ones.

    Blocks that a request holds stay. What only host memory has is written to a level below first.
    A level below host only forgets its blocks; they are not written further down.

    Parameters
    ----------
    target:
        ask the cache of this control socket, http://HOST:PORT, or YAML file
    keys:
        evict the blocks with these keys, 64 hexadecimal digits each
    level:
        evict from the level of this name
    amount:
        evict so many of the blocks that would be next: 100, 10GiB or 25%
    wait_s:
        wait at most N seconds for blocks to be written below (default %(default)g)
    token_file:
        read the token that changes at a port need (http.token) from this file

    Raises
    ------
    ConfigError
        An argument is wrong, or no cache answers, or blocks still wait after that time.
    """
    if bool(keys) == (amount is not None):
        hint = "expected either keys or --amount"
        raise ConfigError("which blocks?", path="evict", hint=hint)
    for key in keys:
        require_key(key)
    if not 0 <= wait_s <= 86400:
        raise ConfigError(f"{wait_s:g}", path="--wait", hint="expected 0 to 86400 seconds")
    data: dict[str, dict[str, int]] = {}
    for cache in caches(target, token_file=token_file):
        if amount is None:
            data[cache.name] = _by_key(cache, level, list(keys), wait_s)
        else:
            data[cache.name] = _next(cache, level, _blocks(cache, level, amount), wait_s)
    lines = [f"{name}: {_told(level, done)}" for name, done in data.items()]
    return Result("\n".join(lines), data)


def _told(level: str, done: dict[str, int]) -> str:
    parts = [f"{counted(done['evicted'], 'block')} evicted from {level}"]
    words = {
        "held": "stay since requests hold them",
        "missing": "were not there",
        "waiting": "still wait to be written below",
    }
    parts += [f"{done[name]} {text}" for name, text in words.items() if done[name]]
    return ", ".join(parts)


def _blocks(cache: RunningCache, level: str, amount: str) -> int:
    """Return a number of blocks from a number, a size, or a percentage of the level's blocks."""
    hint = "expected a number of blocks, a size such as 10GiB, or a percentage such as 25%"
    if amount.strip().isdigit() and int(amount):
        return int(amount)
    status = cache.status()
    there = status["stats"].get(level, {}).get("blocks")
    if there is None:
        known = ", ".join(one["name"] for one in status["levels"])
        raise ConfigError(repr(level), path="--level", hint=f"expected one of {known}")
    try:
        portion = Portion.parse(amount)
    except ValueError as error:
        raise ConfigError(repr(amount), path="--amount", hint=hint) from error
    return portion.of(there, status["block_bytes"]) if there else 0


def _by_key(cache: RunningCache, level: str, keys: list[str], wait_s: float) -> dict[str, int]:
    """Evict keys, and those again that wait for a queue."""
    total: Counter[str] = Counter(evicted=0, held=0, missing=0, waiting=0)
    for start in range(0, len(keys), KEYS_MAX):
        part = keys[start : start + KEYS_MAX]
        limit_s = SystemClock().now() + wait_s
        done = cache.ask("POST", "/evict", {"level": level, "keys": part})
        while done["waiting"] and SystemClock().now() < limit_s:
            Event().wait(POLL_S)
            again = cache.ask("POST", "/evict", {"level": level, "keys": part})
            done["evicted"] += again["evicted"]
            done["waiting"], done["held"] = again["waiting"], again["held"]
        total.update(done)
    return dict(total)


def _next(cache: RunningCache, level: str, count: int, wait_s: float) -> dict[str, int]:
    """Evict the next blocks, in steps, as long as there are some that may go."""
    total: dict[str, int] = dict.fromkeys(("evicted", "held", "missing", "waiting"), 0)
    limit_s = SystemClock().now() + wait_s
    while total["evicted"] < count:
        body: dict[str, Any] = {"level": level, "count": min(STEP, count - total["evicted"])}
        done = cache.ask("POST", "/evict", body)
        total["evicted"] += done["evicted"]
        total["held"], total["waiting"] = done["held"], done["waiting"]
        if done["evicted"]:
            continue
        if not done["waiting"] or SystemClock().now() >= limit_s:
            break
        Event().wait(POLL_S)
    else:
        total["held"] = total["waiting"] = 0  # others went in their place
    return total
