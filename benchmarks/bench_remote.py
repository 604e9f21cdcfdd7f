"""Compares the tiers that engines share: Redis, NIXL, Mooncake, an object store.

Each has its server on this machine, over TCP on loopback, so no network and no RDMA is measured.
The object store's server is moto's, in Python, which says nothing about a distant store. All take
turns.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.blocks import SIZES, batches, in_turns, opened
from benchmarks.row import Row, measured_by, tell
from kvladder.layout import Layout
from kvladder.measuring.blocks import MIB, Blocks, copied, told
from kvladder.testing.redisserver import RedisServer
from kvladder.tiers.base import Tier
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.mooncake.tier import MooncakeOptions, MooncakeTier
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier
from kvladder.tiers.object.options import ObjectOptions
from kvladder.tiers.object.tier import BLOCK_BYTES_MIN, ObjectTier
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions
from tests.kit.far import Far
from tests.kit.mooncake import Mooncake
from tests.kit.objectserver import BUCKET, ObjectServer


def rows() -> Iterable[Row]:
    """Return the rows of a separate process, because NIXL crashes its interpreter at exit."""
    return measured_by("benchmarks.bench_remote")


def measured() -> Iterable[Row]:
    """Measure puts and gets of each size and batch."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(RedisServer(folder))
        store = stack.enter_context(Mooncake(folder, memory=1 << 30))
        server = stack.enter_context(ObjectServer(folder))
        for size in SIZES:
            with Far(folder / str(size), slots=(512 * MIB) // size, block_bytes=size) as far:
                for batch in batches(size):
                    tiers: dict[str, Tier] = {
                        "redis": RedisTier(RedisOptions(url=redis.url)),
                        "nixl": IsolatedTier(
                            NixlTier, NixlOptions(servers=(far.address,), keys=far.keys)
                        ),
                        "mooncake": IsolatedTier(
                            MooncakeTier, MooncakeOptions(master=store.master)
                        ),
                    }
                    if size >= BLOCK_BYTES_MIN:
                        bucket = ObjectOptions(url=f"s3://{BUCKET}/kv", options=server.options)
                        tiers["object"] = ObjectTier(bucket)
                    yield from asyncio.run(transfers(tiers, size, batch))


async def transfers(tiers: dict[str, Tier], size: int, batch: int) -> list[Row]:
    """Measure one batch after the other, in turns; return its rows."""
    blocks = Blocks(Layout(block_tokens=16, block_bytes=size), batch)
    async with opened(tiers, blocks):
        speed = await in_turns(blocks, {"memcpy": copied(blocks)}, tiers)
    blocks.close()
    return [
        Row(
            name=f"{name} {call}, {told(size, batch)}",
            unit="GB/s",
            peer=None if name == "redis" else speed[f"{call} redis"],
            ours=speed[f"{call} {name}"],
            note=f"memcpy {speed['memcpy']:.1f}" if name == "redis" else "peer: the Redis tier",
        )
        for call in ("put", "get")
        for name in tiers
    ]


if __name__ == "__main__":
    tell(measured())
