"""The levels as one cache, hot to cold. Pools, publishers and connectors use it as a `Ladder`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.lock import StackLock
from kvladder.tiers.context import Clock
from kvladder.tiers.ladder.base_level import EventBuffer
from kvladder.tiers.ladder.records.index import BlockMeta


class Holdings(Iterable[BlockKey], Protocol):
    """The blocks of one level. The ladder's lock is held around every call."""

    @property
    def places(self) -> int:
        """How many places there are to look at with ``held``, from 0 on."""
        ...

    def held(self, start: int, end: int) -> Sequence[BlockKey]:
        """The blocks in the places from ``start`` up to ``end``."""
        ...

    def __contains__(self, key: BlockKey, /) -> bool: ...


class Ladder(Protocol):
    """The levels as one cache. Calls come from any thread and never wait for a tier.

    ``lock`` guards the bookkeeping; it is reentrant, so that whoever holds it makes several calls
    as one. Mappings are by the levels' names, hottest first.
    """

    @property
    def lock(self) -> StackLock:
        """Held for at most ``STEP`` blocks that are looked at one by one."""
        ...

    @property
    def clock(self) -> Clock:
        """The only one; its seconds are those of the loop."""
        ...

    @property
    def events(self) -> EventBuffer:
        """What comes to a level and leaves one; the lock is held around its calls."""
        ...

    @property
    def indexes(self) -> Mapping[str, Holdings]:
        """What each level holds."""
        ...

    @property
    def media(self) -> Mapping[str, str]:
        """What each level is made of, as in vLLM's events: ``CPU``, ``STORAGE`` ..."""
        ...

    @property
    def capacities(self) -> Mapping[str, int]:
        """Blocks that each level has room for."""
        ...

    def lasting(self) -> Mapping[str, bool]:
        """The levels that outlive the engine, and whether each takes blocks now."""
        ...

    def where(self, key: BlockKey) -> str | None:
        """The hottest level that holds the block or is about to; with the lock held."""
        ...

    def meta(self, key: BlockKey) -> BlockMeta | None:
        """What the hottest level that holds the block knows of it; with the lock held."""
        ...

    def used(self, key: BlockKey, meta: BlockMeta) -> str | None:
        """A block that was used elsewhere is worth ``meta`` now; with the lock held.

        It leaves the levels whose thresholds it does not reach any more. The hottest that holds it
        then, or is about to, None if there is none.
        """
        ...

    def lease(self, count: int) -> list[Slot]:
        """Up to ``count`` slots, evicting from host what levels below hold too."""
        ...

    def give_back(self, slots: Sequence[Slot]) -> None:
        """These leased slots are not used any more."""
        ...

    def reserve(
        self,
        keys: Sequence[BlockKey],
        metas: Sequence[BlockMeta],
        *,
        explicit: bool,
        patient: bool = False,
    ) -> tuple[list[int], list[Slot], int]:
        """Lease slots for those of ``keys`` that are to be saved: their positions, and the slots.

        Consecutive blocks of a prefix. ``explicit`` metas replace those of blocks that are here.
        Last comes the position of the first one without room, ``len(keys)`` if all have some; who
        is ``patient`` tries again. Each key returned must be given to ``publish`` or ``abandon``.
        """
        ...

    def publish(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """The bytes of these reserved blocks are complete: from now on they are hits."""
        ...

    def abandon(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """These reserved blocks will not be filled: their slots are free again."""
        ...

    def clear(self, *, erase: bool = False) -> Iterator[object]:
        """Forget every block, step by step; ``erase`` has tiers overwrite what they keep.

        Nothing is stored until the iteration is over or closed.
        """
        ...

    def purge(self, salt: bytes) -> Iterator[Mapping[str, int]]:
        """Forget every block of a salt, step by step: after each, how many by level so far.

        Nothing of this salt is stored until the iteration is over or closed.
        """
        ...
