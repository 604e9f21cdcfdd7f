"""Device slots: the free ones, and the number of references to the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from kvladder.errors import NotHeld
from kvladder.gpu.tree.columns import drop_ones, fill, gather
from kvladder.gpu.tree.names import NO_SLOT, DeviceSlot


class FreeSlots:
    """Slots without useful content, in the order in which they are handed out."""

    __slots__ = ("_at", "_slots")

    def __init__(self, slots: Iterable[int]) -> None:
        self._slots = cast("list[DeviceSlot]", list(slots))
        self._at = 0
        """Index of the first one; the entries before it are spare room."""

    def __len__(self) -> int:
        return len(self._slots) - self._at

    def __iter__(self) -> Iterator[DeviceSlot]:
        return iter(self._slots[self._at :])

    def take(self, count: int) -> list[DeviceSlot]:
        """Remove and return the first ``count`` of them; there must be enough."""
        slots, at = self._slots, self._at
        end = at + count
        taken = slots[at:end]
        assert len(taken) == count
        if 2 * end > len(slots):
            del slots[:end]
            end = 0
        self._at = end
        return taken

    def add(self, slots: Sequence[DeviceSlot]) -> None:
        """Add slots that are handed out after all others, in this order."""
        self._slots.extend(slots)

    def add_front(self, slots: Sequence[DeviceSlot]) -> None:
        """Add slots that are handed out before all others, in this order."""
        at, count = self._at, len(slots)
        if at < count:
            more = count + len(self) // 2
            self._slots[:0] = [NO_SLOT] * more
            at += more
        self._slots[at - count : at] = slots
        self._at = at - count


class References:
    """Number of references to each slot."""

    __slots__ = ("_counts", "_held")

    def __init__(self, slots: int) -> None:
        self._counts = [0] * slots
        self._held = 0

    def __len__(self) -> int:
        """Return how many slots are referenced."""
        return self._held

    def __contains__(self, slot: DeviceSlot) -> bool:
        return self[slot] > 0

    def __getitem__(self, slot: DeviceSlot) -> int:
        """Return the references to a slot; 0 for a number that is no slot."""
        return self._counts[slot] if 0 <= slot < len(self._counts) else 0

    def held(self) -> dict[DeviceSlot, int]:
        """Return all referenced slots with their counts; O(n)."""
        return {DeviceSlot(slot): count for slot, count in enumerate(self._counts) if count}

    def all_held(self, slots: Sequence[DeviceSlot]) -> bool:
        """Return whether each of ``slots`` is referenced."""
        counts, size = self._counts, len(self._counts)
        for slot in slots:  # noqa: SIM110 - a generator costs as much as all else
            if not (0 <= slot < size and counts[slot]):
                return False
        return True

    def none_held(self, slots: Sequence[DeviceSlot]) -> bool:
        """Return whether none of ``slots`` is referenced; each must be a valid slot."""
        return sum(gather(self._counts, slots)) == 0

    def first(self, slots: Sequence[DeviceSlot]) -> None:
        """Add the first reference to each of ``slots``, which must have none."""
        fill(self._counts, slots, 1)
        self._held += len(slots)

    def add(self, slots: Sequence[DeviceSlot]) -> None:
        """Add a reference to each of ``slots``."""
        counts, new = self._counts, 0
        for slot in slots:
            count = counts[slot]
            if not count:
                new += 1
            counts[slot] = count + 1
        self._held += new

    def drop(self, slots: Sequence[DeviceSlot]) -> Sequence[DeviceSlot]:
        """Drop a reference to each of ``slots``; return those without references, in order.

        Raises
        ------
        NotHeld, TypeError
            A slot is not referenced, or given twice, or not an integer; nothing was changed.
        """
        counts, size = self._counts, len(self._counts)
        if drop_ones(counts, slots):
            self._held -= len(slots)
            return slots
        shared: list[DeviceSlot] = []
        for at, slot in enumerate(slots):
            try:
                count = counts[slot] if 0 <= slot < size else 0
            except TypeError:  # not an integer
                self._undo(slots[:at], shared)
                raise
            if count == 1:
                counts[slot] = 0
            elif count:
                shared.append(slot)
            else:
                self._undo(slots[:at], shared)
                raise NotHeld(f"slot {slot} is not held, or is released twice in one call")
        self._held -= len(slots) - len(shared)
        if not shared:
            return slots
        others = set(shared)
        if len(others) < len(shared):
            self._held += len(slots) - len(shared)
            self._undo(slots, shared)
            raise NotHeld("a slot is released twice in one call")
        for slot in shared:
            counts[slot] -= 1
        return [slot for slot in slots if slot not in others]

    def _undo(self, dropped: Sequence[DeviceSlot], shared: Sequence[DeviceSlot]) -> None:
        others = set(shared)
        for slot in dropped:
            if slot not in others:
                self._counts[slot] = 1
