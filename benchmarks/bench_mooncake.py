"""The Mooncake tier against the bare store, and what its process of its own costs.

The limit is the store's own client in this process, which puts and gets the same bytes from and to
the same memory without a label and without a checksum. Beside it stand memcpy and the same tier in
this process. All take turns; the store has one node, over TCP on loopback.
"""

from __future__ import annotations

import asyncio
import ctypes
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.blocks import Blocks, timed, timed_raw
from benchmarks.row import Row
from kvladder.layout import Layout
from kvladder.tiers.base import Tier, TierContext
from kvladder.tiers.blocking import BlockingPool, SystemClock
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.mooncake.tier import MooncakeOptions, MooncakeTier
from tests.kit.mooncake import Mooncake

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 4 * MIB)
BATCHES = (1, 16, 64)
BATCH_BYTES = 64 * MIB
ROUNDS = 7


def rows() -> Iterable[Row]:
    """Puts and gets of each size and batch."""
    with tempfile.TemporaryDirectory() as folder, Mooncake(Path(folder), memory=1 << 30) as store:
        for size in SIZES:
            for batch in sorted({min(batch, BATCH_BYTES // size) for batch in BATCHES}):
                yield from asyncio.run(transfers(store, size, batch))
                store.client("remove_all", True)


class Bare:
    """The store's client, and nothing else."""

    def __init__(self, store: Mooncake, blocks: Blocks) -> None:
        library = import_module("mooncake.store")
        self._store: Any = library.MooncakeDistributedStore()
        self._config = library.ReplicateConfig()
        host, metadata = "127.0.0.1", "P2PHANDSHAKE"
        assert not self._store.setup(host, metadata, 0, 16 * MIB, "tcp", "", store.master)
        arena = blocks.arena
        self._at = [[arena.address + slot * arena.slot_bytes] for slot in blocks.slots]
        self._sizes = [[blocks.size]] * len(self._at)
        self._names = [f"bare:{number}" for number in range(len(self._at))]
        assert not self._store.register_buffer(arena.address, arena.size_bytes)

    def put(self) -> None:
        """Store all blocks."""
        codes = self._store.batch_put_from_multi_buffers(
            self._names, self._at, self._sizes, self._config
        )
        assert not any(codes)

    def get(self) -> None:
        """Read all blocks."""
        codes = self._store.batch_get_into_multi_buffers(self._names, self._at, self._sizes)
        assert min(codes) > 0

    def remove(self) -> None:
        """Remove all blocks."""
        self._store.batch_remove(self._names, True)

    def close(self) -> None:
        """Leave the store."""
        self._store.close()


def copied(blocks: Blocks, target: Any) -> None:
    """Copy all blocks to other memory, one thread."""
    for slot in blocks.slots:
        source = blocks.arena.address + slot * blocks.arena.slot_bytes
        ctypes.memmove(target, source, blocks.size)


async def put(tier: Tier, blocks: Blocks) -> Sequence[bool]:
    """Store all blocks."""
    return await tier.put(blocks.writes())


async def get(tier: Tier, blocks: Blocks) -> Sequence[bool | None]:
    """Read all blocks."""
    return await tier.get(blocks.reads())


async def transfers(store: Mooncake, size: int, batch: int) -> Iterable[Row]:
    """One batch after the other, in turns."""
    layout, pool = Layout(block_tokens=16, block_bytes=size), BlockingPool(4, "bench")
    blocks, target = Blocks(layout, batch), ctypes.create_string_buffer(size)
    options = MooncakeOptions(master=store.master)
    tiers: dict[str, Tier] = {
        "ours": IsolatedTier(MooncakeTier, options),
        "inside": MooncakeTier(options),
    }
    took: dict[str, list[float]] = defaultdict(list)
    repeats = max(1, 16 * MIB // (size * batch))
    bare = Bare(store, blocks)
    for name, tier in tiers.items():
        space = layout.namespace(salt=name)
        await tier.open(TierContext(blocks.arena, layout, space, 1 << 16, SystemClock(), pool.run))
    for _ in range(ROUNDS):
        sums: dict[str, float] = defaultdict(float)
        for _ in range(repeats):
            sums["memcpy"] += timed_raw(lambda: copied(blocks, target))
            bare.remove()
            sums["put bare"] += timed_raw(bare.put)
            sums["get bare"] += timed_raw(bare.get)
            for name, tier in tiers.items():
                await tier.remove(blocks.refs)
                sums[f"put {name}"] += await timed(partial(put, tier, blocks))
                sums[f"get {name}"] += await timed(partial(get, tier, blocks))
        for name, seconds in sums.items():
            took[name].append(seconds)
    for tier in tiers.values():
        await tier.aclose()
    bare.close()
    pool.close(timeout_s=5)
    blocks.close()
    moved = size * batch * repeats / 1e9
    speed = {name: moved / median(seconds) for name, seconds in took.items()}
    what = f"{batch} of {size // KIB} KiB" if size < MIB else f"{batch} of {size // MIB} MiB"
    large = size * batch >= 16 * MIB
    return [row for name in ("put", "get") for row in compared(name, what, speed, large=large)]


def compared(call: str, what: str, speed: dict[str, float], *, large: bool) -> Sequence[Row]:
    """Ours beside the bare store, and beside itself without a process of its own."""
    ours = speed[f"{call} ours"]
    return [
        Row(
            name=f"mooncake {call}, {what} at once",
            unit="GB/s",
            limit=speed[f"{call} bare"],
            ours=ours,
            goal="ratio >= 1.0" if large else "",
            note=f"limit: the store's client, no label, no checksum; memcpy {speed['memcpy']:.1f}",
        ),
        Row(
            name=f"mooncake {call}, {what} at once, and inside the engine",
            unit="GB/s",
            peer=speed[f"{call} inside"],
            ours=ours,
            goal="ratio >= 0.85" if large else "",
            note="what a process of its own costs",
        ),
    ]
