"""A cache in a process of its own, which serves requests in turns; see bench_otel.py.

It imports the kvladder of the tree that PYTHONPATH names, so it uses nothing new.
"""

from __future__ import annotations

import hashlib
import json
import sys
from time import process_time, sleep
from typing import Any

from kvladder import Layout, open_cache
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager

BLOCKS = 128
"""Blocks of a prompt: 2,048 tokens."""
LAYOUT = Layout(block_tokens=16, block_bytes=32 << 10, fields={"model": "traced"})


def _keys(number: int) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(f"{number} {n}".encode()).digest()) for n in range(BLOCKS)]


def _serve(cache: CacheManager, number: int) -> None:
    """Load a prompt from the level below host, copy it out, and save another one."""
    fetch = cache.fetch(_keys(0))
    fetch.wait()
    assert fetch.blocks == BLOCKS, fetch
    for slot in fetch.slots:
        bytes(cache.arena.view(slot))
    fetch.release()
    save = cache.save(_keys(number))
    assert len(save.slots) == BLOCKS
    for slot in save.slots:
        cache.arena.view(slot)[: LAYOUT.block_bytes] = bytes(LAYOUT.block_bytes)
    save.commit()
    while not cache.idle():
        sleep(0.001)
    with cache._stack.lock:  # pyright: ignore[reportPrivateUsage]
        cache._stack.host.remove(_keys(0))  # pyright: ignore[reportPrivateUsage]
    cache.remove(_keys(number))


def main() -> None:
    """Print the processor seconds of a request for each line of stdin, which names a number."""
    folder, more = sys.argv[1], json.loads(sys.argv[2])
    files = {"type": "files", "path": folder, "capacity": "64 MiB", "when": "commit"}
    stack: dict[str, Any] = {
        "arena": {"size": 4 * BLOCKS * LAYOUT.slot_bytes},
        "fetch": {"when": "always"},
        "tiers": [{"type": "host"}, files],
        **more,
    }
    with open_cache(stack, layout=LAYOUT) as cache:
        save = cache.save(_keys(0))
        save.commit()
        while not cache.idle():
            sleep(0.001)
        with cache._stack.lock:  # pyright: ignore[reportPrivateUsage]
            cache._stack.host.remove(_keys(0))  # pyright: ignore[reportPrivateUsage]
        number = 0
        for line in sys.stdin:
            begun = process_time()
            for _ in range(int(line)):
                number += 1
                _serve(cache, number)
            print((process_time() - begun) / int(line), flush=True)


if __name__ == "__main__":
    main()
