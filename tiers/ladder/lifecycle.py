"""The start of a level, at once or in the background, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import compress
from types import NoneType
from typing import Any, cast

from kvladder.errors import ConfigError, TierError, Unavailable, refusal
from kvladder.keys import KEY_BYTES, SALT_BYTES, BlockKey, Namespace
from kvladder.layout import Layout
from kvladder.lock import STEP
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import Facts, RecoveredBlock, Ref
from kvladder.tiers.ladder.calling.breaker import contained
from kvladder.tiers.ladder.calling.calls import CALLS_TIMEOUT_S
from kvladder.tiers.ladder.calling.client import Threads
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.writing.writer import Writer, WriterCallbacks

OPEN_TIMEOUT_S = 30.0
"""Time that the start of a cache waits for a tier; then the cache works without the level."""
KEEP_S = 600.0
"""Time between two times at which what policies have learned is kept."""
TERMS_MAX = 7
_ENDS = {NoneType, int, float}


class LevelLifecycle:
    """Opens a level's tier, runs its writer, and closes both. Everything runs on the loop.

    Only wrong settings are an error at start. A tier that raises another error, or takes too long
    to open, leaves its level out. That is reported once, and the level joins when its tier is open.
    An opening that failed is tried again, with the pauses of a breaker. One that hangs is waited
    for. Without a level that is ``required`` the cache does not start.
    """

    def __init__(self, level: Level, above: WriterCallbacks, *, late: bool = False) -> None:
        self.writer = Writer(level, above)
        self.level = level
        self._client = level.client
        self.learned: dict[str, LevelIndex[Any]] = {"own": level.index}
        """Indexes with policies that keep what they learn in this level's tier, by name."""
        self._call: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_attached = self._is_late = late
        """True if listeners have to be told what is there: the cache has started without it."""

    async def open(self, layout: Layout, namespace: Namespace, threads: Threads) -> None:
        """Wait until the level is open with its recovered blocks, or is left out.

        Raises
        ------
        ConfigError
            The tier cannot work as configured, or is required and not open.
        """
        context = self._client.prepare(layout, namespace, threads)
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        name = f"kvladder-open-{self.level.name}"
        self._task = asyncio.create_task(self._open(context, first), name=name)
        await asyncio.wait({first}, timeout=OPEN_TIMEOUT_S)
        self._is_late = True
        if first.done():
            first.result()
        else:
            first.cancel()
            hangs = Unavailable(f"it did not open within {OPEN_TIMEOUT_S:g} s")
            if self._client.required:
                raise refusal(hangs, required=not self._is_attached)
            self._client.leave_out(str(hangs))

    async def _open(self, context: TierContext, first: asyncio.Future[None]) -> None:
        tier, settings = self.level.tier, self._client.settings.breaker
        steps: list[Callable[[], Awaitable[None]]] = [lambda: tier.open(context), self._recover]
        pause_s = settings.retry_s
        while steps:
            error = await self._attempt(steps[0])
            if error is None:
                del steps[0]
                continue
            if not first.done() and isinstance(error, ConfigError):
                first.set_exception(error)
                return
            if not first.done() and self._client.required:
                refused = refusal(error, required=not self._is_attached)
                first.set_exception(refused)
                return
            verb = "open" if len(steps) > 1 else "report its blocks"
            known = isinstance(error, TierError | ConfigError)
            self._client.leave_out(f"it failed to {verb}: {error if known else repr(error)}")
            if not first.done():
                first.set_result(None)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, settings.retry_max_s)
        await self._recall()
        self.writer.start()
        with self.level.shared.lock:
            self.level.opened()
        if not first.done():
            first.set_result(None)

    async def _attempt(self, step: Callable[[], Awaitable[None]]) -> BaseException | None:
        """Do a step in a task of its own, so that none of its errors reaches this one."""

        async def trying() -> None:
            await contained(step())

        self._call = asyncio.create_task(trying(), name=f"kvladder-call-{self.level.name}")
        self._call.add_done_callback(lambda call: call.cancelled() or call.exception())
        await asyncio.wait({self._call})
        if self._call.cancelled():
            return TierError("the tier cancelled the call")
        return self._call.exception()

    async def _recall(self) -> None:
        """Have policies continue with what they had learned; what is damaged is said once."""
        told = {name: index for name, index in self.learned.items() if index.is_told}
        if not told or not self.level.tier.durable:
            return

        async def recalling() -> None:
            for name, index in told.items():
                state = await self.level.tier.recall(name)
                wrong = "" if state is None else "it is no bytes"
                if isinstance(state, bytes):
                    with self.level.shared.lock:
                        wrong = index.restore(state)
                if wrong:
                    self._say(f"what a policy had learned cannot be used: {wrong}")

        await self._shortly(recalling, "read what a policy had learned")
        self.keep_learned()

    def keep_learned(self) -> None:
        """Keep from now on what policies learn, if the tier is durable and a policy learns."""
        told = any(index.is_told for index in self.learned.values())
        if told and self.level.tier.durable and self._keeping is None:
            name = f"kvladder-{self.level.name}"
            self._keeping = asyncio.create_task(self._keep_on(), name=name)

    async def _keep_on(self) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            await self._keep()

    async def _keep(self) -> None:
        """Keep what policies have learned."""

        async def keeping() -> None:
            for name, index in self.learned.items():
                with self.level.shared.lock:
                    state = index.state()
                if state:
                    await self.level.tier.remember(name, state)

        await self._shortly(keeping, "keep what a policy has learned")

    async def _shortly(self, call: Callable[[], Awaitable[None]], what: str) -> None:
        """Wait for a call, but not long; a failure is said, and costs only what was learned."""

        async def calling() -> None:
            await contained(call())

        task = asyncio.create_task(calling(), name=f"kvladder-call-{self.level.name}")
        task.add_done_callback(lambda call: call.cancelled() or call.exception())
        try:
            await asyncio.wait({task}, timeout=CALLS_TIMEOUT_S)
        finally:
            task.cancel()  # one that ignores it is left behind: it has no slots
        error = None if not task.done() or task.cancelled() else task.exception()
        if error is not None or not task.done() or task.cancelled():
            why = "it took too long" if error is None else repr(error)
            self._say(f"failed to {what}: {why}")

    def _say(self, what: str) -> None:
        level = self.level
        level.shared.notices.say(
            f"{level.name} learned", f"tier {level.name}: {what}; it starts afresh"
        )

    async def drain(self, *, erased: bool = False) -> None:
        """Wait until everything offered was written or given up; then for purges, if ``erased``."""
        with self.level.shared.lock:
            self.level.purges.later(later=not erased)
        await self.writer.drain()

    async def aclose(self) -> None:
        """Stop the writer, and close the tier; may be called again.

        Whatever the tier does, this ends within ``CLOSE_TIMEOUT_S`` and twice ``CALLS_TIMEOUT_S``,
        or three times if it was not open yet. What policies learned is kept in the same time.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            keeping.cancel()
            await asyncio.wait({keeping})
            await asyncio.gather(self._keep(), self._end_calls())
        else:
            await self._end_calls()
        await self._client.aclose()
        await self._client.end_calls()  # these calls could end only with the tier

    async def _end_calls(self) -> None:
        """Stop the writer, and end calls in flight."""
        if self._call is not None and not self._call.done():
            self._call.cancel()
            await asyncio.wait({self._call}, timeout=CALLS_TIMEOUT_S)
        await self.writer.aclose()
        await self._client.end_calls()

    # ---- what is there

    async def _recover(self) -> None:
        """Hold what the tier recovered; remove for good what is not to be held any more.

        A block that expired while no process ran must not come back when a clock is set back, and a
        purge must find its bytes. Entries that cannot be blocks are skipped.
        """
        level, lock = self.level, self.level.shared.lock
        if not level.tier.durable:
            return
        taken, gone, places = bytearray(level.capacity_blocks), list[Ref](), list[int]()
        strange = 0
        try:
            async for batch in level.tier.recover():
                given = cast("object", batch)
                if not isinstance(given, Sequence):
                    strange += 1
                    continue
                is_sound = level.tier.recovers_checked
                blocks = batch if is_sound else self._sound(batch, taken)
                strange += len(batch) - len(blocks)
                places += [block.place for block in blocks]
                for start in range(0, len(blocks), STEP):
                    gone += self._hold(blocks[start : start + STEP])
        except BaseException:
            self._drop()
            raise
        level.places.occupy(places)
        level.stats.recovered = len(level.index)
        trimmed = bool(level.index.above)
        while trimmed:
            with lock:
                trimmed = level.trim()
        for start in range(0, len(gone), STEP):
            with lock:
                level.remove_later(gone[start : start + STEP])
        if strange:
            what = f"tier {level.name} recovered {strange} invalid blocks, which are ignored"
            level.shared.notices.say(f"{level.name} recover", what)

    def _hold(self, blocks: Sequence[RecoveredBlock]) -> list[Ref]:
        """Hold the blocks that are still wanted, and return the others."""
        level, clock = self.level, self.level.shared.clock
        least, wall_s = level.rule.min_priority, clock.wall()
        if level.rule.ttl_s is not None:  # or else a clock that ran ahead would keep them for ever
            blocks = [*map(_until(wall_s + level.rule.ttl_s), blocks)]
        with level.shared.lock:
            missed = level.purges.missed
            kept = [
                block
                for block in blocks
                if (facts := block.facts).floor >= least
                and (facts.expires_wall_s is None or facts.expires_wall_s > wall_s)
                and not (missed and missed & {None, facts.salt or block.key, block.key})
            ]
            for keeps in level.purges.filters if kept else ():
                kept = [*compress(kept, keeps(kept))]
            level.index.fill(kept, clock.now() - wall_s, level.bit)
            if self._is_late:  # during the start, listeners ask what is there
                level.shared.events.stored(level.name, [block.key for block in kept])
        if len(kept) == len(blocks):
            return []
        places = {block.place for block in kept}
        return [Ref(key, place) for key, place, _ in blocks if place not in places]

    def _drop(self) -> None:
        """Forget what was recovered before recovery failed: the tier will recover it again."""
        level = self.level
        for start in range(0, level.index.places, STEP):
            with level.shared.lock:
                keys = level.index.held(start, start + STEP)
                level.unrecovered(keys)
                if self._is_late:
                    level.shared.events.removed(level.name, keys, "lost")

    def _sound(self, blocks: Sequence[RecoveredBlock], taken: bytearray) -> list[RecoveredBlock]:
        """Return the valid blocks of a batch, each key and place once, and mark their places."""
        found: dict[BlockKey, RecoveredBlock] = {}
        for block in blocks:
            is_free = _is_block(block, len(taken)) and not taken[block.place]
            if is_free and block.key not in found and block.key not in self.level.index:
                found[block.key] = block
                taken[block.place] = 1
        return list(found.values())


def _until(last_s: float) -> Callable[[RecoveredBlock], RecoveredBlock]:
    """Make a function that limits the expiry of a block to the wall time ``last_s``."""

    def bounded(block: RecoveredBlock) -> RecoveredBlock:
        end_s = block.facts.expires_wall_s
        if end_s is not None and end_s <= last_s:
            return block
        return block._replace(facts=block.facts._replace(expires_wall_s=last_s))

    return bounded


def _is_block(block: object, places: int) -> bool:
    """Return whether an object from a plug-in is a valid block, at one of so many places."""
    return (
        type(block) is RecoveredBlock
        and type(block.key) is bytes
        and len(block.key) == KEY_BYTES
        and _whole(block.place, places - 1)
        and type(facts := block.facts) is Facts
        and _whole(facts.priority, PRIORITY_MAX)
        and _whole(facts.floor, PRIORITY_MAX)
        and _whole(facts.terms, TERMS_MAX)
        and type(facts.expires_wall_s) in _ENDS
        and type(facts.salt) is bytes
        and len(facts.salt) in {0, SALT_BYTES}
    )


def _whole(said: object, most: int) -> bool:
    """Return whether ``said`` is a whole number from 0 to ``most``."""
    return isinstance(said, int) and 0 <= said <= most
