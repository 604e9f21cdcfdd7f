"""Removals by a user from files, without a purge, and a power loss at every call and at the end.

The law: once ``removals`` is 0, no loss of power brings a removed block back, though only a purge
overwrites its bytes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.offload import OffloadRule
from kvladder.testing.sim import sim_run
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.units import Size
from tests.export.clients import Client, keys_of, server
from tests.kit.disk import MODES, SECTOR_BYTES, FakeDisk, InlinePool, Mode
from tests.kit.removals import destroyed

pytestmark = [pytest.mark.crash, pytest.mark.slow]

ROOT = Path("/disk/kv")
RED, BLUE, MORE = SimCache.keys(1, 2, 3), SimCache.keys(4, 5), SimCache.keys(6)
FAR = keys_of(1, 2, 3)
LOSSES: list[Mode] = [mode for mode in MODES if mode != "misdirect"]
CAPACITY = 8


def files_on(disk: FakeDisk, *, stride: int = 8192) -> LevelSpec:
    tier = FilesTier(
        FilesOptions(path=str(ROOT), segment=Size(4 * stride)),
        disk=disk,
        pool=InlinePool(),
        log_slack_records=4,
        segments_min=2,
    )
    return LevelSpec(tier, OffloadRule(when="commit"), CAPACITY)


async def cache_on(disk: FakeDisk) -> SimCache:
    return await SimCache.open(files_on(disk))


def on_disk() -> FakeDisk:
    """Return a disk that has all blocks, also after a loss of power."""

    async def fill() -> None:
        cache = await cache_on(disk)
        cache.save(RED, salt="red")
        cache.save(BLUE, salt="blue")
        await cache.settle()
        await cache.aclose()

    disk = FakeDisk(ROOT.parent, ROOT)
    sim_run(fill())
    disk.crash("keep")
    return disk


async def ended(cache: SimCache, disk: FakeDisk) -> None:
    """End the process at once: none of its later calls reaches the disk."""
    disk._on = False
    await cache.aclose(flush_timeout_s=0.0)


async def forgotten(cache: SimCache, disk: FakeDisk) -> bool:
    """Wait until everything is forgotten, and end; return False if power was lost before."""
    while cache.manager.removals and disk.has_power:  # noqa: ASYNC110 - as seen from outside
        await asyncio.sleep(0.01)
    done = disk.has_power
    await ended(cache, disk)
    return done


async def look(disk: FakeDisk, *, gone: list[BlockKey], kept: list[BlockKey]) -> None:
    cache = await cache_on(disk)
    held = {*cache.levels[0].index}
    assert held.isdisjoint(gone), "a removed block is back"
    assert held >= {*kept}, "a block is lost"
    await cache.aclose()


def remove(cache: SimCache) -> None:
    cache.manager.remove(RED)


def clear(cache: SimCache) -> None:
    cache.manager.clear()


def reset(cache: SimCache) -> None:
    cache.manager.reset()


def evicted(cache: SimCache) -> None:
    """Evict the blocks first: then the level does not know them when they are removed."""
    level = cache.levels[0]
    with cache.stack.lock:
        level.forget([key for key in RED if key in level.index], "evicted")
    cache.manager.remove(RED)


@pytest.mark.parametrize("how", [remove, clear, reset, evicted])
@pytest.mark.parametrize("mode", LOSSES)
def test_no_loss_of_power_undoes_a_removal(mode: Mode, how: Callable[[SimCache], None]) -> None:
    async def work(disk: FakeDisk, cut_at: int) -> bool:
        cache = await cache_on(disk)
        disk.crash_at = disk.calls + cut_at
        how(cache)
        return await forgotten(cache, disk)

    used = on_disk()
    for number in count(1):
        disk = used.copied(number)
        done = sim_run(work(disk, number))
        disk.crash(mode)
        if not done:
            assert sim_run(work(disk, 1000))
            disk.crash(mode)
        sim_run(look(disk, gone=RED, kept=BLUE if how in {remove, evicted} else []))
        if done:
            assert number > 4, "a record, and three calls to make it and its name survive"
            break


def require_paid(owe: Callable[[FakeDisk], Awaitable[SimCache]]) -> None:
    """Require that what is owed on a failing disk is paid when the disk works again."""

    async def work() -> bool:
        cache = await owe(disk)
        assert cache.manager.removals
        disk.refuse = lambda _call, _path: 0
        return await forgotten(cache, disk)

    disk = on_disk()
    assert sim_run(work())
    disk.crash("drop")
    sim_run(look(disk, gone=RED, kept=BLUE))


def test_a_removal_is_not_done_before_it_is_synced() -> None:
    """A disk that fails to sync: the removal stays owed, and is paid when the disk works again."""

    async def owe(disk: FakeDisk) -> SimCache:
        cache = await cache_on(disk)
        disk.refuse = lambda call, path: errno.EIO if call == "fsync" else 0
        cache.manager.remove(RED)
        await asyncio.sleep(5.0)
        return cache

    require_paid(owe)


def test_a_later_write_to_a_wrong_place_undoes_no_removal_that_it_spares() -> None:
    """Removals that lie behind it in the log count all the same, at this start and at others."""

    async def paid(cache: SimCache) -> None:
        while cache.manager.removals:  # noqa: ASYNC110 - as seen from outside
            await asyncio.sleep(0.01)

    async def work() -> None:
        cache = await cache_on(used)
        for _ in range(4):  # the removals shall lie in another sector than what they remove
            cache.save(MORE)
            await cache.settle()
            cache.manager.remove(MORE)
            await paid(cache)
        cache.manager.remove(RED)
        await paid(cache)
        cache.save(MORE)
        await cache.settle()
        await ended(cache, used)

    def misplace(disk: FakeDisk, path: str, offset: int) -> None:
        file = disk._names[path]
        (*_, last) = (write for write in file.unsynced if write.data)
        whole, end = bytearray(file.durable), offset + len(last.data)
        whole[offset:end] = last.data
        file.content = whole
        disk.crash("keep")

    used = on_disk()
    sim_run(work())
    (log,) = (path for path in used.files() if path.endswith("/index.log"))
    spared = 0
    for offset in range(0, used._names[log].unsynced[-1].offset, SECTOR_BYTES):
        disk = used.copied(offset)
        lost = destroyed(disk, partial(misplace, disk, log, offset))
        spared += not lost.intersection(RED)
        for _ in range(2):
            sim_run(look(disk, gone=[key for key in RED if key not in lost], kept=[]))
            disk.crash("keep")
    assert spared > 1


def test_a_removal_from_a_level_that_is_left_out_is_owed_until_it_is_synced() -> None:
    async def owe(disk: FakeDisk) -> SimCache:
        disk.refuse = lambda _call, _path: errno.EIO
        cache = await cache_on(disk)
        cache.manager.remove(RED)
        return cache

    require_paid(owe)


@pytest.mark.parametrize("mode", LOSSES)
def test_no_loss_of_power_undoes_what_a_cache_server_has_answered(mode: Mode) -> None:
    """A client's purge by keys is told as done when its servers have answered."""

    async def serve(disk: FakeDisk, cut_at: int | None) -> bool:
        async with server(files_on(disk, stride=16384)) as (_, offers):
            client = Client(offers)
            await client.hello()
            if cut_at is None:
                assert await client.put(FAR) == [True] * len(FAR)
                return True
            disk.crash_at = disk.calls + cut_at
            answered = list[bool]()
            removing = asyncio.create_task(offers.remove(client.session, FAR))

            def note(_: object) -> None:
                answered.append(disk.has_power)

            removing.add_done_callback(note)
            await asyncio.sleep(1.0)
            removing.cancel()
            disk._on = False
            return answered == [True]

    async def look(disk: FakeDisk) -> None:
        async with server(files_on(disk, stride=16384)) as (cache, offers):
            client = Client(offers)
            await client.hello()
            assert await client.has(FAR) == [False] * len(FAR)
            assert not len(cache.levels[0].index), "a removed block is back"

    used = FakeDisk(ROOT.parent, ROOT)
    sim_run(serve(used, None))
    used.crash("keep")
    for number in count(1):
        disk = used.copied(number)
        if sim_run(serve(disk, number)):
            disk.crash(mode)
            sim_run(look(disk))
            if number > 8:  # after its last call
                break


