"""``kvladder bench``: measures a disk, a Redis, a store or a server, beside its own limit."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from yaml import YAMLError

from kvladder.cli.output import EXIT_SIGNAL, Failed, Result
from kvladder.cli.tracing import ProgressLine, aligned, drawable, positive, seconds_of, size_of
from kvladder.errors import ConfigError
from kvladder.measuring.blocks import KIB, MIB
from kvladder.measuring.run import BenchSettings, Case, Measured, measure
from kvladder.measuring.targets import MediumTarget, target
from kvladder.measuring.worth import Worth, worth
from kvladder.planning.models import bytes_per_token
from kvladder.report.charts import bench_page
from kvladder.report.page import write
from kvladder.schema import is_list, is_mapping, parse_yaml
from kvladder.units import Size

SIZES: Final = (64 * KIB, MIB, 4 * MIB)
DEPTHS: Final = "1,4,16,64"
DEPTH_MAX: Final = 1024
BLOCK_TOKENS: Final = 16
BUDGET_S: Final = 30.0
BYTES: Final = "8 GiB"
WAYS: Final = ("write", "read")


def bench(
    medium: str,
    *,
    settings: str | None = None,
    codec: str | None = None,
    sizes: str | None = None,
    depths: str = DEPTHS,
    model: Path | None = None,
    dtype: str | None = None,
    block_bytes: str | None = None,
    block_tokens: int = BLOCK_TOKENS,
    prefill: float | None = None,
    budget_s: float = BUDGET_S,
    bytes_: str = BYTES,
    out: Path | None = None,
    report: Path | None = None,
    progress: bool = False,
) -> Result:
    """Measure a disk, a Redis, an object store or a cache server, beside the medium's own limit.

    Writes blocks of its own, reads them, and removes them, also after Ctrl-C. Exits with 2 if an
    argument is wrong or the medium cannot be used.

    Parameters
    ----------
    medium:
        a directory, redis://host, s3://bucket/prefix, http://host/bucket, or a server's host:port
    settings:
        further settings of the tier as in a stack, for example {keys: client.keys}
    codec:
        store through these codecs, written as in a stack: zstd, {name: zstd, level: 3}, or a list
    sizes:
        sizes of blocks with commas between (default: the model's block, else 64KiB,1MiB,4MiB)
    depths:
        numbers of blocks in one call with commas between (default %(default)s)
    model:
        a model's config.json (or its folder), for the size of a block
    dtype:
        data type of the KV cache, such as fp8 (default: the model's)
    block_bytes:
        size of a block in place of --model, for example 2 MiB
    block_tokens:
        tokens per block (default %(default)s)
    prefill:
        prompt tokens that the engine computes per second; tells when loading is worth it
    budget_s:
        stop measuring after N seconds (default %(default)s)
    bytes_:
        write at most this much in all (default %(default)s)
    out:
        write the results as JSON to this file, for --speeds of replay and --disk-read of plan
    report:
        write a page with plots to this file; needs kvladder[report]
    progress:
        print progress on standard error even if that is no terminal
    """
    drawable(report)
    token_s = seconds_of(prefill)
    own = _own_block(model, dtype, block_bytes, block_tokens)
    found = target(medium, _mapping(settings))
    wanted = _wanted(own, sizes, depths, block_tokens, budget_s, bytes_, codec)
    done = _run(found, wanted, ProgressLine(f"bench {found.shown}", always=progress))
    is_worth = None if own is None or token_s is None else _worth(done, own, block_tokens, token_s)
    data = _data(found, wanted, done, is_worth)
    if report is not None:
        write(report, bench_page(data, [*_head(found, done), _line(is_worth)], _rows(done.cases)))
    if out is not None:
        _write(out, data)
    lines = [*_head(found, done), "", *aligned(_rows(done.cases)), "", _line(is_worth)]
    return Result("\n".join(lines), data)


def _wanted(
    own: int | None,
    sizes: str | None,
    depths: str,
    block_tokens: int,
    budget_s: float,
    most: str,
    codec: str | None,
) -> BenchSettings:
    """Return what the options say."""
    wanted = BenchSettings(
        _sizes(sizes, own),
        _depths(depths),
        block_tokens,
        positive(budget_s, "--budget") or BUDGET_S,
        int(size_of(most, "--bytes")),
        () if codec is None else _codecs(codec),
    )
    least = 2 * min(wanted.sizes) * min(wanted.depths)
    if wanted.bytes_max < least:
        hint = f"expected at least {Size(least).about()}"
        raise ConfigError(most, path="--bytes", hint=hint)
    return wanted


def _write(out: Path, data: Mapping[str, Any]) -> None:
    try:
        out.write_text(f"{json.dumps(data, indent=2)}\n")
    except OSError as error:
        hint = "expected a file that this user may write"
        raise ConfigError(f"{out}: {error.strerror}", path="--out", hint=hint) from error


def _run(found: MediumTarget, wanted: BenchSettings, progress: ProgressLine) -> Measured:
    """Measure in an event loop; SIGINT and SIGTERM cancel it, so that it removes what it wrote."""
    came: list[int] = []

    async def measuring() -> Measured:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            came.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(RuntimeError, ValueError):  # only the main thread gets signals
                loop.add_signal_handler(number, stop, number)
        return await measure(found, wanted, progress)

    try:
        done = asyncio.run(measuring())
    except asyncio.CancelledError as error:
        code = EXIT_SIGNAL + (came[0] if came else signal.SIGINT)
        raise Failed("interrupted; what it wrote is removed", code) from error
    if not done.cases:
        raise ConfigError(f"{wanted.budget_s:g} s are too few to measure", path="--budget")
    return done


def _mapping(text: str | None) -> Mapping[str, Any]:
    """Return the settings of an option written as YAML."""
    hint = "expected a mapping such as {threads: 16}"
    try:
        found: object = dict[str, Any]() if text is None else parse_yaml(text)
    except YAMLError as error:
        raise ConfigError(repr(text), path="--settings", hint=hint) from error
    if not is_mapping(found):
        raise ConfigError(repr(text), path="--settings", hint=hint)
    return found


def _codecs(text: str) -> object:
    try:
        found = parse_yaml(text)
    except YAMLError as error:
        hint = "expected a name, {name: ...} or a list of them"
        raise ConfigError(repr(text), path="--codec", hint=hint) from error
    entries: list[Any] = list(found) if is_list(found) else [found]
    return entries if "checksum" in entries else [*entries, "checksum"]


def _own_block(
    model: Path | None, dtype: str | None, given: str | None, block_tokens: int
) -> int | None:
    """Return the bytes of the model's block; None if no option tells."""
    if block_tokens < 1:
        hint = "expected 1 or more"
        raise ConfigError(str(block_tokens), path="--block-tokens", hint=hint)
    if given is not None and model is not None:
        hint = "leave out one of the two"
        raise ConfigError("given with --model", path="--block-bytes", hint=hint)
    if given is not None:
        return int(size_of(given, "--block-bytes"))
    return None if model is None else block_tokens * bytes_per_token(model, dtype=dtype)


def _sizes(text: str | None, own: int | None) -> list[int]:
    if text is None:
        return [own] if own is not None else list(SIZES)
    found = {int(size_of(part.strip(), "--sizes")) for part in text.split(",")}
    if own is not None:
        found.add(own)
    return sorted(found)


def _depths(text: str) -> list[int]:
    hint = f"expected numbers from 1 to {DEPTH_MAX} with commas between"
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(repr(text), path="--depths", hint=hint) from error
    if found[0] < 1 or found[-1] > DEPTH_MAX:
        raise ConfigError(repr(text), path="--depths", hint=hint)
    return found


def _worth(done: Measured, own: int, block_tokens: int, token_s: float) -> Worth | None:
    """Return from when on the model's blocks are worth loading; None if none was measured."""
    took = {one.blocks: one.took["read"].median_s for one in done.cases if one.block_bytes == own}
    return worth(block_tokens, token_s, took) if took else None


def _line(found: Worth | None) -> str:
    if found is None:
        return "for the tokens from which on it is worth it: give --model and --prefill"
    compared = f"loading {1 / found.load_token_s:,.0f} tokens/s"
    compared += f", computing {1 / found.compute_token_s:,.0f} tokens/s"
    if found.tokens is None:
        return f"not worth it at any length: {compared}"
    return f"worth it from {found.tokens} tokens on: {compared}"


def _head(found: MediumTarget, done: Measured) -> list[str]:
    facts = ", ".join(f"{name} {value}" for name, value in done.facts.items())
    lines = [f"{found.shown}: {found.settings['type']}{f', {facts}' if facts else ''}"]
    lines.append(f"limit: {done.limit}, the same bytes in turns; GB/s of the median round")
    if done.skipped:
        lines.append(f"left out for lack of time or bytes: {done.skipped} cases")
    return lines


def _rows(cases: Sequence[Case]) -> list[list[str]]:
    head = ["block", "blocks", "rounds"]
    for way in WAYS:
        head += [way, "limit", "of limit", "ms"]
    rows = [head]
    for one in cases:
        row = [Size(one.block_bytes).about(), str(one.blocks), str(one.rounds)]
        for way in WAYS:
            ours, limit = one.per_s(way), one.per_s(f"limit {way}")
            row += [f"{ours / 1e9:.3f}", f"{limit / 1e9:.3f}", f"{ours / limit:.2f}"]
            row.append(f"{one.took[way].median_s * 1e3:.2f}")
        rows.append(row)
    return rows


def _data(
    found: MediumTarget, wanted: BenchSettings, done: Measured, is_worth: Worth | None
) -> dict[str, Any]:
    """Return all numbers as plain data."""
    return {
        "medium": found.shown,
        "type": found.settings["type"],
        "limit": done.limit,
        "facts": dict(done.facts),
        "block_tokens": wanted.block_tokens,
        "cases": [
            {
                "block_bytes": one.block_bytes,
                "blocks": one.blocks,
                "rounds": one.rounds,
                "seconds": {what: spread._asdict() for what, spread in one.took.items()},
            }
            for one in done.cases
        ],
        "speeds": _speeds(done.cases),
        "worth": None if is_worth is None else is_worth._asdict(),
        "skipped": done.skipped,
    }


def _speeds(cases: Sequence[Case]) -> dict[str, float]:
    """Return the best speeds, and the seconds that the smallest read takes beside its bytes."""
    read = max(one.per_s("read") for one in cases)
    least = min(cases, key=lambda one: one.block_bytes * one.blocks)
    beside_s = least.took["read"].median_s - least.block_bytes * least.blocks / read
    return {
        "read": read,
        "write": max(one.per_s("write") for one in cases),
        "latency_s": max(0.0, beside_s),
    }
