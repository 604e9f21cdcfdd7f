"""What a load costs the process in which the engine runs, in CPU time of the loop thread a block.

The tier answers at once and moves nothing, so that bookkeeping alone is measured. The limit is what
a load into a host that is free takes in the same run: nothing has to leave for it. A host that is
full of blocks that a level below has is the steady state of loading. Where what leaves has still to
be written, each block that is loaded has one written, too: the row is for both.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from statistics import median

import kvladder
from benchmarks.row import Row
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.registry import register
from kvladder.tiers.base import Item, Tier

HOST_BLOCKS = 16384
FETCH_BLOCKS = 4096
ROUNDS = 3
BLOCKS = HOST_BLOCKS + 2 * ROUNDS * FETCH_BLOCKS


def key(name: str, number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(f"{name} {number}".encode()).digest())


HELD = [key("held", number) for number in range(BLOCKS)]


class Instant(Tier):
    """Has all of ``HELD`` from its start and answers at once."""

    durable = True

    async def get(self, items: Sequence[Item]) -> Sequence[bool]:
        return [True] * len(items)

    async def put(self, items: Sequence[Item]) -> Sequence[bool]:
        return [True] * len(items)

    async def remove(self, items: Sequence[Item]) -> None:
        del items

    async def contains(self, items: Sequence[Item]) -> Sequence[bool]:
        return [True] * len(items)

    async def recover(self) -> AsyncIterator[Sequence[Item]]:
        yield [Item(name, place) for place, name in enumerate(HELD)]

    async def aclose(self) -> None:
        pass


def rows() -> Iterable[Row]:
    """Loads into a host that is free, full of clean blocks, full of such as are to be written."""
    register("tiers", "instant", Instant)
    layout = kvladder.Layout(block_tokens=16, block_bytes=4096, fields={"model": "benchmark"})
    level = {"name": "instant", "type": "instant", "capacity": 4 * BLOCKS * 4096}
    stack = {
        "arena": {"size": HOST_BLOCKS * 4096},
        "fetch": {"deadline": "60 s"},
        "tiers": [{"name": "host", "type": "host"}, level],
    }
    with kvladder.open_cache(stack, layout=layout) as cache:
        parts = iter(range(0, BLOCKS, FETCH_BLOCKS))
        free = loaded(cache, next(parts))
        for _ in range(HOST_BLOCKS // FETCH_BLOCKS - 1):
            loaded(cache, next(parts))
        clean = median(loaded(cache, next(parts)) for _ in range(ROUNDS))
        for start in range(0, HOST_BLOCKS, 1024):
            fresh = [key("fresh", start + number) for number in range(1024)]
            cache.save(fresh).commit()
        dirty = median(loaded(cache, next(parts)) for _ in range(ROUNDS))
    yield row("load, host full of clean blocks", free, clean, "ours <= 15")
    yield row("load, and write what leaves for it", free, dirty, "ours <= 15")


def row(name: str, limit: float, ours: float, goal: str) -> Row:
    note = "CPU of the loop thread; limit: host free"
    return Row(name=name, unit="us a block", limit=limit, ours=ours, goal=goal, note=note)


def loaded(cache: CacheManager, start: int) -> float:
    """CPU time of the loop thread, microseconds a block, for a fetch from there on."""
    [loop] = [thread for thread in threading.enumerate() if thread.name == "kvladder-loop"]
    clock = time.pthread_getcpuclockid(loop.ident or 0)
    before = time.clock_gettime(clock)
    fetch = cache.fetch(HELD[start : start + FETCH_BLOCKS])
    fetch.wait(60)
    assert fetch.blocks == FETCH_BLOCKS
    spent = time.clock_gettime(clock) - before
    fetch.release()
    while not cache.idle():
        time.sleep(0.01)
    return 1e6 * spent / FETCH_BLOCKS
