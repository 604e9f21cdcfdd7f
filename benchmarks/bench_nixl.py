"""The NIXL tier against bare NIXL between two processes, and beside a socket and the Redis tier.

The limit is an agent at each end that writes the same bytes from and to the same slots, with lists
that are made once, without labels, checksums or a cache. Beside it stand memcpy, one blocking TCP
socket, the same tier in this process, and the Redis tier. All take turns, over TCP on loopback.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.blocks import Blocks, key, timed, timed_raw
from benchmarks.nixl_child import heard, moved, received, told, written
from benchmarks.row import Row
from kvladder.layout import Layout
from kvladder.testing.redisserver import RedisServer
from kvladder.tiers.base import NO_PLACE, Tier, TierContext
from kvladder.tiers.blocking import BlockingPool, SystemClock
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.label import Ref
from kvladder.tiers.nixl.plane import Area, NixlPlane
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions
from tests.kit.far import Far

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 4 * MIB)
BATCHES = (1, 16, 64)
BATCH_BYTES = 64 * MIB
ROUNDS = 7
KEYS = 8192


def rows() -> Iterable[Row]:
    """What a process of its own measures: with NIXL in it, an interpreter crashes at its end."""
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_nixl"], stdout=subprocess.PIPE, check=True
    )
    measured: list[Row] = pickle.loads(child.stdout)
    return measured


def main() -> None:
    """Measure, and tell the process that began this one."""
    sys.stdout.buffer.write(pickle.dumps([*measured()]))
    sys.stdout.flush()
    os._exit(0)


def measured() -> Iterable[Row]:
    """Puts and gets of each size and batch, then existence."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as redis:
        for size in SIZES:
            keys = Path(folder) / str(size)
            with Far(keys, slots=(512 * MIB) // size, block_bytes=size) as far:
                for batch in sorted({min(batch, BATCH_BYTES // size) for batch in BATCHES}):
                    yield from asyncio.run(transfers(far, redis, size, batch))
                    redis.run("FLUSHALL")
                if size == SIZES[0]:
                    yield from asyncio.run(existence(far, redis))


class Bare:
    """An agent and a socket here, the same in another process, and nothing else."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._count, size = blocks, len(blocks.slots), blocks.size
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.nixl_child", str(self._count), str(size)],
            stdout=subprocess.PIPE,
        )
        assert self._child.stdout is not None
        port = int(self._child.stdout.readline())
        self._end = socket.create_connection(("127.0.0.1", port))
        self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._plane = NixlPlane(blocks.arena, "tcp", "lo")
        told(self._end, (self._plane.metadata, tuple(self._plane.area)))
        metadata, area = heard(self._end)
        self._plane.join(metadata, Area(*area), size)
        self._memory = memoryview(bytearray(self._count * size))

    def _ask(self, call: bytes) -> None:
        self._end.sendall(call + self._count.to_bytes(4, "little"))

    def get(self) -> None:
        """The other end writes all blocks."""
        self._ask(b"G")
        self._end.setblocking(False)
        moved(self._plane, self._is_told)
        self._end.setblocking(True)

    def _is_told(self) -> bool:
        try:
            return self._end.recv(1) == b"k"
        except BlockingIOError:
            return False

    def put(self) -> None:
        """Write all blocks."""
        self._ask(b"P")
        written(self._plane, self._count, self._blocks.size)

    def get_by_socket(self) -> None:
        """Receive all blocks."""
        self._ask(b"g")
        received(self._end, self._memory)

    def put_by_socket(self) -> None:
        """Send all blocks."""
        self._ask(b"p")
        self._end.sendall(self._memory)
        assert self._end.recv(1) == b"k"

    def close(self) -> None:
        """End both."""
        self._end.close()
        self._plane.destroy()
        self._child.communicate()


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


@asynccontextmanager
async def opened(
    far: Far, redis: RedisServer, blocks: Blocks
) -> AsyncGenerator[Mapping[str, Tier]]:
    """The tiers that take turns."""
    layout, pool = Layout(block_tokens=16, block_bytes=blocks.size), BlockingPool(4, "bench")
    options = NixlOptions(servers=(far.address,), keys=far.keys, interfaces="lo")
    tiers: dict[str, Tier] = {
        "ours": IsolatedTier(NixlTier, options),
        "inside": NixlTier(options),
        "redis": RedisTier(RedisOptions(url=f"redis://127.0.0.1:{redis.port}/0")),
    }
    space = layout.namespace()
    for tier in tiers.values():
        await tier.open(TierContext(blocks.arena, layout, space, 1 << 16, SystemClock(), pool.run))
    try:
        yield tiers
    finally:
        for tier in tiers.values():
            await tier.aclose()
        pool.close(timeout_s=5)


async def transfers(far: Far, redis: RedisServer, size: int, batch: int) -> Iterable[Row]:
    """One batch after the other, in turns."""
    blocks = Blocks(Layout(block_tokens=16, block_bytes=size), batch)
    target = ctypes.create_string_buffer(size)
    took: dict[str, list[float]] = defaultdict(list)
    repeats = max(1, 16 * MIB // (size * batch))
    bare = Bare(blocks)
    raw: dict[str, Callable[[], None]] = {
        "put bare": bare.put,
        "get bare": bare.get,
        "put socket": bare.put_by_socket,
        "get socket": bare.get_by_socket,
        "memcpy": partial(copied, blocks, target),
    }
    async with opened(far, redis, blocks) as tiers:
        for _ in range(ROUNDS):
            sums: dict[str, float] = defaultdict(float)
            for _ in range(repeats):
                for name, call in raw.items():
                    sums[name] += timed_raw(call)
                for name, tier in tiers.items():
                    await tier.remove(blocks.refs)
                    sums[f"put {name}"] += await timed(partial(put, tier, blocks))
                    sums[f"get {name}"] += await timed(partial(get, tier, blocks))
            for name, seconds in sums.items():
                took[name].append(seconds)
    bare.close()
    blocks.close()
    done = size * batch * repeats / 1e9
    speed = {name: done / median(seconds) for name, seconds in took.items()}
    what = f"{batch} of {size // KIB} KiB" if size < MIB else f"{batch} of {size // MIB} MiB"
    large = size * batch >= 16 * MIB
    return [row for name in ("put", "get") for row in compared(name, what, speed, large=large)]


def compared(call: str, what: str, speed: dict[str, float], *, large: bool) -> Sequence[Row]:
    """Ours beside bare NIXL, beside itself without a process of its own, and beside Redis."""
    ours = speed[f"{call} ours"]
    return [
        Row(
            name=f"nixl {call}, {what} at once",
            unit="GB/s",
            limit=speed[f"{call} bare"],
            ours=ours,
            goal="ratio >= 0.9" if large else "",
            note="limit: bare NIXL, no label, no checksum;"
            f" one socket {speed[f'{call} socket']:.2f}, memcpy {speed['memcpy']:.1f}",
        ),
        Row(
            name=f"nixl {call}, {what} at once, and inside the engine",
            unit="GB/s",
            peer=speed[f"{call} inside"],
            ours=ours,
            goal="ratio >= 0.85" if large else "",
            note="what a process of its own costs",
        ),
        Row(
            name=f"nixl {call}, {what} at once, and Redis",
            unit="GB/s",
            peer=speed[f"{call} redis"],
            ours=ours,
            note="peer: the Redis tier; without RDMA it is the faster one for small batches",
        ),
    ]


async def existence(far: Far, redis: RedisServer) -> Iterable[Row]:
    """Ask for many blocks that are not there."""
    blocks = Blocks(Layout(block_tokens=16, block_bytes=64 * KIB), 1)
    refs = [Ref(key(1000 + number), NO_PLACE) for number in range(KEYS)]
    took: dict[str, list[float]] = defaultdict(list)

    async def asked(tier: Tier) -> int:
        step, found = tier.probe_max or tier.batch_max, 0
        for start in range(0, KEYS, step):
            found += sum(await tier.contains(refs[start : start + step]))
        return found

    async with opened(far, redis, blocks) as tiers:
        for _ in range(ROUNDS):
            for name, tier in tiers.items():
                took[name].append(await timed(partial(asked, tier)))
    blocks.close()
    rate = {name: KEYS / median(seconds) / 1e6 for name, seconds in took.items()}
    return [
        Row(
            name=f"nixl contains, {KEYS:,} absent keys",
            unit="M keys/s",
            peer=rate["redis"],
            ours=rate["ours"],
            goal="ratio >= 1.0",
            note=f"peer: the Redis tier; inside the engine {rate['inside']:.2f}",
        )
    ]


if __name__ == "__main__":
    main()
