"""A tier whose calls take the time of a medium with given speeds, in any loop's time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvladder.tiers.label import Coding, Outcome, Read, ReadResult, Write, arrived
from kvladder.tiers.memory import MemoryTier


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a medium, in bytes a second and seconds a call."""

    read: float = inf
    write: float = inf
    latency_s: float = 0.0


class _Channel:
    """One direction of a medium: calls share its bandwidth, first come, first served."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_at_s = 0.0

    async def move(self, count: float) -> None:
        """Wait for as long as moving ``count`` bytes takes."""
        now = asyncio.get_running_loop().time()
        self._free_at_s = max(now, self._free_at_s) + count / self._bytes_per_s
        wait_s = self._free_at_s - now + self._latency_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)


class PacedTier(MemoryTier):
    """Takes the time for its blocks that a medium of these speeds would take.

    Parameters
    ----------
    stored_bytes:
        Bytes that a block takes on the medium, after codecs.
    batch_max:
        Largest batch, as of the tier that it stands for.
    is_bare:
        True to keep only which blocks are there, for replays: a read finds the block good, and its
        bytes are not defined.
    """

    def __init__(
        self,
        speeds: Speeds | None = None,
        *,
        stored_bytes: float = 0,
        batch_max: int = 64,
        is_bare: bool = False,
    ) -> None:
        super().__init__()
        speeds = speeds or Speeds()
        self.batch_max = batch_max
        self._stored_bytes = stored_bytes
        self._is_bare = is_bare
        self._reads = _Channel(speeds.read, speeds.latency_s)
        self._writes = _Channel(speeds.write, speeds.latency_s)

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        self._require_open()
        there = sum(read.key in self._blocks for read in reads)
        await self._reads.move(there * self._stored_bytes)
        if not self._is_bare:
            return await super().get(reads)
        self._require_open()
        for read in reads:
            if read.key in self._blocks:
                arrived(read, self._good)
        return [read.key in self._blocks for read in reads]

    @property
    def _good(self) -> ReadResult:
        size = self.context.layout.block_bytes
        return ReadResult(b"-", size, Outcome.GOOD, Coding(size))

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        self._require_open()
        await self._writes.move(len(writes) * self._stored_bytes)
        if not self._is_bare:
            return await super().put(writes)
        self._require_open()
        self._blocks.update(dict.fromkeys([write.key for write in writes], (b"", b"")))
        return [True] * len(writes)
