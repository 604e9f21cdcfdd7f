"""Measures the NIXL tier against bare NIXL between two processes, and against a socket.

The limit is an agent at each end that writes the same bytes from and to the same slots. It makes
its lists once, and has no labels, checksums or cache. A second limit adds control's round trips and
the passes over the bytes for checksums: at both ends of a put, and at the reader of a get. For
comparison there are memcpy, one blocking TCP socket, and the same tier in this process. All take
turns, over TCP on loopback.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import nixl_child
from benchmarks.blocks import (
    LARGE_BYTES,
    ROUNDS,
    SIZES,
    batches,
    in_turns,
    isolation,
    opened,
    timed,
)
from benchmarks.row import Row, measured_by, tell
from kvladder.layout import Layout
from kvladder.measuring.blocks import KIB, MIB, Blocks, copied, key, told
from kvladder.testing.redisserver import RedisServer
from kvladder.tiers.base import NO_PLACE, Tier
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.label import Ref
from kvladder.tiers.nixl.plane import Area, NixlPlane
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions
from tests.kit.far import Far

KEYS = 8192


def rows() -> Iterable[Row]:
    """Return the rows of a separate process, because NIXL crashes its interpreter at exit."""
    return measured_by("benchmarks.bench_nixl")


def measured() -> Iterable[Row]:
    """Measure puts and gets of each size and batch, then existence."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as redis:
        for size in SIZES:
            keys = Path(folder) / str(size)
            with Far(keys, slots=(512 * MIB) // size, block_bytes=size) as far:
                for batch in batches(size):
                    yield from asyncio.run(transfers(far, size, batch))
                if size == SIZES[0]:
                    yield from asyncio.run(existence(far, redis))


class Bare:
    """A bare agent and socket here, with the same in another process."""

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
        nixl_child.told(self._end, (self._plane.metadata, tuple(self._plane.area)))
        metadata, area = nixl_child.heard(self._end)
        self._plane.join(metadata, Area(*area), size)
        self._memory = memoryview(bytearray(self._count * size))

    def _ask(self, call: bytes) -> None:
        self._end.sendall(call + self._count.to_bytes(4, "little"))

    def get(self) -> None:
        """Let the other end write all blocks."""
        self._ask(b"G")
        self._end.setblocking(False)
        nixl_child.moved(self._plane, self._is_told)
        self._end.setblocking(True)

    def _is_told(self) -> bool:
        try:
            return self._end.recv(1) == b"k"
        except BlockingIOError:
            return False

    def put(self) -> None:
        """Write all blocks."""
        self._ask(b"P")
        nixl_child.written(self._plane, self._count, self._blocks.size)

    def put_checked(self) -> None:
        """Write all blocks between two round trips; each end reads them once.

        The round trips stand for asking for slots, and the reads for the checksums.
        """
        self._ask(b"E")
        assert self._end.recv(1) == b"k"
        nixl_child.summed(self._blocks.views)
        self.put()
        self._ask(b"C")
        assert self._end.recv(1) == b"k"

    def get_checked(self) -> None:
        """Let the other end write all blocks, and read them once here."""
        self.get()
        nixl_child.summed(self._blocks.views)

    def get_by_socket(self) -> None:
        """Receive all blocks."""
        self._ask(b"g")
        nixl_child.received(self._end, self._memory)

    def put_by_socket(self) -> None:
        """Send all blocks."""
        self._ask(b"p")
        self._end.sendall(self._memory)
        assert self._end.recv(1) == b"k"

    def close(self) -> None:
        """Close the agent, the socket and the other process."""
        self._end.close()
        self._plane.destroy()
        self._child.communicate()


def both(far: Far) -> dict[str, Tier]:
    """Return the tier as it is used, and the tier in the engine's process."""
    options = NixlOptions(servers=(far.address,), keys=far.keys, interfaces="lo")
    return {"ours": IsolatedTier(NixlTier, options), "inside": NixlTier(options)}


async def transfers(far: Far, size: int, batch: int) -> list[Row]:
    """Measure one batch after the other, in turns; return its rows."""
    blocks, tiers = Blocks(Layout(block_tokens=16, block_bytes=size), batch), both(far)
    bare = Bare(blocks)
    raw = {
        "put bare": bare.put,
        "get bare": bare.get,
        "put checked": bare.put_checked,
        "get checked": bare.get_checked,
        "put socket": bare.put_by_socket,
        "get socket": bare.get_by_socket,
        "memcpy": copied(blocks),
    }
    async with opened(tiers, blocks):
        speed = await in_turns(blocks, raw, tiers)
    bare.close()
    blocks.close()
    is_large, rows = size * batch >= LARGE_BYTES, list[Row]()
    for call in ("put", "get"):
        ours, what = speed[f"{call} ours"], f"nixl {call}, {told(size, batch)}"
        others = f"one socket {speed[f'{call} socket']:.2f}, memcpy {speed['memcpy']:.1f}"
        rows.append(
            Row(
                name=what,
                unit="GB/s",
                limit=speed[f"{call} bare"],
                ours=ours,
                goal="ratio >= 0.9" if is_large else "",
                note=f"limit: bare NIXL, no label, no checksum; {others}",
            )
        )
        rows.append(
            Row(
                name=f"{what}, each byte checked",
                unit="GB/s",
                limit=speed[f"{call} checked"],
                ours=ours,
                goal="ratio >= 0.9" if is_large else "",
                note="limit: bare NIXL with control's round trips and the passes of checksums",
            )
        )
        rows.append(isolation("nixl", blocks, call, speed))
    return rows


async def existence(far: Far, redis: RedisServer) -> Iterable[Row]:
    """Measure an existence query for many missing blocks."""
    blocks = Blocks(Layout(block_tokens=16, block_bytes=64 * KIB), 1)
    refs = [Ref(key(1000 + number), NO_PLACE) for number in range(KEYS)]
    took: dict[str, list[float]] = defaultdict(list)

    async def asked(tier: Tier) -> int:
        step, found = tier.probe_max or tier.batch_max, 0
        for start in range(0, KEYS, step):
            found += sum(await tier.contains(refs[start : start + step]))
        return found

    tiers = {**both(far), "redis": RedisTier(RedisOptions(url=redis.url))}
    async with opened(tiers, blocks):
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
    tell(measured())
