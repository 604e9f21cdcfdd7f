"""Processes killed during writes: every block that they reported as stored is found."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvladder.arena import Arena
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.runtime import SystemClock
from kvladder.testing.sim import inline_blocking
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.directory import held_by, leases
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import Labels, Read, Ref, Write
from kvladder.units import Size

pytestmark = [pytest.mark.crash, pytest.mark.slow]

LAYOUT = Layout(block_tokens=16, block_bytes=100_000)
CAPACITY = 64
BATCH = 8
LABELS = Labels(LAYOUT.namespace(), LAYOUT.block_bytes, verify=True)


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"kill %d" % number).digest())


def data(number: int) -> bytes:
    return random.Random(number).randbytes(LAYOUT.block_bytes)


async def open_tier(path: Path, arena: Arena) -> FilesTier:
    tier = FilesTier(FilesOptions(path=str(path), segment=Size(2 << 20)), log_slack_records=16)
    clock = SystemClock()
    await tier.open(
        TierContext(arena, LAYOUT, LAYOUT.namespace(), CAPACITY, clock, inline_blocking)
    )
    return tier


async def write_for_ever(path: Path) -> None:
    """Store blocks at random places for ever; print the stored ones and those to be removed."""
    arena = Arena.create(BATCH, LAYOUT.slot_bytes)
    slots = arena.lease(BATCH)
    assert slots is not None
    tier = await open_tier(path, arena)
    chosen = random.Random(1)
    number = 0
    while True:
        places = chosen.sample(range(CAPACITY), BATCH)
        say("going", *places)
        writes: list[Write] = []
        for slot, place in zip(slots, places, strict=True):
            number += 1
            view = arena.view(slot)
            view[: LAYOUT.block_bytes] = data(number)
            writes.append(Write(LABELS, *Ref(key(number), place), slot, view))
        if number % 3 == 0:
            await tier.remove([Ref(write.key, write.place) for write in writes])
        assert all(await tier.put(writes))
        say("stored", *(f"{number - BATCH + 1 + i}:{places[i]}" for i in range(BATCH)))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def check(path: Path, promised: dict[int, int]) -> None:
    """Check that all stored blocks that were not being overwritten are there and right."""
    arena = Arena.create(1, LAYOUT.slot_bytes)
    (slot,) = arena.lease(1) or []
    tier = await open_tier(path, arena)
    found = {kept.place: kept.key async for batch in tier.recover() for kept in batch}
    for place, number in promised.items():
        assert found.get(place) == key(number)
        read = Read(LABELS, *Ref(key(number), place), slot, arena.view(slot))
        assert list(await tier.get([read])) == [True]
        assert read.check()
        assert arena.view(slot)[: LAYOUT.block_bytes] == data(number)
    await tier.aclose()
    arena.release([slot])
    arena.close()


async def open_beside(path: Path, arena: Arena, process: int) -> None:
    """Open a tier beside it, which gets a directory of its own."""
    tier = await open_tier(path, arena)
    home = LAYOUT.namespace().hex()[:16]
    assert tier.describe()["directory"] == f"{home}.1"
    disk = Disk()
    assert {one.home.name: held_by(disk, one.home) for one in leases(disk, path)} == {
        home: str(process),
        f"{home}.1": str(os.getpid()),
    }
    await tier.aclose()


@pytest.mark.parametrize("batches", [1, 7, 40])
def test_files_survive_kill_9_during_a_write(tmp_path: Path, batches: int) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    promised: dict[int, int] = {}
    stored = 0
    try:
        for line in process.stdout:
            word, *rest = line.split()
            if word == "going":
                for gone in rest:
                    promised.pop(int(gone), None)
                continue
            for pair in rest:
                number, place = map(int, pair.split(":"))
                promised[place] = number
            stored += 1
            if stored == batches:
                arena = Arena.create(1, LAYOUT.slot_bytes)
                asyncio.run(open_beside(tmp_path, arena, process.pid))
                arena.close()
                process.kill()
    finally:
        process.kill()
        process.wait()
        rest_of_it = process.stdout.read()
        process.stdout.close()
    assert stored >= batches, rest_of_it
    assert promised
    asyncio.run(check(tmp_path, promised))


if __name__ == "__main__":
    asyncio.run(write_for_ever(Path(sys.argv[1])))
