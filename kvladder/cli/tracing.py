"""What the commands about traces share: options, tables, and progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeVar

from kvladder.errors import ConfigError
from kvladder.planning.models import bytes_per_token
from kvladder.replay.medium import Speeds
from kvladder.report.page import plotly
from kvladder.runtime import SystemClock
from kvladder.traces.reader import Trace, read_trace
from kvladder.units import Size

T = TypeVar("T")
PROGRESS_S: Final = 0.5
"""Seconds between two reports of progress on a terminal."""
LOGGED_S: Final = 5.0
"""The same where standard error is a file."""
TOKENS_MAX: Final = 1 << 20
_BENCHED: Final = "expected a file that kvladder bench --out wrote"


def opened(path: Path, block_tokens: int | None) -> Trace:
    """Return the trace of a file; print its warnings on standard error."""
    if block_tokens is not None and not 1 <= block_tokens <= TOKENS_MAX:
        hint = f"expected 1 to {TOKENS_MAX}"
        raise ConfigError(str(block_tokens), path="--block-tokens", hint=hint)
    trace = read_trace(path, block_tokens=block_tokens)
    for text in trace.warnings:
        print(f"kvladder: warning: {text}", file=sys.stderr)
    return trace


def block_bytes_of(
    trace: Trace, model: Path | None, dtype: str | None, given: str | None
) -> tuple[int, str]:
    """Return the bytes of one of the trace's blocks, and how they were found."""
    if given is not None:
        if model is not None:
            hint = "leave out one of the two"
            raise ConfigError("given with --model", path="--block-bytes", hint=hint)
        return size_of(given, "--block-bytes"), "given"
    if model is None:
        hint = "expected --model (a config.json) or --block-bytes, such as 64 MiB"
        raise ConfigError("the size of a block is not known", path="--model", hint=hint)
    return trace.block_tokens * bytes_per_token(model, dtype=dtype), f"of {model}"


def size_of(text: str, flag: str) -> Size:
    """Return the size that an option gives."""
    try:
        return Size.parse(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise ConfigError(repr(text), path=flag, hint=str(error)) from error


def positive(value: float | None, flag: str, *, zero: bool = False) -> float | None:
    """Return a number that must be more than 0, or at least 0; None stays None."""
    if value is not None and not (isfinite(value) and (value > 0 or (zero and value == 0))):
        hint = "expected 0 or more" if zero else "expected a number above 0"
        raise ConfigError(str(value), path=flag, hint=hint)
    return value


def seconds_of(prefill: float | None) -> float | None:
    """Return the seconds of a token from the option ``--prefill``, tokens a second."""
    speed = positive(prefill, "--prefill")
    return None if speed is None else 1 / speed


def drawable(report: Path | None) -> None:
    """Raise ConfigError if a report is wanted and nothing can draw it, before anything is done."""
    if report is not None:
        plotly()
        if not report.absolute().parent.is_dir():
            hint = "expected a file in a directory that exists"
            raise ConfigError(f"{report}: no such directory", path="--report", hint=hint)


def by_level(
    text: str | None, flag: str, levels: Sequence[str], read: Callable[[str], T]
) -> dict[str, T]:
    """Return what an option such as ``nvme=5 GB,far=1 GB`` says of each level."""
    found: dict[str, T] = {}
    for part in text.split(",") if text else ():
        name, equals, value = (one.strip() for one in part.partition("="))
        if not equals or name not in levels:
            hint = f"expected NAME=VALUE with one of: {', '.join(levels) or 'none is below host'}"
            raise ConfigError(repr(part), path=flag, hint=hint)
        found[name] = read(value)
    return found


def speeds_of(text: str) -> Speeds:
    """Return speeds written as ``READ`` or ``READ:WRITE``, bytes a second, or of a bench's file."""
    if text.endswith(".json"):
        return benched(Path(text), "--speeds")
    read, _, write = text.partition(":")
    fast = float(size_of(read.removesuffix("/s"), "--speeds"))
    return Speeds(fast, float(size_of(write.removesuffix("/s"), "--speeds")) if write else fast)


def benched(path: Path, flag: str) -> Speeds:
    """Return the speeds in a file that ``kvladder bench --out`` wrote."""
    try:
        speeds = json.loads(path.read_text())["speeds"]
        read, write, latency_s = (float(speeds[name]) for name in ("read", "write", "latency_s"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", path=flag, hint=_BENCHED) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} has no speeds", path=flag, hint=_BENCHED) from error
    for value in (read, write):
        positive(value, flag)
    return Speeds(read, write, positive(latency_s, flag, zero=True) or 0.0)


def ratio_of(text: str) -> float:
    """Return a ratio of stored bytes to a block's bytes, above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ConfigError(repr(text), path="--ratios", hint="expected a number above 0, at most 1")
    return value


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for first, *cells in rows:
        right = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:{widths[0]}}", *right]).rstrip())
    return lines


def summary_of(trace: Trace) -> str:
    """Return one line about a trace."""
    own = f"; the engine had {trace.own} more itself" if trace.own else ""
    return (
        f"{trace.name}: {len(trace.requests)} requests in {trace.seconds:.0f} s, {trace.blocks}"
        f" blocks of {trace.block_tokens} tokens, {trace.unique} different{own}"
    )


def about(trace: Trace) -> dict[str, Any]:
    """Return the facts about a trace as plain data."""
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "blocks": trace.blocks,
        "own": trace.own,
        "unique": trace.unique,
        "block_tokens": trace.block_tokens,
        "seconds": trace.seconds,
        "overlaps": trace.overlaps,
        "warnings": list(trace.warnings),
    }


class ProgressLine:
    """Prints how far a task is, and how long the rest takes, on standard error.

    Prints nothing if standard error is no terminal, unless ``always``.
    """

    def __init__(self, what: str, *, always: bool = False) -> None:
        self._what = what
        self._now = SystemClock().now
        self._begun_s = self._said_s = self._now()
        self._is_terminal = sys.stderr.isatty()
        self._every_s = PROGRESS_S if self._is_terminal else LOGGED_S
        self._is_shown = always or self._is_terminal

    def __call__(self, done: int, total: int) -> None:
        """Take the amount done, of ``total``."""
        now = self._now()
        if not self._is_shown or (now - self._said_s < self._every_s and done < total):
            return
        self._said_s = now
        left = (now - self._begun_s) / done * (total - done) if done else 0.0
        end = "\r" if self._is_terminal and done < total else "\n"
        text = f"{self._what}: {done} of {total}, {left:.0f} s left"
        print(f"{text:<72}", file=sys.stderr, end=end, flush=True)


def shown(ratio: float) -> str:
    """Return a ratio as people read it in tables."""
    return f"{ratio:.4f}"


def assumed(
    token_s: float | None, block_bytes: int, how: str, ratios: Mapping[str, float]
) -> list[str]:
    """Return lines about what was given or assumed."""
    lines = [f"a block is {Size(block_bytes).about()} ({how})"]
    if token_s is None:
        lines.append("computing takes no time: give --prefill for seconds saved")
    lines += [f"{name}: stored bytes are {ratio:g} of a block's" for name, ratio in ratios.items()]
    return lines
