"""A files tier on a disk that is full when blocks are to be forgotten or overwritten."""

from __future__ import annotations

import asyncio
import errno

import pytest

from kvladder.errors import TierError, TierFull
from kvladder.testing.stacks import LevelSpec
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from tests.crash.harness import ROOT, Machine, new_disk
from tests.kit.disk import FakeDisk, InlinePool
from tests.stack.caches import COMMIT, QUICK, cache_of


def full_for_the_log(disk: FakeDisk) -> list[str]:
    """Refuse room to the index log a thousand times; return the refused calls."""
    refused: list[str] = []

    def refuse(call: str, path: str) -> int:
        if call != "pwritev" or not path.endswith("index.log") or len(refused) == 1000:
            return 0
        refused.append(path)
        return errno.ENOSPC

    disk.refuse = refuse
    return refused


async def test_only_a_put_reports_a_full_disk() -> None:
    disk = new_disk()
    machine = Machine(disk)
    tier, _ = await machine.open()
    await machine.put(tier, (0, 0))
    assert full_for_the_log(disk) == []
    await machine.remove(tier, (0, 0))
    await machine.put(tier, (1, 1))
    disk.refuse = lambda call, _path: errno.ENOSPC if call == "fsync" else 0
    with pytest.raises(TierError, match="No space left") as erasing:
        await tier.erase(None, 0)
    assert [type(error) for error in (*machine.errors, erasing.value)] == [
        TierError,
        TierFull,
        TierError,
    ]
    assert machine.errors[0].temporary
    disk.refuse = lambda _call, _path: 0
    await tier.aclose()
    machine.close()


async def test_removals_wait_for_room_and_are_done_then() -> None:
    disk = new_disk()
    tier = FilesTier(FilesOptions(path=str(ROOT)), disk=disk, pool=InlinePool())
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys)
        await cache.settle()
        refused = full_for_the_log(disk)
        cache.manager.remove(keys)
        await asyncio.sleep(60)
        assert 2 <= len(refused) < 20, "it is left alone for a while"
        assert cache.manager.removals == 3, "two removals, and the sync after them"
        disk.refuse = lambda _call, _path: 0
        await asyncio.sleep(60)
        assert cache.manager.removals == 0
