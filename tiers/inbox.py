"""Blocks that wait to be written to a level: bounded, and the least valuable gives way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from math import inf
from typing import NamedTuple

from kvladder.arena import Arena, Slot
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.tiers.base import Clock, Item
from kvladder.tiers.index import Meta
from kvladder.tiers.terms import NO_TERMS


class Pending(NamedTuple):
    """A block on its way into a level, which holds a claim on ``slot``."""

    slot: Slot
    meta: Meta
    since_s: float
    """Loop time at which it was offered."""

    def item(
        self,
        key: BlockKey,
        place: int,
        *,
        ttl_s: float | None,
        clock: Clock,
        replace: bool = False,
    ) -> Item:
        """What a level with this TTL writes.

        A priority that ends is not stored: after a restart it has ended.
        """
        meta = self.meta
        if ttl_s is None and meta.until_s == inf and meta.terms == NO_TERMS:
            return Item(key, place, self.slot, meta.priority, meta.floor, replace=replace)
        left_s = min(inf if ttl_s is None else ttl_s, meta.terms.expires_s - clock.now())
        return Item(
            key,
            place,
            self.slot,
            meta.priority if meta.until_s == inf else min(meta.priority, PRIORITY_DEFAULT),
            meta.floor,
            None if left_s == inf else clock.wall() + left_s,
            meta.terms.salt,
            terms=meta.terms.packed(),
            replace=replace,
        )


class Inbox:
    """First in, first out, at most ``blocks_max`` blocks. The stack's lock guards every call."""

    def __init__(self, arena: Arena, *, blocks_max: int) -> None:
        self._arena = arena
        self._max = blocks_max
        self._blocks: dict[BlockKey, Pending] = {}
        self._by_priority: dict[int, dict[BlockKey, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def loser(self, priority: int) -> BlockKey | None:
        """Who gives way to a block of this ``priority``: the youngest of the lowest priority.

        None if there is room, or if nothing waits that is worth less; see ``full``.
        """
        if not self.full or min(self._by_priority) >= priority:
            return None
        return next(reversed(self._by_priority[min(self._by_priority)]))

    @property
    def full(self) -> bool:
        """Whether nothing more fits."""
        return len(self._blocks) >= self._max

    def __getitem__(self, key: BlockKey) -> Pending:
        return self._blocks[key]

    def get(self, key: BlockKey) -> Pending | None:
        """The block, if it waits."""
        return self._blocks.get(key)

    def oldest(self) -> list[Pending]:
        """What has waited longest, if anything does."""
        return list(islice(self._blocks.values(), 1))

    def add(self, key: BlockKey, slot: Slot, meta: Meta, now_s: float) -> None:
        """Queue a block and take a claim on its slot; there is room."""
        assert not self.full
        assert key not in self._blocks
        self._arena.share([slot])
        self._blocks[key] = Pending(slot, meta, now_s)
        self._by_priority.setdefault(meta.priority, {})[key] = None

    def add_all(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], metas: Sequence[Meta], now_s: float
    ) -> None:
        """``add`` all of them, in that order."""
        assert len(self._blocks) + len(keys) <= self._max
        assert self._blocks.keys().isdisjoint(keys)
        self._arena.share(slots)
        self._blocks.update(zip(keys, map(Pending, slots, metas, repeat(now_s)), strict=True))
        for key, meta in zip(keys, metas, strict=True):
            self._by_priority.setdefault(meta.priority, {})[key] = None

    @property
    def room(self) -> int:
        """How many more may wait."""
        return self._max - len(self._blocks)

    def lacks(self, keys: Iterable[BlockKey]) -> bool:
        """Whether none of ``keys`` waits."""
        return self._blocks.keys().isdisjoint(keys)

    def among(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of ``keys`` that wait."""
        return [*filter(self._blocks.__contains__, keys)]

    def remove(self, key: BlockKey) -> None:
        """Give a block up and release its slot."""
        self._arena.release([self._pop(key).slot])

    def _pop(self, key: BlockKey) -> Pending:
        pending = self._blocks.pop(key)
        alike = self._by_priority[pending.meta.priority]
        del alike[key]
        if not alike:
            del self._by_priority[pending.meta.priority]
        return pending

    def above(self, keys: Sequence[BlockKey], spare: Mapping[bytes, float]) -> list[BlockKey]:
        """Those of ``keys`` for which their salt has nothing to spare.

        ``spare`` says how many blocks more of each salt there may be; of others none.
        """
        left = dict(spare)
        over: list[BlockKey] = []
        for key in keys:
            salt = self._blocks[key].meta.terms.salt
            left[salt] = left.get(salt, 0.0) - 1
            if left[salt] < 0:
                over.append(key)
        return over

    def take(self, keys: Iterable[BlockKey]) -> dict[BlockKey, Pending]:
        """These blocks; the claims on their slots go to the caller."""
        return {key: self._pop(key) for key in keys}

    def __iter__(self) -> Iterator[BlockKey]:
        """All keys, oldest first; do not change the inbox meanwhile."""
        return iter(self._blocks)

    def check(self) -> None:
        """Assert bounds and claims; for tests."""
        assert len(self._blocks) <= self._max
        ranked = {k: n for n, keys in self._by_priority.items() for k in keys}
        assert ranked == {key: pending.meta.priority for key, pending in self._blocks.items()}
        assert all(self._by_priority.values())
        assert all(self._arena.claims(p.slot) > 0 for p in self._blocks.values())
