"""Purges owed by a level that is detached: the debt stays until its medium is back and has paid."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvladder.forgetting.scope import PurgeScope
from kvladder.keys import START
from kvladder.testing.fakes import Fail, FakeStore, FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from tests.stack.caches import COMMIT, QUICK
from tests.stack.test_changing import attacher, definition, lifecycle_of
from tests.stack.test_erasing import KeepingTier, left
from tests.stack.test_forgetting import MINUTE_S, keep, purging, stored, there

MEDIUM = "the medium"


async def detach(cache: SimCache, medium: str = MEDIUM, flush_s: float = 1.0) -> None:
    (level,) = cache.levels
    await attacher(cache).detach(lifecycle_of(cache, level), medium, flush_s=flush_s)


async def attach(cache: SimCache, tier: FakeTier, name: str = "level1", **more: Any) -> None:
    await attacher(cache).attach(definition(name, tier, **more), 0, MEDIUM)


def removable(tier: SharedFakeTier) -> SharedFakeTier:
    tier.removable = lambda _: True
    return tier


@pytest.mark.parametrize("name", ["level1", "another name"])
@pytest.mark.parametrize("kind", ["salt", "prefix", "age"])
async def test_a_shared_level_that_owes_pays_when_it_is_attached_again(
    tmp_path: Path, kind: str, name: str
) -> None:
    store = FakeStore()
    tier = removable(SharedFakeTier(store=store))
    async with purging(tmp_path, LevelSpec(tier, COMMIT, settings=QUICK)) as (cache, purger):
        path = cache.keys(1, 2)
        cache.save(path, salt="red", parent=START)
        cache.save(cache.keys(5), salt="blue", parent=START)
        await cache.settle()
        await asyncio.sleep(10 * MINUTE_S)
        cache.save(cache.keys(6), salt="blue", parent=START)
        await cache.settle()
        scope = {
            "salt": PurgeScope(salt="red"),
            "prefix": PurgeScope(keys=[path[0].hex()], salt="red"),
            "age": PurgeScope(older_than_s=5 * MINUTE_S),
        }[kind]
        tier.script += [Fail(on="purge", times=None), Fail(on="remove", times=None)]
        receipt = await purger.purge(scope, wait_s=1.0)
        assert [one.name for one in receipt.owed] == ["level1"]
        await detach(cache)
        await asyncio.sleep(10.0)
        kept = stored(tmp_path, receipt)
        assert kept.owed[0].why.startswith("it is detached: attach it again")

        back = removable(SharedFakeTier(store=store))
        back.script.append(Fail(on="purge", times=2))
        await attach(cache, back, name)
        assert await cache.load(path, deadline_s=1.0) == []
        await asyncio.sleep(5 * MINUTE_S)
        assert stored(tmp_path, receipt).complete
        assert not {*path} & {record.key for record in back.records.values()}
        assert back.stored(cache.keys(6)[0]) is not None


async def test_a_private_level_does_not_bring_back_what_it_owes(tmp_path: Path) -> None:
    """It was left out when the purge was asked, so no index named its blocks."""
    store = FakeStore()
    await keep(tmp_path, store)
    away = FakeTier([Fail(on="open", times=None)], store=store, durable=True)
    async with purging(tmp_path, LevelSpec(away, COMMIT, settings=QUICK)) as (cache, purger):
        scope = PurgeScope(keys=[cache.keys(1)[0].hex()], salt="red")
        receipt = await purger.purge(scope, wait_s=1.0)
        await detach(cache)
        back = FakeTier(store=store, durable=True)
        await attach(cache, back)
        assert there(cache, [*cache.keys(1, 2), *cache.keys(3)]) == [False, False, True]
        await asyncio.sleep(10.0)
        assert stored(tmp_path, receipt).complete
        assert back.stored(cache.keys(1)[0]) is None


async def test_a_purge_covers_a_level_that_is_detached_when_it_is_asked(tmp_path: Path) -> None:
    store = FakeStore()
    tier = KeepingTier(store=store, durable=True)
    async with purging(tmp_path, LevelSpec(tier, COMMIT)) as (cache, purger):
        old = [*cache.keys(1, 2), *cache.keys(3)]
        cache.save(cache.keys(1, 2), parent=START)
        cache.save(cache.keys(3), parent=START)
        await cache.settle()
        await asyncio.sleep(10 * MINUTE_S)
        await detach(cache)
        receipt = await purger.purge(PurgeScope(older_than_s=5 * MINUTE_S), wait_s=1.0)
        assert [(one.name, one.state) for one in receipt.levels] == [
            ("host", "done"),
            ("level1", "owed"),
        ]
        cache.save(cache.keys(3), parent=START)  # saved again: it is new
        back = KeepingTier(store=store, durable=True)
        await attach(cache, back)
        assert there(cache, old) == [False, False, True]
        await asyncio.sleep(10.0)
        assert stored(tmp_path, receipt).complete
        assert not left(back), "it overwrote what it had"


async def test_another_medium_does_not_pay(tmp_path: Path) -> None:
    tier = removable(SharedFakeTier([Fail(on="purge", times=None)]))
    async with purging(tmp_path, LevelSpec(tier, COMMIT, settings=QUICK)) as (cache, purger):
        cache.save(cache.keys(1), salt="red")
        await cache.settle()
        receipt = await purger.purge(PurgeScope(salt="red"), wait_s=1.0)
        await detach(cache, "another medium")
        await attach(cache, removable(SharedFakeTier()))
        await asyncio.sleep(MINUTE_S)
        assert stored(tmp_path, receipt).owed
        later = await purger.purge(PurgeScope(salt="red"), wait_s=1.0)
        assert [(one.name, one.state) for one in later.levels] == [
            ("host", "done"),
            ("level1", "done"),
            ("level1 (detached)", "owed"),
        ]


async def test_a_level_owes_nothing_once_it_has_paid_or_its_medium_is_gone(tmp_path: Path) -> None:
    for tier in (removable(SharedFakeTier()), FakeTier([Fail(on="remove", times=None)])):
        folder = tmp_path / type(tier).__name__
        folder.mkdir()
        async with purging(folder, LevelSpec(tier, COMMIT, settings=QUICK)) as (cache, purger):
            cache.save(cache.keys(1), salt="red")
            await cache.settle()
            receipt = await purger.purge(PurgeScope(salt="red"), wait_s=0.0)
            await detach(cache)
            await asyncio.sleep(10.0)
            assert stored(folder, receipt).complete


async def test_what_a_detached_level_owes_is_paid_after_a_restart(tmp_path: Path) -> None:
    store = FakeStore()
    tier = removable(SharedFakeTier([Fail(on="purge", times=None)], store=store))
    async with purging(tmp_path, LevelSpec(tier, COMMIT, settings=QUICK)) as (cache, purger):
        cache.save(cache.keys(1), salt="red")
        await cache.settle()
        receipt = await purger.purge(PurgeScope(salt="red"), wait_s=1.0)
        await detach(cache)
    async with purging(tmp_path) as (cache, purger):
        assert purger.owed == 1
        await asyncio.sleep(10.0)
        assert stored(tmp_path, receipt).owed[0].why.startswith("the deployment has no level")
        back = removable(SharedFakeTier(store=store))
        await attach(cache, back)
        await asyncio.sleep(MINUTE_S)
        assert stored(tmp_path, receipt).complete
        assert back.stored(cache.keys(1)[0]) is None
