"""A tier that costs nothing: what is measured, or counted, over it is the stack's own work."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence

from kvladder.keys import BlockKey
from kvladder.tiers.base import Item, Tier


def keys_of(name: str, count: int) -> list[BlockKey]:
    """So many keys; equal names have equal ones."""
    return [BlockKey(hashlib.sha256(f"{name} {n}".encode()).digest()) for n in range(count)]


class InstantTier(Tier):
    """Answers at once that it has, and has stored, whatever it is asked for; moves nothing.

    Parameters
    ----------
    held:
        The keys of the blocks that it has from its start, in this order.
    salt:
        The digest of the salt of all of them.
    """

    durable = True

    def __init__(self, held: Sequence[BlockKey] = (), *, salt: bytes = b"") -> None:
        self._held = held
        self._salt = salt

    async def get(self, items: Sequence[Item]) -> Sequence[bool]:
        return [True] * len(items)

    async def put(self, items: Sequence[Item]) -> Sequence[bool]:
        return [True] * len(items)

    async def remove(self, items: Sequence[Item]) -> None:
        del items

    async def contains(self, items: Sequence[Item]) -> Sequence[bool]:
        return [True] * len(items)

    async def recover(self) -> AsyncIterator[Sequence[Item]]:
        yield [Item(key, place, salt=self._salt) for place, key in enumerate(self._held)]

    async def aclose(self) -> None:
        pass
