"""Belady's optimum: the hits of a cache that knows the future."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

NEVER: Final = 1 << 60


def belady(
    requests: Sequence[Sequence[int]],
    unique: int,
    capacity: int,
    *,
    counted_from: int = 0,
    used: Sequence[Sequence[int]] | None = None,
) -> int:
    """Return the hits, leading blocks of prompts, of a cache that knows the future.

    It evicts the block used furthest in the future, of one request the last one. Blocks are
    numbered below ``unique``. Hits of requests before number ``counted_from`` only warm it up. It
    may keep the blocks that each request ``used``; None stands for those that it asked for.
    """
    used = requests if used is None else used
    upcoming = [NEVER] * unique
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        uses.append([upcoming[block] for block in used[number]])
        for block in requests[number]:
            upcoming[block] = number
    uses.reverse()
    kept: dict[int, tuple[int, int]] = {}
    order: list[tuple[int, int, int]] = []
    hits = 0
    for number, (blocks, nexts) in enumerate(zip(requests, uses, strict=True)):
        for block in blocks if number >= counted_from else ():
            if block not in kept:
                break
            hits += 1
        for depth, (block, then) in enumerate(zip(used[number], nexts, strict=True)):
            if then == NEVER:  # never used again
                kept.pop(block, None)
                continue
            kept[block] = then, depth
            heappush(order, (-then, -depth, block))
        while len(kept) > capacity:
            then, depth, block = heappop(order)
            if kept.get(block) == (-then, -depth):
                del kept[block]
    return hits
