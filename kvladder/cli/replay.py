"""``kvladder replay``: runs a trace over a stack's levels and policies in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvladder.cli.output import Result
from kvladder.cli.tracing import (
    ProgressLine,
    about,
    aligned,
    assumed,
    block_bytes_of,
    by_level,
    drawable,
    opened,
    ratio_of,
    seconds_of,
    shown,
    speeds_of,
    summary_of,
)
from kvladder.config import registry
from kvladder.config.settings import LevelConfig
from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.replay.bounds import belady, lru_hits
from kvladder.replay.engine import ReplayResult, ReplaySettings
from kvladder.replay.engine import replay as run
from kvladder.report.charts import replay_page
from kvladder.report.page import write
from kvladder.traces.reader import Trace
from kvladder.units import Size

KNOWN_RATIOS: Final = {"fp8": 0.5}
"""Ratios of codecs that always encode to the same fraction of 16-bit elements."""


def replay(
    trace: Path,
    *,
    config: Path,
    policies: str | None = None,
    model: Path | None = None,
    dtype: str | None = None,
    block_bytes: str | None = None,
    block_tokens: int | None = None,
    prefill: float | None = None,
    speeds: str | None = None,
    ratios: str | None = None,
    report: Path | None = None,
    progress: bool = False,
) -> Result:
    """Replay a trace over the levels and policies of a stack, in virtual time.

    Prints for each policy the hits of each level, blocks and bytes written, and the seconds of
    computing that the hits save; beside them Belady's optimum for the same number of blocks, and
    the hits without any limit. The stack's media are simulated; nothing is written to them. Exits
    with 2 if an argument or a file is wrong.

    Parameters
    ----------
    trace:
        a trace in Mooncake's format, plain or gzip, such as a recording (record: in a stack)
    config:
        the stack's YAML file
    policies:
        names of eviction policies with commas between (default: the stack's own and all known)
    model:
        a model's config.json (or its folder), for the size of a block
    dtype:
        data type of the KV cache, such as fp8 (default: the model's)
    block_bytes:
        size of one of the trace's blocks in place of --model, for example 64 MiB
    block_tokens:
        tokens per block of the trace (default: found out from the lengths of prompts)
    prefill:
        prompt tokens that the engine computes per second (default: computing takes no time)
    speeds:
        bytes per second of each level's medium, NAME=READ or NAME=READ:WRITE with commas between,
        for example nvme=6GB:3GB, or a file that bench --out wrote (default: no time)
    ratios:
        stored bytes of each level by a block's bytes, NAME=RATIO (default: what its codecs always
        reach, else 1)
    report:
        write a page with plots to this file; needs kvladder[report]
    progress:
        print progress on standard error even if that is no terminal
    """
    drawable(report)
    token_s = seconds_of(prefill)
    found = opened(trace, block_tokens)
    size, how = block_bytes_of(found, model, dtype, block_bytes)
    stack = _loaded(config, found)
    settings = _settings(stack, size, token_s, speeds, ratios)
    results = [
        _replayed(found, stack, replace(settings, policy=name), progress=progress)
        for name in _chosen(policies, stack)
    ]
    bounds = _bounds(found, stack, size)
    data, rows = _data(found, results, bounds, settings), _rows(results, bounds)
    if report is not None:
        write(report, replay_page(data, rows))
    assumptions = assumed(token_s, size, how, settings.ratios)
    lines = [summary_of(found), _order(found), *assumptions, ""]
    return Result("\n".join([*lines, *aligned(rows)]), data)


def _replayed(
    trace: Trace, stack: StackConfig, settings: ReplaySettings, *, progress: bool
) -> ReplayResult:
    line = ProgressLine(f"replay {settings.policy or 'as configured'}", always=progress)
    return run(trace, stack, settings, progress=line)


def _loaded(config: Path, trace: Trace) -> StackConfig:
    """Return the stack of a file, for blocks of the trace's length."""
    stack = load_config(config, overrides={"block": {"tokens": trace.block_tokens}})
    if not stack.arena_bytes:
        hint = "expected arena: and tiers:"
        raise ConfigError("it has no tiers to replay over", path=str(config), hint=hint)
    return stack


def _settings(
    stack: StackConfig,
    block_bytes: int,
    token_s: float | None,
    speeds: str | None,
    ratios: str | None,
) -> ReplaySettings:
    """Return the settings of a replay of this stack."""
    below = [level.name for level in stack.levels]
    known = {level.name: _ratio(level) for level in stack.levels}
    return ReplaySettings(
        block_bytes,
        token_s,
        by_level(speeds, "--speeds", below, speeds_of),
        known | by_level(ratios, "--ratios", below, ratio_of),
    )


def _chosen(policies: str | None, stack: StackConfig) -> list[str | None]:
    """Return the names of the policies to replay; None is the stack's own mixture."""
    if policies is not None:
        names = [name.strip() for name in policies.split(",")]
        for name in names:
            registry.load("policies", name, path="--policies")
        return [*dict.fromkeys(names)]
    own = list(dict.fromkeys(tier.policy for tier in stack.tiers))
    first: list[str | None] = [own[0] if len(own) == 1 else None]
    return [*first, *(name for name in registry.names("policies") if name != first[0])]


def _ratio(level: LevelConfig) -> float:
    ratio = 1.0
    for codec in level.codecs:
        ratio *= KNOWN_RATIOS.get(codec.name, 1.0)
    return ratio


def _bounds(trace: Trace, stack: StackConfig, block_bytes: int) -> dict[str, float]:
    """Return the hits of Belady's optimum for all levels together, and without any limit."""
    layout = Layout(trace.block_tokens, block_bytes)
    room = stack.arena_slots(layout)
    room += sum(level.capacity_blocks(layout) for level in stack.levels)
    wanted, used = zip(*((one.wanted, one.used) for one in trace.requests), strict=True)
    best = belady(wanted, trace.unique, room, used=used)
    return {
        "Belady": best / max(1, trace.blocks),
        "no limit": lru_hits(trace).ratio(float("inf")),
    }


def _order(trace: Trace) -> str:
    how = "overlap as in the run" if trace.overlaps else "are served one after the other"
    return f"requests {how}"


def _rows(results: Sequence[ReplayResult], bounds: Mapping[str, float]) -> list[list[str]]:
    first = results[0]
    levels, below = [*first.hits], [*first.hits][1:]
    has_seconds = first.saved_s is not None
    head = ["policy", "hits", *levels, *(f"to {name}" for name in below)]
    head += [f"s by {name}" for name in levels] if has_seconds else []
    has_admission = any(any(one.refused.values()) for one in results)
    rows = [[*head, *(["left out"] if has_admission else []), "no room"]]
    for one in results:
        row = [one.policy, shown(one.ratio)]
        row += [shown(one.hits[name] / one.asked) for name in levels]
        row += [f"{Size(one.written_bytes[name]).about()}" for name in below]
        row += [f"{saved:.0f}" for saved in (one.saved_s or {}).values()]
        row += [str(sum(one.refused.values()))] if has_admission else []
        rows.append([*row, str(one.unsaved)])
    width = len(rows[0])
    for name, ratio in bounds.items():
        rows.append([name, shown(ratio), *[""] * (width - 2)])
    return rows


def _data(
    trace: Trace,
    results: Sequence[ReplayResult],
    bounds: Mapping[str, float],
    settings: ReplaySettings,
) -> dict[str, Any]:
    return {
        "trace": about(trace),
        "block_bytes": settings.block_bytes,
        "token_s": settings.token_s,
        "results": [one.as_dict() for one in results],
        "bounds": dict(bounds),
    }
