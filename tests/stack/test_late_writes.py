"""Writes that a shared tier's server carries out after the call has failed, and after a purge."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import pytest

from kvladder.testing.fakes import Fail, Hang, Step
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.label import Write
from tests.stack.caches import COMMIT, QUICK, cache_of

LATE_S = 10.0
FAILURES = {
    "fails": Fail(on="put"),
    "hangs": Hang(on="put"),
}


class Halving(SharedFakeTier):
    """Stores none of the second half of its first batch."""

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        half = len(writes) if self.batches("put") else len(writes) // 2
        await super().put(writes[:half])
        return [True] * half + [False] * (len(writes) - half)


def late_tier(*script: Step) -> SharedFakeTier:
    """Return a tier whose puts may be carried out within ``LATE_S`` after they failed."""
    tier = SharedFakeTier(script)
    tier.removable = lambda _: True
    tier.late_s = LATE_S
    return tier


async def removed(cache: SimCache, how: str) -> None:
    if how == "keys":
        cache.manager.remove(cache.keys(1, 2))
    else:
        deque(cache.stack.purge(None))
    await asyncio.sleep(0.5)


def comes(tier: SharedFakeTier, cache: SimCache) -> None:
    """The server carries the put out."""
    tier.others_put({key: cache.payload(key) for key in cache.keys(1, 2)})


@pytest.mark.parametrize("how", ["keys", "all"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_block_that_is_stored_after_its_removal_is_removed_again(
    failure: str, how: str
) -> None:
    tier = late_tier(FAILURES[failure])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys)
        await asyncio.sleep(2.0)
        await removed(cache, how)
        assert cache.manager.removals == len(keys)
        comes(tier, cache)
        await asyncio.sleep(LATE_S)
        assert cache.manager.removals == 0
        assert not tier.records


async def test_a_block_that_its_batch_did_not_store_is_removed_again() -> None:
    tier = Halving()
    tier.removable, tier.late_s = lambda _: True, LATE_S
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()
        await removed(cache, "keys")
        assert cache.manager.removals == 1
        comes(tier, cache)
        tier.others_remove(cache.keys(1))
        await asyncio.sleep(LATE_S)
        assert cache.manager.removals == 0
        assert not tier.records


async def test_a_block_removed_while_its_write_hangs_is_removed_again() -> None:
    tier = late_tier(Hang(on="put"))
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1, 2))
        await asyncio.sleep(0.1)
        await removed(cache, "keys")
        await asyncio.sleep(LATE_S - 1)
        assert cache.manager.removals == 2
        comes(tier, cache)
        await asyncio.sleep(3.0)
        assert cache.manager.removals == 0
        assert not tier.records


async def test_a_failed_write_delays_no_removal_of_other_blocks_and_no_new_write() -> None:
    tier = late_tier(Fail(on="put"))
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys)
        await asyncio.sleep(1.0)
        cache.manager.remove(cache.keys(3))
        await asyncio.sleep(0.5)
        assert cache.manager.removals == 0
        cache.stack.host.remove(keys)
        cache.save(keys)
        await cache.settle()
        assert all(tier.stored(key) for key in keys)
        await asyncio.sleep(2 * LATE_S)
        assert all(tier.stored(key) for key in keys), "nobody removed them"


async def test_a_removed_block_is_not_stored_again_while_the_old_one_may_come() -> None:
    """Its second removal would remove the new one, too."""
    tier = late_tier(Fail(on="put"))
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys)
        await asyncio.sleep(1.0)
        await removed(cache, "keys")
        cache.save(keys)
        await asyncio.sleep(LATE_S)
        assert tier.batches("put") == [2]
        await removed(cache, "keys")
        cache.save(keys)
        await cache.settle()
        assert all(tier.stored(key) for key in keys)


async def test_a_write_that_never_began_is_not_awaited() -> None:
    tier = late_tier(Fail(on="put"), Fail(on="put"))
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        for number in (1, 2):
            cache.save(cache.keys(number))
            await asyncio.sleep(0.1)
        cache.save(cache.keys(3))  # the breaker is open
        await asyncio.sleep(0.1)
        cache.manager.remove(cache.keys(3))
        await asyncio.sleep(0.5)
        assert cache.manager.removals == 0


async def test_a_level_that_closes_leaves_no_timer_behind() -> None:
    tier = late_tier(Fail(on="put"))
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1, 2))
        await asyncio.sleep(1.0)
        await removed(cache, "keys")
        assert cache.manager.removals == 2
