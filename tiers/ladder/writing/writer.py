"""The one writer of a level: it takes what is queued, calls the tier's client, and settles."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from kvladder.keys import BlockKey
from kvladder.metrics import DropReason
from kvladder.tiers.label import LevelRead, Ref, Write
from kvladder.tiers.ladder.base_level import StackCallbacks
from kvladder.tiers.ladder.calling.breaker import supervised
from kvladder.tiers.ladder.calling.calls import CallOutcome
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.meta import BlockMeta


class WriterCallbacks(StackCallbacks, Protocol):
    """The part of the stack that a writer needs. The stack's lock is held around every call."""

    def below(self, level: Level, key: BlockKey, meta: BlockMeta) -> Level | None:
        """Return the level below ``level`` that should get the block when it leaves, if any."""
        ...


class Writer:
    """Has a tier forget, store and erase in batches, at its own pace, one call after the other.

    All its state is in the level, so it may die and start again at any time. Its coroutines run on
    the loop thread.
    """

    def __init__(self, level: Level, above: WriterCallbacks) -> None:
        self._level = level
        self._client = level.client
        self._above = above
        self._lock = level.shared.lock
        self._wakeup = asyncio.Event()
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Have the writer look at what is queued."""
        self._wakeup.set()

    def start(self) -> None:
        """Start the task."""
        name = f"kvladder-writer-{self._level.name}"
        self._task = asyncio.create_task(supervised(self._run, self._died), name=name)

    def _died(self, error: BaseException) -> None:
        """Count and report the death of the task; it is started again."""
        level = self._level
        level.stats.task_failures += 1
        what = f"a task of level {level.name} died and is started again: {error!r}"
        level.shared.notices.say(f"{level.name} task", what)

    async def _run(self) -> None:
        level, client = self._level, self._client
        while True:
            was_ill = client.ill("put", "remove")
            with suppress(TimeoutError):  # wait_for would swallow a cancellation in 3.11
                waits = client.retry_in_s("put", "remove"), level.late_in_s
                async with asyncio.timeout(min((s for s in waits if s is not None), default=None)):
                    await self._wakeup.wait()
            self._wakeup.clear()
            with self._lock:
                level.remove_late()
            while level.due:
                await self._step()
            if not level.writable:
                self._lose_all()
            with self._lock:
                if was_ill and level.writable:
                    self._above.wake()  # other levels may have blocks for it again
            self._idle.set()

    def _lose_all(self) -> None:
        """Drop all queued blocks, since the tier takes no writes now."""
        goes_on = True
        while goes_on:
            with self._lock:
                goes_on = self._level.lose_some()

    async def _step(self) -> None:
        """Do what is due: a purge, one batch of removals, or one batch of writes and a step of
        erasing.
        """
        level = self._level
        if level.tier.shared and level.purges.next:  # nothing else may run until the purge is over
            await self._purge()
            return
        with self._lock:
            removals = level.take_removals()
        if removals:
            await self._remove(removals)
            return
        await self._write()
        await self._purge()

    async def _purge(self) -> None:
        """Sync if that is due, and run a step of the purge that is due; what fails is still due."""
        purges = self._level.purges
        with self._lock:
            purge, removals, is_due = purges.next, purges.removals, purges.sync_due
        syncs = purge is not None and purge[1] == 0 and self._level.tier.erases
        if is_due and not syncs:
            if not await self._client.sync():
                return
            with self._lock:
                purges.synced(removals)
        if purge is None:
            return
        done = await self._client.purge(*purge)
        if done is not None:
            with self._lock:
                purges.done(*done)
                if is_due and syncs:
                    purges.synced(removals)

    async def _remove(self, blocks: Sequence[Ref]) -> None:
        """Have the tier forget these blocks; if it fails, they are queued again."""
        answer = await self._client.remove(blocks, lambda: self._level.forgotten_late(blocks))
        with self._lock:
            self._level.forgotten(blocks, answer)

    async def _write(self) -> None:
        """Store the oldest queued blocks, one batch, and make the room for them."""
        level = self._level
        with self._lock:
            salts = level.next_batch()
        # the tier is asked without the lock
        spare = {salt: self._client.spare(salt) for salt in dict.fromkeys(salts.values())}
        blocks, answer = list[Write](), CallOutcome(())
        try:
            with self._lock:
                priorities = level.begin(salts, spare)
            reason = await self._make_room(priorities)
            with self._lock:
                placed = level.placed(reason)
            if placed:
                answer = await self._client.put(placed, lambda: level.stored_late(placed))
                blocks = placed
        finally:
            with self._lock:
                level.settle(blocks, answer)

    async def _make_room(self, priorities: Sequence[int]) -> DropReason:
        """Evict as many blocks as writes of these priorities need; victims are demoted first.

        Returns why newcomers without a place get none.
        """
        with self._lock:
            victims, reason = self._level.victims(priorities)
        if victims:
            await self._demote(victims)
            with self._lock:
                gone = self._level.evict([block for block, _ in victims])
            for start in range(0, len(gone), self._level.batch_max):
                await self._remove(gone[start : start + self._level.batch_max])
        return reason

    async def _demote(self, victims: Sequence[tuple[Ref, BlockMeta]]) -> None:
        """Read those victims that a level below admits, and offer them to it."""
        level, arena = self._level, self._level.shared.arena
        moves: list[tuple[LevelRead, BlockMeta, Level]] = []
        with self._lock:
            for (key, place), meta in victims:
                target = self._above.below(level, key, meta)
                if target is None:
                    continue
                slots = self._above.room(1, meta.priority)
                if not slots:
                    level.stats.drop("arena", meta.priority)
                    continue
                level.places.begin_reads([place])
                wanted = self._client.pipeline.side.read(key, place, slots[0])
                moves.append((wanted, meta, target))
        if not moves:
            return
        blocks = [block for block, _, _ in moves]
        found: Sequence[bool] = [False] * len(blocks)
        try:
            answer = await self._client.get(blocks, lambda: level.read_ended(blocks))
            with self._lock:
                found = level.came(blocks, answer)
        finally:
            with self._lock:
                for (block, meta, target), ok in zip(moves, found, strict=True):
                    if ok and level.index.place(block.key) == block.place:
                        target.offer([block.key], [block.slot], [meta])
                    arena.release([block.slot])

    async def drain(self) -> None:
        """Wait until everything offered was written or given up."""
        while self._level.due or self._level.is_writing:
            self._idle.clear()
            self.wake()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Stop the task and drop what is queued; may be called again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        self._lose_all()
