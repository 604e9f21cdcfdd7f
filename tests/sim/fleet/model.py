"""The reference model of a fleet: all bytes that any engine may be served for a block."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from kvladder.keys import BlockKey
from kvladder.testing.stacks import SimCache

SALTS = ("", "one", "two")
"""Salts that all engines use."""
ALONE = "alone"
"""A salt that one engine uses: no purge by another engine makes good what its own leaves out."""
LENGTH = 6
TIMEOUTS_S = (0.8, 2.0)
"""Timeouts of calls to tiers; each level has one of them."""
PROMPTS = 8


class FleetModel:
    """The versions of each block that were saved, and those that a purge forbids.

    Each purge changes the bytes that later saves of the key write. So a block that comes back from
    before a purge is recognized. The bytes name key and version, so those of another salt, another
    prompt or other weights are recognized, too.
    """

    def __init__(self) -> None:
        self.weights = 0
        self.salts: dict[BlockKey, str] = {}
        self.versions: Counter[BlockKey] = Counter()
        self.saved: defaultdict[BlockKey, set[int]] = defaultdict(set)
        self.floors: Counter[BlockKey] = Counter()
        """The first version of each block that may be served."""
        self.undone: defaultdict[BlockKey, set[int]] = defaultdict(set)
        """Versions below it that may be served, as a store has lost their removal."""
        self.forbidding = 0
        """Number of purges that have completed: what was right may be wrong since the last one."""
        self._known: dict[bytes, tuple[BlockKey, int]] = {}

    def prompt(self, salt: str, number: int, length: int) -> list[BlockKey]:
        """Return the keys of a prompt under the weights of now; many share a prefix."""
        place = [*SALTS, ALONE].index(salt)
        path = [self.weights, place, number & 1, number >> 1 & 1, number >> 2, 0, 0, 0]
        keys = SimCache.keys(*path)[2 : 2 + length]
        self.salts.update(dict.fromkeys(keys, salt))
        return keys

    def payload(self, key: BlockKey) -> bytes:
        """Return the 64 bytes that a save of this block writes now."""
        version = self.versions[key]
        data = hashlib.sha512(key + b"%d" % version).digest()
        self._known[data] = key, version
        return data

    def committed(self, key: BlockKey, data: bytes) -> None:
        """A save of these bytes was committed."""
        _, version = self._known[data]
        self.saved[key].add(version)

    def is_right(self, key: BlockKey, data: bytes) -> bool:
        """Return whether a block may have these bytes now."""
        of, version = self._known.get(data, (None, 0))
        return of == key and version in self.saved[key] and self._allows(key, version)

    def _allows(self, key: BlockKey, version: int) -> bool:
        return version >= self.floors[key] or version in self.undone[key]

    def may_be_held(self, key: BlockKey) -> bool:
        """Return whether any bytes of this block may be served."""
        return any(self._allows(key, version) for version in self.saved[key])

    def of_salt(self, salt: str) -> list[BlockKey]:
        """Return all blocks of a salt."""
        return [key for key, its in self.salts.items() if its == salt]

    def purging(self, keys: Iterable[BlockKey]) -> None:
        """A purge begins: later saves write other bytes."""
        for key in keys:
            self.versions[key] += 1

    def purged(self, keys: Sequence[BlockKey]) -> None:
        """A purge is complete on all engines: none of the bytes from before is served any more."""
        self.forbidding += 1
        for key in keys:
            self.floors[key] = self.versions[key]

    def comes_back(self, key: BlockKey, data: bytes) -> bool:
        """A store brings back bytes; return whether a purge has removed them, or is about to."""
        of, version = self._known.get(data, (None, 0))
        is_old = of == key and version < self.versions[key]
        if is_old:
            self.undone[key].add(version)
        return is_old

    def may_come_back(self, keys: Iterable[BlockKey]) -> None:
        """A disk has destroyed the removals of blocks: what was purged before may be found."""
        for key in keys:
            self.undone[key].update(v for v in self.saved[key] if v < self.versions[key])
