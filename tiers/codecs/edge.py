"""The edge of a level: what its codecs do to blocks on their way to the tier and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvladder.arena import Slot
from kvladder.errors import ConfigError, TierFull
from kvladder.layout import align
from kvladder.schema import within
from kvladder.tiers.base import Blocking, Item, Outcome, Tier, TierContext
from kvladder.tiers.codecs.base import ChecksumCodec, Codec
from kvladder.tiers.codecs.chain import Chain, Find
from kvladder.tiers.ladder.gate import checked

S = TypeVar("S")
T = TypeVar("T")

SCRATCH_BYTES = 64 << 20
SCRATCH_BLOCKS_MAX = 32
JOBS = 4
"""Threads that a batch is spread over."""


def scratch_blocks(codecs: Sequence[Codec], slot_bytes: int) -> int:
    """How many slots a level needs to encode into; none if its codecs leave bytes as they are."""
    if all(isinstance(codec, ChecksumCodec) for codec in codecs):
        return 0
    return max(2, min(SCRATCH_BLOCKS_MAX, SCRATCH_BYTES // slot_bytes))


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """What is done to blocks at the edge of a level."""

    codecs: tuple[Codec, ...] = ()
    """Applied in this order to blocks that are stored; not opened yet, of this level alone."""
    find: Find = lambda _: None
    """Finds the codecs of blocks that were stored with others, opened."""


class Edge:
    """Stands between a level and its tier. Coroutines run on the loop thread.

    Blocks are encoded from their slots into scratch slots, in threads, and the tier is given
    those; if there are fewer of them than blocks, a batch is stored in parts, and if there are
    none, it waits for another batch to end. What is read is decoded in the slot it was read into.

    Parameters
    ----------
    scratch:
        Slots of the arena that are the edge's own.
    """

    def __init__(self, tier: Tier, settings: EdgeSettings, scratch: Sequence[Slot] = ()) -> None:
        self._tier = tier
        self._settings = settings
        self._scratch = list(scratch)
        self._queue = asyncio.Lock()
        self._given = asyncio.Event()
        self.corrupt = 0
        """Blocks that were damaged when the tier delivered them."""
        self.unreadable = 0
        """Blocks whose codecs or keys are not here, or less than what is demanded."""
        self.encoded_bytes = 0
        """What the blocks came to that codecs made smaller, or could not."""

    def open(self, context: TierContext, run: Blocking) -> None:
        """Open the codecs, which run in the threads of ``run``; the tier comes after it.

        Raises
        ------
        ConfigError
            One of them cannot work as configured.
        """
        self._arena, self._run = context.arena, run
        self._size = context.layout.block_bytes
        # a tier that checks what it reads need not be checked
        codecs = [
            codec
            for codec in self._settings.codecs
            if not (self._tier.checks and isinstance(codec, ChecksumCodec))
        ]
        layout = context.layout
        for codec in codecs:
            try:
                layout = codec.open(layout, context.namespace)
            except ConfigError as error:
                raise within("codecs", error) from error
        self._chain = Chain(
            codecs,
            layout=context.layout,
            namespace=context.namespace,
            find=self._settings.find,
            checked=context.verify and not self._tier.checks,
        )

    # ---- down

    async def put(self, items: Sequence[Item]) -> Sequence[bool]:
        """As ``Tier.put``."""
        if not self._chain.codecs:
            return await self._tier.put(items)
        if self._chain.last < 0:
            own = [(item, item.slot) for item in items]
            return await self._tier.put(await self._each(self._encode, own))
        kept: list[bool] = []
        while len(kept) < len(items):
            slots = await self._take(len(items) - len(kept))
            try:
                pairs = list(zip(items[len(kept) :], slots, strict=False))
                coded = await self._each(self._encode, pairs)
                kept += map(bool, checked("put", await self._tier.put(coded), len(coded)))
                self.encoded_bytes += sum(item.length for item in coded)
            except TierFull:
                if not kept:
                    raise
                kept += [False] * (len(items) - len(kept))  # what is stored is not taken back
            finally:
                self._give(slots)
        return kept

    def _encode(self, pair: tuple[Item, Slot]) -> Item:
        """What the tier is to store, which lies in the scratch slot if it is not the block."""
        item, scratch = pair
        data = self._arena.view(item.slot)[: self._size]
        target = self._arena.view(scratch)
        stored, note = self._chain.encode(item, data, target[: self._size])
        length = len(stored)
        if stored is not data:  # a tier may store whole pages, and before this came another block
            target[length : align(length)] = bytes(align(length) - length)
        slot = item.slot if stored is data else scratch
        return item._replace(slot=slot, length=length, note=bytearray(note))

    async def _take(self, wanted: int) -> list[Slot]:
        """Between one and ``wanted`` scratch slots; first come, first served."""
        async with self._queue:
            while not self._scratch:
                self._given.clear()
                await self._given.wait()
            return [self._scratch.pop() for _ in range(min(wanted, len(self._scratch)))]

    def _give(self, slots: Sequence[Slot]) -> None:
        self._scratch.extend(slots)
        self._given.set()

    # ---- up

    async def get(self, items: Sequence[Item]) -> Sequence[bool | None]:
        """As ``Tier.get``."""
        if not self._tier.notes:
            return await self._tier.get(items)
        asked = [item._replace(note=bytearray()) for item in items]
        found = list(checked("get", await self._tier.get(asked), len(asked)))
        coded = [index for index, ok in enumerate(found) if ok and not self._plain(asked[index])]
        outcomes = await self._each(self._decode, [asked[index] for index in coded])
        for index, outcome in zip(coded, outcomes, strict=True):
            found[index] = outcome is Outcome.GOOD
            self.corrupt += outcome is Outcome.CORRUPT
            self.unreadable += outcome is Outcome.STALE
        return found

    def _plain(self, item: Item) -> bool:
        """Whether a block that was found is to be taken as it is."""
        return not item.note and not self._chain.demands

    def _decode(self, item: Item) -> Outcome:
        return self._chain.decode(item, bytes(item.note or b""), self._arena.view(item.slot))

    async def _each(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """``function`` of each item, in threads; ends when no call runs any more."""
        if not items:
            return []

        def part(start: int) -> list[T]:
            return [function(item) for item in items[start::JOBS]]

        jobs = [asyncio.ensure_future(self._run(part, n)) for n in range(min(JOBS, len(items)))]
        try:
            await asyncio.wait(jobs)
        finally:  # cancelled: they still touch the slots
            while not all(job.done() for job in jobs):
                with suppress(asyncio.CancelledError):
                    await asyncio.wait(jobs)
        failures = [failure for job in jobs if (failure := job.exception()) is not None]
        if failures:
            raise failures[0]
        done = [iter(job.result()) for job in jobs]
        return [next(done[index % JOBS]) for index in range(len(items))]
