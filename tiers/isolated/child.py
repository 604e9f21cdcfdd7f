"""The child process of an isolated tier: maps the arena, opens the tier, and serves its calls."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from itertools import compress, count
from typing import cast

from kvladder.arena import Arena, ArenaHandle, Slot
from kvladder.errors import ConfigError, TierError, TierFull, Unavailable
from kvladder.tiers.base import Tier
from kvladder.tiers.blocking import BlockingPool, SystemClock
from kvladder.tiers.context import TierContext
from kvladder.tiers.isolated.spawn import run
from kvladder.tiers.isolated.wire import (
    UNHEARD,
    Ask,
    Cancel,
    Close,
    Done,
    Erase,
    Examine,
    Failed,
    Get,
    Got,
    Message,
    Open,
    Progressed,
    Purge,
    Put,
    Recover,
    Recovered,
    Request,
    Said,
    Spare,
    Start,
    frame,
    requests,
    take,
)
from kvladder.tiers.label import Labels, Read, RecoveredBlock, Write, arrival

THREADS = 4


class Child:
    """Serves one tier to its parent process, and ends when that dies."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[bytes]] = {}
        self._pool = BlockingPool(THREADS, "kvladder-isolated")
        self._tier: Tier
        self._context: TierContext
        self._kept: AsyncIterator[Sequence[RecoveredBlock]] | None = None

    async def serve(self) -> None:
        """Serve requests until the parent is gone."""
        while True:
            message = requests.decode(await take(self._reader))
            if isinstance(message, Cancel):
                task = self._tasks.get(message.number)
                if task is not None:
                    task.cancel()
            else:
                task = asyncio.create_task(self._answer(message))
                self._tasks[message.number] = task
                task.add_done_callback(partial(self._answered, message.number))

    async def _answer(self, message: Request) -> bytes:
        """Serve one request and return the answer as a frame; an error becomes a ``Failed``."""
        try:
            answer = await self._done(message)
            answer.number = message.number
            return frame(answer)
        except BaseException as error:  # noqa: BLE001 - told to the caller
            return frame(failure(message.number, error))

    def _answered(self, number: int, task: asyncio.Task[bytes]) -> None:
        """Send the answer of a call, also if the call was cancelled before it began."""
        del self._tasks[number]
        gone = Failed(number, "cancelled")
        self._writer.write(frame(gone) if task.cancelled() else task.result())

    async def _done(self, message: Request) -> Message:
        match message:
            case Start():
                make, options = pickle.loads(message.pickled)  # noqa: S301 - of our own process
                self._tier = make() if options is None else make(options)
                return Done()
            case Open():
                return await self._open(message)
            case Examine():
                facts = await self._tier.examine(message.capacity_bytes, self._tell)
                return Done(value=dict(facts))
            case Get():
                return await self._get(message)
            case Put():
                return await self._put(message)
            case Ask():
                call = getattr(self._tier, message.call)
                return Done(value=plain(await call(message.blocks)))
            case Purge():
                number = message.number

                def progress(done: int, total: int) -> None:
                    self._say(Progressed(number, done, total))

                return Done(value=await self._tier.purge(message.salt, progress))
            case Erase():
                return Done(value=await self._tier.erase(message.salt, message.start))
            case Spare():
                return Done(spare=self._spare(message.salts))
            case Recover():
                return await self._recover(anew=message.anew)
            case Close():
                await self._tier.aclose()
                return Done()
            case Cancel():
                raise AssertionError("is not answered")

    def _say(self, message: Message) -> None:
        self._writer.write(frame(message))

    def _tell(self, text: str) -> None:
        self._say(Said(text=text))

    async def _open(self, message: Open) -> Done:
        fd, slots, slot_bytes = message.arena
        told = pickle.loads(message.pickled)  # noqa: S301
        layout, namespace, capacity_blocks, timeout_s, required, fields = told
        handle = ArenaHandle(os.getppid(), fd, slots, slot_bytes)
        self._context = TierContext(
            arena=Arena.attach(handle, inherited=fd),
            layout=layout,
            namespace=namespace,
            capacity_blocks=capacity_blocks,
            clock=SystemClock(),
            run_blocking=self._pool.run,
            say=self._tell,
            timeout_s=timeout_s,
            required=required,
            fields=fields,
        )
        await self._tier.open(self._context)
        value = self._tier.batch_max, self._tier.describe()
        return Done(value=value, spare=self._spare([UNHEARD]))

    def _labels(self, *, verify: bool) -> Labels:
        context = self._context
        wall = context.clock.wall if self._tier.shared else None
        return Labels(context.namespace, context.layout.block_bytes, verify=verify, wall=wall)

    async def _get(self, message: Get) -> Got:
        labels, view = self._labels(verify=message.verify), self._context.arena.view
        reads = [Read(labels, ref, Slot(slot), view(Slot(slot))) for ref, slot in message.reads]
        results = await self._tier.get(reads)
        return Got(
            results=plain(results),
            found=[*map(arrival, reads)],
            gauges=dict(self._tier.gauges()),
        )

    async def _put(self, message: Put) -> Done:
        labels, view = self._labels(verify=message.verify), self._context.arena.view
        writes = [
            Write(labels, ref, Slot(slot), view(Slot(slot)), facts, coding=coding, replace=replace)
            for ref, slot, facts, coding, replace in message.writes
        ]
        salts, fits = {write.facts.salt for write in writes}, list[bool]()
        left = self._spare(salts)  # the number that the level knows may be outdated
        for write in writes:
            left[write.facts.salt] -= 1
            fits.append(left[write.facts.salt] >= 0)
        results = plain(await self._tier.put([*compress(writes, fits)]))
        if not all(fits):
            kept = dict(zip(compress(count(), fits), cast("list[bool]", results), strict=True))
            results = [kept.get(number, False) for number in range(len(fits))]
        return Done(value=results, spare=self._spare(salts), gauges=dict(self._tier.gauges()))

    def _spare(self, salts: Iterable[bytes]) -> dict[bytes, float]:
        return {salt: self._tier.spare(salt) for salt in salts}

    async def _recover(self, *, anew: bool) -> Recovered:
        if anew or self._kept is None:
            self._kept = self._tier.recover()
        async for batch in self._kept:
            return Recovered(kept=list(batch))
        self._kept = None
        return Recovered()


def plain(results: object) -> object:
    """Return a tier's results as plain data; the parent checks whether they are valid."""
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        return results
    return [one if one is None else bool(one) for one in cast("Sequence[object]", results)]


def failure(number: int, error: BaseException) -> Failed:
    """Return the error that a call raised, as an answer."""
    match error:
        case ConfigError():
            return Failed(number, "config", error.message, error.path, error.hint)
        case Unavailable():
            return Failed(number, "unavailable", error.message, error.path, error.hint)
        case TierError():
            full = isinstance(error, TierFull)
            temporary = error.temporary
            return Failed(number, "full" if full else "tier", str(error), temporary=temporary)
        case asyncio.CancelledError():
            return Failed(number, "cancelled")
        case _:
            return Failed(number, "tier", f"it raised {error!r}", temporary=False)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await Child(reader, writer).serve()


if __name__ == "__main__":
    run(_serve)
