"""Measures the files tier against the raw device, and the recovery of a million blocks.

The limit of a transfer is O_DIRECT pwrite or pread from the same memory to the same part of the
same file. It uses the best thread count and length per call. Ours and raw take turns, and the
medians are compared. Set KVLADDER_BENCH_DIR to a directory on the device to measure.

A note says what the same raw calls reach if each thread also takes the xxh3-128 of its bytes. For a
fast disk, that is the limit of a tier with checksums: a thread takes those of 128 MiB in some
4.5 ms, while the disk may need 18 ms. Where a virtual machine's disk is memory of its host,
the same processors also copy the bytes. Making labels ahead in a thread of their own changed
nothing: 7.2 to 7.5 of 8 calls are in flight either way.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from xxhash import xxh3_128_digest

from benchmarks.row import Row
from kvladder.arena import Arena
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.lock import StackLock
from kvladder.measuring.files import RawFile, whole
from kvladder.notices import Notices
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.policy.offload import OffloadRule
from kvladder.runtime import SystemClock
from kvladder.testing.sim import inline_blocking
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.header import HEADER_BYTES
from kvladder.tiers.files.log import IndexLog
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import Labels, Read, RecoveredBlock, Ref, Write
from kvladder.tiers.ladder.base_level import EventBuffer, Shared
from kvladder.tiers.ladder.definition import LevelDefinition, LevelSettings
from kvladder.tiers.ladder.stack import HostSettings, TierStack
from kvladder.units import Size
from tests.kit.memory import resident_bytes

MIB = 1 << 20
FILE_BYTES = 512 * MIB
ROUNDS = 20
RECOVERED = 1_000_000
SEED = b"bench"


def rows() -> Iterable[Row]:
    """Measure writes and reads of one request at two block sizes, then recovery."""
    with directory() as path:
        for size in (MIB, 4 * MIB):
            yield from asyncio.run(transfers(path / f"{size}", size))
        yield from recovery(path / "recovery")


@contextmanager
def directory() -> Generator[Path]:
    """Return an empty directory on the device to measure."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVLADDER_BENCH_DIR")) as path:
        yield Path(path)


def key(number: int) -> BlockKey:
    """Return the key of a block."""
    return BlockKey(hashlib.sha256(SEED + number.to_bytes(8, "little")).digest())


def context(arena: Arena, layout: Layout, capacity: int) -> TierContext:
    """Return the context to open a tier with."""
    return TierContext(arena, layout, layout.namespace(), capacity, SystemClock(), inline_blocking)


# ---- transfers


