"""Measures the object store tier against plain HTTP requests to the same server, and plain files.

The server is moto's on this machine, in Python. It bounds both sides, and says nothing about a
distant store. The limit puts and gets the same bytes with ``http.client``, with the same number of
concurrent requests, without signature, label, checksum or condition. In a folder, the limit is
``write_bytes`` and ``readinto``. The sides take turns, and the medians are compared. The note gives
the speed of memcpy for the same bytes.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from threading import local
from urllib.parse import urlsplit

import numpy as np

from benchmarks.blocks import timed
from benchmarks.row import Row
from kvladder.layout import Layout
from kvladder.measuring.blocks import Blocks, timed_raw
from kvladder.runtime import BlockingPool, SystemClock
from kvladder.tiers.context import TierContext
from kvladder.tiers.object.options import ObjectOptions
from kvladder.tiers.object.tier import ObjectTier
from tests.kit.objectserver import BUCKET, HEADERS, ObjectServer

MIB = 1 << 20
SIZES = (MIB, 4 * MIB)
BATCH = 16
ROUNDS = 7
PATIENCE_S = 60.0
Move = Callable[[int, memoryview], None]


def rows() -> Iterable[Row]:
    """Measure puts and gets of each size, over a server and in a folder."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(ObjectServer(folder))
        for size in SIZES:
            options = ObjectOptions(url=f"s3://{BUCKET}/kv", options=server.options)
            with http(server) as (put, get):
                yield from asyncio.run(transfers("S3", options, size, put, get))
            options = ObjectOptions(url=f"file://{folder}")
            with files(folder) as (put, get):
                yield from asyncio.run(transfers("folder", options, size, put, get))


@contextmanager
def http(server: ObjectServer) -> Generator[tuple[Move, Move]]:
    """Yield a put and a get by HTTP requests, with one connection per thread."""
    own, every = local(), list[HTTPConnection]()
    host = urlsplit(server.address).netloc

    def connection() -> HTTPConnection:
        if not hasattr(own, "connection"):
            own.connection = HTTPConnection(host, timeout=PATIENCE_S)
            every.append(own.connection)
        found: HTTPConnection = own.connection
        return found

    def put(number: int, view: memoryview) -> None:
        connection().request("PUT", f"/{BUCKET}/raw/{number}", view, HEADERS)
        with connection().getresponse() as answer:
            answer.read()
            assert answer.status == 200, answer.status

    def get(number: int, view: memoryview) -> None:
        connection().request("GET", f"/{BUCKET}/raw/{number}", headers=HEADERS)
        with connection().getresponse() as answer:
            assert (answer.status, answer.length) == (200, len(view)), answer.status
            filled = 0
            while filled < len(view):
                got = answer.readinto(view[filled:])
                assert got, "the connection ended"
                filled += got

    yield put, get
    for one in every:
        one.close()


@contextmanager
def files(folder: Path) -> Generator[tuple[Move, Move]]:
    """Yield a put and a get by plain files."""

    def put(number: int, view: memoryview) -> None:
        (folder / f"raw{number}").write_bytes(view)

    def get(number: int, view: memoryview) -> None:
        with (folder / f"raw{number}").open("rb", buffering=0) as file:
            file.readinto(view)

    yield put, get


@asynccontextmanager
async def opened(
    options: ObjectOptions, size: int
) -> AsyncGenerator[tuple[ObjectTier, Blocks, ThreadPoolExecutor]]:
    """Open a tier, a batch of blocks of ``size`` bytes, and threads for the limit."""
    layout = Layout(block_tokens=16, block_bytes=size)
    blocks, tier, pool = Blocks(layout, BATCH), ObjectTier(options), BlockingPool(4, "bench")
    context = TierContext(
        blocks.arena, layout, layout.namespace(), BATCH, SystemClock(), pool.run,
        timeout_s=PATIENCE_S,
    )  # fmt: skip
    await tier.open(context)
    try:
        with ThreadPoolExecutor(BATCH) as threads:
            yield tier, blocks, threads
    finally:
        await tier.aclose()
        pool.close(timeout_s=5.0)
        blocks.close()


async def transfers(
    where: str, options: ObjectOptions, size: int, put: Move, get: Move
) -> list[Row]:
    """Measure one batch after the other, ours and the limit in turns."""
    took: dict[str, list[float]] = {}

    def note(what: str, seconds: float) -> None:
        took.setdefault(what, []).append(seconds)

    async with opened(options, size) as (tier, blocks, threads):
        views = [view[:size] for view in blocks.views]

        def all_by(move: Move) -> None:
            list(threads.map(move, range(BATCH), views))

        for _ in range(ROUNDS):
            note("put limit", timed_raw(lambda: all_by(put)))
            note("get limit", timed_raw(lambda: all_by(get)))
            await tier.remove(blocks.refs)
            note("put ours", await timed(lambda: tier.put(blocks.writes())))
            note("get ours", await timed(lambda: tier.get(blocks.reads())))
            note("memcpy", copied(views))
    per_s = {what: size * BATCH / median(seconds) / 1e9 for what, seconds in took.items()}
    return [
        Row(
            name=f"object, {where}: {what}, {BATCH} x {size // MIB} MiB",
            unit="GB/s",
            limit=per_s[f"{what} limit"],
            ours=per_s[f"{what} ours"],
            note=f"memcpy {per_s['memcpy']:.1f} GB/s",
        )
        for what in ("put", "get")
    ]


def copied(views: Iterable[memoryview]) -> float:
    """Return the seconds that memcpy of these blocks takes."""
    sources = [np.frombuffer(view, np.uint8) for view in views]
    target = np.ones_like(sources[0])
    began = time.perf_counter()
    for source in sources:
        np.copyto(target, source)
    return time.perf_counter() - began
