"""Blocks of failed writes, while their tier may still come to store them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from kvladder.keys import BlockKey


class LateWrites:
    """Keeps blocks that a shared tier may still store, although its call has ended without success.

    A request that a client has given up may reach its server later. ``Medium.late_s`` bounds how
    much later. A block that a user removes meanwhile is owed until then: it has to be removed once
    more. The stack's lock is held around every call.
    """

    def __init__(self) -> None:
        self._until_s: dict[BlockKey, tuple[float, bytes]] = {}
        """When each block can no longer come, and its salt; the earliest first."""
        self._owed: dict[BlockKey, float] = {}
        """When each removed block can no longer come."""

    def __len__(self) -> int:
        """Return the number of removed blocks that may still come."""
        return len(self._owed)

    def __contains__(self, key: BlockKey) -> bool:
        """Return whether a block was removed and may still come."""
        return key in self._owed

    def keys(self) -> set[BlockKey]:
        """Return the removed blocks that may still come."""
        return {*self._owed}

    def disjoint(self, keys: Iterable[BlockKey]) -> bool:
        """Return whether none of ``keys`` was removed and may still come."""
        return not self._owed or self._owed.keys().isdisjoint(keys)

    @property
    def next_s(self) -> float | None:
        """Time at which the next of them can no longer come; None without any."""
        return min(self._owed.values(), default=None)

    def add(self, key: BlockKey, salt: bytes, until_s: float, *, removed: bool) -> None:
        """Note that a block may come until ``until_s``, which is not before any earlier one.

        ``removed`` says that a user has removed it since its write began.
        """
        self._until_s.pop(key, None)
        self._until_s[key] = until_s, salt
        if removed or key in self._owed:
            self._owed[key] = until_s

    def recall(self, keys: Iterable[BlockKey], salt: bytes | None = None) -> None:
        """Note that a user removes blocks, only those of ``salt`` if one is given."""
        for key in keys if self._until_s else ():
            until_s, of = self._until_s.get(key, (0.0, None))
            if of is not None and salt in (None, of):
                self._owed[key] = until_s

    def purge(self, salt: bytes | None) -> None:
        """``recall`` all blocks of a salt, or all blocks for None."""
        self.recall([*self._until_s], salt)

    def due(self, now_s: float) -> list[BlockKey]:
        """Forget the blocks that can no longer come; return those of them that were removed."""
        past = [*takewhile(lambda key: self._until_s[key][0] <= now_s, self._until_s)]
        for key in past:
            del self._until_s[key]
        return [key for key in past if self._owed.pop(key, None) is not None]
