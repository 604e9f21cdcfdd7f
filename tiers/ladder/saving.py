"""Blocks that are being copied out of an engine: their slots, and what goes with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Protocol

from kvladder.arena import Slot
from kvladder.keys import BlockKey, Book, by_key
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.retention import checked_duration, checked_priority
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import Terms
from kvladder.tiers.spans import SaveSpan
from kvladder.units import counted


class _ReservationBatch:
    """Keeps what one step reserved, so that a whole prompt costs little more than one block."""

    __slots__ = ("_by_key", "keys", "metas", "slots", "whole")

    def __init__(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], metas: Sequence[BlockMeta]
    ) -> None:
        self.keys = list(keys)
        self.slots = list(slots)
        self.metas = metas
        self.whole = True
        """True while every block of the batch is still reserved, and each was named once."""
        self._by_key: dict[BlockKey, tuple[Slot, BlockMeta]] = {}

    def tear(self) -> None:
        """Note that a block is no longer reserved, or was named twice."""
        self.whole = False

    def __getitem__(self, key: BlockKey) -> tuple[Slot, BlockMeta]:
        if not self._by_key:
            pairs = zip(self.slots, self.metas, strict=True)
            self._by_key.update(zip(self.keys, pairs, strict=True))
        return self._by_key[key]


class Saving:
    """Keeps blocks that are reserved and not yet published or abandoned; at most ``blocks_max``.

    The stack's lock is held around every call. A block that is removed leaves it at once; the save
    that fills its slot learns of it from ``pop``.
    """

    def __init__(self, blocks_max: int = 0) -> None:
        self._lots: Book[_ReservationBatch] = by_key(blocks_max)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._lots

    def __len__(self) -> int:
        return len(self._lots)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._lots)

    def disjoint(self, keys: Iterable[BlockKey]) -> bool:
        """Return whether none of ``keys`` is being saved."""
        return not self._lots or self._lots.isdisjoint(keys)

    def put(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], metas: Sequence[BlockMeta]
    ) -> None:
        """Add blocks that are going to be filled; none of them is here yet."""
        lot = _ReservationBatch(keys, slots, metas)
        lots = dict.fromkeys(keys, lot)
        self._lots.put_all(lots)
        if len(lots) < len(keys):
            lot.tear()

    def pop(self, key: BlockKey, slot: Slot) -> BlockMeta | None:
        """Take a block out and return its meta; None if it was removed, or then saved anew."""
        lot = self._lots.get(key)
        if lot is None or lot[key][0] != slot:
            return None
        self.discard([key])
        return lot[key][1]

    def discard(self, keys: Iterable[BlockKey], salt: bytes | None = None) -> None:
        """Forget those of ``keys`` that are here, only those of ``salt`` if one is given."""
        for key in keys:
            lot = self._lots.get(key)
            if lot is not None and (salt is None or lot[key][1].terms.salt == salt):
                del self._lots[key]
                lot.tear()

    def metas(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> Sequence[BlockMeta] | None:
        """Return the metas of these blocks if one step reserved them and none has changed since.

        Otherwise returns None.
        """
        lot = self._lots.get(keys[0])
        if lot is None or not lot.whole:
            return None
        if lot.keys != [*keys] or lot.slots != [*slots]:
            return None
        return lot.metas

    def together(self, key: BlockKey, default: int) -> int:
        """Return how many blocks were reserved in one step with this one, or ``default``."""
        lot = self._lots.get(key)
        return default if lot is None else len(lot.keys)

    def done(self, keys: Sequence[BlockKey]) -> None:
        """Take out these blocks, with known ``metas``, as they are hits now."""
        if len(keys) == len(self._lots):
            self._lots.clear()
        else:
            for key in keys:
                del self._lots[key]

    def slots(self) -> list[Slot]:
        """Return the slots of all reserved blocks."""
        return [lot[key][0] for key, lot in self._lots.items()]


class Reserves(Protocol):
    """The part of the stack that a save needs."""

    @property
    def shared(self) -> Shared:
        """The part that all levels have in common."""
        ...

    def publish(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Make these reserved blocks hits: their bytes are complete."""
        ...

    def abandon(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Free the slots of these reserved blocks, which will not be filled."""
        ...


class Save:
    """Slots leased for blocks that an engine is about to copy out of its KV cache.

    The caller owns it, fills the slots and then calls ``commit`` or ``abort`` once. If the caller
    loses it, a ResourceWarning says so and it is aborted: keep it as long as a copy writes.
    """

    _open = False

    def __init__(
        self,
        stack: Reserves,
        keys: list[BlockKey],
        indices: list[int],
        slots: list[Slot],
        floor: int,
        end: int,
        span: SaveSpan | None = None,
    ) -> None:
        self._stack = stack
        self._unreleased = stack.shared.unreleased
        self._keys = keys
        self.indices = indices
        """Positions of these blocks in the keys that were given, ascending."""
        self.slots = slots
        """Slots of these blocks, in the same order."""
        self.end = end
        """Position of the first block without room; the number of keys if there is none."""
        self.floor = floor
        """Lowest priority so far: ``parent_floor`` of the prefix's next blocks."""
        self.span = span
        """Is told how the save ends; None without tracing."""
        self._open = True

    def __repr__(self) -> str:
        state = "to be committed" if self._open else "ended"
        return f"<Save: {counted(len(self.slots), 'block')}, {state}>"

    def commit(self) -> None:
        """Make the blocks hits: all bytes are in the slots. Idempotent."""
        if self._open:
            self._open = False
            self._stack.publish(self._keys, self.slots)
            if self.span is not None:
                self.span.ended(committed=True)

    def abort(self) -> None:
        """Free the slots after a copy that failed: no block becomes visible. Idempotent."""
        if self._open:
            self._open = False
            self._stack.abandon(self._keys, self.slots)
            if self.span is not None:
                self.span.ended(committed=False)

    def __del__(self) -> None:
        if self._open and self.slots:
            self._unreleased.add("save", self.abort)


def require_one_each(count: int, **told: Sequence[object] | None) -> None:
    """Raise ValueError unless each sequence that is given has one value for each key."""
    for name, given in told.items():
        if given is not None and len(given) != count:
            raise ValueError(f"{name}: expected one for each of {count} keys, found {len(given)}")


def metas_of(
    count: int,
    priorities: Sequence[int] | None,
    durations_s: Sequence[float | None] | None,
    floor: int,
    now: float,
    terms: Terms,
) -> list[BlockMeta]:
    """Return the metas of consecutive blocks of a prefix; ``floor`` is that before them."""
    if priorities is None and durations_s is None:  # one object for all of them
        return [BlockMeta(PRIORITY_DEFAULT, min(floor, PRIORITY_DEFAULT), 0, inf, terms)] * count
    metas: list[BlockMeta] = []
    wanted = [PRIORITY_DEFAULT] * count if priorities is None else priorities
    durations = [None] * count if durations_s is None else durations_s
    for priority, duration_s in zip(wanted, durations, strict=True):
        priority = checked_priority(priority)
        floor = min(floor, priority)
        lasts_s = checked_duration(duration_s)
        until_s = inf if lasts_s is None else now + lasts_s
        metas.append(BlockMeta(priority, floor, 0, until_s, terms))
    return metas
