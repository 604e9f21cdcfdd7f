"""Replays a trace: an engine without a model, over the levels of a configuration.

Everything that decides is real: the manager, the levels, their rules and policies, and the choice
between fetching and computing. Only the media are replaced, by tiers that take a medium's time, and
the arena has no bytes. Each request is looked up, fetched, and saved once it is computed, and then
touched, as by vLLM's connector. Requests overlap as they did in the run, if the trace tells it:
their lookups, saves and ends are in its order. Else they are served one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import msgspec

from kvladder.compose import build_stack
from kvladder.config.settings import LevelConfig
from kvladder.config.stack import StackConfig
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.manager import CacheManager, Fetch
from kvladder.policy.fetch_cost import AvoidedCompute
from kvladder.replay.loop import VirtualLoop
from kvladder.replay.medium import PacedTier, Speeds
from kvladder.replay.virtual import (
    VIEW_BYTES,
    VirtualArena,
    VirtualClock,
    VirtualPortal,
    run_inline,
)
from kvladder.tiers.codecs.pipeline import PipelineSettings
from kvladder.tiers.ladder.base_level import AccessListener
from kvladder.tiers.ladder.stack import TierStack
from kvladder.traces.reader import Trace, TraceRequest

POLL_S: Final = 0.002
"""Virtual seconds between two looks at a fetch in flight, as between an engine's steps."""
SETTLE_S: Final = 60.0
"""Longest virtual time for which writes are waited for where computing takes no time."""
REPORT_EVERY: Final = 64
"""Requests between two reports of progress."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What a trace and a stack do not tell."""

    block_bytes: int
    """Bytes of one of the trace's blocks before codecs."""
    token_s: float | None = None
    """Seconds to compute one token; None if unknown: then computing takes no time."""
    speeds: Mapping[str, Speeds] = field(default_factory=dict[str, Speeds])
    """Speed of each level's medium, by the level's name; others take no time."""
    ratios: Mapping[str, float] = field(default_factory=dict[str, float])
    """Stored bytes of each level by bytes of the block, by its name; 1 for others."""
    policy: str | None = None
    """Name of the policy of all levels; None takes those of the configuration."""


@dataclass(slots=True)
class ReplayResult:
    """What a replay counted; blocks unless a name says otherwise."""

    policy: str
    requests: int = 0
    asked: int = 0
    hits: dict[str, int] = field(default_factory=dict[str, int])
    """By the level that had the block; host if it was on its way there for another request."""
    written: dict[str, int] = field(default_factory=dict[str, int])
    written_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """After codecs."""
    evicted: dict[str, int] = field(default_factory=dict[str, int])
    refused: dict[str, int] = field(default_factory=dict[str, int])
    """Left out by ``admit: adaptive``."""
    missed: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Blocks that were asked for and not found, by level and reason, as ``stats`` has them."""
    unsaved: int = 0
    """Blocks that found no room, or waited for none."""
    wait_s: float = 0.0
    """Virtual seconds for which requests waited for fetches."""
    virtual_s: float = 0.0
    token_s: float | None = None
    block_tokens: int = 1

    @property
    def ratio(self) -> float:
        """Fraction of the blocks that some level had."""
        return sum(self.hits.values()) / self.asked if self.asked else 0.0

    @property
    def saved_s(self) -> dict[str, float] | None:
        """Seconds of computing that each level's hits save; None if the speed is not known."""
        if self.token_s is None:
            return None
        block_s = self.token_s * self.block_tokens
        return {name: count * block_s for name, count in self.hits.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        names = ("policy", "requests", "asked", "hits", "written", "written_bytes", "evicted")
        found = {name: getattr(self, name) for name in (*names, "refused", "missed")}
        more = {"unsaved": self.unsaved, "wait_s": self.wait_s, "virtual_s": self.virtual_s}
        return {**found, "ratio": self.ratio, "saved_s": self.saved_s, **more}


def replay(
    trace: Trace,
    config: StackConfig,
    settings: ReplaySettings,
    *,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
    listener: AccessListener | None = None,
) -> ReplayResult:
    """Replay a trace over the levels of ``config``; ``progress`` gets requests done and all.

    ``listener`` hears what requests use.

    Raises
    ------
    ConfigError
        The trace's blocks do not fit the configuration.
    """
    if settings.policy is not None:
        config = with_policy(config, settings.policy)
    layout = Layout(trace.block_tokens, settings.block_bytes)
    config.check(layout)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_Replayer(trace, config, settings, layout, listener).run(progress))


