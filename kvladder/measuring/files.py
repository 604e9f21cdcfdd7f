"""Moves bytes of a file by plain calls: the limit of a tier of files."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from kvladder.arena import Arena
from kvladder.measuring.blocks import MIB


class Threads:
    """A minimal thread pool: threads that take calls from a queue."""

    def __init__(self, count: int) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._errors: list[OSError] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except OSError as error:  # ``run`` raises it
                self._errors.append(error)
            finally:
                self._done.release()

    def run(self, calls: Sequence[Callable[[], object]]) -> None:
        """Make all calls and wait for their end; raise the first error of any."""
        for call in calls:
            self._calls.put(call)
        for _ in calls:
            self._done.acquire()
        if self._errors:
            error, self._errors = self._errors[0], []
            raise error

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()


class RawFile:
    """Plain calls on one file, from and into ``memory``."""

    def __init__(self, path: Path, memory: memoryview, *, direct: bool) -> None:
        self._memory = memory
        self._fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))

    def seconds(
        self,
        name: str,
        threads: Threads,
        length: int,
        start: int,
        end: int | None = None,
        checksum: Callable[[memoryview], object] | None = None,
    ) -> float:
        """Return the seconds to move the memory up to ``end`` in calls of ``length`` bytes.

        With ``checksum``, each thread also takes that of its bytes: before a write, after a read.
        """
        call = os.pwritev if name == "write" else os.preadv

        def job(at: int) -> Callable[[], object]:
            part = self._memory[at : at + length]

            def move() -> None:
                if checksum is not None and name == "write":
                    checksum(part)
                if (moved := call(self._fd, [part], start + at)) != len(part):
                    raise OSError(f"{name} moved {moved} of {len(part)} bytes")
                if checksum is not None and name == "read":
                    checksum(part)

            return move

        jobs = [job(at) for at in range(0, end or len(self._memory), length)]
        began = time.perf_counter()
        threads.run(jobs)
        return time.perf_counter() - began

    def best(self, name: str, block_bytes: int) -> tuple[Threads, int]:
        """Return the fastest number of threads and length per call."""
        found: list[tuple[float, Threads, int]] = []
        for count in (2, 4, 8, 16):
            threads = Threads(count)
            for length in {block_bytes, 2 * MIB, 4 * MIB}:
                times = [self.seconds(name, threads, length, 0) for _ in range(5)]
                found.append((median(times), threads, length))
        found.sort(key=lambda entry: entry[0])
        for _, threads, _ in found:
            if threads is not found[0][1]:
                threads.close()
        return found[0][1], found[0][2]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def whole(arena: Arena) -> memoryview:
    """Return all slots of an arena, one after the other."""
    size = arena.slots * arena.slot_bytes
    return memoryview((ctypes.c_char * size).from_address(arena.address)).cast("B")
