"""The levels as one cache, hot to cold. Pools, publishers and connectors use it as a `Ladder`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.lock import StackLock
from kvladder.tiers.context import Clock
from kvladder.tiers.ladder.base_level import EventBuffer
from kvladder.tiers.ladder.records.meta import BlockMeta


class Holdings(Iterable[BlockKey], Protocol):
    """The blocks of one level. The ladder's lock is held around every call."""

    @property
    def places(self) -> int:
        """Number of places that ``held`` can look at, from 0 on."""
        ...

    def held(self, start: int, end: int) -> Sequence[BlockKey]:
        """Return the blocks at the places from ``start`` up to ``end``."""
        ...

    def __contains__(self, key: BlockKey, /) -> bool: ...


class Ladder(Protocol):
    """The levels as one cache. Calls come from any thread and never wait for a tier.

    ``lock`` guards the bookkeeping. It is reentrant, so a caller that holds it makes several calls
    as one. Mappings are by the levels' names, hottest first.
    """

    @property
    def lock(self) -> StackLock:
        """Lock of the bookkeeping, held for at most ``STEP`` blocks that are handled one by one."""
        ...

    @property
    def clock(self) -> Clock:
        """The only clock; its seconds are those of the loop."""
        ...

    @property
    def events(self) -> EventBuffer:
        """Blocks that come to a level and leave one; the lock is held around its calls."""
        ...

    @property
    def indexes(self) -> Mapping[str, Holdings]:
        """Blocks that each level holds."""
        ...

    @property
    def media(self) -> Mapping[str, str]:
        """Medium of each level, as in vLLM's events: ``CPU``, ``STORAGE`` ..."""
        ...

    @property
    def capacities(self) -> Mapping[str, int]:
        """Blocks that each level has room for."""
        ...

    def lasting(self) -> Mapping[str, bool]:
        """Return the levels that outlive the engine, and whether each takes blocks now."""
        ...

    def where(self, key: BlockKey) -> str | None:
        """Return the hottest level that holds the block or is about to; with the lock held."""
        ...

    def meta(self, key: BlockKey) -> BlockMeta | None:
        """Return what the hottest level that holds the block knows of it; with the lock held."""
        ...

    def used(self, key: BlockKey, meta: BlockMeta) -> str | None:
        """Update what a block that was used elsewhere is worth; with the lock held.

        The block leaves the levels with thresholds that it no longer reaches. Returns the hottest
        level that still holds it or is about to, None if there is none.
        """
        ...

    def lease(self, count: int) -> list[Slot]:
        """Lease up to ``count`` slots, evicting from host blocks that levels below hold too."""
        ...

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Give back leased slots that are not used any more."""
        ...

    def reserve(
        self,
        keys: Sequence[BlockKey],
        metas: Sequence[BlockMeta],
        *,
        explicit: bool,
        patient: bool = False,
    ) -> tuple[list[int], list[Slot], int]:
        """Lease slots for those of ``keys`` that are to be saved; return their positions and the
        slots.

        The keys are consecutive blocks of a prefix. ``explicit`` metas replace those of blocks that
        are here. The third result is the position of the first block without room, ``len(keys)`` if
        all have some; a ``patient`` caller tries again. Each key returned must be given to
        ``publish`` or ``abandon``.
        """
        ...

    def publish(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Make these reserved blocks hits: their bytes are complete."""
        ...

    def abandon(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Free the slots of these reserved blocks, which will not be filled."""
        ...

    def remove(self, keys: Sequence[BlockKey]) -> Callable[[], bool]:
        """Forget these blocks in every level.

        Returns a function that says whether a tier has still to forget one of them, or to make that
        survive a power cut.
        """
        ...

    def clear(self, *, erase: bool = False) -> Iterator[object]:
        """Forget every block, step by step; ``erase`` has tiers overwrite what they keep.

        Nothing is stored until the iteration is over or closed.
        """
        ...

    def purge(self, salt: bytes) -> Iterator[Mapping[str, int]]:
        """Forget every block of a salt; yield after each step how many are gone by level so far.

        Nothing of this salt is stored until the iteration is over or closed.
        """
        ...
