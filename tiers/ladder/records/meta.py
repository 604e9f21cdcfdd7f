"""What a level knows of a block besides its place; it goes with the block to other levels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import inf
from typing import NamedTuple

from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.tiers.ladder.records.terms import NO_TERMS, Terms


class BlockMeta(NamedTuple):
    """Facts that travel with a block from level to level."""

    priority: int = PRIORITY_DEFAULT
    floor: int = PRIORITY_DEFAULT
    """The lowest priority among the block and its ancestors; see ``OffloadRule``."""
    hits: int = 0
    """Number of times the block was used again, at most 255."""
    until_s: float = inf
    """Loop time at which ``priority`` reverts to the default."""
    terms: Terms = NO_TERMS
    """Terms that its request gave it."""


def alike(metas: Sequence[BlockMeta]) -> bool:
    """Return whether all of them are the same, as they are when no request said anything."""
    return bool(metas) and metas.count(metas[0]) == len(metas)


def runs(metas: Iterable[BlockMeta]) -> Iterator[tuple[BlockMeta, slice]]:
    """Yield each run of equal metas, and its slice; mostly there is one run."""
    end = 0
    for meta, run in groupby(metas):
        start, end = end, end + len([*run])
        yield meta, slice(start, end)
