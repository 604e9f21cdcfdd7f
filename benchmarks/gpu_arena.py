"""Parts of ``make gpu`` about the arena: two processes that share one, and the host's time.

``python -m benchmarks.gpu --dry`` runs them on a CPU with few and small blocks.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from benchmarks.row import Row
from kvladder.arena import Arena, ArenaHandle, Slot
from kvladder.gpu.copy.copier import Copier, CopyJob, Direction, JobId
from kvladder.gpu.copy.cuda import copier_for
from kvladder.gpu.copy.pages import BlockPages

SHARED_BLOCKS, SHARED_BYTES = 512, 1 << 20
"""Blocks of each of two processes, and bytes of one."""
DRY_SHARE = 64
"""The blocks are divided by this number without a device."""
TIMES = 8
"""Copies of all blocks, one after the other, when both processes copy."""
PATIENCE_S = 120.0
PAGE = 1024
"""Bytes of a page where only the host's time is measured: the number of pages decides it."""
HOST_ROUNDS = 9
HOST_GOAL_US = 2000
"""Largest time of one call, in microseconds, that an engine's step may lose."""


def where(*, dry: bool) -> torch.device:
    """Return the device that is measured, or the CPU if the parts are only tried."""
    return torch.device("cpu" if dry else f"cuda:{torch.cuda.current_device()}")


@contextmanager
def opened(tensors: dict[str, torch.Tensor], arena: Arena) -> Generator[Copier]:
    """Yield a copier between tensors and an arena once all slots may be used."""
    blocks = next(iter(tensors.values())).shape[0]
    copier = copier_for(BlockPages.of(tensors, blocks=blocks), arena)
    end_s = perf_counter() + PATIENCE_S
    try:
        while arena.admitted < arena.slots:
            assert perf_counter() < end_s, f"{arena.admitted} of {arena.slots} slots are registered"
            sleep(0.01)
        yield copier
    finally:
        copier.close()


# ---- two processes


class Side:
    """One of two processes with a KV cache of its own on the same device."""

    def __init__(self, kv: torch.Tensor, copier: Copier) -> None:
        self._kv, self._copier = kv, copier
        self._jobs = 0

    def fill(self, seed: int) -> str:
        """Fill the KV cache with random bytes; return their digest."""
        made = torch.Generator().manual_seed(seed)
        bytes_ = torch.randint(0, 256, self._kv.shape, dtype=torch.uint8, generator=made)
        self._kv.copy_(bytes_)
        return self.digest()

    def digest(self) -> str:
        """Return the digest of the KV cache."""
        return hashlib.sha256(self._kv.cpu().numpy().tobytes()).hexdigest()

    def copy(self, direction: Direction, first: int, times: int) -> float:
        """Copy all blocks to or from the slots that begin at ``first``; return the seconds."""
        blocks = tuple(range(len(self._kv)))
        slots = tuple(map(Slot, range(first, first + len(blocks))))
        begun_s = perf_counter()
        for _ in range(times):
            self._jobs += 1
            self._copier.submit(CopyJob(JobId(self._jobs), direction, blocks, slots))
        self._copier.drain()
        seconds = perf_counter() - begun_s
        for finished in self._copier.poll():
            assert finished.ok, finished.error
        return seconds


def serve(pipe: Connection, handle: ArenaHandle, blocks: int, size: int, device: str) -> None:
    """Run the other process: obey calls of ``Side`` until None comes."""
    arena = Arena.attach(handle)
    kv = torch.zeros(blocks, size, dtype=torch.uint8, device=device)
    begun_s = perf_counter()
    with opened({"kv": kv}, arena) as copier:
        side = Side(kv, copier)
        pipe.send(perf_counter() - begun_s)
        while (call := pipe.recv()) is not None:
            name, arguments = call
            pipe.send(getattr(side, name)(*arguments))
    arena.close()


