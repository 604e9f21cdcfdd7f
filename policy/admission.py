"""The admission ``adaptive``: keeps writes of blocks that nothing reads again off a medium.

A level whose medium wears takes blocks that leave the level above. Three rules compete: every
block, those asked for at least twice lately, at least three times. Each has a shadow of the level
with the keys of a sample. The level follows the rule with the fewest writes among those with nearly
the most hits in prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvladder.keys import BlockKey

RULES: Final = 3
"""Number of rules; rule ``n`` takes blocks that were asked for more than ``n`` times."""
LOSS: Final = 0.01
"""Largest share of the best rule's hits that a rule with fewer writes may cost."""
SAVING: Final = 0.05
"""Smallest share of writes that a rule has to save, or every block is taken."""
SAMPLE: Final = 2048
"""Number of blocks in a shadow, if the level has as many."""
FADING: Final = 0.98
"""Factor of hits and writes at each choice, so that recent ones count most."""
SPAN: Final = 5
"""Accesses by block of the level after which counts begin anew; those before still count."""
CELLS: Final = 8
"""Bits of a filter for each key that it may get: 2 to 3 % of the other keys count once more."""
PROBES: Final = 4

Words = NDArray[np.uint64]
Above = Callable[[Sequence[BlockKey]], Sequence[bool]]
"""Returns which keys a hotter level holds."""


