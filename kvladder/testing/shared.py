"""A fake shared tier: like a server, it also takes blocks and removals from other engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from kvladder.errors import TierFull
from kvladder.keys import BlockKey
from kvladder.testing.fakes import FakeTier, Record
from kvladder.tiers.base import NO_PLACE
from kvladder.tiers.context import Progress
from kvladder.tiers.label import NO_FACTS, Labels, Ref, Write


class SharedFakeTier(FakeTier):
    """Stores blocks by key. A second put of a block changes nothing and reports it as stored.

    To remove a block that others may still use breaks a rule. Blocks for which ``removable`` is
    true may be removed. After the tier was full once, all may.
    """

    shared = True
    surveys = True

    removable: Callable[[BlockKey], bool] = frozenset[BlockKey]().__contains__
    """Returns whether a user removed or purged a block; the test sets it."""
    was_full = False
    """True if a put once raised TierFull: from then on, blocks may be removed to make room."""

    def _where(self, key: BlockKey, place: int) -> int | BlockKey:
        del place
        return key

    def at(self, key: BlockKey, place: int) -> Record | None:
        record = super().at(key, place)
        end_s = None if record is None else record.facts.expires_wall_s
        return record if end_s is None or end_s > self.context.clock.wall() else None

    def _keep(self, record: Record, *, replace: bool) -> None:
        key = record.key
        if replace or self.at(key, record.place) is None or key in self._forgotten:
            super()._keep(record, replace=replace)

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        try:
            return await super().put(writes)
        except TierFull:
            self.was_full = True
            raise

    async def remove(self, blocks: Sequence[Ref]) -> None:
        wanted = [key for key, _ in blocks if not (self.was_full or self.removable(key))]
        self._require(not wanted, "a remove of a block that others may use")
        await super().remove(blocks)
        self.others_remove([key for key, _ in blocks])  # also expired ones, which at() hides

    def others_put(self, blocks: Mapping[BlockKey, bytes]) -> None:
        """Store blocks as another engine would."""
        context = self.context
        labels = Labels(context.namespace, context.layout.block_bytes, verify=True)
        for key, data in blocks.items():
            label = labels.pack(key, data)
            self._keep(Record(key, NO_PLACE, NO_FACTS, label, data), replace=False)

    def others_remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks as another engine, or the server itself, would."""
        for key in keys:
            self.records.pop(key, None)

    async def survey(self, salt: bytes | None) -> AsyncIterator[Sequence[BlockKey]]:
        async with self._call("purge", ()):
            found = [r.key for r in self.records.values() if salt in {None, r.facts.salt}]
        yield found

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        async with self._call("purge", ()):
            gone = [r.key for r in self.records.values() if salt in {None, r.facts.salt}]
            self.others_remove(gone)
            progress(len(gone), len(gone))
        return len(gone)
