"""Tiers that do not open, or report invalid blocks: the cache starts without them."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from kvladder.errors import ConfigError, TierError, Unavailable
from kvladder.events import Stored
from kvladder.testing.fakes import Block, Fail, FakeTier, Hang, Hold, Raise
from kvladder.testing.sim import SimThreads
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import Facts, RecoveredBlock
from kvladder.tiers.ladder.calling.calls import CALLS_TIMEOUT_S
from kvladder.tiers.ladder.calling.client import CLOSE_TIMEOUT_S
from kvladder.tiers.ladder.lifecycle import OPEN_TIMEOUT_S
from kvladder.units import Size
from tests.crash.harness import ROOT, new_disk
from tests.kit.disk import FakeDisk, InlinePool
from tests.stack.caches import COMMIT, cache_of, flushed

TROUBLES = {
    "fails": lambda on: Fail(on=on, times=3),
    "fails after it": lambda on: Fail(on=on, times=3, after=True),
    "is full": lambda on: Raise(OSError, on=on),
    "exits": lambda on: Raise(SystemExit, on=on, times=2),
    "interrupts": lambda on: Raise(KeyboardInterrupt, on=on),
    "ends": lambda on: Raise(GeneratorExit, on=on),
    "cancels itself": lambda on: Raise(asyncio.CancelledError, on=on),
    "hangs": lambda on: Hang(on=on),
    "hangs for good": lambda on: Hang(on=on, stubborn=True),
    "hangs in its thread": lambda on: Block(on=on),
}


def left_out(cache: SimCache) -> list[int]:
    stats = cache.manager.stats()
    return [stats[level.name]["left_out"] for level in cache.levels]


@pytest.mark.parametrize("operation", ["open", "recover"])
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_tier_that_does_not_open_is_left_out_until_it_does(
    trouble: str, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FakeTier([TROUBLES[trouble](operation)], store=await flushed((1, 2)), durable=True)
    loop, pools = asyncio.get_running_loop(), dict[str, SimThreads]()

    def threads(name: str) -> SimThreads:
        return pools.setdefault(name, SimThreads(2))

    began = loop.time()
    specs = LevelSpec(tier, COMMIT), LevelSpec(FakeTier(), COMMIT)
    async with cache_of(*specs, slots=4, threads=threads) as cache:
        assert loop.time() - began <= OPEN_TIMEOUT_S
        assert left_out(cache) == [1, 0]
        assert cache.manager.stats()["level1"]["breaker_open"] == 1
        assert "level1 is left out: it " in cache.manager.describe()
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)
        assert await cache.load(cache.keys(1, 2)) == []
        cache.save(cache.keys(7, 8))
        await cache.settle()
        cache.stack.host.remove(cache.keys(7, 8))
        assert await cache.load(cache.keys(7, 8)) == ["level2"] * 2, "the others work"
        await asyncio.sleep(3 * 60.0)
        if "hangs" in trouble:
            assert left_out(cache) == [1, 0]
            tier.heal()
            await asyncio.sleep(1.0)
        assert left_out(cache) == [0, 0]
        assert "left out" not in cache.manager.describe()
        assert await cache.load(cache.keys(1, 2)) == ["level1"] * 2
        cache.save(cache.keys(9))
        await cache.settle()
        assert tier.stored(cache.keys(9)[0])
        said = [text for text in caplog.messages if "level1 is left out" in text]
        assert len(said) == 1
        assert cache.manager.stats()["level1"]["task_failures"] == 0


async def test_a_tier_that_never_opens_is_retried_less_and_less() -> None:
    tier = FakeTier([Fail(on="open", times=None)])
    async with cache_of(LevelSpec(tier)):
        await asyncio.sleep(600.0)
        times = [call.at_s for call in tier.calls]
        pauses = [round(b - a) for a, b in itertools.pairwise(times)]
        assert pauses[:6] == [5, 10, 20, 40, 60, 60]


async def test_wrong_settings_are_an_error_only_at_start() -> None:
    with pytest.raises(ConfigError, match="scripted"):
        await SimCache.open(LevelSpec(FakeTier([Raise(ConfigError, on="open")])))
    tier = FakeTier([Fail(on="open"), Raise(ConfigError, on="open", times=3)])
    async with cache_of(LevelSpec(tier)) as cache:
        await asyncio.sleep(60.0)
        assert left_out(cache) == [1]
        await asyncio.sleep(60.0)
        assert left_out(cache) == [0], "somebody has set right what it found"


@pytest.mark.parametrize("operation", ["open", "recover"])
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_without_a_required_level_there_is_no_cache(trouble: str, operation: str) -> None:
    tier = FakeTier([TROUBLES[trouble](operation)], durable=True)
    first, pools = FakeTier(), dict[str, SimThreads]()

    def threads(name: str) -> SimThreads:
        return pools.setdefault(name, SimThreads(2))

    with pytest.raises(ConfigError, match=r"^tiers\[2\].required: .*required: true") as refused:
        await SimCache.open(LevelSpec(first), LevelSpec(tier, required=True), threads=threads)
    assert "leave out required: true, to start without this level" in str(refused.value)
    for closed in (first, tier):
        with pytest.raises(TierError, match="closed"):
            await closed.contains([])


async def test_a_required_level_says_what_to_fix() -> None:
    class Missing(FakeTier):
        async def open(self, context: TierContext) -> None:
            await super().open(context)
            raise Unavailable("no server", path="url", hint="start it")

    tier = Missing()
    with pytest.raises(ConfigError) as refused:
        await SimCache.open(LevelSpec(tier, required=True))
    found = refused.value.path, refused.value.message, refused.value.hint.split(";")[0]
    assert found == ("tiers[1].url", "no server", "start it")
    async with cache_of(LevelSpec(Missing())) as cache:
        assert "left out: it failed to open: no server (start it)" in cache.manager.describe()


# ---- disks that fail

DISK_CALLS = ["open", "preadv", "pwritev", "fallocate", "truncate", "fsync", "lock", "rename"]
DISK_CALLS += ["unlink", "mkdir", "listdir", "stat"]
CODES = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE]


def files_level(disk: FakeDisk, **options: Any) -> LevelSpec:
    settings = FilesOptions(path=str(ROOT), segment=Size(32 << 10))
    tier = FilesTier(settings, disk=disk, pool=InlinePool(), log_slack_records=4, segments_min=2)
    return LevelSpec(tier, COMMIT, **options)


async def stored_on(disk: FakeDisk) -> None:
    async with cache_of(files_level(disk)) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()


@pytest.mark.product("code", "call")
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("call", DISK_CALLS)
async def test_a_disk_that_fails_at_start_is_used_once_it_works(call: str, code: int) -> None:
    for has_blocks in (False, True):
        disk = new_disk()
        if has_blocks:
            await stored_on(disk)
        disk.refuse = lambda name, _path: code if name == call else 0
        async with cache_of(files_level(disk)) as cache:
            await asyncio.sleep(30.0)
            disk.refuse = lambda _name, _path: 0
            await asyncio.sleep(60.0)
            assert left_out(cache) == [0]
            assert await cache.load(cache.keys(1, 2)) == ["level1"] * (2 * has_blocks)
            cache.save(cache.keys(7, 8))
            await cache.settle()
            assert cache.levels[0].holds(cache.keys(7, 8)[1])
        assert disk.open_fds == 0


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EMFILE])
async def test_a_failing_disk_call_at_the_start_costs_no_block(code: int) -> None:
    for number in itertools.count(1):
        disk = new_disk()
        await stored_on(disk)
        disk.fail_at, disk.fail_errno = disk.calls + number, code
        async with cache_of(files_level(disk)) as cache:
            reached = disk.calls >= disk.fail_at
            disk.fail_at = None
            await asyncio.sleep(10.0)
            assert left_out(cache) == [0]
            assert await cache.load(cache.keys(1, 2)) == ["level1"] * 2
        if not reached:
            assert number > 20
            break


async def test_a_full_disk_is_read_from(caplog: pytest.LogCaptureFixture) -> None:
    disk = new_disk()
    await stored_on(disk)
    disk.capacity_bytes = sum(disk.files().values())
    disk.put(ROOT / "others", b"")
    disk.refuse = lambda name, _path: errno.ENOSPC if name in {"fallocate", "pwritev"} else 0
    async with cache_of(files_level(disk, required=True)) as cache:
        assert await cache.load(cache.keys(1, 2)) == ["level1"] * 2
        cache.save(cache.keys(7, 8))
        await asyncio.sleep(1.0)
        assert not cache.levels[0].holds(cache.keys(7, 8)[0])
    assert any("its medium is full" in text for text in caplog.messages)


# ---- recovered blocks


class Telling(FakeTier):
    """Recovers the blocks given by a test."""

    told: tuple[Any, ...] = ()

    async def recover(self) -> AsyncIterator[Any]:
        for batch in self.told:
            yield batch


def telling(*batches: Any) -> Telling:
    tier = Telling(durable=True)
    tier.told = batches
    return tier


def block(number: int, **changes: Any) -> RecoveredBlock:
    own = {name: changes.pop(name) for name in [*changes] if name in RecoveredBlock._fields}
    return RecoveredBlock(SimCache.keys(number)[0], number, Facts()._replace(**changes))._replace(
        **own
    )


STRANGE: dict[str, Any] = {
    "nothing": None,
    "a number": 7,
    "a text": "text",
    "an item": block(1),
    "nothings": [None, None],
    "tuples": [tuple(block(1))],
    "no facts": [block(1, facts=None)],
    "facts that are none": [block(1, facts=tuple(Facts()))],
    "a short tuple": [(b"k" * 32, 1)],
    "no key": [block(1, key=None)],
    "a key of text": [block(1, key="k" * 32)],
    "a short key": [block(1, key=b"k" * 31)],
    "a place below all": [block(1, place=-1)],
    "a place beyond": [block(1, place=64)],
    "a huge place": [block(1, place=1 << 80)],
    "no place": [block(1, place=None)],
    "half a place": [block(1, place=1.5)],
    "a priority beyond": [block(1, priority=101)],
    "a priority of text": [block(1, priority="high")],
    "a floor below all": [block(1, floor=-1)],
    "no floor": [block(1, floor=None)],
    "an end of text": [block(1, expires_wall_s="soon")],
    "a short salt": [block(1, salt=b"salt")],
    "a salt of text": [block(1, salt="8 bytes!")],
    "too many terms": [block(1, terms=8)],
    "a key again": [block(3, place=40)],
    "a place again": [block(1, place=3)],
    "a key twice in a batch": [block(3, place=41), block(3, place=42)],
}


@pytest.mark.parametrize("strange", STRANGE)
async def test_invalid_recovered_blocks_are_skipped(
    strange: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = [[block(3), block(4)], [block(5)]]
    tier = telling(good[0], STRANGE[strange], good[1])
    async with cache_of(LevelSpec(tier, COMMIT), LevelSpec(FakeTier(), COMMIT)) as cache:
        level = cache.levels[0]
        assert left_out(cache) == [0, 0]
        assert level.index.prefix([one.key for batch in good for one in batch]) == 3
        assert len(level.index) == 3
        ignored = [text for text in caplog.messages if "invalid blocks, which are ignored" in text]
        assert len(ignored) == 1
        cache.save(cache.keys(1))
        await cache.settle()
        assert tier.stored(cache.keys(1)[0])


async def test_good_blocks_beside_strange_ones_in_a_batch_are_held() -> None:
    tier = telling([block(1), None, block(2), block(2), block(1, place=9), block(3)])
    async with cache_of(LevelSpec(tier)) as cache:
        assert [cache.levels[0].index.place(block(n).key) for n in (1, 2, 3)] == [1, 2, 3]
        assert cache.levels[0].places.taken == 3


@pytest.mark.parametrize("what", [None, [], 7])
async def test_a_recovery_that_returns_no_iterator_leaves_the_level_out(what: Any) -> None:
    tier = FakeTier(durable=True)
    tier.recover = lambda: what  # type: ignore[method-assign]
    async with cache_of(LevelSpec(tier), LevelSpec(FakeTier(), COMMIT)) as cache:
        assert left_out(cache) == [1, 0]
        cache.save(cache.keys(1))
        await cache.settle()


# ---- events during the recovery


class Halting(FakeTier):
    """Recovers half of its blocks, and waits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.halt = Hold()
        self.fails = False

    async def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        number = 0
        async for batch in super().recover():
            for item in batch:
                if number == 2:
                    await self.halt.happen()
                    if self.fails:
                        self.fails = False
                        raise OSError("half of it")
                number += 1
                yield [item]


