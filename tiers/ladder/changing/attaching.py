"""Attaches levels to a stack while it serves, and detaches them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvladder.errors import ConfigError
from kvladder.keys import KEY_BYTES, BlockKey, Namespace
from kvladder.layout import Layout
from kvladder.lock import STEP
from kvladder.tiers.ladder.calling.client import Threads
from kvladder.tiers.ladder.definition import LevelDefinition
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.lifecycle import LevelLifecycle
from kvladder.tiers.ladder.records.terms import EVERYTHING
from kvladder.tiers.ladder.removing import MISSED_MAX, TOO_MANY, note_missed
from kvladder.tiers.ladder.stack import TierStack


class LevelAttacher:
    """Adds levels to a stack and takes them out. Its coroutines run on the loop thread.

    A level that is attached takes part as one that was left out at the start: nothing is read or
    written there until its tier is open. So removals and purges reach it from its first moment.
    """

    def __init__(
        self, stack: TierStack, layout: Layout, namespace: Namespace, threads: Threads
    ) -> None:
        self._stack = stack
        self._layout = layout
        self._namespace = namespace
        self._threads = threads

    async def attach(self, spec: LevelDefinition, position: int, identity: str) -> LevelLifecycle:
        """Make a level, and open it as the one at ``position`` below host, from 0.

        ``spec.required`` must be True. ``identity`` names the medium. Blocks that were removed
        while it was detached do not come back.

        Raises
        ------
        ConfigError
            The tier did not open; the stack is as before.
        """
        assert spec.required, "an attached level is open, or is not there"
        stack = self._stack
        with stack.lock:
            level = stack.make_level(spec)
            lifecycle = LevelLifecycle(level, stack, late=True)
            missed = stack.away.pop(identity, set())
            if TOO_MANY in missed and level.tier.shared:
                stack.away[identity] = missed
                what = f"more than {MISSED_MAX} blocks were removed since it was detached"
                raise ConfigError(what, hint="purge it with kvladder purge, and restart the engine")
            _condemn(level, missed)
            _condemn(level, {None if s == EVERYTHING else s for s in stack.shared.purging})
            others = [*stack.lifecycles]
            stack.rejoin([*others[:position], lifecycle, *others[position:]])
        try:
            if stack.debts is not None:
                await stack.debts.arriving(level, identity)
            await lifecycle.open(self._layout, self._namespace, self._threads)
        except BaseException:
            await asyncio.shield(self.detach(lifecycle, identity, flush_s=0.0, missed=missed))
            raise
        return lifecycle

    async def detach(
        self,
        lifecycle: LevelLifecycle,
        identity: str,
        *,
        flush_s: float,
        missed: set[BlockKey | bytes | None] | None = None,
    ) -> None:
        """Take a level out, write what is queued for it, close its tier, and forget its blocks.

        Nothing new is read from it or offered to it from the first moment. Reads in flight, queued
        writes and removals get ``flush_s`` seconds; then they end as misses and drops. A medium
        that survives keeps its blocks. ``missed`` are removals that it has missed already.
        """
        stack, level = self._stack, lifecycle.level
        with stack.lock:
            level.depart()
            if level.outlives:
                stack.away[identity] = (missed or set()) | level.purges.missed
            stack.rejoin([one for one in stack.lifecycles if one is not lifecycle])
        try:
            if flush_s and not level.client.absent:
                await self._settled(lifecycle, flush_s)
        finally:  # also if the cache closes meanwhile, as no other part closes it then
            await self._end(lifecycle, identity)

    async def _end(self, lifecycle: LevelLifecycle, identity: str) -> None:
        """Close the tier of a level that left the stack, and forget its blocks."""
        stack, level = self._stack, lifecycle.level
        if stack.debts is not None:
            stack.debts.departed(level, identity)
        await lifecycle.aclose()
        with stack.lock:
            if identity in stack.away:  # a later ``attach`` does what is left to do
                note_missed(stack.away[identity], level.owed())
        start = 0
        while start < level.index.places:
            with stack.lock:
                keys = level.index.held(start, start + STEP)
                level.index.drop(keys)
                stack.shared.ghosts.add(keys, level.name, "lost")
                stack.shared.events.removed(level.name, keys, "lost")
            start += STEP
            await asyncio.sleep(0)

    async def _settled(self, lifecycle: LevelLifecycle, within_s: float) -> None:
        """Wait until the level has written and removed what is due, and until no read is left."""
        level, quiet = lifecycle.level, asyncio.Event()
        with self._stack.lock:
            level.places.listen(quiet.set)
        try:
            async with asyncio.timeout(within_s):
                if level.outlives:
                    await lifecycle.drain(erased=True)
                await quiet.wait()
        except TimeoutError:
            what = f"tier {level.name} is detached with work left: its calls are cancelled"
            self._stack.shared.notices.say(f"{level.name} detach", what)
        finally:
            level.places.listen(None)


def _condemn(level: Level, removed: Iterable[BlockKey | bytes | None]) -> None:
    """Have a level that is not open yet forget what was removed: keys, salts, None for all."""
    for one in removed:
        level.purges.condemn(None if one == TOO_MANY else one)
        if level.tier.shared:
            if one is not None and len(one) == KEY_BYTES:
                level.remove([BlockKey(one)])
            else:
                level.purge(one)