def two_processes(*, dry: bool = False) -> Iterable[Row]:
    """Test that what one process saves another one loads, and measure both at once."""
    device = where(dry=dry)
    blocks, size = (SHARED_BLOCKS // DRY_SHARE, 1 << 12) if dry else (SHARED_BLOCKS, SHARED_BYTES)
    arena = Arena.create(2 * blocks, size)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (theirs, arena.handle, blocks, size, str(device))
    other = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
    other.start()
    kv = torch.zeros(blocks, size, dtype=torch.uint8, device=device)
    try:
        with opened({"kv": kv}, arena) as copier:
            yield from _beside(Side(kv, copier), ours, blocks, size)
        ours.send(None)
        other.join(PATIENCE_S)
        assert other.exitcode == 0, f"the other process ended with {other.exitcode}"
    finally:
        other.kill()
        other.join()
        arena.close()


def _beside(mine: Side, pipe: Connection, blocks: int, size: int) -> Iterator[Row]:
    def answer() -> Any:
        assert pipe.poll(PATIENCE_S), "the other process does not answer"
        return pipe.recv()

    def tell(name: str, *arguments: Any) -> Any:
        pipe.send((name, arguments))
        return answer()

    gigabytes = 2 * blocks * size / 1e9
    yield Row(
        name=f"register {gigabytes:.2g} GB that another process registers",
        unit="GB/s",
        ours=gigabytes / answer(),
    )
    wanted = mine.fill(1)
    mine.copy("offload", 0, 1)
    tell("copy", "onboard", 0, 1)
    assert tell("digest") == wanted, "the other process loaded other bytes"
    wanted = tell("fill", 2)
    tell("copy", "offload", blocks, 1)
    mine.copy("onboard", blocks, 1)
    assert mine.digest() == wanted, "this process loaded other bytes"
    gigabytes = TIMES * blocks * size / 1e9
    for direction in ("offload", "onboard"):
        alone = gigabytes / mine.copy(direction, 0, TIMES)
        pipe.send(("copy", (direction, blocks, TIMES)))
        own = gigabytes / mine.copy(direction, 0, TIMES)
        yield Row(
            name=f"{direction} by two processes at once",
            unit="GB/s",
            limit=alone,
            ours=own + gigabytes / answer(),
            note=f"limit: one alone; {blocks} blocks of {size >> 10} KiB each",
        )


# ---- the host's time


def host_time(*, dry: bool = False) -> Iterable[Row]:
    """Measure the engine's thread in ``submit``, ``poll`` and ``fence``, by the number of pages."""
    for blocks, layers, together in (
        (1, 32, True),
        (2, 32, False),
        (4096, 32, True),
        (4096, 32, False),
    ):
        yield from _host_time(max(1, blocks // (DRY_SHARE if dry else 1)), layers, together, dry)


def _host_time(blocks: int, layers: int, together: bool, dry: bool) -> Iterator[Row]:
    device = where(dry=dry)
    if together:
        kv = torch.zeros(blocks, layers, PAGE, dtype=torch.uint8, device=device)
        tensors = {f"layer{number}": kv[:, number] for number in range(layers)}
    else:
        kv = torch.zeros(layers, blocks, PAGE, dtype=torch.uint8, device=device)
        tensors = {f"layer{number}": kv[number] for number in range(layers)}
    arena = Arena.create(blocks, layers * PAGE)
    taken: dict[str, list[float]] = {}

    def timed(name: str, call: Any, *arguments: Any) -> None:
        begun_s = perf_counter()
        call(*arguments)
        taken.setdefault(name, []).append(perf_counter() - begun_s)

    # Every other block, in another order than the slots: no two are one run.
    slots = tuple(map(Slot, range(blocks)))
    order = tuple(reversed(range(blocks)))
    directions: tuple[Direction, ...] = ("offload", "onboard")
    gc.collect()
    try:
        with opened(tensors, arena) as copier:
            for number in range(1, HOST_ROUNDS + 1):
                for at, direction in enumerate(directions):
                    job = CopyJob(JobId(2 * number + at), direction, order, slots)
                    timed(f"submit of {direction}", copier.submit, job)
                    timed("poll", copier.poll)
                    if not dry:  # without a device a fence waits for the copy
                        timed("fence", copier.fence, [job.id])
                    copier.drain()
                    assert all(one.ok for one in copier.poll()), "a copy failed"
    finally:
        arena.close()
    pages = blocks * (1 if together else layers)
    layout = "BLHNC" if together else "LBHNC"
    for name, seconds in taken.items():
        yield Row(
            name=f"host time of {name}, {blocks} blocks of {layers} layers, {layout}",
            unit="us",
            ours=1e6 * median(seconds[1:]),
            goal="" if dry else f"<= {HOST_GOAL_US}",
            note=f"{pages} pages" + (f"; the slowest took {1e6 * max(seconds[1:]):,.0f}"),
        )