def remove(cache: SimCache) -> None:
    cache.manager.remove(cache.keys(1, 2, 3, 4))


def purge(cache: SimCache) -> None:
    list(cache.manager.purge("tenant"))


def clear(cache: SimCache) -> None:
    cache.manager.clear()


def reset(cache: SimCache) -> None:
    cache.manager.reset()


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("forget", [remove, purge, clear, reset])
async def test_blocks_removed_while_a_level_is_left_out_do_not_come_back(
    forget: Callable[[SimCache], None], *, fails: bool
) -> None:
    first = FakeTier(durable=True)
    async with cache_of(LevelSpec(first, COMMIT)) as cache:
        cache.save(cache.keys(1, 2, 3, 4), salt="tenant")
        cache.save(cache.keys(5))
    tier = Halting(store=first.store, durable=True)
    tier.fails = fails
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        assert left_out(cache) == [1]
        forget(cache)
        await asyncio.sleep(1.0)
        tier.halt.let_go()
        await asyncio.sleep(20.0)
        assert left_out(cache) == [0]
        await cache.settle()
        kept = cache.keys(5) if forget in {remove, purge} else []
        assert [*cache.levels[0].index] == kept
        assert [record.key for record in tier.records.values()] == kept
        assert cache.manager.removals == 0
        if fails:  # listeners must learn of late blocks
            events = cache.manager.take_events()
            assert {*kept} <= {
                key for event in events if isinstance(event, Stored) for key in event.keys
            }


@pytest.mark.parametrize("operation", ["open", "recover"])
async def test_closing_takes_seconds_while_a_tier_hangs_in_its_start(operation: Any) -> None:
    class Deaf(FakeTier):
        """A tier with hanging calls that do not end even with it."""

        def heal(self) -> None:
            pass

    loop = asyncio.get_running_loop()
    tier = Deaf([Hang(on=operation, stubborn=True)], durable=True)
    cache = await SimCache.open(LevelSpec(tier, COMMIT))
    cache.save(cache.keys(1))
    began = loop.time()
    await cache.aclose()
    assert loop.time() - began <= CLOSE_TIMEOUT_S + 3 * CALLS_TIMEOUT_S + 0.1
    FakeTier.heal(tier)
    await asyncio.sleep(1.0)
