"""Drains and warm starts over tiers that other engines read, and that fail."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.changing.drain import Drain
from kvladder.changing.warm import HotBlock, Warm, hottest, traced
from kvladder.errors import ConfigError
from kvladder.keys import salt_digest
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import Fail, FakeStore, FakeTier, Hold, Step
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from tests.stack.caches import COMMIT, cache_of

ON_EVICTION = OffloadRule()


def specs(store: FakeStore, *steps: Step) -> list[LevelSpec]:
    """A private level that gets all, and a shared one that gets only what is evicted."""
    shared = SharedFakeTier(store=store)
    shared.script += steps
    shared.removable = lambda _: True
    return [LevelSpec(FakeTier(), COMMIT, 64), LevelSpec(shared, ON_EVICTION, 64)]


@pytest.mark.slow
async def test_another_engine_serves_what_was_drained_to_a_shared_level() -> None:
    store = FakeStore()
    async with cache_of(*specs(store), slots=32) as cache:
        for n in range(10):
            cache.save(cache.keys(n, 1), salt="me")
        await cache.settle()
        cache.stack.host.forget([key for n in range(5) for key in cache.keys(n, 1)], "evicted")
        drain = Drain(cache.manager, cache.stack)
        await drain.begin("level2")
        await drain.wait(100.0)
        assert drain.as_dict()["state"] == "done"
        assert drain.as_dict()["left"] == {}
        assert cache.save(cache.keys(77)) == 0, "nothing new is taken"
        warmed = hottest(cache.manager, cache.stack, 100)
        assert cache.stack.held() == (0, 0)
    async with cache_of(*specs(store), slots=32) as other:
        for n in range(10):
            assert await other.load(other.keys(n, 1)) == ["level2"] * 2
    async with cache_of(*specs(store), slots=32) as third:
        warm = Warm(third.manager, third.stack)
        warm.begin([HotBlock.of(one, "blocks") for one in warmed.blocks])
        await warm.wait(100.0)
        assert warm.as_dict()["brought"] == 20
        assert await third.load(third.keys(7, 1)) == ["host"] * 2
        for _ in third.manager.purge("me"):
            pass
        await third.settle()
        assert await third.load(third.keys(7, 1)) == [], "they are known as blocks of their salt"


async def test_what_a_failing_level_does_not_take_is_left_and_told() -> None:
    async with cache_of(*specs(FakeStore(), Fail(on="put", times=None)), slots=32) as cache:
        for n in range(10):
            cache.save(cache.keys(n))
        await cache.settle()
        drain = Drain(cache.manager, cache.stack)
        await drain.begin("level2")
        await drain.wait(1000.0)
        told = drain.as_dict()
        assert told["state"] == "done"
        assert sum(told["left"].values()) == told["lost"] == 10
        assert cache.stack.held() == (0, 0)


async def test_a_write_that_fails_once_is_tried_again() -> None:
    async with cache_of(*specs(FakeStore(), Fail(on="put", times=1)), slots=32) as cache:
        for n in range(10):
            cache.save(cache.keys(n))
        await cache.settle()
        drain = Drain(cache.manager, cache.stack)
        await drain.begin("level2")
        await drain.wait(1000.0)
        assert drain.as_dict()["left"] == {}


async def test_a_drain_that_is_stopped_takes_blocks_again() -> None:
    hold = Hold(on="put")
    async with cache_of(*specs(FakeStore(), hold), slots=32) as cache:
        for n in range(10):
            cache.save(cache.keys(n))
        await asyncio.sleep(1.0)
        drain = Drain(cache.manager, cache.stack)
        await drain.begin("level2")
        await asyncio.sleep(0.1)
        assert drain.as_dict()["state"] == "draining"
        await drain.stop()
        assert drain.as_dict()["state"] == "stopped"
        assert cache.save(cache.keys(77)) == 1
        hold.let_go()
        await cache.settle()
        assert cache.stack.held() == (0, 0)


async def test_a_drain_needs_a_level_that_outlives_the_engine() -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT), slots=8) as cache:
        drain = Drain(cache.manager, cache.stack)
        with pytest.raises(ConfigError, match="no level outlives the engine"):
            await drain.begin(None)
        with pytest.raises(ConfigError, match="'level1' is no level to drain to"):
            await drain.begin("level1")
        assert cache.save(cache.keys(1)) == 1, "nothing has changed"


async def test_a_warm_start_waits_while_requests_wait_for_slots() -> None:
    store = FakeStore()
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier, COMMIT, 64), slots=32) as cache:
        for n in range(20):
            cache.save(cache.keys(n))
    hold = Hold(on="get")
    spec = LevelSpec(FakeTier([hold], store=store, durable=True), COMMIT, 64)
    async with cache_of(spec, slots=4, fetch_blocks_max=1) as cache:
        fetches = [cache.manager.fetch(cache.keys(n), deadline_s=60.0) for n in range(3)]
        warm = Warm(cache.manager, cache.stack)
        warm.begin([HotBlock(cache.keys(n)[0]) for n in range(10, 14)])
        await asyncio.sleep(1.0)
        assert warm.as_dict() == {
            "state": "warming", "blocks": 4, "brought": 0, "here": 0, "missing": 0, "no_room": 0,
        }  # fmt: skip
        with pytest.raises(ConfigError, match="another warm start is in progress"):
            warm.begin([])
        hold.let_go()
        await asyncio.sleep(1.0)
        for fetch in fetches:
            assert fetch.done
            assert fetch.blocks == 1, "requests had the slots"
            fetch.release()
        await warm.wait(100.0)
        told = warm.as_dict()
        assert told["state"] == "done"
        assert told["brought"] + told["missing"] + told["no_room"] == 4
        assert cache.stack.host.stats.evicted == 0


def test_names_of_blocks() -> None:
    key = SimCache.keys(1)[0]
    salt = salt_digest(LAYOUT.namespace(), "me")
    for one in (HotBlock(key), HotBlock(key, salt)):
        assert HotBlock.of(str(one), "blocks") == one
    for wrong in ("", "00", key.hex() + ":00", "zz" * 32, key.hex() + "00"):
        with pytest.raises(ConfigError, match="expected 64 hexadecimal digits"):
            HotBlock.of(wrong, "blocks[0]")


def test_a_trace_names_the_most_frequent_blocks_first() -> None:
    lines = ['{"hash_ids": ["a", "b"]}', '{"hash_ids": ["a", "c"]}', "{}"]
    assert traced(iter(lines), "t") == ["a", "b", "c"]
    for wrong in ('{"hash_ids": [1]}', "[", '{"hash_ids": 1}'):
        with pytest.raises(ConfigError, match=r"t, line 1"):
            traced(iter([wrong]), "t")
