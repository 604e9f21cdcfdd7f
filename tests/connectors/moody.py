"""A cold tier that is slow, loses blocks, fails and hangs, as it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import ClassVar

import msgspec

from kvladder.errors import TierError
from kvladder.tiers.label import Read, Write
from kvladder.tiers.memory import MemoryTier


class MoodyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the moody tier."""

    seed: int = 0
    mood: float = 0.1


class MoodyTier(MemoryTier):
    """``mood`` is how likely each kind of trouble is; 0 for a tier that is only slow."""

    batch_max = 4

    Options: ClassVar = MoodyOptions

    def __init__(self, options: MoodyOptions) -> None:
        super().__init__()
        self._random = Random(options.seed)
        self._mood = options.mood

    async def _trouble(self) -> None:
        await asyncio.sleep(self._random.choice([0.0, 0.0, 0.001, 0.003]))
        if self._random.random() < self._mood:
            raise TierError("not in the mood", temporary=self._random.random() < 0.8)
        if self._random.random() < self._mood / 10:
            await asyncio.Event().wait()

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        await self._trouble()
        for item in reads:
            if self._random.random() < self._mood:
                self._blocks.pop(item.key, None)
        return await super().get(reads)

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        await self._trouble()
        return await super().put(writes)
