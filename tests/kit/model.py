"""The reference model of a simulated run: all answers that a cache may give."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from kvladder.arena import Slot
from kvladder.events import Overflow, Stored
from kvladder.keys import BlockKey
from kvladder.manager import Save
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX
from kvladder.testing.fakes import FakeStore
from kvladder.testing.stacks import SimCache
from kvladder.tiers.ladder.loading.fetch import Fetch
from tests.kit.mirror import plain
from tests.kit.wishes import Promises, Wishes

NOTHING: frozenset[bytes] = frozenset()


class Model:
    """All blocks that were ever saved and not removed since; a cache may have forgotten them.

    Each removal changes the bytes that later saves of the key write. So blocks that a transfer
    brings back from before the removal are recognized.
    """

    def __init__(self) -> None:
        self.allowed: dict[BlockKey, frozenset[bytes]] = {}
        """The bytes that may be served, by key."""
        self.floors: dict[BlockKey, set[int]] = {}
        """The lowest priority of its prefix that each block was ever given."""
        self.versions: Counter[BlockKey] = Counter()
        self.promises = Promises()

    def payload(self, key: BlockKey) -> bytes:
        """The 64 bytes that a save of this block writes now."""
        return hashlib.sha512(key + b"%d" % self.versions[key]).digest()

    def may_be(self, key: BlockKey) -> frozenset[bytes]:
        """Return the possible contents of the block; none if it must not be served."""
        return self.allowed.get(key, NOTHING)

    def asked(self, keys: Sequence[BlockKey], priorities: Sequence[int] | None) -> None:
        """An engine offers blocks of one prefix at these priorities."""
        floor = PRIORITY_MAX
        for key, priority in zip(keys, priorities or [PRIORITY_DEFAULT] * len(keys), strict=True):
            floor = min(floor, priority)
            self.floors.setdefault(key, set()).add(floor)

    def put_by_others(self, keys: Sequence[BlockKey]) -> dict[BlockKey, bytes]:
        """Store the blocks from another engine as a save would now, and return their bytes."""
        data = {key: self.payload(key) for key in keys}
        for key in keys:
            self.floors.setdefault(key, set())
            self.allowed[key] = self.may_be(key) | {data[key]}
        return data

    def saved(self, key: BlockKey, version: int, data: bytes) -> None:
        """A save was committed that began at this version of the key."""
        if version == self.versions[key]:
            self.allowed[key] = self.may_be(key) | {data}

    def removed(self, keys: Sequence[BlockKey]) -> None:
        """Forbid serving these blocks from now on."""
        for key in keys:
            self.allowed.pop(key, None)
            self.versions[key] += 1
            self.promises.removed(key)

    def left_in(self, stores: Sequence[FakeStore]) -> None:
        """After an end that was not clean, removals may not have reached the media."""
        for store in stores:
            for space in store.spaces.values():
                for record in space.values():
                    key = record.key
                    self.allowed[key] = self.may_be(key) | {plain(record)}
                    self.promises.left(key)


class Replay:
    """The events of each level, from the beginning, give its index."""

    def __init__(self, cache: SimCache) -> None:
        self._cache = cache
        self._held = self._indexes()

    def _indexes(self) -> dict[str, set[BlockKey]]:
        host = self._cache.stack.host
        levels = {level.name: set(level.index) for level in self._cache.levels}
        return {host.name: set(host.index), **levels}

    def check(self) -> None:
        """Take the events since the last check, and compare."""
        for event in self._cache.manager.take_events():
            assert not isinstance(event, Overflow)
            held, keys = self._held[event.level], set(event.keys)
            if isinstance(event, Stored):
                assert not held & keys
                held |= keys
            else:
                assert held >= keys
                held -= keys
        assert self._held == self._indexes()


def must_survive(cache: SimCache, now_s: float) -> set[BlockKey]:
    """Return the blocks that must survive a clean end: those that a durable level admits."""
    host, kept = cache.stack.host.index, set[BlockKey]()
    metas = {
        key: host.meta(place)
        for key in host
        if (place := host.place(key)) is not None and host.expires_s(place) > now_s
    }
    for key, meta in metas.items():
        for level in cache.levels:
            if level.tier.durable and level.admits(meta):
                full = level.capacity_blocks <= len(metas) + level.places.taken
                if not full and not level.places.limited and meta.terms.expires_s == inf:
                    kept.add(key)
                break
    shared = [level for level in cache.levels if level.tier.shared]
    return {key for key in kept if not any(level.holds(key) for level in shared)}


@dataclass(eq=False)
class Request:
    """One request of the engine: loads a prefix, computes the rest, saves it."""

    name: int
    keys: list[BlockKey]
    priorities: list[int] | None
    duration_s: float | None
    wishes: Wishes
    fetch: Fetch
    deadline_s: float
    expected: dict[BlockKey, frozenset[bytes]]
    """The allowed bytes at the begin of the fetch."""
    session: str | None = None
    loaded: dict[Slot, bytes] = field(default_factory=dict[Slot, bytes])
    """The bytes of its pinned slots; they must not change."""
    save: Save | None = None
    filled: dict[Slot, tuple[BlockKey, int, bytes]] = field(
        default_factory=dict[Slot, tuple[BlockKey, int, bytes]]
    )
    """Per slot that it saves from: key, version and bytes; must not change either."""
