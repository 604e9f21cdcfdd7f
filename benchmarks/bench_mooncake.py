"""Measures the Mooncake tier against the bare store, and the cost of its own process.

The limit is the store's own client in this process. It puts and gets the same bytes from and to the
same memory, without labels and checksums. A second limit adds the pass over the bytes that a
checksum needs, before a put and after a get. For comparison there are memcpy, and the same tier in
this process. All take turns. The store has one node, over TCP on loopback.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.blocks import LARGE_BYTES, SIZES, batches, in_turns, isolation, opened
from benchmarks.nixl_child import summed
from benchmarks.row import Row
from kvladder.layout import Layout
from kvladder.measuring.blocks import MIB, Blocks, copied, told
from kvladder.tiers.base import Tier
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.mooncake.tier import MooncakeOptions, MooncakeTier
from tests.kit.mooncake import Mooncake


def rows() -> Iterable[Row]:
    """Measure puts and gets of each size and batch."""
    with tempfile.TemporaryDirectory() as folder, Mooncake(Path(folder), memory=1 << 30) as store:
        for size in SIZES:
            for batch in batches(size):
                yield from asyncio.run(transfers(store, size, batch))
                store.client("remove_all", True)


class Bare:
    """The bare client of the store."""

    def __init__(self, store: Mooncake, blocks: Blocks) -> None:
        library = import_module("mooncake.store")
        self._store: Any = library.MooncakeDistributedStore()
        self._config = library.ReplicateConfig()
        host, metadata = "127.0.0.1", "P2PHANDSHAKE"
        assert not self._store.setup(host, metadata, 0, 16 * MIB, "tcp", "", store.master)
        arena, self._views = blocks.arena, blocks.views
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
        """Fetch all blocks."""
        codes = self._store.batch_get_into_multi_buffers(self._names, self._at, self._sizes)
        assert min(codes) > 0

    def put_checked(self) -> None:
        """Read all blocks once, as making checksums does, and store them."""
        summed(self._views)
        self.put()

    def get_checked(self) -> None:
        """Read all blocks from the store, and once more here, as checking checksums does."""
        self.get()
        summed(self._views)

    def remove(self) -> None:
        """Remove all blocks."""
        self._store.batch_remove(self._names, True)

    def close(self) -> None:
        """Close the client."""
        self._store.close()


async def transfers(store: Mooncake, size: int, batch: int) -> list[Row]:
    """Measure one batch after the other, in turns; return its rows."""
    blocks = Blocks(Layout(block_tokens=16, block_bytes=size), batch)
    options = MooncakeOptions(master=store.master)
    tiers: dict[str, Tier] = {
        "ours": IsolatedTier(MooncakeTier, options),
        "inside": MooncakeTier(options),
    }
    bare = Bare(store, blocks)
    raw = {
        "memcpy": copied(blocks),
        "": bare.remove,
        "put bare": bare.put,
        "get bare": bare.get,
        " ": bare.remove,
        "put checked": bare.put_checked,
        "get checked": bare.get_checked,
    }
    async with opened(tiers, blocks):
        speed = await in_turns(blocks, raw, tiers)
    bare.close()
    blocks.close()
    is_large = size * batch >= LARGE_BYTES
    rows: list[Row] = []
    for call in ("put", "get"):
        beside = Row(
            name=f"mooncake {call}, {told(size, batch)}",
            unit="GB/s",
            limit=speed[f"{call} bare"],
            ours=speed[f"{call} ours"],
            goal="ratio >= 1.0" if is_large else "",
            note=f"limit: the store's client, no label, no checksum; memcpy {speed['memcpy']:.1f}",
        )
        checked = Row(
            name=f"mooncake {call}, {told(size, batch)}, each byte checked",
            unit="GB/s",
            limit=speed[f"{call} checked"],
            ours=speed[f"{call} ours"],
            goal="ratio >= 1.0" if is_large else "",
            note="limit: the store's client, and the pass over the bytes that a checksum takes",
        )
        rows += [beside, checked, isolation("mooncake", blocks, call, speed)]
    return rows
