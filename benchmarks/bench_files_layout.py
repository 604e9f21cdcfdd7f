"""Compares one file per block with segment files: the table behind decision 0001.

The peer does what a store with one file per block must do. It writes a temporary file and renames
it, opens and reads, lists and inspects every file at a restart, and unlinks to evict. It has the
same threads, headers and checksums. KVLADDER_BENCH_FILES sets the number of blocks that are listed
and evicted (10^6 for the recorded table).
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.bench_files import LAYOUT, MIB, context, directory, key, prepare
from benchmarks.row import Row
from kvladder.arena import Arena
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.blocking import BlockingPool
from kvladder.tiers.files.header import HEADER_BYTES
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import LABEL_BYTES, Labels, Read, Ref, Write

BLOCKS = 256
BATCH = 64
LISTED = int(os.environ.get("KVLADDER_BENCH_FILES", "50000"))
THREADS = 8
ROUNDS = 5


class FilePerBlock:
    """A store with one file per block, in nested directories, named by the blocks' keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pool = BlockingPool(THREADS, "bench")
        for number in range(256):
            (path / f"{number:02x}").mkdir(parents=True)

    def name(self, block: BlockKey) -> Path:
        return self.path / f"{block[0]:02x}" / block.hex()

    def _write(self, write: Write) -> bool:
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        page[:LABEL_BYTES] = write.label()
        name = self.name(write.key)
        aside = name.with_suffix(".tmp")
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        os.pwritev(fd, [page, write.view], 0)
        os.close(fd)
        aside.rename(name)
        return True

    def _read(self, read: Read) -> bool:
        page = memoryview(mmap.mmap(-1, HEADER_BYTES))
        fd = os.open(self.name(read.key), os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [page, read.view], 0)
        os.close(fd)
        read.came(page[:LABEL_BYTES], len(read.view))
        return read.check()

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        return await self.pool.run_all([partial(self._write, write) for write in writes])

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        return await self.pool.run_all([partial(self._read, read) for read in reads], urgent=True)

    async def close(self) -> None:
        await self.pool.aclose(lambda: None, timeout_s=5.0)

    async def evict(self, blocks: Sequence[BlockKey]) -> None:
        await self.pool.run_all([self.name(block).unlink for block in blocks])

    def recover(self) -> list[tuple[int, BlockKey]]:
        """Return keys in the order of writing; priorities would cost one more read per file."""
        found: list[tuple[int, BlockKey]] = []
        for home in os.scandir(self.path):
            with os.scandir(home) as entries:
                for entry in entries:
                    name = BlockKey(bytes.fromhex(entry.name))
                    found.append((entry.stat().st_mtime_ns, name))
        return sorted(found)


def rows() -> Iterable[Row]:
    """Measure transfers of 1 MiB blocks in a full tier, then start and eviction with many."""
    with directory() as path:
        yield from asyncio.run(transfers(path))
        yield from many(path)


async def transfers(path: Path) -> list[Row]:
    """Evict and store a batch, and read one, in turns."""
    layout = Layout(block_tokens=16, block_bytes=MIB)
    arena = Arena.create(BATCH, layout.slot_bytes)
    slots = arena.lease(BATCH)
    assert slots is not None
    for number, slot in enumerate(slots):
        arena.view(slot)[:] = os.urandom(4096) * (MIB // 4096 - 1) + bytes([number]) * 4096
    tier = FilesTier(FilesOptions(path=str(path / "tier"), threads=THREADS))
    await tier.open(context(arena, layout, BLOCKS))
    files = FilePerBlock(path / "files")
    seconds: dict[str, list[float]] = {}

    def note(name: str, began: float) -> None:
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    labels = Labels(layout.namespace(), MIB, verify=True)

    def batch(number: int) -> list[Ref]:
        """Return new keys for a round, at the places of those of the round before."""
        first = number % (BLOCKS // BATCH) * BATCH
        return [Ref(key(number * BATCH + n), first + n) for n in range(BATCH)]

    def writes(refs: Sequence[Ref]) -> list[Write]:
        return [Write(labels, *ref, slots[n], arena.view(slots[n])) for n, ref in enumerate(refs)]

    def reads(refs: Sequence[Ref]) -> list[Read]:
        return [Read(labels, *ref, slots[n], arena.view(slots[n])) for n, ref in enumerate(refs)]

    turns = BLOCKS // BATCH
    for number in range(ROUNDS * turns):
        full = number >= turns
        refs, old = batch(number), batch(number - turns) if full else []
        began = time.perf_counter()
        if full:
            await files.evict([ref.key for ref in old])
        note("peer evict", began)
        assert all(await files.put(writes(refs)))
        note("peer store", began)
        began = time.perf_counter()
        if full:
            await tier.remove(old)
        note("ours evict", began)
        assert all(await tier.put(writes(refs)))
        note("ours store", began)
        began = time.perf_counter()
        assert all(await files.get(reads(refs)))
        note("peer load", began)
        began = time.perf_counter()
        assert all(await tier.get(reads(refs)))
        note("ours load", began)
    await tier.aclose()
    await files.close()
    arena.close()
    middle = {name: median(values[turns:]) for name, values in seconds.items()}
    return [
        Row(
            name=f"{name} of 1 MiB blocks, {BATCH} at once: segments against a file per block",
            unit="us a block" if name == "evict" else "GB/s",
            ours=figure(name, middle[f"ours {name}"]),
            peer=figure(name, middle[f"peer {name}"]),
            note="evict included" if name == "store" else "",
        )
        for name in ("store", "load", "evict")
    ]


def figure(name: str, seconds: float) -> float:
    """Return time per block for evictions, else bytes per second."""
    return seconds / BATCH * 1e6 if name == "evict" else BATCH * MIB / seconds / 1e9


def many(path: Path) -> list[Row]:
    """Measure a start with many blocks: reading the index log against listing the files."""
    arena = Arena.create(1, LAYOUT.slot_bytes)
    files = FilePerBlock(path / "listed")
    for number in range(LISTED):
        os.close(os.open(files.name(key(number)), os.O_CREAT | os.O_WRONLY, 0o600))
    (path / "logged").mkdir()
    prepare(path / "logged", LISTED, dead=False)

    async def start() -> int:
        tier = FilesTier(FilesOptions(path=str(path / "logged")))
        await tier.open(context(arena, LAYOUT, LISTED))
        found = sum([len(batch) async for batch in tier.recover()])
        await tier.aclose()
        return found

    made: list[Row] = []
    for state in ("cold", "warm"):
        cold = state == "cold" and drop_caches()
        began = time.perf_counter()
        assert asyncio.run(start()) == LISTED
        ours = time.perf_counter() - began
        began = time.perf_counter()
        assert len(files.recover()) == LISTED
        peer = time.perf_counter() - began
        made.append(
            Row(
                name=f"start with {LISTED} blocks, {'cold' if cold else 'warm'}:"
                " segments against a file per block",
                unit="s",
                ours=ours,
                peer=peer,
                note="the files: names and times only, priorities would take a read of each",
            )
        )
    began = time.perf_counter()
    asyncio.run(files.evict([key(number) for number in range(LISTED)]))
    evicted = time.perf_counter() - began
    made.append(
        Row(
            name=f"evict {LISTED} empty files",
            unit="us a block",
            ours=0.0,
            peer=evicted / LISTED * 1e6,
            note="ours: a place is used again",
        )
    )
    asyncio.run(files.close())
    arena.close()
    return made


def drop_caches() -> bool:
    """Drop cached directory entries, inodes and pages; return False if not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True
