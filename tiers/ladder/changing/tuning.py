"""Gives a level other settings while it serves: rule, policy, limits, capacity, calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvladder.errors import TierError
from kvladder.policy.eviction import EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_SHARES, Shares, Tenants
from kvladder.tiers.label import LevelRead, Ref
from kvladder.tiers.ladder.base_level import BaseLevel
from kvladder.tiers.ladder.calling.breaker import CallSettings
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.lifecycle import LevelLifecycle
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.stack import TierStack

ROUNDS_MAX = 8
"""Passes over the places that a smaller capacity gives up; a call that hangs may keep some."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Settings that a level is to have from now on."""

    rule: OffloadRule
    shares: Shares
    policy: EvictionPolicy | None = None
    """An empty policy that takes over; None keeps the one it has."""


@dataclass(frozen=True, kw_only=True)
class HostTuning(Tuning):
    """Settings that the host level is to have."""

    reserve_blocks: int


@dataclass(frozen=True, kw_only=True)
class LevelTuning(Tuning):
    """Settings that a level below host is to have."""

    capacity_blocks: int
    queue_blocks: int
    calls: CallSettings
    endurance_bytes: int | None


class LevelTuner:
    """Changes the settings of a stack's levels. Its coroutines run on the loop thread.

    Decisions follow the new settings at once. Work on many blocks is done in steps. Each step holds
    the lock briefly.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack

    async def grow(self, level: Level, capacity_blocks: int) -> None:
        """Prepare a level's tier for a larger capacity, which ``set`` then uses.

        Raises
        ------
        TierError
            The tier cannot grow; nothing has changed.
        """
        if not level.tier.shared:
            await level.client.resize(capacity_blocks)

    def set(self, level: BaseLevel[Any], tuning: Tuning) -> None:
        """Decide by these settings from now on; with the lock held. It cannot fail."""
        level.rule = tuning.rule
        if isinstance(level, HostLevel) and isinstance(tuning, HostTuning):
            level.reserve_blocks = tuning.reserve_blocks
        if isinstance(level, Level) and isinstance(tuning, LevelTuning):
            level.client.retune(tuning.calls)
            level.endurance_bytes = tuning.endurance_bytes
            level.limit_queue(tuning.queue_blocks)
            if tuning.capacity_blocks > level.capacity_blocks:
                level.resized(tuning.capacity_blocks)

    async def follow(self, lifecycle: LevelLifecycle | None, tuning: Tuning) -> None:
        """Bring the blocks of a level, None for host, in line with its settings; see ``set``."""
        level: HostLevel | Level = self._stack.host if lifecycle is None else lifecycle.level
        with self._stack.lock:
            level.index.limit_ttl(tuning.rule.ttl_s)
        await self._sweep(level)
        if tuning.policy is not None:
            await self._replace_policy(level, tuning)
            if lifecycle is not None:
                lifecycle.keep_learned()
        await self._recount(level, tuning)
        if isinstance(level, Level) and isinstance(tuning, LevelTuning):
            await self._shrink(level, tuning.capacity_blocks)
        with self._stack.lock:
            self._stack.wake()

    async def _steps(self, work: Iterator[object]) -> None:
        """Take every step of some work with the lock held, and let others run in between."""
        while True:
            with self._stack.lock:
                is_over = next(work, self) is self
            if is_over:
                return
            await asyncio.sleep(0)

    async def _sweep(self, level: HostLevel | Level) -> None:
        """Have blocks leave that the level's threshold excludes; host offers its own downwards."""
        start, least = 0, level.rule.min_priority
        while start < level.index.places:
            with self._stack.lock:
                keys, start = level.index.below(least, start)
                if isinstance(level, HostLevel):
                    self._stack.leave_host(keys)
                else:
                    level.forget(keys, "evicted", "threshold")
            await asyncio.sleep(0)

    async def _replace_policy(self, level: HostLevel | Level, tuning: Tuning) -> None:
        assert tuning.policy is not None
        blocks_max = self._stack.shared.arena.slots
        if isinstance(tuning, LevelTuning):
            blocks_max = tuning.capacity_blocks
        with self._stack.lock:
            learned, is_same = level.index.state(), level.index.orders_like(tuning.policy)
        await self._steps(level.index.replace_policy(tuning.policy, blocks_max))
        with self._stack.lock:
            if learned and is_same:  # what it cannot use, it learns again
                level.index.restore(learned)

    async def _recount(self, level: HostLevel | Level, tuning: Tuning) -> None:
        """Count by other limits, if they differ, and evict what salts hold beyond their quota."""
        shares, least = tuning.shares, tuning.rule.min_priority
        tenants = None if shares == NO_SHARES else Tenants(shares, least)
        before = level.index.tenants
        is_same = (before is None) == (tenants is None) and (
            before is None
            or tenants is None
            or (before.shares == tenants.shares and before.base == tenants.base)
        )
        if is_same:
            return
        with self._stack.lock:
            ages = level.index.unused_for()
        order: list[int] = np.argsort(ages, kind="stable")[::-1].tolist()
        await self._steps(level.index.recount(tenants, order))
        goes_on = True
        while goes_on:
            with self._stack.lock:
                if isinstance(level, Level):
                    goes_on = level.trim()
                else:
                    goes_on = self._stack.leave_host([key for key, _, _ in level.excess()], "quota")
            await asyncio.sleep(0)

    # ---- a smaller capacity

    async def _shrink(self, level: Level, capacity_blocks: int) -> None:
        """Evict exactly as many blocks as a smaller capacity needs, and move others below it."""
        if capacity_blocks >= level.capacity_blocks:
            return
        with self._stack.lock:
            level.narrow(capacity_blocks)
        (lifecycle,) = [one for one in self._stack.lifecycles if one.level is level]
        for _ in range(ROUNDS_MAX):
            goes_on = True
            while goes_on:
                with self._stack.lock:
                    goes_on = level.shed()
                await asyncio.sleep(0)
            await self._drained(lifecycle)
            if not level.places.above:
                break
            start = capacity_blocks
            while start < level.index.places:
                start = await self._move(level, start)
                await self._drained(lifecycle)
        with self._stack.lock:
            level.resized(capacity_blocks)
        if not level.places.above and not level.tier.shared and level.tier.resizes:
            await self._give_up_space(level, capacity_blocks)

    async def _drained(self, lifecycle: LevelLifecycle) -> None:
        """Wait until the level has written what is queued, as far as its tier answers in time."""
        limit_s = 4 * lifecycle.level.client.settings.timeout_s
        try:
            await asyncio.wait_for(lifecycle.writer.drain(), limit_s)
        except TimeoutError:
            return

    async def _give_up_space(self, level: Level, capacity_blocks: int) -> None:
        try:
            await level.client.resize(capacity_blocks)
        except TierError as error:
            what = f"tier {level.name} keeps the space above its capacity until its next start"
            self._stack.shared.notices.say(f"{level.name} resize", f"{what}: {error}")

    async def _move(self, level: Level, start: int) -> int:
        """Have a step of blocks above the capacity written to places below it.

        A block that cannot be read, or for which host has no slot, is evicted. Returns where the
        next step begins.
        """
        stack, arena = self._stack, self._stack.shared.arena
        reads: list[tuple[LevelRead, BlockMeta]] = []
        gone: list[Ref] = []
        with stack.lock:
            found, end = level.above(start)
            if level.tier.shared:
                level.renumber(found)
                return end
            side = level.client.pipeline.side
            for ref, meta in found:
                slots = stack.room(1, meta.priority) if level.write_queue.room > len(reads) else []
                if slots:
                    reads.append((side.read(*ref, slots[0]), meta))
                else:
                    gone.append(ref)
            level.places.begin_reads([read.place for read, _ in reads])
            level.forget([ref.key for ref in gone], "evicted")
        if not reads:
            return end
        blocks = [read for read, _ in reads]
        came: list[bool] = [False] * len(blocks)
        try:
            answer = await level.client.get(blocks, partial(level.read_ended, blocks))
            with stack.lock:
                came = [*level.came(blocks, answer)]
        finally:
            with stack.lock:
                for (block, meta), ok in zip(reads, came, strict=True):
                    ref = Ref(block.key, block.place)
                    if level.index.place(ref.key) != ref.place:
                        pass  # it left meanwhile
                    elif ok:
                        level.lift(ref)
                        level.queue_again(ref, block.slot, meta)
                    else:
                        level.forget([ref.key], "evicted")
                    arena.release([block.slot])
        return end
