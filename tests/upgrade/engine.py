"""An engine of any version, as a process: it saves and loads blocks of known contents.

It uses only what has been the same in all versions: ``open_cache``, ``save``, ``fetch``, ``idle``
and ``stats``. It runs with the kvladder that its interpreter finds.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import kvladder
from kvladder.errors import ConfigError
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from tests.kit.puppet import heard, line

WAIT_S = 60.0


def keys(name: str, blocks: int) -> list[BlockKey]:
    """Return the keys of a prefix."""
    return [
        BlockKey(hashlib.sha256(f"{name} {number}".encode()).digest()) for number in range(blocks)
    ]


class Engine:
    """The commands of a test, by the names of methods."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._bytes = cache.layout.block_bytes

    def _content(self, key: BlockKey) -> bytes:
        content: bytes = key * (self._bytes // len(key))
        return content

    def save(self, name: str, blocks: int) -> int:
        """Save a prefix, and wait until all levels have it; return how many blocks were new."""
        wanted = keys(name, blocks)
        saving = self._cache.save(wanted)
        for index, slot in zip(saving.indices, saving.slots, strict=True):
            self._cache.arena.view(slot)[: self._bytes] = self._content(wanted[index])
        saved = len(saving.slots)
        saving.commit()
        end = time.monotonic() + WAIT_S
        while not self._cache.idle() and time.monotonic() < end:
            time.sleep(0.005)
        return saved

    def load(self, name: str, blocks: int) -> list[int]:
        """Return how many blocks of a prefix are found, and how many of these are wrong."""
        wanted = keys(name, blocks)
        fetch = self._cache.fetch(wanted)
        fetch.wait()
        wrong = sum(
            self._cache.arena.view(slot)[: self._bytes] != self._content(key)
            for key, slot in zip(wanted, fetch.slots, strict=False)
        )
        found = [fetch.blocks, wrong]
        fetch.release()
        return found

    def stats(self, level: str) -> dict[str, int]:
        """Return the plain counters of a level."""
        told = self._cache.stats()[level]
        return {name: value for name, value in told.items() if isinstance(value, int)}

    def close(self) -> bool:
        """Close the cache, which makes its files durable."""
        self._cache.close()
        return True


def main() -> None:
    """Open the cache of the first argument, and execute commands; the first answer is an error."""
    stack, layout = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    try:
        cache = kvladder.open_cache(stack, layout=Layout(**layout))
    except ConfigError as error:
        print(line(str(error)), flush=True)
        return
    print(line(""), flush=True)
    engine = Engine(cache)
    for said in sys.stdin:
        call, *arguments = heard(said)
        print(line(getattr(engine, call)(*arguments)), flush=True)
    cache.close()
