"""What waits for a level's tier: blocks to be written, keys to be removed, purges that are due."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from math import inf
from typing import NamedTuple

from kvladder.arena import Arena, Slot
from kvladder.errors import TierError
from kvladder.keys import BlockKey
from kvladder.metrics import LevelStats
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.tiers.base import NO_TERMS, Clock, Item, Shared, Tier
from kvladder.tiers.ladder.gate import Gate
from kvladder.tiers.ladder.index import Meta


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

    def disjoint(self, keys: Iterable[BlockKey]) -> bool:
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
        taken = {key: self._blocks.pop(key) for key in keys}
        for priority, alike in list(self._by_priority.items()):
            for key in filter(alike.__contains__, taken):
                del alike[key]
            if not alike:
                del self._by_priority[priority]
        return taken

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


PURGE_TIMEOUT_S = 600.0


class Purges:
    """Salts, None for everything, whose blocks a tier is to remove or erase, one after the other.

    A shared tier is purged before anything else is done with it, and is not asked until then. One
    that keeps the bytes of what it forgot erases them step by step, once all is forgotten, between
    the writes. What fails is still to be done. ``add`` is called with the stack's lock held.
    """

    def __init__(self, tier: Tier, gate: Gate, stats: LevelStats, shared: Shared) -> None:
        self._tier = tier
        self._gate = gate
        self._stats = stats
        self._shared = shared
        self.paused = False
        """Whether erasing has to wait for what is more urgent."""
        self._waiting: list[bytes | None] = []
        self._start = 0
        """From which place on the first of them is still to be erased."""

    def __len__(self) -> int:
        return len(self._waiting)

    def due(self, *, quiet: bool) -> bool:
        """Whether there is something to do; erasing waits until no call is left that may write."""
        return bool(self._waiting) and (self._tier.shared or (quiet and not self.paused))

    def add(self, salt: bytes | None) -> None:
        """Begin with this salt after those that wait."""
        self._waiting.append(salt)

    async def step(self) -> None:
        """Do what is to be done next; a writer calls neither ``put`` nor ``remove`` meanwhile."""
        salt, start = self._waiting[0], self._start
        done, following = 0, None

        async def purging() -> Sequence[bool]:
            nonlocal done, following
            if self._tier.shared:
                done = int(await self._tier.purge(salt, lambda _done, _total: None))
            else:
                done, following = await self._tier.erase(salt, start)
                if following is not None and following <= start:
                    raise TierError(f"erasing goes on at place {following} after {start}")
            return ()

        timeout_s = PURGE_TIMEOUT_S if self._tier.shared else None
        answer = await self._gate.call("remove", purging, lambda: None, timeout_s=timeout_s)
        if answer.results is None:
            return
        with self._shared.lock:
            self._stats.purged += done
            self._start = following or 0
            if following is None:
                del self._waiting[0]
