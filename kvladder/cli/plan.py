"""``kvladder plan``: what sizes of memory and disk would bring on a trace, and cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvladder.cli.output import Result
from kvladder.cli.tracing import (
    ProgressLine,
    about,
    aligned,
    assumed,
    benched,
    block_bytes_of,
    by_level,
    drawable,
    opened,
    positive,
    seconds_of,
    shown,
    size_of,
    summary_of,
)
from kvladder.config import registry
from kvladder.config.stack import StackConfig, load_config
from kvladder.errors import ConfigError
from kvladder.replay.bounds import LruCurve, lru_hits
from kvladder.replay.engine import ReplaySettings, replay, with_policy
from kvladder.replay.sizes import (
    Hits,
    PlanSettings,
    Prices,
    SizePlan,
    SizePoint,
    as_data,
    interpolated,
    knee,
)
from kvladder.report.charts import plan_page
from kvladder.report.page import write
from kvladder.runtime import SystemClock
from kvladder.schema import is_mapping, load_yaml
from kvladder.traces.reader import Trace
from kvladder.units import Size, counted

LRU: Final = "lru"
MEASURED: Final = 8
"""Sizes at which a policy is simulated."""
BUDGET_S: Final = 120.0
PRICES: Final = ("memory", "disk", "gpu")
MEDIA: Final = ("memory", "disk")


def plan(
    trace: Path,
    *,
    model: Path | None = None,
    dtype: str | None = None,
    block_bytes: str | None = None,
    block_tokens: int | None = None,
    prefill: float | None = None,
    disk_read: str | None = None,
    prices: str | None = None,
    most: str | None = None,
    policy: str = LRU,
    budget_s: float = BUDGET_S,
    report: Path | None = None,
    check: bool = False,
) -> Result:
    """Print what sizes of memory and disk would bring on a trace, and what to buy.

    Prints the hits, seconds of computing saved and costs by the size of memory, and of a disk below
    little memory; the knee of both curves; and, if all prices and --prefill are given, the split
    between memory and disk with most money left. Exits with 2 if an argument or a file is wrong.

    Parameters
    ----------
    trace:
        a trace in Mooncake's format, plain or gzip, such as a recording (record: in a stack)
    model:
        a model's config.json (or its folder), for the size of a block
    dtype:
        data type of the KV cache, such as fp8 (default: the model's)
    block_bytes:
        size of one of the trace's blocks in place of --model, for example 64 MiB
    block_tokens:
        tokens per block of the trace (default: found out from the lengths of prompts)
    prefill:
        prompt tokens that the engine computes per second, for seconds saved
    disk_read:
        bytes that the disk reads per second, for example 6GB, or a file that bench --out wrote
        (default: no time)
    prices:
        a GiB of memory and of disk for a month, and an hour of the device, in one currency:
        memory=3,disk=0.1,gpu=2.5 or a YAML file with these keys
    most:
        largest sizes, for example memory=512GiB,disk=8TiB (default: room for all blocks)
    policy:
        lru, computed for all sizes in one pass, or the name of an eviction policy, replayed at
        some sizes (default %(default)s)
    budget_s:
        stop replaying further sizes of a policy after N seconds (default %(default)s)
    report:
        write a page with plots to this file; needs kvladder[report]
    check:
        replay the stack that the plan ends with, and print its hits beside the planned ones
    """
    drawable(report)
    settings = _settings(prefill, disk_read, prices, most)
    positive(budget_s, "--budget")
    found = opened(trace, block_tokens)
    size, how = block_bytes_of(found, model, dtype, block_bytes)
    settings = replace(settings, block_bytes=size)
    SizePlan(found, float, settings)  # sizes are checked before anything takes long
    planned = _planned(found, policy, settings, budget_s)
    checked = planned.replayed() if check else None
    if report is not None:
        write(report, plan_page(planned.data(checked), planned.promise(checked)))
    data = planned.data(checked)
    return Result(planned.printed(how, checked), data)


def _planned(trace: Trace, policy: str, settings: PlanSettings, budget_s: float) -> _Planned:
    """Return the plan by the hits of a policy."""
    hits, method = _hits(trace, policy, settings, budget_s)
    return _Planned(trace, SizePlan(trace, hits, settings), policy, method)


def _settings(
    prefill: float | None, disk_read: str | None, prices: str | None, most: str | None
) -> PlanSettings:
    """Return what the options say; the size of a block is still missing."""
    disk = registry.load("tiers", "files")
    sizes = by_level(most, "--most", MEDIA, lambda text: size_of(text, "--most"))
    return PlanSettings(
        1,
        seconds_of(prefill),
        None if disk_read is None else _read_of(disk_read),
        _prices(prices),
        disk_overhead=disk.overhead_bytes,
        batch=disk.batch_max,
        memory_max=sizes.get("memory"),
        disk_max=sizes.get("disk"),
    )


def _read_of(text: str) -> float:
    """Return the bytes that a disk reads per second, given or of a bench's file."""
    if text.endswith(".json"):
        return benched(Path(text), "--disk-read").read
    return float(size_of(text.removesuffix("/s"), "--disk-read"))


def _prices(text: str | None) -> Prices:
    """Return the prices that an option gives, or a file that it names."""
    found: dict[str, float | None] = dict.fromkeys(PRICES)
    if text is not None and "=" in text:
        found |= by_level(text, "--prices", PRICES, _price)
    elif text is not None:
        raw: Any = load_yaml(Path(text))
        if not is_mapping(raw):
            raise ConfigError("not a mapping", path=text, hint=f"expected {', '.join(PRICES)}")
        for name, value in raw.items():
            if name not in PRICES or isinstance(value, bool) or not isinstance(value, int | float):
                what = "unknown key" if name not in PRICES else f"{value!r}"
                hint = f"expected numbers for {', '.join(PRICES)}"
                raise ConfigError(what, path=f"{text}: {name}", hint=hint)
            found[name] = positive(float(value), f"{text}: {name}", zero=True)
    return Prices(**found)


def _price(text: str) -> float | None:
    try:
        return positive(float(text), "--prices", zero=True)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(repr(text), path="--prices", hint="expected a number") from error


def _hits(trace: Trace, policy: str, settings: PlanSettings, budget_s: float) -> tuple[Hits, str]:
    """Return the hits by size, and how they were found."""
    if policy == LRU:
        curve: LruCurve = lru_hits(trace)
        exact = "exact" if curve.rate == 1 else f"of {curve.rate:.1%} of the blocks, by hash"
        return curve.hits, f"LRU, {exact}, from stack distances"
    registry.load("policies", policy, path="--policy")
    sizes = SizePlan(trace, float, settings).sizes(max(settings.batch, trace.unique))
    last = len(sizes) - 1
    wanted = [
        sizes[at] for at in sorted({round(last * n / (MEASURED - 1)) for n in range(MEASURED)})
    ]
    now = SystemClock().now
    begun_s, progress = now(), ProgressLine(f"replay {policy}")
    measured: list[tuple[int, float]] = []
    for number, blocks in enumerate(wanted):
        if measured and now() - begun_s > budget_s:
            break
        progress(number, len(wanted))
        result = replay(
            trace, _stack(blocks, 0, settings, policy), ReplaySettings(settings.block_bytes)
        )
        measured.append((blocks, float(sum(result.hits.values()))))
    left = len(wanted) - len(measured)
    note = f", {left} larger ones left out after {budget_s:g} s" if left else ""
    return interpolated(measured), f"{policy}, replayed at {counted(len(measured), 'size')}{note}"


def _stack(memory: int, disk: int, settings: PlanSettings, policy: str) -> StackConfig:
    """Return a stack of these sizes in blocks."""
    given: dict[str, Any] = {"host": memory * settings.memory_block}
    if disk:  # the short form has ``when: commit``
        given |= {"files": "/planned", "capacity": disk * settings.disk_block}
    config = load_config(given, env={})
    return config if policy == LRU else with_policy(config, policy)


def _report(sizes: SizePlan) -> list[str]:
    """Return the two curves as tables, and their knees."""
    settings, lines = sizes.settings, list[str]()
    for of_disk, title in ((False, "memory alone"), (True, "a disk below little memory")):
        points = sizes.disk_curve() if of_disk else sizes.curve()
        if not points:
            continue
        best = knee(points, of_disk=of_disk)
        rows = [[title, "blocks", "hits", "s saved", "cost/month", "left/month", ""]]
        for one in points:
            blocks = one.disk if of_disk else one.memory
            room = blocks * (settings.disk_block if of_disk else settings.memory_block)
            mark = "knee" if one == best else ""
            rows.append([Size(room).about(), str(blocks), *_cells(sizes, one), mark])
        lines += ["", *aligned(rows)]
    return lines


def _cells(sizes: SizePlan, one: SizePoint) -> list[str]:
    numbers = (one.saved_s, one.cost, one.net)
    told = ["-" if number is None else f"{number:,.0f}" for number in numbers]
    return [shown((one.memory_hits + one.disk_hits) / sizes.asked), *told]


class _Planned(NamedTuple):
    """A plan with the trace and the policy that it is for."""

    trace: Trace
    sizes: SizePlan
    policy: str
    method: str

    def printed(self, how: str, checked: dict[str, Any] | None) -> str:
        """Return the whole text; ``how`` tells where the size of a block is from."""
        settings = self.sizes.settings
        lines = assumed(settings.token_s, settings.block_bytes, how, {})
        lines = [summary_of(self.trace), *lines, f"hits: {self.method}"]
        return "\n".join([*lines, *_report(self.sizes), *self.promise(checked)])

    @property
    def chosen(self) -> SizePoint | None:
        """The split with most money left; without all prices the knee of memory alone."""
        return self.sizes.best() or knee(self.sizes.curve())

    def replayed(self) -> dict[str, Any] | None:
        """Return the hits of a replay of the chosen sizes."""
        point, settings = self.chosen, self.sizes.settings
        if point is None:
            return None
        stack = _stack(point.memory, point.disk, settings, self.policy)
        progress = ProgressLine("replay the plan")
        result = replay(self.trace, stack, ReplaySettings(settings.block_bytes), progress=progress)
        found = {"ratio": result.ratio, "hits": dict(result.hits), "policy": result.policy}
        written = [result.written_bytes[level.name] for level in stack.levels]
        return {**found, "written_bytes": sum(written)}

    def promise(self, checked: dict[str, Any] | None) -> list[str]:
        """Return what to buy, what it brings, and the stack that does it."""
        chosen, settings = self.chosen, self.sizes.settings
        if chosen is None:
            return ["", "no size brings more than the smallest: no plan"]
        is_best = chosen.net is not None
        why = "most money left" if is_best else "the knee of memory alone; a split needs prices"
        given = {"--prefill": settings.token_s, "--prices": settings.prices.whole}
        missing = [flag for flag, value in given.items() if value is None]
        if missing:
            why += f" (not given: {', '.join(missing)})"
        memory = Size(chosen.memory * settings.memory_block).above()
        lines = ["", f"plan: {why}", f"arena: {{size: {memory}}}", "tiers:", "  - {type: host}"]
        if chosen.disk:
            room = Size(chosen.disk * settings.disk_block).above()
            lines.append(f"  - {{type: files, path: DIRECTORY, capacity: {room}, when: commit}}")
        ratio = (chosen.memory_hits + chosen.disk_hits) / self.sizes.asked
        promise = f"hits {shown(ratio)}"
        if chosen.net is not None:
            promise += f", {chosen.value:,.0f} saved and {chosen.cost:,.0f} paid a month"
        if checked is not None:
            promise += f"; replayed: {shown(checked['ratio'])} with {checked['policy']}"
            if chosen.disk:
                promise += f", {Size(checked['written_bytes']).about()} written to the disk"
        return [*lines, promise]

    def data(self, checked: dict[str, Any] | None) -> dict[str, Any]:
        """Return all numbers as plain data."""
        sizes = self.sizes
        memory, disk = sizes.curve(), sizes.disk_curve()
        prices = sizes.settings.prices
        return {
            "trace": about(self.trace),
            "policy": self.policy,
            "method": self.method,
            "block_bytes": sizes.settings.block_bytes,
            "token_s": sizes.settings.token_s,
            "prices": {name: getattr(prices, name) for name in PRICES},
            "memory": [as_data(sizes, one) for one in memory],
            "disk": [as_data(sizes, one) for one in disk],
            "memory_knee": as_data(sizes, knee(memory)),
            "disk_knee": as_data(sizes, knee(disk, of_disk=True)),
            "best": as_data(sizes, sizes.best()),
            "replayed": checked,
        }
