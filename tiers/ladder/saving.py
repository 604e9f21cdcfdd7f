"""Blocks that are being copied out of an engine: their slots, and what goes with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from kvladder.arena import Slot
from kvladder.keys import BlockKey, Book, by_key
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.retention import checked_duration, checked_priority
from kvladder.tiers.base import Terms
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

    At most ``blocks_max`` blocks. One that was removed is not there any more; whoever fills its
    slot is told so by ``pop``.
    """

    def __init__(self, blocks_max: int = 0) -> None:
        self._lots: Book[_Lot] = by_key(blocks_max)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._lots

    def __len__(self) -> int:
        return len(self._lots)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._lots)

    def disjoint(self, keys: Iterable[BlockKey]) -> bool:
        """Whether none of ``keys`` is being saved."""
        return not self._lots or self._lots.isdisjoint(keys)

    def put(self, keys: Sequence[BlockKey], slots: Sequence[Slot], metas: Sequence[Meta]) -> None:
        """These blocks are going to be filled; none is here yet."""
        lot = _Lot(keys, slots, metas)
        lots = dict.fromkeys(keys, lot)
        self._lots.put_all(lots)
        if len(lots) < len(keys):
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
        if len(keys) == len(self._lots):
            self._lots.clear()
        else:
            for key in keys:
                del self._lots[key]

    def slots(self) -> list[Slot]:
        """The slots of all of them."""
        return [lot[key][0] for key, lot in self._lots.items()]


def require_one_each(count: int, **told: Sequence[object] | None) -> None:
    """Raise ValueError unless of all that is told of blocks there is one for each."""
    for name, given in told.items():
        if given is not None and len(given) != count:
            raise ValueError(f"{name}: {len(given)} for {count} keys, expected one each")


def metas_of(
    count: int,
    priorities: Sequence[int] | None,
    durations_s: Sequence[float | None] | None,
    floor: int,
    now: float,
    terms: Terms,
) -> list[Meta]:
    """What levels are told of consecutive blocks of a prefix, ``floor`` being that before them."""
    if priorities is None and durations_s is None:  # one for all of them
        return [Meta(PRIORITY_DEFAULT, min(floor, PRIORITY_DEFAULT), 0, inf, terms)] * count
    metas: list[Meta] = []
    wanted = [PRIORITY_DEFAULT] * count if priorities is None else priorities
    durations = [None] * count if durations_s is None else durations_s
    for priority, duration_s in zip(wanted, durations, strict=True):
        priority = checked_priority(priority)
        floor = min(floor, priority)
        lasts_s = checked_duration(duration_s)
        until_s = inf if lasts_s is None else now + lasts_s
        metas.append(Meta(priority, floor, 0, until_s, terms))
    return metas
