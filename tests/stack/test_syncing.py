"""Removals by a user from a durable tier: they are done once the tier has synced them."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.testing.fakes import Fail, FakeStore, FakeTier, Hang, Hold
from kvladder.testing.stacks import LevelSpec
from tests.stack.caches import COMMIT, QUICK, cache_of


class SyncingTier(FakeTier):
    """Notes when it was synced, and what it held then."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **{"durable": True, "store": FakeStore(), **options})
        self.synced: list[int] = []

    async def sync(self) -> None:
        async with self._call("purge", ()):
            self.synced.append(len(self.records))


class ErasingTier(SyncingTier):
    """Syncs with the first step of a purge."""

    erases = True

    async def erase(self, salt, start):
        return 0, None


async def test_a_removal_is_owed_until_the_tier_has_synced_it() -> None:
    syncing = Hold(on="purge")
    tier = SyncingTier([syncing])
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        keys = cache.keys(1, 2, 3)
        cache.save(keys)
        await cache.settle()
        cache.manager.remove(keys[1:])
        await syncing.reached()
        assert len(tier.records) == 1, "the removals came first"
        assert cache.manager.removals == 1
        syncing.let_go()
        await cache.settle()
        assert cache.manager.removals == 0
        assert tier.synced == [1]


async def test_what_is_removed_during_a_sync_is_synced_by_another_one() -> None:
    syncing = Hold(on="purge")
    tier = SyncingTier([syncing])
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys)
        await cache.settle()
        cache.manager.remove(keys[1:])
        await syncing.reached()
        cache.manager.remove(keys[:1])
        syncing.let_go()
        await cache.settle()
        assert cache.manager.removals == 0
        assert tier.synced == [1, 0]


async def test_a_sync_that_fails_or_hangs_is_repeated() -> None:
    tier = SyncingTier([Fail(on="purge"), Hang(on="purge")])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1))
        await cache.settle()
        cache.manager.remove(cache.keys(1))
        await asyncio.sleep(30)
        assert cache.manager.removals == 0
        assert tier.synced == [0]


async def test_blocks_that_only_earlier_evictions_removed_are_synced_too() -> None:
    tier = SyncingTier()
    async with cache_of(LevelSpec(tier, COMMIT, capacity_blocks=1)) as cache:
        for number in range(4):
            cache.save(cache.keys(number))
            await cache.settle()
        assert not tier.synced, "evictions are not synced"
        cache.manager.remove(cache.keys(0))
        await cache.settle()
        assert cache.manager.removals == 0
        assert len(tier.synced) == 1


async def test_a_removal_while_the_tier_is_left_out_is_synced_when_it_opens() -> None:
    store, blocks = FakeStore(), []
    async with cache_of(LevelSpec(SyncingTier(store=store), COMMIT)) as cache:
        blocks = cache.keys(1, 2)
        cache.save(blocks)
        await cache.settle()
    tier = SyncingTier([Fail(on="open")], store=store)
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.manager.remove(blocks)
        assert cache.manager.removals == 1
        await asyncio.sleep(30)
        assert cache.manager.removals == 0
        assert tier.synced == [0]


async def test_the_first_step_of_a_purge_syncs_as_well() -> None:
    tier = ErasingTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1), salt="tenant")
        await cache.settle()
        list(cache.manager.purge("tenant"))
        await cache.settle()
        assert cache.manager.removals == 0
        assert not tier.synced


class SharedTier(SyncingTier):
    """Keeps blocks for others."""

    shared = True


@pytest.mark.parametrize("tier", [SharedTier(durable=False), SyncingTier(durable=False)])
async def test_a_tier_that_keeps_nothing_for_the_next_process_is_not_synced(tier) -> None:
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1))
        await cache.settle()
        cache.manager.remove(cache.keys(1))
        await cache.settle()
        assert cache.manager.removals == 0
        assert not tier.synced
