"""The reference tier: a dict of bytes. As short as a tier can be, and right."""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.errors import TierError
from kvladder.keys import BlockKey
from kvladder.tiers.base import Item, Tier


class MemoryTier(Tier):
    """Keeps blocks in ordinary process memory; useful as a cold tier in tests and examples."""

    checks = False
    notes = True
    medium = "CPU"

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, tuple[bytes, bytes]] = {}
        self._closed = False

    def _require_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed", temporary=False)

    async def get(self, items: Sequence[Item]) -> Sequence[bool]:
        self._require_open()
        found: list[bool] = []
        for item in items:
            data, note = self._blocks.get(item.key, (b"", b""))
            found.append(bool(data) and (item.note is not None or not note))
            if found[-1]:
                self.context.arena.view(item.slot)[: len(data)] = data
            if item.note is not None:
                item.note[:] = note
        return found

    async def put(self, items: Sequence[Item]) -> Sequence[bool]:
        self._require_open()
        for item in items:
            size = item.length or self.context.layout.block_bytes
            data = bytes(self.context.arena.view(item.slot)[:size])
            self._blocks[item.key] = data, bytes(item.note or b"")
        return [True] * len(items)

    async def remove(self, items: Sequence[Item]) -> None:
        self._require_open()
        for item in items:
            self._blocks.pop(item.key, None)

    async def contains(self, items: Sequence[Item]) -> Sequence[bool]:
        self._require_open()
        return [item.key in self._blocks for item in items]

    async def aclose(self) -> None:
        self._closed = True
        self._blocks.clear()