def with_policy(config: StackConfig, name: str) -> StackConfig:
    """Return the configuration with one eviction policy for all levels."""
    tiers = tuple(msgspec.structs.replace(tier, policy=name) for tier in config.tiers)
    return msgspec.structs.replace(config, tiers=tiers)


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended."""

    request: TraceRequest
    keys: Sequence[BlockKey]
    fetch: Fetch | None = None
    waiting: asyncio.Task[None] | None = None
    """Ends when the fetch is done."""


def _happenings(orders: Sequence[tuple[int, int, int]]) -> list[tuple[str, int]]:
    """Return in order what happens to each request: it begins, is saved and ends."""
    kinds = ("begin", "save", "end")
    found = [
        (at, kinds.index(kind), number)
        for number, order in enumerate(orders)
        for kind, at in zip(kinds, order, strict=True)
    ]
    return [(kinds[kind], number) for _, kind, number in sorted(found)]


class _Replayer:
    """One replay, inside a virtual loop."""

    def __init__(
        self,
        trace: Trace,
        config: StackConfig,
        settings: ReplaySettings,
        layout: Layout,
        listener: AccessListener | None,
    ) -> None:
        self._trace = trace
        self._config = config
        self._settings = settings
        self._layout = layout
        self._listener = listener
        numbers = range(trace.unique)
        self._keys = [BlockKey(blake2b(b"%d" % n, digest_size=32).digest()) for n in numbers]
        named = {config.host.policy: None, **{level.policy: None for level in config.levels}}
        self._result = ReplayResult(
            ", ".join(named), token_s=settings.token_s, block_tokens=trace.block_tokens
        )
        self._open: dict[int, _OpenRequest] = {}
        orders = [one.order for one in trace.requests if one.order is not None]
        self._overlaps = trace.overlaps
        one_by_one = [(number, number, number) for number in range(len(trace.requests))]
        self._happenings = _happenings(orders if self._overlaps else one_by_one)

    async def run(self, progress: Callable[[int, int], object]) -> ReplayResult:
        """Replay all requests and return the counts."""
        loop, result, requests = asyncio.get_running_loop(), self._result, self._trace.requests
        manager, stack = await self._start()
        token_s = self._settings.token_s
        if token_s is not None:
            manager.prefilled(self._trace.block_tokens * 64, token_s * 64 * result.block_tokens)
        begin_s = requests[0].at_s
        begun = 0
        for kind, number in self._happenings:
            if kind == "begin":
                if begun % REPORT_EVERY == 0:
                    progress(begun, len(requests))
                begun += 1
                wait_s = requests[number].at_s - begin_s - loop.time()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                self._open[number] = self._begin(requests[number], manager)
            elif kind == "save":
                await self._save(self._open[number], manager)
            else:
                await self._end(self._open.pop(number), manager, stack)
        progress(len(requests), len(requests))
        result.virtual_s = loop.time()
        await self._settle(stack)
        self._count(manager)
        await stack.aclose(flush_timeout_s=0)
        return result

    async def _start(self) -> tuple[CacheManager, TierStack]:
        config, layout, loop = self._config, self._layout, asyncio.get_running_loop()
        slots = config.arena_slots(layout)
        arena = VirtualArena(max(1, slots), layout.slot_bytes)
        arena.set_aside(int(not slots))
        clock = VirtualClock(loop)
        edges = [(PipelineSettings(), ()) for _ in config.levels]
        quiet = msgspec.structs.replace(
            config, events=msgspec.structs.replace(config.events, max=0, publish=None, replay=None)
        )
        stack = build_stack(
            quiet,
            layout,
            arena,
            edges,
            {},
            post=loop.call_soon,
            clock=clock,
            make_tier=self._tier,
            listener=self._listener,
        )
        small = Layout(layout.block_tokens, VIEW_BYTES)
        space = small.namespace()
        await stack.open(small, space, lambda _name: run_inline)
        manager = CacheManager(
            layout=layout,
            namespace=space,
            arena=arena,
            stack=stack,
            portal=VirtualPortal(loop),
            fetch_deadline_s=config.fetch.deadline_s,
        )
        return manager, stack

    def _tier(self, level: LevelConfig) -> PacedTier:
        return PacedTier(
            self._settings.speeds.get(level.name),
            stored_bytes=self._stored_bytes(level.name),
            batch_max=level.make.batch_max,
            is_bare=True,
        )

    def _stored_bytes(self, level: str) -> float:
        return self._settings.block_bytes * self._settings.ratios.get(level, 1.0)

    def _begin(self, request: TraceRequest, manager: CacheManager) -> _OpenRequest:
        """Look up a request's blocks, and begin to fetch them."""
        self._result.requests += 1
        wanted = [self._keys[block] for block in request.wanted]
        self._result.asked += len(wanted)
        found = _OpenRequest(request, [self._keys[block] for block in request.used])
        if wanted:
            tokens = len(wanted) * self._trace.block_tokens
            found.fetch = manager.fetch(wanted, saves=AvoidedCompute(tokens))
            found.waiting = asyncio.create_task(self._wait(found.fetch))
        return found

    async def _wait(self, fetch: Fetch) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while not fetch.done:  # noqa: ASYNC110 - an engine asks at every step
            await asyncio.sleep(POLL_S)
        self._result.wait_s += loop.time() - begun_s

    async def _save(self, one: _OpenRequest, manager: CacheManager) -> None:
        """Take what was found of a request's blocks, compute the rest, and save all of them."""
        request, token_s = one.request, self._settings.token_s
        here = own = 0 if request.asked is None else request.asked[0]
        if one.fetch is not None and one.waiting is not None:
            await one.waiting
            here += one.fetch.blocks
            one.fetch.release()
        if own:
            manager.touch(one.keys[:own])
        if token_s is not None and not self._overlaps:
            left = max(0, request.input_tokens - here * self._trace.block_tokens)
            await asyncio.sleep(left * token_s)
        if one.keys:
            manager.save(one.keys).commit()

    async def _end(self, one: _OpenRequest, manager: CacheManager, stack: TierStack) -> None:
        """Use a request's blocks for the last time."""
        if self._settings.token_s is None:
            await self._settle(stack)  # an engine writes while it computes
        if one.keys:
            manager.touch(one.keys)

    async def _settle(self, stack: TierStack) -> None:
        """Wait until blocks on their way down are written."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        end_s = loop.time() + SETTLE_S
        while stack.pending and loop.time() < end_s:  # noqa: ASYNC110 - as seen from outside
            await asyncio.sleep(POLL_S)

    def _count(self, manager: CacheManager) -> None:
        result, stats = self._result, manager.stats()
        result.missed = stats["misses"]["blocks"]
        for level in (self._config.host, *self._config.levels):
            counts: Mapping[str, Any] = stats[level.name]
            result.hits[level.name] = counts["hits"] + counts["joined"]
            result.written[level.name] = counts["stored"]
            size = self._stored_bytes(level.name)
            if level is self._config.host:
                size = self._settings.block_bytes
            result.written_bytes[level.name] = int(counts["stored"] * size)
            result.evicted[level.name] = counts["evicted"]
            dropped = {name: n for name, n in counts.items() if name.startswith("dropped_")}
            result.refused[level.name] = dropped.pop("dropped_admission", 0)
            result.unsaved += sum(dropped.values())
