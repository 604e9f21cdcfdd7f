"""The longest hold of a cache's lock, by operation, over a tier with a million blocks.

An engine's thread that needs the lock meanwhile waits at most that long. A figure is the CPU time
of the holding thread, for holds in which the kernel did not interrupt it. In an interrupted hold,
time of the kernel and of other machines on the processor counts as the thread's CPU time too, and
its caches are cold afterwards.

Each operation runs several times, and its row is that of the best pass: outside interference
varies between passes, the cache's own work does not. The note gives the number of interrupted
holds, and the longest of them by CPU time and by the clock. Garbage collections stop all threads,
with or without the lock. They are left out, and two rows show what the cache adds to a collection.
The tier answers at once and moves nothing.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from inspect import currentframe
from resource import RUSAGE_THREAD, getrusage
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import kvladder
from benchmarks.instant import InstantTier, keys_of
from benchmarks.row import Row
from kvladder import compose
from kvladder.config.registry import register
from kvladder.keys import salt_digest
from kvladder.lock import StackLock
from kvladder.manager import CacheManager
from kvladder.tiers.label import Facts, RecoveredBlock

BLOCKS = 10**6
"""Blocks that the tier has from its start, half of them with a salt."""
HOST_BLOCKS = 2**17
CALL_BLOCKS = 8192
"""Blocks in one save or fetch."""
REMOVED = 65536
RECOVERED = 4096
"""Blocks per batch of the tier's ``recover``."""
PASSES = 3
SALT = "tenant"
LAYOUT = kvladder.Layout(block_tokens=16, block_bytes=4096, fields={"model": "benchmark"})
HELD = tuple(keys_of("held", BLOCKS))
"""Keys of the tier's blocks; a tuple of bytes, which the garbage collector does not scan."""


class Hold(NamedTuple):
    """A long hold of the lock."""

    took_ns: int = 0
    """CPU time."""
    wall_ns: int = 0
    where: str = "nothing"
    faults: int = 0
    """Page faults during the hold."""


