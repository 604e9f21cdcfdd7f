"""The CPU time that a load costs the engine's process, over all its threads, per block.

The tier answers at once and moves nothing, so only bookkeeping is measured. The limit is a load
into a free host level in the same run, where no block has to leave. The steady state of loading is
a host level full of blocks that a level below already has. If the blocks that leave must still be
written, each loaded block also causes one write, and the row is for both.

Further rows measure calls for a single block that only the host level has. They show the cost of
the calls in the engine's own thread, which large batches hide.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from statistics import median
from typing import TypeVar

import kvladder
from benchmarks.instant import InstantTier, keys_of
from benchmarks.row import Row
from kvladder.config.registry import register
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager

T = TypeVar("T")

HOST_BLOCKS = 16384
FETCH_BLOCKS = 4096
ROUNDS = 3
TURN = 32
"""Blocks of one kind in a row, where two kinds alternate."""
BLOCKS = 2 * HOST_BLOCKS + 3 * ROUNDS * FETCH_BLOCKS

SINGLES = 2048
"""Blocks that are saved and loaded one after the other."""

HELD = keys_of("held", BLOCKS)


class Held(InstantTier):
    """Holds all of ``HELD`` from its start."""

    batch_max = 128
    """The same as for Redis; files take up to 256."""

    def __init__(self) -> None:
        super().__init__(HELD)


def rows() -> Iterable[Row]:
    """Measure loads into a free host and a full one, of blocks that are below, are not, or both."""
    register("tiers", "instant", Held)
    layout = kvladder.Layout(block_tokens=16, block_bytes=4096, fields={"model": "benchmark"})
    yield from singles(layout)
    level = {"name": "instant", "type": "instant", "capacity": 4 * BLOCKS * 4096}
    stack = {
        "arena": {"size": HOST_BLOCKS * 4096},
        "fetch": {"deadline": "60 s"},
        "tiers": [{"name": "host", "type": "host"}, level],
    }
    held, fresh = iter(HELD), iter(keys_of("fresh", 2 * HOST_BLOCKS))
    with kvladder.open_cache(stack, layout=layout) as cache:
        free = median(loaded(cache, held) for _ in range(HOST_BLOCKS // FETCH_BLOCKS))
        yield row("load, host free", free, free)
        yield row("load, host full of clean blocks", free, rounds(cache, held))
        for _ in range(0, HOST_BLOCKS, FETCH_BLOCKS):
            cache.save(list(islice(fresh, FETCH_BLOCKS))).commit()
        yield row("load, and write what leaves for it", free, rounds(cache, held))
        for _ in range(0, HOST_BLOCKS, 2 * TURN):
            cache.save(list(islice(fresh, TURN))).commit()
            loaded(cache, held, TURN)
        yield row("load, and write half of what leaves", free, rounds(cache, held))


def singles(layout: kvladder.Layout) -> Iterable[Row]:
    """Measure an engine thread's calls for one block."""
    took: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[[], T]) -> T:
        before = time.thread_time_ns()
        answer = call()
        took[name].append((time.thread_time_ns() - before) / 1e3)
        return answer

    stack = {"arena": {"size": SINGLES * 4096}, "tiers": [{"name": "host", "type": "host"}]}
    with kvladder.open_cache(stack, layout=layout) as cache:
        for key in keys_of("single", SINGLES):
            save = timed("reserve", partial(cache.save, [key]))
            timed("publish", save.commit)
            fetch = timed("fetch", partial(cache.fetch, [key]))
            assert timed("poll", lambda: fetch.done and fetch.slots)  # noqa: B023 - called at once
            timed("release", fetch.release)
    for name, each in took.items():
        note = "CPU of the calling thread, and of reading its clock"
        yield Row(name=f"one block, {name}", unit="us", ours=median(each), note=note)


def row(name: str, limit: float, ours: float) -> Row:
    note = "CPU of the process; limit: host free"
    return Row(name=name, unit="us a block", limit=limit, ours=ours, goal="ours <= 15", note=note)


def rounds(cache: CacheManager, held: Iterator[BlockKey]) -> float:
    """Return the median of ``ROUNDS`` loads, one after the other."""
    return median(loaded(cache, held) for _ in range(ROUNDS))


def loaded(cache: CacheManager, held: Iterator[BlockKey], blocks: int = FETCH_BLOCKS) -> float:
    """Return the process's CPU time per block, in microseconds, to fetch the next held blocks."""
    keys = list(islice(held, blocks))
    before = time.process_time()
    fetch = cache.fetch(keys)
    fetch.wait(60)
    assert fetch.blocks == blocks
    spent = time.process_time() - before
    fetch.release()
    while blocks == FETCH_BLOCKS and not cache.idle():
        time.sleep(0.01)
    return 1e6 * spent / blocks
