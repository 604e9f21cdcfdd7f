"""Measures the Redis tier against the raw protocol on the same server.

The limit is a minimal client without labels and checksums. Its blocking socket sends the same
commands with the same values from memory (``sendmsg``), and receives the replies into the same
memory (``recv_into``). Ours and raw take turns, and the medians are compared. LMCache's clients,
which write neither labels nor checksums, take turns as well. The rows below show redis-benchmark,
which reuses one value.

A note has the same commands sent and received on the event loop (``LoopRedis``, up to 1 MiB), which
a tier cannot do without, and the speed of the checksums. For one value of 64 KiB, a blocking socket
needs some 45 us, the event loop 54, ours 95: 7 for the label, 4 for the mark that ends each
exchange and shows that no reply was lost, and some 30 for choosing a server, making the command and
reading the replies in Python. A batch pays the fixed part once, but copies and checks each value
between two receptions, on the thread that receives; a blocking socket receives into place and
checks nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from xxhash import xxh3_128_digest

from benchmarks.blocks import timed
from benchmarks.foreign import Absent
from benchmarks.lmcache_clients import CLIENTS, VERSION, Client, install
from benchmarks.row import Row
from kvladder.layout import Layout
from kvladder.measuring.blocks import Blocks, key, timed_raw
from kvladder.measuring.limits import RawRedis
from kvladder.runtime import SystemClock
from kvladder.testing.redisserver import RedisServer
from kvladder.testing.sim import inline_blocking
from kvladder.tiers.base import NO_PLACE
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import Ref
from kvladder.tiers.redis.resp import encode, encode_around
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 4 * MIB)
BATCHES = (1, 16, 128)
BATCH_BYTES = 128 * MIB
"""Maximum bytes of a batch, so fewer of the largest blocks are sent at once."""
ROUNDS = 9
SLOW_ROUNDS = 3
"""Number of rounds for clients that ask for one key after the other."""
KEYS = 8192


def rows() -> Iterable[Row]:
    """Measure sets and gets of each size and batch, then existence."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        for size in SIZES:
            for batch in sorted({min(batch, BATCH_BYTES // size) for batch in BATCHES}):
                yield from asyncio.run(transfers(server, size, batch))
                server.run("FLUSHALL")
        yield from asyncio.run(existence(server))
        yield from redis_benchmark(server)


@asynccontextmanager
async def opened(
    server: RedisServer, size: int, count: int
) -> AsyncGenerator[tuple[RedisTier, Blocks]]:
    """Open a tier, and make blocks of ``size`` bytes."""
    layout = Layout(block_tokens=16, block_bytes=size)
    blocks = Blocks(layout, count)
    tier = RedisTier(RedisOptions(url=server.url))
    context = TierContext(
        blocks.arena, layout, layout.namespace(), 1 << 20, SystemClock(), inline_blocking
    )
    await tier.open(context)
    try:
        yield tier, blocks
    finally:
        await tier.aclose()
        blocks.close()


class LoopRedis(asyncio.BufferedProtocol):
    """The limit on an event loop: commands of ``raw``, and replies of a known length, not read.

    Parameters
    ----------
    reply_bytes:
        Length of the longest reply to all commands of a call.
    """

    def __init__(self, reply_bytes: int) -> None:
        self._buffer = memoryview(bytearray(reply_bytes + 1))
        self._came = self._wanted = 0
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: Any) -> None:
        """Write through ``transport`` from now on."""
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes."""
        del sizehint
        return self._buffer[self._came :]

    def buffer_updated(self, nbytes: int) -> None:
        """End the call once all bytes have come."""
        self._came += nbytes
        if self._came == self._wanted and self._done is not None:
            self._done.set_result(None)

    async def exchange(self, commands: Sequence[bytes | memoryview], reply_bytes: int) -> bool:
        """Send commands, and wait for as many bytes of replies."""
        assert self._transport is not None
        self._came, self._wanted = 0, reply_bytes
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines(commands)
        await self._done
        return True

    def close(self) -> None:
        """Close the connection."""
        assert self._transport is not None
        self._transport.close()


async def transfers(server: RedisServer, size: int, batch: int) -> Iterable[Row]:
    """Measure one batch after the other: ours, raw and LMCache's in turns."""
    took: dict[str, list[float]] = {}
    raw = RawRedis(("127.0.0.1", server.port))
    repeats = max(1, 16 * MIB // (size * batch))
    async with opened(server, size, batch) as (tier, blocks):
        views = [view[:size] for view in blocks.views]
        stores = [part for n, view in enumerate(views) for part in set_command(raw.name(n), view)]
        asks = [encode(b"GET", raw.name(n)) for n in range(batch)]
        values = (len(b"$%d\r\n" % size) + size + 2) * batch
        make = asyncio.get_running_loop().create_connection
        _, loop = await make(partial(LoopRedis, values), "127.0.0.1", server.port)
        others = peers(server, views)
        for _ in range(ROUNDS):
            sums: dict[str, float] = defaultdict(float)
            for _ in range(repeats):
                raw.delete([b"raw:%d" % number for number in range(batch)])
                sums["set raw"] += timed_raw(lambda: raw.set(views))
                sums["get raw"] += timed_raw(lambda: raw.get(views))
                if size * batch <= MIB:
                    raw.delete([raw.name(number) for number in range(batch)])
                    sums["set loop"] += await timed(lambda: loop.exchange(stores, 5 * batch))
                    sums["get loop"] += await timed(lambda: loop.exchange(asks, values))
                sums["checksums"] += timed_raw(lambda: [*map(xxh3_128_digest, views)])
                await tier.remove(blocks.refs)
                sums["set ours"] += await timed(lambda: tier.put(blocks.writes()))
                sums["get ours"] += await timed(lambda: tier.get(blocks.reads()))
                for peer in others:
                    raw.delete([name for n in range(batch) for name in peer.stored_as(n)])
                    sums[f"set {peer.name}"] += await timed(partial(peer.set, batch))
                    sums[f"get {peer.name}"] += await timed(partial(peer.get, batch))
            for name, seconds in sums.items():
                took.setdefault(name, []).append(seconds)
        for peer in others:
            await peer.close()
        loop.close()
    raw.close()
    moved = size * batch * repeats / 1e9
    speed = {name: moved / median(seconds) for name, seconds in took.items()}
    what = f"{batch} of {size // KIB} KiB" if size < MIB else f"{batch} of {size // MIB} MiB"
    return [row for name in ("set", "get") for row in compared(f"{name}, {what}", name, speed)]


def set_command(name: bytes, value: memoryview) -> tuple[bytes, memoryview, bytes]:
    """Return the parts of a command that stores a value."""
    before, after = encode_around(b"SET", name, length=len(value))
    return before, value, after


def compared(title: str, name: str, speed: Mapping[str, float]) -> Iterable[Row]:
    """Return rows of ours against the limit, and against each of LMCache's clients."""
    ours, looped = speed[f"{name} ours"], speed.get(f"{name} loop")
    beside = "" if looped is None else f"on the event loop {looped:.2f}, "
    yield Row(
        name=f"redis {title} at once",
        unit="GB/s",
        limit=speed[f"{name} raw"],
        ours=ours,
        goal="ratio >= 0.8",
        note="ours with label and checksum; limit: a blocking socket, nothing else;"
        f" {beside}checksums alone {speed['checksums']:.1f} GB/s",
    )
    for kind in CLIENTS:
        if f"{name} {kind.name}" in speed:
            yield Row(
                name=f"redis {title} at once, and LMCache",
                unit="GB/s",
                peer=speed[f"{name} {kind.name}"],
                ours=ours,
                goal="ratio >= 2",
                note=f"LMCache {VERSION}, its client in {kind.name}: no label, no checksum",
            )


def peers(server: RedisServer, views: Sequence[memoryview]) -> list[Client]:
    """Return LMCache's clients, or none if they cannot be used; call it within a loop."""
    try:
        install()
    except Absent as error:
        print(f"without LMCache: {error}", file=sys.stderr)
        return []
    return [make(server.port, views) for make in CLIENTS]


async def existence(server: RedisServer) -> Iterable[Row]:
    """Measure an existence query for a prefix of 8,192 blocks."""
    took: dict[str, list[float]] = defaultdict(list)
    raw = RawRedis(("127.0.0.1", server.port))
    async with opened(server, 4096, 1) as (tier, blocks):
        every = [Ref(key(number), NO_PLACE) for number in range(KEYS)]
        for start in range(0, KEYS, 128):
            assert all(await tier.put(blocks.alike(range(start, start + 128))))
        names = [bytes(name) for name in server.run("KEYS", "kvladder:*")]
        others = peers(server, [blocks.views[0][:4096]])
        for peer in others:
            stored = [name for number in range(KEYS) for name in peer.stored_as(number)]
            server.run("MSET", *(part for name in stored for part in (name, b"")))
        for turn in range(ROUNDS):
            took["limit"].append(timed_raw(lambda: raw.exist(names)))
            took["ours"].append(await timed(lambda: tier.contains(every)))
            for peer in others if turn < SLOW_ROUNDS else ():
                took[peer.name].append(await timed(partial(peer.exist, KEYS)))
        for peer in others:
            assert await peer.exist(KEYS) == KEYS
            await peer.close()
    raw.close()
    server.run("FLUSHALL")
    ms = {name: median(seconds) * 1e3 for name, seconds in took.items()}
    title = "redis, existence of 8,192 keys"
    ours = ms["ours"]
    rows = [
        Row(
            name=title,
            unit="ms",
            limit=ms["limit"],
            ours=ours,
            ratio=ms["limit"] / ours,
            note="one round trip",
        )
    ]
    for peer in others:
        other = ms[peer.name]
        note = f"LMCache {VERSION}, its client in {peer.name}"
        rows.append(
            Row(
                name=f"{title}, and LMCache",
                unit="ms",
                peer=other,
                ours=ours,
                ratio=other / ours,
                goal="ratio >= 2",
                note=note,
            )
        )
    return rows


def redis_benchmark(server: RedisServer) -> Iterable[Row]:
    """Measure the server's own tool with values of 1 MiB, 16 at once."""
    if shutil.which("redis-benchmark") is None:
        return
    command = ["redis-benchmark", "-p", str(server.port), "-d", str(MIB), "-P", "16", "-c", "1"]
    command += ["-n", "512", "-t", "set,get", "--csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines()[1:]:
        name, per_second, *_ = (part.strip('"') for part in line.split(","))
        yield Row(
            name=f"redis-benchmark {name.lower()}, 16 of 1 MiB at once",
            unit="GB/s",
            ours=float(per_second) * MIB / 1e9,
            note="for comparison: the server's own client in C, one value again and again",
        )
