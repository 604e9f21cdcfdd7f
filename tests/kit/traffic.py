"""Blocks of known contents for tests of caches, and threads that save and load them."""

from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Self

from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from tests.patience import until


def keys(*path: object) -> list[BlockKey]:
    """Return the keys of a prefix: equal paths have equal keys."""
    steps = range(1, len(path) + 1)
    return [BlockKey(hashlib.sha256(repr(path[:n]).encode()).digest()) for n in steps]


def contents(cache: CacheManager, key: BlockKey) -> bytes:
    """Return the content of the block with this key."""
    return key * (cache.layout.block_bytes // len(key))


def save(cache: CacheManager, wanted: Sequence[BlockKey], salt: str = "") -> None:
    """Save the blocks that the cache does not have yet."""
    saving = cache.save(wanted, salt=salt)
    for index, slot in zip(saving.indices, saving.slots, strict=True):
        cache.arena.view(slot)[: cache.layout.block_bytes] = contents(cache, wanted[index])
    saving.commit()


def stored(cache: CacheManager, wanted: Sequence[BlockKey], salt: str = "") -> None:
    """Save a prefix, and wait until it is written."""
    save(cache, wanted, salt)
    until(cache.idle)


def forgotten(cache: CacheManager, wanted: Sequence[BlockKey]) -> None:
    """Make the host level forget blocks, so that the next load comes from below."""
    with cache._stack.lock:
        cache._stack.host.remove(wanted)


class Loaded(NamedTuple):
    """The result of a fetch."""

    blocks: int
    took_s: float
    wrong_bytes: int
    sources: list[str]


def loaded(cache: CacheManager, wanted: Sequence[BlockKey]) -> Loaded:
    """Fetch a prefix, wait for it, and compare the loaded blocks with the saved ones."""
    began_s, wrong = time.monotonic(), 0
    fetch = cache.fetch(wanted)
    fetch.wait()
    took_s = time.monotonic() - began_s
    for key, slot in zip(wanted, fetch.slots, strict=False):
        came, right = cache.arena.view(slot)[: cache.layout.block_bytes], contents(cache, key)
        if came != right:
            wrong += sum(one != other for one, other in zip(came, right, strict=True))
    came_from = Loaded(fetch.blocks, took_s, wrong, list(fetch.sources))
    fetch.release()
    return came_from


class Traffic(ABC):
    """Threads that use one cache until they are stopped; a context manager."""

    def __init__(self, cache: CacheManager, *, threads: int = 2) -> None:
        self.cache = cache
        self.loaded = self.wrong_bytes = self.loads = 0
        self.slowest_s = 0.0
        self.ending = threading.Event()
        self._numbers = count()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    @abstractmethod
    def turn(self, number: int) -> None:
        """Save, load and forget blocks; any thread may call it."""

    def load(self, wanted: Sequence[BlockKey]) -> Loaded:
        """Load a prefix and count the loaded blocks."""
        came = loaded(self.cache, wanted)
        self.loads += 1
        self.loaded += came.blocks
        self.wrong_bytes += came.wrong_bytes
        self.slowest_s = max(self.slowest_s, came.took_s)
        return came

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def _run(self) -> None:
        try:
            while not self.ending.is_set():
                self.turn(next(self._numbers))
        except BaseException as error:  # noqa: BLE001 - ``check`` raises it
            self._failures.append(error)

    def more(self) -> None:
        """Wait until blocks are loaded again."""
        before = self.loaded

        def are_more() -> bool:
            self.check()
            return self.loaded > before + 8

        until(are_more)

    def check(self) -> None:
        """Raise the error of a thread, if any."""
        if self._failures:
            raise self._failures[0]

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        for thread in self._threads:
            thread.join()
        self.check()
