"""A tier that costs nothing, so that a measurement over it shows only the stack's own work."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence

from kvladder.keys import BlockKey
from kvladder.tiers.base import Tier
from kvladder.tiers.label import Facts, Read, RecoveredBlock, Ref, Write


def keys_of(name: str, count: int) -> list[BlockKey]:
    """Return ``count`` keys; equal names give equal keys."""
    return [BlockKey(hashlib.sha256(f"{name} {n}".encode()).digest()) for n in range(count)]


class InstantTier(Tier):
    """Answers at once that it holds, or has stored, every block it is asked for; moves no bytes.

    Parameters
    ----------
    held:
        Keys of the blocks that it recovers at its start, in this order.
    salt:
        Digest of the salt of all these blocks.
    """

    durable = True

    def __init__(self, held: Sequence[BlockKey] = (), *, salt: bytes = b"") -> None:
        self._held = held
        self._salt = salt

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        whole = None
        for read in reads:  # no bytes came, so that there is nothing to check
            whole = whole or read._labels.whole  # pyright: ignore[reportPrivateUsage]
            read._coding = whole  # pyright: ignore[reportPrivateUsage]
        return [True] * len(reads)

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        return [True] * len(writes)

    async def remove(self, blocks: Sequence[Ref]) -> None:
        del blocks

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        return [True] * len(blocks)

    async def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        facts = Facts(salt=self._salt)
        yield [RecoveredBlock(key, place, facts) for place, key in enumerate(self._held)]

    async def aclose(self) -> None:
        pass
