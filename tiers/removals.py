"""Blocks that have left a level's index and that its tier has still to forget."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvladder.keys import BlockKey
from kvladder.tiers.base import Item


class Removals:
    """First in, first out. A block is in it until its removal has ended; the lock guards it."""

    def __init__(self) -> None:
        self._waiting: deque[Item] = deque()
        self._keys: Counter[BlockKey] = Counter()
        self._count = 0

    def __len__(self) -> int:
        """How many have not ended, whether or not they have begun."""
        return self._count

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def among(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that are in it."""
        return [*filter(self._keys.__contains__, keys)]

    def add(self, items: Iterable[Item]) -> None:
        """Have these removed."""
        self._waiting += self.begun(list(items))

    def begun(self, items: Sequence[Item]) -> Sequence[Item]:
        """The removal of these begins without having waited."""
        self._keys.update(item.key for item in items)
        self._count += len(items)
        return items

    def take(self, count: int) -> list[Item]:
        """Begin with the oldest, at most ``count``, no block twice."""
        taken: dict[BlockKey, Item] = {}
        while self._waiting and len(taken) < count and self._waiting[0].key not in taken:
            item = self._waiting.popleft()
            taken[item.key] = item
        return list(taken.values())

    def ended(self, items: Sequence[Item]) -> None:
        """The removal of these has ended, well or not."""
        self._count -= len(items)
        for item in items:
            if self._keys[item.key] == 1:
                del self._keys[item.key]
            else:
                self._keys[item.key] -= 1
