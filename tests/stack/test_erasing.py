"""Purges of tiers that keep removed bytes: which bytes are erased, when, and by which call."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.keys import BlockKey
from kvladder.testing.fakes import Delay, Fail, FakeStore, FakeTier, Hang, Hold, Record
from kvladder.testing.stacks import LevelSpec
from tests.stack.caches import COMMIT, QUICK, cache_of


class KeepingTier(FakeTier):
    """Keeps removed blocks in ``dregs`` until they are erased, two places at a time."""

    erases = True

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.dregs: dict[int, Record] = {}

    def _keep(self, record, *, replace) -> None:
        super()._keep(record, replace=replace)
        self.dregs.pop(record.place, None)

    async def remove(self, items) -> None:
        held = list(self.records.values())
        await super().remove(items)
        gone = {item.place for item in items}
        self.dregs.update({record.place: record for record in held if record.place in gone})

    async def erase(self, salt, start):
        async with self._call("purge", ()):
            end = start + 2
            places = [
                place
                for place, record in self.dregs.items()
                if start <= place < end and salt in {None, record.facts.salt}
            ]
            for place in places:
                del self.dregs[place]
            return len(places), end if end < self.context.capacity_blocks else None


def left(tier: KeepingTier) -> set[BlockKey]:
    return {record.key for record in tier.dregs.values()}


async def test_a_purge_erases_its_blocks_and_those_removed_earlier() -> None:
    tier = KeepingTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1, 2), salt="tenant")
        cache.save(cache.keys(3), salt="another")
        await cache.settle()
        cache.manager.remove([*cache.keys(1, 2)[1:], *cache.keys(3)])
        await cache.settle()
        assert left(tier) == {*cache.keys(1, 2)[1:], *cache.keys(3)}
        list(cache.manager.purge("tenant"))
        assert cache.manager.removals == 2, "a removal, and a purge that goes on"
        assert cache.manager.stats()["level1"]["removals"] == 2
        await cache.settle()
        assert cache.manager.removals == 0
        assert left(tier) == set(cache.keys(3))
        assert cache.manager.stats()["level1"]["purged"] == 2


async def test_a_clear_erases_only_if_it_is_asked_to() -> None:
    tier = KeepingTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        for erase in (False, True):
            cache.save(cache.keys(1), salt="tenant")
            await cache.settle()
            cache.manager.clear(erase=erase)
            await cache.settle()
            assert bool(tier.dregs) != erase


@pytest.mark.slow
async def test_writes_continue_while_a_tier_erases() -> None:
    tier = KeepingTier([Delay(1.0, on="purge", times=None)])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1), salt="tenant")
        await cache.settle()
        list(cache.manager.purge("tenant"))
        await asyncio.sleep(0.5)
        cache.save(cache.keys(2))
        await asyncio.sleep(3.0)
        assert tier.stored(cache.keys(2)[0]) is not None
        assert cache.manager.removals == 1
        await cache.settle()
        assert not tier.dregs


async def test_an_erasure_that_fails_or_hangs_is_repeated() -> None:
    tier = KeepingTier([Fail(on="purge"), Hang(on="purge")])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1), salt="tenant")
        await cache.settle()
        list(cache.manager.purge("tenant"))
        await asyncio.sleep(30)
        await cache.settle()
        assert cache.manager.removals == 0
        assert not tier.dregs
        assert cache.manager.stats()["level1"]["errors"] == 2


async def test_nothing_is_erased_while_an_abandoned_write_may_still_write() -> None:
    writing = Hold(on="put")
    tier = KeepingTier([writing])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1), salt="tenant")
        await writing.reached()
        await asyncio.sleep(QUICK.calls.timeout_s + 0.1)
        list(cache.manager.purge("tenant"))
        await asyncio.sleep(20)
        erased = len(tier.batches("purge"))
        behind = cache.levels[0].abandoned
        writing.let_go()
        await asyncio.sleep(20)
        await cache.settle()
        assert (bool(behind), bool(erased)) in {(True, False), (False, True)}
        assert cache.manager.removals == 0
        assert tier.batches("purge")
        assert not tier.dregs
        assert not tier.records


async def test_several_purges_are_done_one_after_the_other() -> None:
    tier = KeepingTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        for number, salt in enumerate(("a", "b", "c")):
            cache.save(cache.keys(number), salt=salt)
        await cache.settle()
        for salt in ("a", "b"):
            list(cache.manager.purge(salt))
        await cache.settle()
        assert cache.manager.removals == 0
        assert not tier.dregs
        assert [record.key for record in tier.records.values()] == cache.keys(2)


async def test_closing_writes_first_and_erases_as_long_as_there_is_time() -> None:
    store = FakeStore()
    tier = KeepingTier([Delay(3.0, on="purge", times=None)], store=store, durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        cache.save(cache.keys(1), salt="tenant")
        await cache.stack.flush()
        tier.script.clear()
        list(cache.manager.purge("tenant"))
        await cache.settle()
        assert not tier.dregs
        tier.script.append(Delay(3.0, on="purge", times=None))
        cache.save(cache.keys(1), salt="tenant")
        await cache.stack.flush()
        list(cache.manager.purge("tenant"))
        saved = cache.keys(2, 3)
        cache.save(saved)
        assert await cache.load(saved) == ["host"] * 2
    assert sorted(tier.stored(key) is not None for key in saved) == [True, True]
