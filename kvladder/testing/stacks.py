"""A complete cache over given tiers, opened in one line on the running loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from kvladder.arena import Arena, Slot
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.lock import StackLock
from kvladder.manager import CacheManager
from kvladder.notices import Notices
from kvladder.policy.eviction import EvictionPolicy, PrioritizedLRU
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_LIMITS, NO_SHARES, Limits, Shares
from kvladder.testing.sim import EPOCH_S, SimClock, inline_blocking
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.pipeline import scratch_blocks, told_apart
from kvladder.tiers.context import Clock
from kvladder.tiers.ladder.base_level import EventBuffer, Shared
from kvladder.tiers.ladder.calling.client import Threads
from kvladder.tiers.ladder.definition import LevelDefinition as Spec
from kvladder.tiers.ladder.definition import LevelSettings
from kvladder.tiers.ladder.stack import HostSettings, Post, TierStack
from kvladder.tiers.spans import Tracer

T = TypeVar("T")

LAYOUT = Layout(block_tokens=4, block_bytes=64, fields={"model": "simulated"})


@dataclass(frozen=True)
class LevelSpec:
    """The tier and the settings of a level below host."""

    tier: Tier
    rule: OffloadRule = field(default_factory=OffloadRule)
    capacity_blocks: int = 64
    settings: LevelSettings = field(default_factory=LevelSettings)
    required: bool = False
    shares: Shares = NO_SHARES
    policy: EvictionPolicy = field(default_factory=PrioritizedLRU)

    def definition(self, name: str, scratch: Sequence[Slot]) -> Spec:
        """Return the level's definition; ``scratch`` are slots for its codecs."""
        return Spec(
            name=name,
            tier=self.tier,
            rule=self.rule,
            capacity_blocks=self.capacity_blocks,
            policy=self.policy,
            settings=self.settings,
            required=self.required,
            scratch=scratch,
            shares=self.shares,
        )


class LoopPortal:
    """Replaces ``Runtime`` where the engine's code runs on the loop itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @property
    def post(self) -> Post:
        """The loop's ``call_soon``, which suffices as the engine runs in the loop's thread."""
        return self._loop.call_soon

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Raise AssertionError: await ``SimCache.aclose`` instead of closing its manager."""
        del timeout_s
        work.close()
        raise AssertionError("expected await aclose() on a simulated loop")

    @property
    def faults(self) -> int:
        """Always 0: a fault ends the test."""
        return 0

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Do nothing: the test owns the loop."""
        del timeout_s


class SimCache:
    """A cache manager with its tiers and a simulated engine, all on the running loop.

    ``save`` fills slots with ``payload``, and ``load`` checks them. ``aclose`` asserts that no slot
    is still claimed.
    """

    def __init__(self, manager: CacheManager, stack: TierStack) -> None:
        self.manager = manager
        self.stack = stack
        self.arena = manager.arena
        self.levels = stack.levels

    @classmethod
    async def open(
        cls,
        *levels: LevelSpec,
        slots: int = 8,
        host: OffloadRule | None = None,
        reserve_blocks: int = 0,
        fetch_blocks_max: int | None = None,
        layout: Layout = LAYOUT,
        epoch_s: float = EPOCH_S,
        threads: Threads = lambda _: inline_blocking,
        shares: Shares = NO_SHARES,
        limits: Limits = NO_LIMITS,
        policy: EvictionPolicy | None = None,
        make_tracer: Callable[[Clock], Tracer] | None = None,
    ) -> SimCache:
        """Open a cache over ``levels``, hottest first, at the wall time ``epoch_s``.

        ``threads`` runs blocking calls. ``shares`` and ``policy``, an empty one, are host's.
        ``make_tracer`` returns what begins spans.
        """
        loop = asyncio.get_running_loop()
        clock, lock = SimClock(loop, epoch_s=epoch_s), StackLock()
        edges = [spec.settings.pipeline.codecs for spec in levels]
        # the least scratch that works, so that batches are stored in parts
        scratch = [min(2, scratch_blocks(codecs, layout.slot_bytes)) for codecs in edges]
        arena = Arena.create(slots + sum(scratch), layout.slot_bytes)
        aside = [arena.set_aside(count) for count in scratch]
        shared = Shared(
            arena=arena,
            lock=lock,
            clock=clock,
            events=EventBuffer(10_000, post=loop.call_soon),
            notices=Notices(clock.now, held=lock.held, post=loop.call_soon),
            tracer=None if make_tracer is None else make_tracer(clock),
        )
        made = [
            spec.definition(f"level{position}", aside[position - 1])
            for position, spec in enumerate(levels, start=1)
        ]
        order = PrioritizedLRU() if policy is None else policy
        stack = TierStack(
            HostSettings("host", host or OffloadRule(), order, reserve_blocks, shares),
            made,
            shared,
            post=loop.call_soon,
            fetch_blocks_max=slots if fetch_blocks_max is None else fetch_blocks_max,
        )
        space = layout.namespace()
        try:
            await stack.open(layout, space, threads)
        except BaseException:
            arena.close()
            raise
        manager = CacheManager(
            layout=layout,
            namespace=space,
            arena=arena,
            stack=stack,
            portal=LoopPortal(loop),
            kinds=told_apart(layout, chain.from_iterable(edges)),
            limits=limits,
        )
        return cls(manager, stack)

    @staticmethod
    def keys(*path: int) -> list[BlockKey]:
        """Return the keys of a prefix; equal paths have equal keys."""
        steps = range(1, len(path) + 1)
        return [BlockKey(hashlib.sha256(repr(path[:n]).encode()).digest()) for n in steps]

    @staticmethod
    def payload(key: BlockKey) -> bytes:
        """Return the 64 bytes of the block named ``key``."""
        return hashlib.sha512(key).digest()

    def save(self, keys: Sequence[BlockKey], **options: Any) -> int:
        """Save blocks as an engine does, and return how many got a slot."""
        save = self.manager.save(keys, **options)
        for index, slot in zip(save.indices, save.slots, strict=True):
            self.arena.view(slot)[:64] = self.payload(keys[index])
        save.commit()
        return len(save.indices)

    async def load(self, keys: Sequence[BlockKey], *, deadline_s: float = 60.0) -> list[str]:
        """Load a prefix as an engine does, check every byte, and return each block's source."""
        fetch = self.manager.fetch(keys, deadline_s=deadline_s)
        while not fetch.done:  # noqa: ASYNC110 - an engine asks at every step
            await asyncio.sleep(0.01)
        for key, slot in zip(keys, fetch.slots, strict=False):
            assert bytes(self.arena.view(slot)[:64]) == self.payload(key), "wrong bytes"
        sources = fetch.sources
        fetch.release()
        return sources

    async def settle(self) -> None:
        """Wait until no level has a pending write."""
        while self.stack.pending:  # noqa: ASYNC110 - as seen from outside
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)

    async def aclose(self, *, flush_timeout_s: float = 10.0) -> None:
        """Close the cache; assert that the arena is consistent and that no slot is claimed."""
        await self.stack.aclose(flush_timeout_s=flush_timeout_s)
        self.arena.check()
        assert self.arena.free == self.arena.slots, "a slot is still claimed"
        self.arena.close()
