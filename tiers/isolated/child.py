"""The child process of an isolated tier: maps the arena, opens the tier, and serves its calls."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator, Sequence
from itertools import compress, count
from typing import cast

from kvladder.arena import Arena, ArenaHandle, Slot
from kvladder.children.pipe import Pipe
from kvladder.children.spawn import run
from kvladder.keys import BlockKey
from kvladder.tiers.base import Tier
from kvladder.tiers.blocking import BlockingPool, SystemClock
from kvladder.tiers.context import TierContext
from kvladder.tiers.isolated.calls import (
    LISTENER,
    TIER,
    UNHEARD,
    GetResult,
    OpenedTier,
    PutResult,
    TierListener,
)
from kvladder.tiers.label import (
    Coding,
    Facts,
    Labels,
    Read,
    RecoveredBlock,
    Ref,
    Write,
    arrival,
)

THREADS = 4


class Child:
    """Serves one tier, see ``TierCalls``."""

    def __init__(self, listener: TierListener) -> None:
        self._listener = listener
        self._pool = BlockingPool(THREADS, "kvladder-isolated")
        self._tier: Tier
        self._context: TierContext
        self._kept: AsyncIterator[Sequence[RecoveredBlock]] | None = None
        self._surveyed: AsyncIterator[Sequence[BlockKey]] | None = None

    async def make(self, pickled: bytes) -> None:
        """See ``TierCalls``."""
        make, options = pickle.loads(pickled)  # noqa: S301 - of our own process
        self._tier = make() if options is None else make(options)

    async def examine(self, capacity_bytes: int) -> dict[str, str]:
        """See ``TierCalls``."""
        return dict(await self._tier.examine(capacity_bytes, self._listener.said))

    async def open(self, arena: tuple[int, int, int], pickled: bytes) -> OpenedTier:
        """See ``TierCalls``."""
        fd, slots, slot_bytes = arena
        told = pickle.loads(pickled)  # noqa: S301 - of our own process
        layout, namespace, capacity_blocks, timeout_s, required, fields = told
        handle = ArenaHandle(os.getppid(), fd, slots, slot_bytes)
        tier = self._tier
        self._context = TierContext(
            arena=Arena.attach(handle, inherited=fd),
            layout=layout,
            namespace=namespace,
            capacity_blocks=capacity_blocks,
            clock=SystemClock(),
            run_blocking=self._pool.run,
            say=self._listener.said,
            timeout_s=timeout_s,
            required=required,
            fields=fields,
        )
        await tier.open(self._context)
        return OpenedTier(tier.batch_max, tier.describe(), tier.spare(UNHEARD))

    def _labels(self, *, verify: bool) -> Labels:
        context = self._context
        wall = context.clock.wall if self._tier.shared else None
        return Labels(context.namespace, context.layout.block_bytes, verify=verify, wall=wall)

    async def get(self, verify: bool, reads: list[tuple[Ref, int]]) -> GetResult:
        """See ``TierCalls``."""
        labels, view = self._labels(verify=verify), self._context.arena.view
        wanted = [Read(labels, *ref, Slot(slot), view(Slot(slot))) for ref, slot in reads]
        results = plain(await self._tier.get(wanted))
        return GetResult(results, [*map(arrival, wanted)], dict(self._tier.gauges()))

    async def put(
        self, verify: bool, writes: list[tuple[Ref, int, Facts, Coding | None, bool]]
    ) -> PutResult:
        """See ``TierCalls``."""
        labels, view = self._labels(verify=verify), self._context.arena.view
        blocks = [
            Write(labels, *ref, Slot(slot), view(Slot(slot)), facts, coding=coding, replace=replace)
            for ref, slot, facts, coding, replace in writes
        ]
        salts, fits = [*{block.facts.salt for block in blocks}], list[bool]()
        left = await self.spare(salts)  # the number that the level knows may be outdated
        for block in blocks:
            left[block.facts.salt] -= 1
            fits.append(left[block.facts.salt] >= 0)
        results = plain(await self._tier.put([*compress(blocks, fits)]))
        if not all(fits):
            kept = dict(zip(compress(count(), fits), cast("list[bool]", results), strict=True))
            results = [kept.get(number, False) for number in range(len(fits))]
        return PutResult(results, await self.spare(salts), dict(self._tier.gauges()))

    async def contains(self, blocks: list[Ref]) -> object:
        """See ``TierCalls``."""
        return plain(await self._tier.contains(blocks))

    async def remove(self, blocks: list[Ref]) -> None:
        """See ``TierCalls``."""
        await self._tier.remove(blocks)

    async def purge(self, salt: bytes | None, number: int) -> int:
        """See ``TierCalls``."""

        def progress(done: int, total: int) -> None:
            self._listener.progressed(number, done, total)

        return await self._tier.purge(salt, progress)

    async def sync(self) -> None:
        """See ``TierCalls``."""
        await self._tier.sync()

    async def erase(self, salt: bytes | None, start: int) -> tuple[int, int | None]:
        """See ``TierCalls``."""
        return await self._tier.erase(salt, start)

    async def survey(self, salt: bytes | None, anew: bool) -> list[BlockKey] | None:
        """See ``TierCalls``."""
        if anew or self._surveyed is None:
            self._surveyed = self._tier.survey(salt)
        async for batch in self._surveyed:
            return list(batch)
        self._surveyed = None
        return None

    async def spare(self, salts: list[bytes]) -> dict[bytes, float]:
        """See ``TierCalls``."""
        return {salt: self._tier.spare(salt) for salt in salts}

    async def recover(self, anew: bool) -> list[RecoveredBlock] | None:
        """See ``TierCalls``."""
        if anew or self._kept is None:
            self._kept = self._tier.recover()
        async for batch in self._kept:
            return list(batch)
        self._kept = None
        return None

    async def aclose(self) -> None:
        """See ``TierCalls``."""
        await self._tier.aclose()


def plain(results: object) -> object:
    """Return a tier's results as plain data; the parent checks whether they are valid."""
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        return results
    return [one if one is None else bool(one) for one in cast("Sequence[object]", results)]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pipe = Pipe(reader, writer, "the engine's process")
    pipe.answer(TIER, Child(pipe.stub(LISTENER)))
    if fault := await pipe.join():
        raise ValueError(fault)


if __name__ == "__main__":
    run(_serve)
