"""The router's index of engines and their blocks, filled with 10^7 blocks of eight engines.

The limit of an update is one item of a dictionary per block. The limit of an answer is the time to
compute the names of the prompt's blocks. Both are from the same run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.row import Row
from kvladder.routing.index import Index, names

BLOCKS = 10_000_000
ENGINES = 8
PROMPT, SIZE = 2048, 16
"""Tokens of each stored prompt, and of a block."""
ASKED = (128, 2048)
ROUNDS = 200


def rows() -> Iterator[Row]:
    """Measure filling the index, its memory, and queries."""
    chance, index = random.Random(1), Index()
    before = resident()
    count = PROMPT // SIZE
    prompts: list[list[int]] = []
    told: list[float] = []
    for number in range(BLOCKS // count):
        tokens = [number, *chance.choices(range(150_000), k=PROMPT - 1)]
        hashes = [number * count + n for n in range(count)]
        start = perf_counter()
        index.stored(f"engine {number % ENGINES}", "GPU", hashes, tokens=tokens, block_size=SIZE)
        told.append(perf_counter() - start)
        if number % (BLOCKS // count // 100) == 0:
            prompts.append(tokens)
    grown = resident() - before
    start = perf_counter()
    plain = {number: number for number in range(1_000_000)}
    item_s = (perf_counter() - start) / len(plain)
    yield Row(
        name="routing, one of 128 blocks that an engine stored",
        unit="us",
        limit=item_s * 1e6,
        ours=median(told) / count * 1e6,
        note="named, and found by two tables; limit: an item of a dictionary",
    )
    yield Row(
        name="routing, memory for 10^7 blocks",
        unit="bytes a block",
        ours=grown / index.rows,
        goal="<= 100",
        note="growth of the process",
    )
    for asked in ASKED:
        some = [prompt[:asked] for prompt in prompts]
        assert all(index.match(prompt)[0].tokens == asked for prompt in some)
        yield Row(
            name=f"routing, which engine has most of a prompt of {asked:,} tokens",
            unit="us",
            limit=timed(lambda prompt: names(prompt, SIZE), some) * 1e6,
            ours=timed(index.match, some) * 1e6,
            goal="< 1,000",
            note="limit: the digests of its blocks alone",
        )


def timed(call: Callable[[list[int]], object], prompts: list[list[int]]) -> float:
    """Return the median seconds of one call."""
    taken: list[float] = []
    for number in range(ROUNDS):
        prompt = prompts[number % len(prompts)]
        start = perf_counter()
        call(prompt)
        taken.append(perf_counter() - start)
    return median(taken)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10
