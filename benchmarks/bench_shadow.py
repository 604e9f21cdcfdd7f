"""The live shadow: its share of a cache's processor time, and its memory.

The limits are 1 % of one processor, for so many blocks a second, and a thousandth of the blocks'
bytes. The shadow keeps to the first by halving its sample. Prompts have 256 blocks; an access is
bookkeeping alone: no engine runs beside it, and no byte is copied.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from random import Random
from time import process_time, thread_time
from typing import Any

from benchmarks.row import Row
from kvladder import Layout, open_cache
from kvladder.keys import KEY_BYTES, BlockKey, KeyScheme
from kvladder.manager import CacheManager
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import EvictionPolicy, PrioritizedLRU
from kvladder.policy.prices import Prices
from kvladder.shadow.level import ShadowSpec
from kvladder.shadow.live import LiveShadow, ShadowClocks

PROMPT = 256
"""Blocks of a prompt."""
TOKENS = 16
ROUNDS = 400
BLOCK = 4096
RATE = 10_000
"""Blocks a second: 40 requests of 4,096 tokens."""
LEAST = 1 << 16
"""Bytes of a small block."""


def rows() -> Iterator[Row]:
    """Measure what an access takes more; then the loop thread's work by size; then memory."""
    access_s, both_s = _access(shadow=False), _access(shadow=True)
    yield Row(
        name="shadow, an access of a block, with it",
        unit="us",
        peer=access_s * 1e6,
        ours=both_s * 1e6,
        note="peer: without it; named by tokens, fetched, released, saved, touched; all threads",
    )
    for make in (PrioritizedLRU, Adaptive):
        for blocks in (10_000, 100_000, 1_000_000) if make is PrioritizedLRU else (100_000,):
            shadow, spent_s = _fed(blocks, make)
            yield Row(
                name=f"shadow, {make.__name__}, {blocks:,} blocks, at {RATE:,} blocks a second",
                unit="% of a processor",
                limit=1.0,
                ours=100 * spent_s * RATE,
                goal="<= 1",
                note=f"{spent_s / access_s:.3f} of an access; {spent_s * 1e9:.0f} ns a block; "
                f"follows 1 of {1 << shadow.levels[0].shift} keys; thinned above the limit",
            )
    for blocks in (100_000, 1_000_000):
        held = _memory(blocks)
        yield Row(
            name=f"shadow, memory, level of {blocks:,} blocks",
            unit="bytes a block",
            limit=0.001 * LEAST,
            ours=held / blocks,
            goal="ratio <= 1",
            note=f"{held / 2**20:.1f} MiB; limit: a thousandth of blocks of {LEAST >> 10} KiB",
        )


def _prompts(keys: Sequence[BlockKey], rounds: int) -> Iterator[Sequence[BlockKey]]:
    """Yield prompts, some of them often."""
    random, last = Random(1), len(keys) // PROMPT - 1
    for _ in range(rounds):
        first = PROMPT * int(random.betavariate(0.5, 1.5) * last)
        yield keys[first : first + PROMPT]


def _keys(count: int) -> list[BlockKey]:
    random = Random(2)
    return [BlockKey(random.randbytes(KEY_BYTES)) for _ in range(count)]


def _shadow(blocks: int, make: Callable[[], EvictionPolicy] = PrioritizedLRU) -> LiveShadow:
    spec = ShadowSpec("host", blocks, make, is_written_through=True)
    clocks = ShadowClocks(lambda: 0.0, thread_time)
    return LiveShadow([spec], arena_bytes=1 << 40, prices=Prices(), clocks=clocks, post=_at_once)


def _at_once(work: Callable[[], object]) -> None:
    work()


def _tell(shadow: LiveShadow, keys: Sequence[BlockKey], rounds: int) -> None:
    for prompt in _prompts(keys, rounds):
        shadow.asked(prompt, PROMPT // 2)
        shadow.stored(prompt[PROMPT // 2 :])


def _fed(blocks: int, make: Callable[[], EvictionPolicy]) -> tuple[LiveShadow, float]:
    """Return a shadow with full caches, and its seconds for a block."""
    shadow, keys = _shadow(blocks, make), _keys(2 * blocks)
    _tell(shadow, keys, 8 * blocks // PROMPT)
    before_s = shadow.cpu_s
    _tell(shadow, keys, ROUNDS)
    return shadow, (shadow.cpu_s - before_s) / (ROUNDS * PROMPT)


def _memory(blocks: int) -> int:
    """Return the bytes of a shadow with full caches, without the keys, which the cache has."""
    keys = _keys(5 * blocks)
    tracemalloc.start()
    try:
        shadow = _shadow(blocks)
        _tell(shadow, keys, 20 * blocks // PROMPT)
        del keys
        gc.collect()
        assert shadow.levels
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _access(*, shadow: bool) -> float:
    """Return the processor seconds that an access of one block takes."""
    source: dict[str, Any] = {
        "arena": {"size": 20_000 * BLOCK},
        "tiers": [{"type": "host"}],
        "shadow": shadow,
    }
    random = Random(3)
    talks = [[random.randrange(1 << 16)] * (PROMPT * TOKENS) for _ in range(120)]
    with open_cache(source, layout=Layout(TOKENS, BLOCK, {"model": "bench"})) as cache:
        scheme = KeyScheme(cache.namespace, block_tokens=TOKENS)
        for number in range(len(talks)):
            _serve(cache, scheme.chain(talks[number]))
        best_s = float("inf")
        for _ in range(5):
            began_s = process_time()
            for _ in range(ROUNDS // 4):
                _serve(cache, scheme.chain(random.choice(talks)))
            best_s = min(best_s, (process_time() - began_s) / (ROUNDS // 4 * PROMPT))
    return best_s


def _serve(cache: CacheManager, keys: list[BlockKey]) -> None:
    fetch = cache.fetch(keys)
    fetch.wait()
    fetch.release()
    cache.save(keys).commit()
    cache.touch(keys)