@pytest.mark.parametrize("seed", range(30))
def test_what_was_forgotten_for_good_stays_so_over_many_losses_of_power(seed: int) -> None:
    """Lives of random saves, removals, purges and failures; each ends in another kind of loss."""
    random, disk = Random(seed), on_disk().copied(seed)
    prompts = [SimCache.keys(1, 2, 3), SimCache.keys(1, 6), SimCache.keys(4, 5), SimCache.keys(7)]
    salts = ["red", "red", "blue", "green"]
    gone: set[BlockKey] = set()
    """Blocks that were told as forgotten, and not saved since."""

    def sometimes(code: int, _call: str, _path: str) -> int:
        return code if random.random() < 0.2 else 0

    async def live(steps: int) -> None:
        cache = await cache_on(disk)
        for _ in range(steps):
            number = random.randrange(len(prompts))
            keys, salt = prompts[number], salts[number]
            some, done = set[BlockKey](), random.random()
            match random.randrange(6):
                case 0 | 1:
                    gone.difference_update(keys)
                    cache.save(keys, salt=salt)
                case 2:
                    cache.manager.remove(keys)
                    some = {*keys}
                case 3:
                    list(cache.manager.purge(salt))
                    some = {k for of, own in zip(prompts, salts, strict=True) for k in of
                            if own == salt}  # fmt: skip
                case 4:
                    cache.manager.clear()
                    some = {key for of in prompts for key in of}
                case _:
                    code = random.choice((0, 0, errno.EIO, errno.ENOSPC))
                    disk.refuse = partial(sometimes, code)
            await asyncio.sleep(random.choice((0.0, 0.01, 1.0)))
            if done < 0.7 and some:
                for _ in range(300):
                    if not (cache.manager.removals and disk.has_power):
                        break
                    await asyncio.sleep(0.1)
                if not cache.manager.removals:
                    gone.update(some)
            if not disk.has_power:
                break
        await ended(cache, disk)

    for _ in range(12):
        disk.crash_at = disk.calls + random.randint(1, 200)
        sim_run(live(random.randint(1, 12)))
        disk.refuse = lambda _call, _path: 0
        mode = random.choice(MODES)
        if mode == "misdirect":  # such a write may destroy removals, but hide none behind it
            gone -= destroyed(disk, partial(disk.crash, mode))
        else:
            disk.crash(mode)
        sim_run(look(disk, gone=[*gone], kept=[]))
