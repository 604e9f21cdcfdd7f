"""The terms that requests of a simulated run set for their blocks, and a check of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from random import Random
from typing import NamedTuple, Self

from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.testing.sim import EPOCH_S

SALT = "odd"
LEVEL_NAMES = ("host", "level1", "level2", "level3")


class Wishes(NamedTuple):
    """The terms of one request."""

    load: tuple[str, ...] | None = None
    """The levels that may be read, None for all."""
    store: tuple[str, ...] | None = None
    """The levels that may store its blocks."""
    ttl_s: float | None = None

    @classmethod
    def draw(cls, random: Random) -> Self:
        """Mostly none."""

        def some() -> tuple[str, ...] | None:
            chosen = tuple(name for name in LEVEL_NAMES if random.random() < 0.5)
            return chosen if random.random() < 0.3 else None

        return cls(some(), some(), random.choice((None, None, 0.5, 5.0, 25.0)))

    def here(self, manager: CacheManager) -> Wishes:
        """The same without levels that this cache has not."""
        names = manager.ladder.indexes.keys()
        load, store = (
            None if chosen is None else tuple(name for name in chosen if name in names)
            for chosen in (self.load, self.store)
        )
        return Wishes(load, store, self.ttl_s)


NO_WISHES = Wishes()


class Promises:
    """The terms of the most generous request for each block since its removal."""

    def __init__(self) -> None:
        self._levels: dict[BlockKey, set[str]] = {}
        self._ends_s: dict[BlockKey, float] = {}
        """The end of each block in wall time, which continues over a restart."""

    def offered(self, keys: Sequence[BlockKey], wishes: Wishes, now_s: float) -> None:
        """An engine offers blocks at this loop time."""
        end_s = inf if wishes.ttl_s is None else EPOCH_S + now_s + wishes.ttl_s
        for key in keys:
            names = LEVEL_NAMES if wishes.store is None else wishes.store
            self._levels.setdefault(key, set()).update(names)
            self._ends_s[key] = max(end_s, self._ends_s.get(key, 0.0))

    def removed(self, key: BlockKey) -> None:
        """Forget a block and its terms."""
        self._levels.pop(key, None)
        self._ends_s.pop(key, None)

    def left(self, key: BlockKey) -> None:
        """Allow a block to come back with its terms from before its removal."""
        self._levels[key] = set(LEVEL_NAMES)
        self._ends_s[key] = inf

    def check(self, key: BlockKey, level: str, now_s: float) -> None:
        """Assert that a level may hold a block at this loop time."""
        assert level in self._levels.get(key, LEVEL_NAMES), (
            f"{level} has a block that nobody wants there"
        )
        assert self._ends_s.get(key, inf) >= EPOCH_S + now_s - 1e-3, f"{level} has an expired block"


class Purge:
    """A purge that runs step by step beside all else; one at a time."""

    def __init__(self) -> None:
        self._steps: Iterator[dict[str, int]] | None = None

    def begin(self, manager: CacheManager) -> None:
        """Begin a purge, unless one is in progress."""
        if self._steps is None:
            self._steps = manager.purge(SALT)

    def step(self) -> bool:
        """Take a step; True if it was the last one."""
        if self._steps is not None and next(self._steps, None) is None:
            self._steps = None
            return True
        return False

    def give_up(self) -> None:
        """The process ends before it has."""
        self._steps = None
