"""Blocks that are being copied out of an engine: their slots, and what goes with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.tiers.ladder.index import Meta


class _Lot:
    """What was reserved in one step, so that a whole prompt costs little more than one block."""

    __slots__ = ("_by_key", "keys", "metas", "slots", "whole")

    def __init__(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], metas: Sequence[Meta]
    ) -> None:
        self.keys = list(keys)
        self.slots = list(slots)
        self.metas = metas
        self.whole = True
        """Whether all of it is there still, each block of it once."""
        self._by_key: dict[BlockKey, tuple[Slot, Meta]] = {}

    def tear(self) -> None:
        """Some of it is not there any more, or was named twice."""
        self.whole = False

    def __getitem__(self, key: BlockKey) -> tuple[Slot, Meta]:
        if not self._by_key:
            pairs = zip(self.slots, self.metas, strict=True)
            self._by_key.update(zip(self.keys, pairs, strict=True))
        return self._by_key[key]


class Saving:
    """What is reserved and neither published nor abandoned yet; with the stack's lock held.

    A block that was removed is not there any more; whoever fills its slot is told so by ``pop``.
    """

    def __init__(self) -> None:
        self._lots: dict[BlockKey, _Lot] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._lots

    def __len__(self) -> int:
        return len(self._lots)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._lots)

    def disjoint(self, keys: Iterable[BlockKey]) -> bool:
        """Whether none of ``keys`` is being saved."""
        return not self._lots or self._lots.keys().isdisjoint(keys)

    def put(self, keys: Sequence[BlockKey], slots: Sequence[Slot], metas: Sequence[Meta]) -> None:
        """These blocks are going to be filled; none is here yet."""
        lot, before = _Lot(keys, slots, metas), len(self._lots)
        self._lots.update(dict.fromkeys(keys, lot))
        if len(self._lots) < before + len(keys):
            lot.tear()

    def pop(self, key: BlockKey, slot: Slot) -> Meta | None:
        """End one block's; None if it was removed, or removed and saved anew, meanwhile."""
        lot = self._lots.get(key)
        if lot is None or lot[key][0] != slot:
            return None
        self.discard([key])
        return lot[key][1]

    def discard(self, keys: Iterable[BlockKey], salt: bytes | None = None) -> None:
        """Forget those of ``keys`` that are there, and of this salt if there is one."""
        for key in keys:
            lot = self._lots.get(key)
            if lot is not None and (salt is None or lot[key][1].terms.salt == salt):
                del self._lots[key]
                lot.tear()

    def metas(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> Sequence[Meta] | None:
        """What goes with them, if they were reserved in one step and nothing happened since."""
        lot = self._lots.get(keys[0])
        if lot is None or not lot.whole:
            return None
        if lot.keys != [*keys] or lot.slots != [*slots]:
            return None
        return lot.metas

    def together(self, key: BlockKey, default: int) -> int:
        """How many blocks were reserved in one step with this one; if it is not there, default."""
        lot = self._lots.get(key)
        return default if lot is None else len(lot.keys)

    def done(self, keys: Sequence[BlockKey]) -> None:
        """All of these, whose ``metas`` are known, are hits now."""
        for key in keys:
            del self._lots[key]

    def slots(self) -> list[Slot]:
        """The slots of all of them."""
        return [lot[key][0] for key, lot in self._lots.items()]
