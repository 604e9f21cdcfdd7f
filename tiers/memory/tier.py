"""The reference tier: a dict of bytes, as short as a correct tier can be."""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.errors import TierError
from kvladder.keys import BlockKey
from kvladder.tiers.base import Tier
from kvladder.tiers.label import Read, Ref, Write


class MemoryTier(Tier):
    """Keeps blocks in ordinary process memory; useful as a cold tier in tests and examples."""

    medium = "CPU"
    resizes = True

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, tuple[bytes, bytes]] = {}
        self._closed = False

    def _require_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed", temporary=False)

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        self._require_open()
        for read in reads:
            if read.key in self._blocks:
                label, data = self._blocks[read.key]
                read.view[: len(data)] = data[: len(read.view)]
                read.came(label, len(data))
        return [read.key in self._blocks for read in reads]

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        self._require_open()
        labels = await self.context.run_blocking(lambda: [write.label() for write in writes])
        self._require_open()
        for write, label in zip(writes, labels, strict=True):
            self._blocks[write.key] = label, bytes(write.view[: write.length])
        return [True] * len(writes)

    async def remove(self, blocks: Sequence[Ref]) -> None:
        self._require_open()
        for block in blocks:
            self._blocks.pop(block.key, None)

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        self._require_open()
        return [block.key in self._blocks for block in blocks]

    async def resize(self, capacity_blocks: int) -> None:
        """Do nothing: a dict has no places."""

    async def aclose(self) -> None:
        self._closed = True
        self._blocks.clear()