class _Hashes(NamedTuple):
    """Two hashes of each of some keys."""

    first: Words
    second: Words

    def at(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> _Hashes:
        """Return those of some keys."""
        return _Hashes(self.first[chosen], self.second[chosen])


def _hashed(keys: Sequence[BlockKey]) -> _Hashes:
    """Return hashes that differ even if keys differ in one bit."""
    words = np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), -1)
    factors = np.arange(1, 2 * words.shape[1], 2, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = np.bitwise_xor.reduce(words * factors ^ (words >> np.uint64(31)), axis=1)
    first = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    second = (first ^ (first >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return _Hashes(first ^ (first >> np.uint64(29)), second ^ (second >> np.uint64(31)))


class _Filters:
    """Counts keys up to ``RULES``: one Bloom filter for each count, smaller for higher ones."""

    def __init__(self, keys: int) -> None:
        self.bits = [np.zeros(keys * CELLS // (8 * n) + 8, np.uint8) for n in range(1, RULES + 1)]

    def _cells(self, level: int, hashes: _Hashes) -> tuple[NDArray[np.intp], NDArray[np.uint8]]:
        steps = np.arange(PROBES, dtype=np.uint64)[:, None]
        spread = hashes.first + steps * (hashes.second | np.uint64(1))
        cells = (spread >> np.uint64(8)) % np.uint64(8 * len(self.bits[level]))
        masks = np.left_shift(1, cells & np.uint64(7)).astype(np.uint8)
        return (cells >> np.uint64(3)).astype(np.intp), masks

    def counts(self, hashes: _Hashes) -> NDArray[np.intp]:
        """Return how often each key was added."""
        found = np.zeros(len(hashes.first), np.intp)
        for level, bits in enumerate(self.bits):
            at, masks = self._cells(level, hashes)
            found += ((bits[at] & masks) != 0).all(axis=0) & (found == level)
        return found

    def add(self, hashes: _Hashes) -> None:
        """Add one to the count of each key."""
        before = self.counts(hashes)
        for level, bits in enumerate(self.bits):
            at, masks = self._cells(level, hashes.at(before == level))
            np.bitwise_or.at(bits, at.ravel(), masks.ravel())

    def clear(self) -> None:
        """Forget all keys."""
        for bits in self.bits:
            bits[:] = 0


class AdaptiveAdmission:
    """Chooses which of the blocks that leave the level above a level writes.

    Pure and synchronous, as policies are; takes about 18 bytes a block of the level. A count covers
    keys that no level holds any more.

    Parameters
    ----------
    blocks:
        Largest number of blocks of the level.
    """

    def __init__(self, blocks: int) -> None:
        self._rate = max(1, blocks // SAMPLE)
        self._size = max(1, blocks // self._rate)
        self._span = max(64, SPAN * blocks)
        self._now, self._old = _Filters(self._span), _Filters(self._span)
        self._left = self._span
        self._every = self._due = max(256, blocks // 8)
        self._shadows = [OrderedDict[BlockKey, None]() for _ in range(RULES)]
        self._hits, self._writes = [0.0] * RULES, [0.0] * RULES
        self.rule = 0
        """Number of the rule that the level follows now."""

    def __sizeof__(self) -> int:
        filters = [bits.nbytes for one in (self._now, self._old) for bits in one.bits]
        return object.__sizeof__(self) + sum(filters) + RULES * self._size * 120

    def _count(self, hashes: _Hashes) -> NDArray[np.intp]:
        return self._now.counts(hashes) + self._old.counts(hashes)

    def _sampled(self, hashes: _Hashes) -> NDArray[np.intp]:
        return np.flatnonzero((hashes.second >> np.uint64(20)) % np.uint64(self._rate) == 0)

    def requested(self, keys: Sequence[BlockKey], above: Above) -> None:
        """Count a request for a prompt of these keys, and what each shadow has of it."""
        hashes = _hashed(keys)
        sampled: list[int] = self._sampled(hashes).tolist()
        some = [keys[at] for at in sampled]
        near = above(some)
        for rule, shadow in enumerate(self._shadows):
            for key, is_near in zip(some, near, strict=True):
                if not is_near and key not in shadow:
                    break
                self._hits[rule] += 1
            for key, is_near in zip(reversed(some), reversed(near), strict=True):
                if not is_near and key in shadow:
                    shadow.move_to_end(key)
        self._add(hashes)
        self._due -= len(keys)
        if self._due <= 0:
            self._due = self._every
            self._choose()

    def saved(self, keys: Sequence[BlockKey]) -> None:
        """Count blocks that were computed, unless a request has asked for them."""
        if keys:
            hashes = _hashed(keys)
            self._add(hashes.at(self._count(hashes) == 0))

    def _add(self, hashes: _Hashes) -> None:
        self._now.add(hashes)
        self._left -= len(hashes.first)
        if self._left <= 0:
            self._left = self._span
            self._now, self._old = self._old, self._now
            self._now.clear()

    def wants(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which of these blocks the level should write."""
        if not self.rule or not keys:
            return [True] * len(keys)
        wanted: list[bool] = (self._count(_hashed(keys)) > self.rule).tolist()
        return wanted

    def left(self, keys: Sequence[BlockKey]) -> None:
        """Note that these blocks left the level above: each shadow takes those of its rule."""
        if not keys:
            return
        hashes = _hashed(keys)
        chosen = self._sampled(hashes)
        counts = self._count(hashes.at(chosen)).tolist()
        places: list[int] = chosen.tolist()
        for at, count in zip(places, counts, strict=True):
            key = keys[at]
            for rule, shadow in enumerate(self._shadows):
                if key in shadow:
                    shadow.move_to_end(key)
                elif not rule or count > rule:
                    if len(shadow) >= self._size:
                        shadow.popitem(last=False)
                    shadow[key] = None
                    self._writes[rule] += 1

    def _choose(self) -> None:
        """Take the rule with the fewest writes among those with nearly the most hits.

        As long as the level has room for every block, nothing is known of what that costs.
        """
        hits, writes = self._hits, self._writes
        enough = (1 - LOSS) * max(hits)
        good = [rule for rule in range(RULES) if hits[rule] >= enough]
        best = min(good, key=lambda rule: (writes[rule], rule))
        is_little = good[0] == 0 and writes[best] > (1 - SAVING) * writes[0]
        is_full = len(self._shadows[0]) >= self._size
        self.rule = best if is_full and not is_little else 0
        for sums in (hits, writes):
            sums[:] = [value * FADING for value in sums]
