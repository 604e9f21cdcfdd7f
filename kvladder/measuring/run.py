"""Measures a medium through its tier, and beside it its own limit, within a time and some bytes.

Each block size has a namespace of its own, made of random bytes, so no block of others is ever
touched. Whatever was written is removed at the end, also after an error or a cancellation.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from kvladder.config import registry
from kvladder.config.settings import LevelConfig
from kvladder.errors import ConfigError, TierError, refusal
from kvladder.layout import Layout
from kvladder.measuring.blocks import MIB, Blocks
from kvladder.measuring.limits import CopyLimit, FileLimit, Limit, RedisLimit, StoreLimit
from kvladder.measuring.targets import MediumTarget
from kvladder.tiers.base import Tier
from kvladder.tiers.blocking import BlockingPool, SystemClock
from kvladder.tiers.codecs.pipeline import CodecPipeline, PipelineSettings
from kvladder.tiers.context import Progress, TierContext
from kvladder.units import Size

BATCH_BYTES: Final = 64 * MIB
"""Most bytes in one call."""
ROUNDS: Final = 25
CALL_S: Final = 30.0
"""Time limit of one call."""
REMOVE_S: Final = 20.0
"""Time limit for removing what was written."""
SPARE: Final = 0.9
"""Part of the free space that may be used."""
OWN: Final = ("path", "directory")
"""Facts about a directory that is removed at the end."""
INDEX_BYTES: Final = 32 * MIB
"""Room for the index and for partly filled segments of a tier of files."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure, and how much it may take."""

    sizes: Sequence[int]
    """Sizes of blocks."""
    depths: Sequence[int]
    """Numbers of blocks in one call."""
    block_tokens: int
    budget_s: float
    bytes_max: int
    """Most bytes written, by the tier and by the limit together."""
    codecs: object = ()
    element: str = ""
    row_elements: int = 0


class Spread(NamedTuple):
    """Seconds of some rounds."""

    median_s: float
    least_s: float
    most_s: float


class Case(NamedTuple):
    """The measurements of one block size and one number of blocks in a call."""

    block_bytes: int
    blocks: int
    rounds: int
    took: Mapping[str, Spread]
    """Seconds by what was done: ``write``, ``read``, ``limit write``, ``limit read``."""

    def per_s(self, what: str) -> float:
        """Return the bytes per second of the median round."""
        return self.block_bytes * self.blocks / self.took[what].median_s


class Measured(NamedTuple):
    """All cases, and what the medium says of itself."""

    cases: list[Case]
    limit: str
    """The means of the limit."""
    facts: Mapping[str, str]
    skipped: int
    """Number of cases for which time or bytes were too few."""


