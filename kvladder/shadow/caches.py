"""Small caches of keys, each in place of a level: with its policy, and no bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from itertools import islice

from kvladder.keys import BlockKey
from kvladder.policy.eviction import EvictionPolicy, PrioritizedLRU
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.records.meta import BlockMeta

Keeps = Callable[[BlockKey], bool]


class MiniCache(ABC):
    """Keeps at most ``size`` keys. Keys of one call are those of a prompt, in order."""

    size: int
    held: Container[BlockKey]
    """Keys that are held, as a live view."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of keys."""

    @abstractmethod
    def use(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Hold these keys as the last ones used, the head last; return the keys evicted for it."""

    @abstractmethod
    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Use those of ``keys`` that are held."""

    @abstractmethod
    def offer(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Hold keys that a hotter level evicted, in that order; return the keys evicted for it."""

    @abstractmethod
    def thin(self, keeps: Keeps, size: int) -> None:
        """Forget the keys that are not to be kept; hold at most ``size`` from now on."""


class LruCache(MiniCache):
    """Evicts the key that was used least recently."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = self._order = OrderedDict[BlockKey, None]()

    def __len__(self) -> int:
        return len(self._order)

    def use(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        order = self._order
        for key in reversed(keys):
            order[key] = None
            order.move_to_end(key)
        return self._trim()

    def touch(self, keys: Sequence[BlockKey]) -> None:
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        order = self._order
        for key in keys:
            order.setdefault(key)
        return self._trim()

    def thin(self, keeps: Keeps, size: int) -> None:
        self.size = size
        for key in [key for key in self._order if not keeps(key)]:
            del self._order[key]
        self._trim()

    def _trim(self) -> Sequence[BlockKey]:
        gone = len(self._order) - self.size
        return [self._order.popitem(last=False)[0] for _ in range(gone)] if gone > 0 else ()


class PolicyCache(MiniCache):
    """Evicts by a policy, which is called and guarded as in a level.

    Parameters
    ----------
    make:
        Returns a new policy.
    say:
        Is told once if the policy failed and was left.
    """

    def __init__(
        self, make: Callable[[], EvictionPolicy], size: int, say: Callable[[str], object]
    ) -> None:
        self.size = size
        self._make = make
        self._say = say
        self._requests = 0
        self._begin()

    def _begin(self) -> None:
        self._index: LevelIndex[int] = LevelIndex(self._make(), blocks_max=self.size, say=self._say)
        self.held = self._index.keys()
        self._free = [*range(self.size - 1, -1, -1)]

    def __len__(self) -> int:
        return len(self._index)

    def use(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        self._requests += 1
        index = self._index
        index.requested(keys, self._requests)
        held = [place for place in index.places_of(keys) if place is not None]
        index.pin(held)  # the steps of a request: fetch, release, save, touch
        index.unpin(held[::-1])
        absent = [key for key in dict.fromkeys(keys) if key not in self.held]
        gone = self._insert(absent[::-1], self._requests)
        index.touch([place for place in index.places_of(keys[::-1]) if place is not None])
        return gone

    def touch(self, keys: Sequence[BlockKey]) -> None:
        index = self._index
        index.requested(keys, self._requests)
        index.touch([place for place in index.places_of(keys[::-1]) if place is not None])

    def offer(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        return self._insert([key for key in dict.fromkeys(keys) if key not in self.held], 0)

    def _insert(self, keys: Sequence[BlockKey], request: int) -> Sequence[BlockKey]:
        """Hold keys that are not held, the last of them first if there is not enough room."""
        index, gone = self._index, list[BlockKey]()
        missing = len(keys) - len(self._free)
        if missing > 0:
            gone = index.keys_at([*islice(index.victims(), missing)])
            self._free += index.drop(gone, evicted_s=0.0)[::-1]
        keys = keys[max(0, len(keys) - len(self._free)) :]
        if keys:
            index.insert(keys, [self._free.pop() for _ in keys], BlockMeta(), request=request)
        return gone

    def thin(self, keeps: Keeps, size: int) -> None:
        before = self._index
        kept = [key for key in before.keys_at([*before.victims()]) if keeps(key)]
        self.size = size
        self._begin()
        self._index.restore(before.state())
        self._insert(kept, 0)


def cache_for(
    make: Callable[[], EvictionPolicy], size: int, say: Callable[[str], object]
) -> MiniCache:
    """Return a cache with the policy that ``make`` returns."""
    is_lru = type(make()) is PrioritizedLRU
    return LruCache(size) if is_lru else PolicyCache(make, size, say)
