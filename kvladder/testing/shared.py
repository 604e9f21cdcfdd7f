"""A fake tier that others put into and remove from, as they do with a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xxhash import xxh3_128_digest

from kvladder.keys import BlockKey
from kvladder.testing.fakes import FakeTier, Record
from kvladder.tiers.base import NO_PLACE, Item, Progress


class SharedFakeTier(FakeTier):
    """Stores blocks by key, each once: who puts it again is told that it is stored."""

    shared = True

    def _where(self, key: BlockKey, place: int) -> int | BlockKey:
        del place
        return key

    def _keep(self, record: Record) -> None:
        item = record.item
        if self.at(item.key, item.place) is None or item.key in self._forgotten:
            super()._keep(record)

    def others_put(self, blocks: Mapping[BlockKey, bytes]) -> None:
        """Another engine stores blocks."""
        for key, data in blocks.items():
            self._keep(Record(Item(key, NO_PLACE), data, xxh3_128_digest(data)))

    def others_remove(self, keys: Sequence[BlockKey]) -> None:
        """Another engine, or the server itself, removes blocks."""
        for key in keys:
            self.records.pop(key, None)

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        async with self._call("purge", ()):
            gone = [r.item.key for r in self.records.values() if salt in {None, r.item.salt}]
            self.others_remove(gone)
            progress(len(gone), len(gone))
        return len(gone)