async def transfers(path: Path, block_bytes: int) -> list[Row]:
    """Return the rows for ``put`` and ``get`` of one batch of the largest size."""
    layout = Layout(block_tokens=16, block_bytes=block_bytes)
    capacity = FILE_BYTES // block_bytes
    # only one segment, so raw calls need not stop at its end
    options = FilesOptions(path=str(path), segment=Size(2 * FILE_BYTES))
    tier = FilesTier(options, segments_min=1)
    count = 128 * MIB // block_bytes
    arena = Arena.create(count, layout.slot_bytes)
    everything = whole(arena)
    slots = arena.lease(count)
    assert slots is not None
    page = random.Random(1).randbytes(MIB)
    for at in range(0, len(everything), MIB):
        everything[at : at + MIB] = page[at // MIB :] + page[: at // MIB]
    await tier.open(context(arena, layout, capacity))
    assert tier.batch_max == count
    labels = Labels(layout.namespace(), block_bytes, verify=True)
    firsts = range(0, capacity, count)

    def writes(first: int) -> list[Write]:
        refs = [Ref(key(first + n), first + n) for n in range(count)]
        return [
            Write(labels, *ref, slot, arena.view(slot))
            for ref, slot in zip(refs, slots, strict=True)
        ]

    def reads(first: int) -> list[Read]:
        refs = [Ref(key(first + n), first + n) for n in range(count)]
        return [
            Read(labels, *ref, slot, arena.view(slot))
            for ref, slot in zip(refs, slots, strict=True)
        ]

    async def write(first: int) -> bool:
        return all(await tier.put(writes(first)))

    async def read(first: int) -> bool:
        wanted = reads(first)
        return all(await tier.get(wanted)) and all(one.check() for one in wanted)

    segment = path / layout.namespace().hex()[:16] / "seg-00000"
    raw = RawFile(segment, everything, direct=tier.describe()["io"] == "O_DIRECT")
    made: list[Row] = []
    for name, call in (("write", write), ("read", read)):
        for first in firsts:  # raw writes have overwritten the blocks
            assert await write(first)
        made.append(await transfer(name, call, raw, firsts, block_bytes, tier))
    await tier.aclose()
    raw.close()
    arena.close()
    return made


async def transfer(
    name: str,
    call: Callable[[int], Awaitable[bool]],
    raw: RawFile,
    firsts: Sequence[int],
    block_bytes: int,
    tier: FilesTier,
) -> Row:
    """Measure ours and raw in turns, on the same part of the same file.

    ``firsts`` has the first block of each batch.
    """
    threads, length = raw.best(name, block_bytes)
    total = 128 * MIB
    ours: list[float] = []
    limit: list[float] = []
    checked: list[float] = []

    def move(start: int) -> None:
        limit.append(raw.seconds(name, threads, length, start))
        checked.append(raw.seconds(name, threads, length, start, checksum=xxh3_128_digest))

    for number in range(ROUNDS):
        first = firsts[number % len(firsts)]
        start = first * (HEADER_BYTES + block_bytes)
        if number % 2:
            move(start)
        began = time.perf_counter()
        assert await call(first)
        ours.append(time.perf_counter() - began)
        if number % 2 == 0:
            move(start)
    threads.close()
    return Row(
        name=f"files tier {name}, {block_bytes // MIB} MiB blocks with checksum, one request",
        unit="GB/s",
        ours=total / median(ours) / 1e9,
        limit=total / median(limit) / 1e9,
        goal="ratio >= 0.95",
        note=f"{total // MIB} MiB, {tier.describe()['io']}, {tier.options.threads} threads;"
        f" raw: the best of 4 thread counts and 3 lengths, here {length // MIB} MiB; with checksums"
        f" {total / median(checked) / 1e9:.2f} GB/s",
    )


# ---- recovery


def recovery(path: Path) -> list[Row]:
    """Yield rows from a process that finds a million blocks, and one after much eviction."""
    made: list[Row] = []
    for dead in (False, True):
        home = path / f"dead-{dead}"
        home.mkdir(parents=True)
        child("prepare", home, dead=dead)
        seconds, of_tier, index_bytes = map(float, child("recover", home, dead=dead))
        what = ", log as long as it gets" if dead else ""
        made.append(
            Row(
                name=f"recovery of 10^6 blocks{what}",
                unit="s",
                ours=seconds,
                goal="< 3",
                note=f"level opened and filled; {of_tier:.2f} s of it in the tier",
            )
        )
        if not dead:
            made.append(
                Row(
                    name="memory for the index of a level with 10^6 blocks",
                    unit="bytes a block",
                    ours=index_bytes,
                    goal="<= 200",
                    note="growth of the process: index, policy, places, tags of the tier",
                )
            )
    return made


def child(task: str, path: Path, *, dead: bool) -> list[str]:
    """Run a task in a new process with fresh memory; return its output."""
    command = [sys.executable, "-m", "benchmarks.bench_files", task, str(path), str(int(dead))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


LAYOUT = Layout(block_tokens=16, block_bytes=4096)


def prepare(path: Path, count: int, *, dead: bool) -> None:
    """Write the index log of a tier with ``count`` blocks, without the blocks themselves.

    With ``dead``, the log also has ``count`` records of blocks that no longer exist.
    """

    async def make_home() -> Path:
        arena = Arena.create(1, LAYOUT.slot_bytes)
        tier = FilesTier(FilesOptions(path=str(path)))
        await tier.open(context(arena, LAYOUT, count))
        await tier.aclose()
        return path / LAYOUT.namespace().hex()[:16]

    home = asyncio.run(make_home())
    segment_bytes = (home / "seg-00000").stat().st_size
    whole = count * (HEADER_BYTES + LAYOUT.slot_bytes)
    for segment in range(1, -(-whole // segment_bytes)):  # sparse: it takes no space on the disk
        with (home / f"seg-{segment:05d}").open("wb") as file:
            file.truncate(min(segment_bytes, whole - segment * segment_bytes))
    log = IndexLog(Disk(), home, LAYOUT.namespace(), places_max=count, slack_records=0)
    log.load()
    for first in (count, 0) if dead else (0,):
        for start in range(0, count, 128):
            places = range(start, min(count, start + 128))
            log.put([RecoveredBlock(key(first + n), n) for n in places])
    log.flush()
    log.close()


def recover(path: Path) -> None:
    """Open a level on the log; print seconds, seconds in the tier alone, and bytes per block."""
    arena = Arena.create(1, LAYOUT.slot_bytes)

    async def tier_alone() -> float:
        tier = FilesTier(FilesOptions(path=str(path)))
        began = time.perf_counter()
        await tier.open(context(arena, LAYOUT, RECOVERED))
        found = sum([len(batch) async for batch in tier.recover()])
        seconds = time.perf_counter() - began
        assert found == RECOVERED
        await tier.aclose()
        return seconds

    async def whole_level() -> tuple[float, float]:
        clock = SystemClock()
        lock = StackLock()
        notices = Notices(clock.now)
        events = EventBuffer(1000, post=asyncio.get_running_loop().call_soon)
        shared = Shared(arena, lock, clock, events, notices)
        spec = LevelDefinition(
            name="nvme",
            tier=FilesTier(FilesOptions(path=str(path))),
            rule=OffloadRule(),
            capacity_blocks=RECOVERED,
            policy=PrioritizedLRU(),
            settings=LevelSettings(),
        )
        host = HostSettings("host", OffloadRule(), PrioritizedLRU(), reserve_blocks=0)
        post = asyncio.get_running_loop().call_soon
        stack = TierStack(host, [spec], shared, post=post, fetch_blocks_max=1)
        (level,) = stack.levels
        before = resident_bytes()
        began = time.perf_counter()
        await stack.open(LAYOUT, LAYOUT.namespace(), lambda _: inline_blocking)
        seconds = time.perf_counter() - began
        assert len(level.index) == RECOVERED
        grown = resident_bytes() - before
        await stack.aclose(flush_timeout_s=1.0)
        return seconds, grown / RECOVERED

    seconds, index_bytes = asyncio.run(whole_level())
    print(seconds, asyncio.run(tier_alone()), index_bytes)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]), RECOVERED, dead=sys.argv[3] == "1")
    else:
        recover(Path(sys.argv[2]))