class TimedLock(StackLock):
    """Records how long it is held, garbage collections left out, since the last ``row``."""

    __slots__ = (
        "_began_ns",
        "_began_wall_ns",
        "_collecting_ns",
        "_depth",
        "_faults",
        "_interrupted",
        "_most",
        "_switches",
        "_took_ns",
    )

    def __init__(self) -> None:
        super().__init__()
        self._depth = self._began_ns = self._began_wall_ns = self._collecting_ns = 0
        self._switches = self._faults = 0
        self._forget()

    def _forget(self) -> None:
        self._took_ns = array("q")
        """CPU time of each hold that was not interrupted."""
        self._interrupted = 0
        self._most = {False: Hold(), True: Hold()}
        """The longest hold; the key is True for interrupted holds."""

    def __enter__(self) -> None:
        super().__enter__()
        self._depth += 1
        if self._depth == 1:
            usage = getrusage(RUSAGE_THREAD)
            self._switches, self._faults = usage.ru_nivcsw, usage.ru_minflt
            self._began_wall_ns = time.perf_counter_ns()
            self._began_ns = time.thread_time_ns()

    def __exit__(self, _type: object, _error: object, _traceback: object) -> None:
        if self._depth == 1:
            took_ns = time.thread_time_ns() - self._began_ns
            wall_ns = time.perf_counter_ns() - self._began_wall_ns
            usage = getrusage(RUSAGE_THREAD)
            interrupted = usage.ru_nivcsw > self._switches
            if interrupted:
                self._interrupted += 1
            else:
                self._took_ns.append(took_ns)
            if took_ns > self._most[interrupted].took_ns:
                frame = currentframe()
                caller = frame and frame.f_back
                where = caller.f_code.co_qualname if caller else ""
                self._most[interrupted] = Hold(
                    took_ns, wall_ns, where, usage.ru_minflt - self._faults
                )
        self._depth -= 1
        super().__exit__(None, None, None)

    def collecting(self, phase: str, _about: object) -> None:
        """Leave garbage collections in the holding thread out of its time; for ``gc.callbacks``."""
        if self.held() and phase == "start":
            self._collecting_ns = time.thread_time_ns()
        elif self.held():
            self._began_ns += time.thread_time_ns() - self._collecting_ns

    def row(self, name: str) -> Row:
        """Return the row of the longest hold since the last row, and begin anew."""
        took_ns, most, other = sorted(self._took_ns), self._most[False], self._most[True]
        most_ms = took_ns[-1 - len(took_ns) // 1000] / 1e6
        note = f"{len(took_ns):,} holds, all but one in a thousand at most {most_ms:.2f} ms; the"
        note += f" longest in {most.where}, {most.wall_ns / 1e6:.2f} ms by the clock,"
        note += f" {most.faults} page faults"
        if self._interrupted:
            took_ms, wall_ms = other.took_ns / 1e6, other.wall_ns / 1e6
            note += f"; {self._interrupted:,} more were interrupted, at most {took_ms:.2f} ms"
            note += f" ({wall_ms:.2f} by the clock)"
        self._forget()
        return Row(
            name=f"hold: {name}", unit="ms", ours=most.took_ns / 1e6, goal="ours <= 1", note=note
        )


class Million(InstantTier):
    """Holds all of ``HELD`` from its start, the first half without a salt."""

    batch_max = 128

    def __init__(self) -> None:
        super().__init__(HELD, salt=salt_digest(LAYOUT.namespace(), SALT))

    async def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        half = len(self._held) // 2
        plain, salted = Facts(), Facts(salt=self._salt)
        for start in range(0, len(self._held), RECOVERED):
            part = enumerate(self._held[start : start + RECOVERED], start)
            yield [
                RecoveredBlock(key, place, plain if place < half else salted) for place, key in part
            ]


def rows() -> Iterable[Row]:
    """Yield each row from its best pass, the one with the smallest maximum."""
    register("tiers", "million", Million)
    for same in zip(*[[*measured()] for _ in range(PASSES)], strict=True):
        yield min(same, key=lambda row: row.ours or 0.0)


def measured() -> Iterable[Row]:
    """Measure recovery, saves, loads, removals, a purge, a reset, and garbage collections."""
    stack = {
        "arena": {"size": HOST_BLOCKS * 4096},
        "fetch": {"deadline": "60 s"},
        "tiers": [
            {"name": "host", "type": "host"},
            {"name": "million", "type": "million", "capacity": 2 * BLOCKS * 4096},
        ],
    }
    without = collected()
    with timed() as lock, kvladder.open_cache(stack, layout=LAYOUT) as cache:
        yield lock.row("recover a million")
        yield from collections("recovered", without)
        for name, act in operations(cache).items():
            act()
            until(cache.idle)
            until(lambda: not cache.removals)
            yield lock.row(name)
        yield from collections("after all of it", without)
    yield lock.row("close")


def operations(cache: CacheManager) -> dict[str, Callable[[], object]]:
    """Return the operations, in order; each is over when the tier has been told of it."""

    def save(name: str, blocks: int) -> None:
        for start in range(0, blocks, CALL_BLOCKS):
            cache.save(keys_of(f"{name} {start}", CALL_BLOCKS)).commit()

    def load(first: int) -> None:
        fetch = cache.fetch(HELD[first : first + CALL_BLOCKS])
        fetch.wait(60)
        assert fetch.blocks == CALL_BLOCKS
        fetch.release()

    def reset() -> None:
        cache.reset()
        until(lambda: not cache.resetting)

    return {
        "load, host free": lambda: load(0),
        "save, host free": lambda: save("first", HOST_BLOCKS),
        "save, host full": lambda: save("second", 2 * HOST_BLOCKS),
        "load, host full": lambda: load(CALL_BLOCKS),
        f"remove {REMOVED:,} in one call": lambda: cache.remove(HELD[4 * CALL_BLOCKS :][:REMOVED]),
        "purge half a million": lambda: [*cache.purge(SALT)],
        "reset": reset,
        "save after it": lambda: save("third", HOST_BLOCKS),
    }


@contextmanager
def timed() -> Generator[TimedLock]:
    """Give the caches that are opened meanwhile this lock, and yield it."""
    lock = TimedLock()
    gc.callbacks.append(lock.collecting)
    try:
        with patch.object(compose, "StackLock", lambda: lock):
            yield lock
    finally:
        gc.callbacks.remove(lock.collecting)


def until(done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns True."""
    while not done():
        time.sleep(0.01)


def collected() -> tuple[int, float]:
    """Return the number of objects that the collector scans, and its median time in ms."""
    gc.collect()
    took: list[float] = []
    for _ in range(3):
        began_ns = time.thread_time_ns()
        gc.collect()
        took.append((time.thread_time_ns() - began_ns) / 1e6)
    return len(gc.get_objects()), median(took)


def collections(when: str, without: tuple[int, float]) -> Iterable[Row]:
    """Yield the row that shows what the cache adds to a garbage collection."""
    objects, took_ms = collected()
    more = objects - without[0]
    note = f"{more:,} objects more; the limit is this process without the cache"
    yield Row(
        name=f"collection of garbage, {when}", unit="ms", limit=without[1], ours=took_ms, note=note
    )