class _Budget:
    """The time and the bytes that are left."""

    def __init__(self, settings: BenchSettings) -> None:
        self._now = SystemClock().now
        self._end_s = self._now() + settings.budget_s
        self._left = settings.bytes_max
        self.cases = 0

    @property
    def case_s(self) -> float:
        """Seconds for the next case, if all that are left take as long."""
        return max(0.0, self._end_s - self._now()) / max(1, self.cases)

    def takes(self, size: int) -> bool:
        """Return whether a round that writes this much fits, and count it."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def now(self) -> float:
        return self._now()


class OpenMedium:
    """One block size: a tier that is open, its limit, and blocks."""

    def __init__(self, pipeline: CodecPipeline, tier: Tier, limit: Limit, blocks: Blocks) -> None:
        self._pipeline, self._tier = pipeline, tier
        self.limit, self.blocks = limit, blocks

    async def _moved(self, what: str, call: Callable[[], Any], count: int) -> float:
        began = time.perf_counter()
        async with asyncio.timeout(CALL_S):
            answers = await call()
        took = time.perf_counter() - began
        if (done := sum(map(bool, answers))) != count:
            raise TierError(f"the tier {what} {done} of {count} blocks", temporary=True)
        return took

    async def round(self, count: int) -> dict[str, float]:
        """Move the first ``count`` blocks once by each means; return the seconds."""
        blocks = self.blocks
        async with asyncio.timeout(CALL_S):
            took = {"limit write": await self.limit.write(count)}
        async with asyncio.timeout(CALL_S):
            took["limit read"] = await self.limit.read(count)
        await self._tier.remove(blocks.refs[:count])
        writes = blocks.writes()[:count]
        took["write"] = await self._moved("stored", lambda: self._pipeline.put(writes), count)
        reads = [
            self._pipeline.side.read(*ref, slot)
            for ref, slot in zip(blocks.refs[:count], blocks.slots, strict=False)
        ]
        took["read"] = await self._moved("found", lambda: self._pipeline.get(reads), count)
        return took

    def facts(self) -> Mapping[str, str]:
        """Return what the tier says of itself."""
        return {name: said for name, said in self._tier.describe().items() if name not in OWN}

    async def clean(self) -> None:
        """Remove what was written; a medium that does not answer keeps it."""
        with suppress(TierError, TimeoutError, OSError):
            async with asyncio.timeout(REMOVE_S):
                step = max(1, self._tier.batch_max)
                for start in range(0, len(self.blocks.refs), step):
                    await self._tier.remove(self.blocks.refs[start : start + step])
        with suppress(Exception):  # the limit's library has errors of its own
            async with asyncio.timeout(REMOVE_S):
                await self.limit.remove()
        await self.limit.aclose()


async def measure(target: MediumTarget, settings: BenchSettings, progress: Progress) -> Measured:
    """Measure all block sizes and depths, the smallest call first, as far as the budget reaches.

    Raises
    ------
    ConfigError
        The medium cannot be used, or has no room.
    """
    home = None if target.directory is None else _home(target.directory)
    plan = {size: _depths(size, settings, target, home) for size in settings.sizes}
    budget = _Budget(settings)
    budget.cases = total = sum(map(len, plan.values()))
    cases: list[Case] = []
    means = ""
    facts: Mapping[str, str] = {}
    try:
        for size, depths in plan.items():
            async with _session(target, settings, size, max(depths), home) as session:
                means, facts = session.limit.name, session.facts()
                for depth in depths:
                    case = await _case(session, depth, budget)
                    cases += [] if case is None else [case]
                    budget.cases -= 1
                    progress(total - budget.cases, total)
    except TimeoutError as error:
        what = f"no answer within {CALL_S:g} s"
        raise ConfigError(what, path=target.shown, hint="check that the medium works") from error
    except TierError as error:
        raise target.explained(refusal(error, required=False)) from error
    except OSError as error:
        raise ConfigError(str(error), path=target.shown) from error
    finally:
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)
    return Measured(cases, means, facts, total - len(cases))


async def _case(session: OpenMedium, depth: int, budget: _Budget) -> Case | None:
    """Measure one depth in rounds; return None if nothing is left of the budget."""
    size, began = session.blocks.size, budget.now()
    limit_s, took = budget.case_s, defaultdict[str, list[float]](list)
    written = 2 * size * depth  # by the limit and by the tier
    while limit_s and len(took["read"]) < ROUNDS and budget.takes(written):
        for what, seconds in (await session.round(depth)).items():
            took[what].append(seconds)
        if budget.now() - began >= limit_s:
            break
    rounds = len(took["read"])
    if not rounds:
        return None
    spread = {what: Spread(median(all_s), min(all_s), max(all_s)) for what, all_s in took.items()}
    return Case(size, depth, rounds, spread)


def _home(directory: Path) -> Path:
    """Return a new directory of its own in the directory to measure."""
    home = directory / f"kvladder-bench-{secrets.token_hex(6)}"
    try:
        home.mkdir(mode=0o700)
    except OSError as error:
        hint = "expected a directory that this user may write to"
        raise ConfigError(error.strerror or "", path=str(directory), hint=hint) from error
    return home


def _depths(
    size: int, settings: BenchSettings, target: MediumTarget, home: Path | None
) -> list[int]:
    """Return the numbers of blocks in one call for which the medium has room, the least first."""
    most = max(1, BATCH_BYTES // size)
    room = None
    if home is not None:
        found = os.statvfs(home)
        room = int(found.f_bavail * found.f_frsize * SPARE) - INDEX_BYTES
        most = min(most, room // (2 * size))
    depths = sorted({min(depth, most) for depth in settings.depths} - {0})
    if not depths or most < 1:
        if home is not None:
            home.rmdir()
        free, needs = Size(max(1, room or 1)).about(), Size(2 * size + INDEX_BYTES).about()
        hint = "free some space, or measure smaller blocks with --sizes"
        what = f"no room: {free} may be used, a block of {Size(size).about()} needs {needs}"
        raise ConfigError(what, path=target.shown, hint=hint)
    return depths


@asynccontextmanager
async def _session(
    target: MediumTarget, settings: BenchSettings, size: int, count: int, home: Path | None
) -> AsyncGenerator[OpenMedium]:
    """Open a tier and its limit for blocks of one size; at the end remove what they wrote."""
    unique = secrets.token_hex(8)
    layout = Layout(
        settings.block_tokens, size, {"bench": unique}, settings.element, settings.row_elements
    )
    if home is not None:
        target = _within(target, home / f"{size}")
    overhead = int(registry.load("tiers", target.settings["type"]).overhead_bytes)
    level = target.level(count * (layout.slot_bytes + overhead), settings.codecs)
    blocks = Blocks(layout, count, scratch=level.scratch_blocks(layout))
    pool, clock, tier = BlockingPool(4, "bench"), SystemClock(), level.make_tier()
    space = layout.namespace()
    pipeline = CodecPipeline(
        tier, PipelineSettings(level.make_codecs(), registry.finder(layout, space)),
        blocks.scratch, verify=not level.unchecked,
    )  # fmt: skip
    context = TierContext(
        blocks.arena, layout, space, level.capacity_blocks(layout), clock, pool.run,
        timeout_s=CALL_S, required=True,
    )  # fmt: skip
    session = None
    try:
        pipeline.open(context, pool.run)
        await tier.open(context)
        limit = _limit(target, level, tier, blocks, pool, unique)
        session = OpenMedium(pipeline, tier, limit, blocks)
        yield session
    except ConfigError as error:
        raise target.explained(error) from error
    finally:
        if session is not None:
            await session.clean()
        await tier.aclose()
        pool.close(timeout_s=5)
        blocks.close()


def _within(target: MediumTarget, directory: Path) -> MediumTarget:
    """Return the same tier in a directory of its own."""
    directory.mkdir()
    settings = {**target.settings, "path": str(directory / "tier")}
    return MediumTarget(target.shown, settings, directory)


def _limit(
    target: MediumTarget,
    level: LevelConfig,
    tier: Tier,
    blocks: Blocks,
    pool: BlockingPool,
    unique: str,
) -> Limit:
    """Return the closest plain way to the medium."""
    options = level.options
    if level.type == "files":
        assert target.directory is not None
        direct = tier.describe()["io"] == "O_DIRECT"
        path = target.directory / "raw"
        return FileLimit(path, blocks, pool.run, direct=direct, threads=options.threads)
    if level.type == "redis" and not options.cluster and not options.sentinel:
        return RedisLimit(options, f"kvladder-bench-{unique}:", blocks, pool.run)
    if level.type == "object":
        prefix = f"kvladder-bench-{unique}"
        return StoreLimit(options.url, options.split(), prefix, blocks, CALL_S)
    return CopyLimit(blocks, pool.run)
