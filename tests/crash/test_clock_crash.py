"""A cache over files with a wrong clock for a while, and a power loss at every single call.

The law: a block that a purge reported as gone is not served again, and none of its bytes are on the
disk. This holds even if the block expired by a fast clock that is set back afterwards.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.offload import OffloadRule
from kvladder.testing.sim import EPOCH_S, sim_run
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from tests.kit.disk import MODES, FakeDisk, InlinePool, Mode, PowerCut

pytestmark = [pytest.mark.crash, pytest.mark.slow]

ROOT = Path("/disk/kv")
RED, BLUE = SimCache.keys(1, 2, 3), SimCache.keys(4, 5)
TTL_S = 100.0
AHEAD_S = 5000.0


async def cache_on(disk: FakeDisk, *, epoch_s: float = EPOCH_S) -> SimCache:
    tier = FilesTier(FilesOptions(path=str(ROOT)), disk=disk, pool=InlinePool())
    return await SimCache.open(LevelSpec(tier, OffloadRule(when="commit")), epoch_s=epoch_s)


def on_disk(disk: FakeDisk, keys: list[BlockKey]) -> int:
    raw = b"".join(disk.content(Path(path)) for path in disk.files() if "/seg-" in path)
    return sum(SimCache.payload(key) in raw for key in keys)


async def fill(disk: FakeDisk) -> None:
    cache = await cache_on(disk)
    cache.save(RED, salt="red", ttl_s=TTL_S)
    cache.save(BLUE, salt="blue")
    await cache.settle()
    await cache.aclose()


async def purge_ahead(disk: FakeDisk) -> None:
    """Purge expired blocks in a process with a fast clock.

    After the power loss it ends all the same: none of its later calls reaches the disk.
    """
    cache = await cache_on(disk, epoch_s=EPOCH_S + AHEAD_S)
    assert cache.manager.lookup(RED).total == 0
    list(cache.manager.purge("red"))
    while cache.manager.removals and disk.has_power:  # noqa: ASYNC110 - as seen from outside
        await asyncio.sleep(0.01)
    await cache.aclose()
    if not disk.has_power:
        raise PowerCut


async def look(disk: FakeDisk, *, blue: bool) -> None:
    """Check the blocks by a clock that is right again."""
    cache = await cache_on(disk)
    assert cache.manager.lookup(RED).total == 0
    assert await cache.load(RED) == []
    assert not blue or len(await cache.load(BLUE)) == len(BLUE)
    await cache.aclose()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "misdirect"])
def test_a_purge_is_final_for_blocks_that_a_fast_clock_expired(mode: Mode) -> None:
    for number in count(1):
        disk = FakeDisk(ROOT.parent, ROOT, seed=number)
        sim_run(fill(disk))
        disk.crash("keep")
        assert on_disk(disk, RED) == len(RED), "they can be told"
        cut = disk.cuts(number, partial(sim_run, purge_ahead(disk)))
        disk.crash(mode)
        if cut:
            sim_run(purge_ahead(disk))
            disk.crash(mode)
        assert on_disk(disk, RED) == 0
        sim_run(look(disk, blue=mode == "keep"))
        if not cut:
            assert number > 20
            break
