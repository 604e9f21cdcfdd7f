"""A million blocks are found again, each at its place.

``benchmarks/bench_files.py`` measures the time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvladder.arena import Arena
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.runtime import SystemClock
from kvladder.testing.sim import inline_blocking
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.disk import Disk
from kvladder.tiers.files.log import IndexLog
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import RecoveredBlock

COUNT = 1_000_000
STRIDE = 8192
PLACES = (256 << 20) // STRIDE


@pytest.mark.slow
@pytest.mark.real
async def test_a_million_blocks_are_recovered(tmp_path: Path) -> None:
    layout = Layout(block_tokens=16, block_bytes=4096)
    arena = Arena.create(1, layout.slot_bytes)
    context = TierContext(arena, layout, layout.namespace(), COUNT, SystemClock(), inline_blocking)
    tier = FilesTier(FilesOptions(path=str(tmp_path)))
    await tier.open(context)
    await tier.aclose()
    home = tmp_path / layout.namespace().hex()[:16]
    for segment in range(1, -(-COUNT // PLACES)):  # without space on the disk
        with (home / f"seg-{segment:05d}").open("wb") as file:
            file.truncate(min(PLACES, COUNT - segment * PLACES) * STRIDE)
    log = IndexLog(Disk(), home, layout.namespace(), places_max=COUNT, slack_records=0)
    log.load()
    for start in range(0, COUNT, 250):
        keys = [hashlib.sha256(b"%d" % n).digest() for n in range(start, start + 250)]
        kept = [RecoveredBlock(BlockKey(key), start + n) for n, key in enumerate(keys)]
        log.put(kept)
        log.remove(kept[7:8])
    log.close()

    tier = FilesTier(FilesOptions(path=str(tmp_path)))
    await tier.open(context)
    places = [kept.place async for batch in tier.recover() for kept in batch]
    await tier.aclose()
    arena.close()
    assert places == [place for place in range(COUNT) if place % 250 != 7]
