"""Levels that are attached, detached and given other settings while a cache serves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvladder.errors import ConfigError
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_SHARES, Shares
from kvladder.testing.fakes import Fail, FakeStore, FakeTier, Hang, Hold, Operation
from kvladder.testing.sim import inline_blocking
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.tiers.ladder.changing.attaching import LevelAttacher
from kvladder.tiers.ladder.changing.tuning import HostTuning, LevelTuner, LevelTuning
from kvladder.tiers.ladder.definition import LevelDefinition
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.lifecycle import LevelLifecycle
from tests.kit.model import Replay
from tests.stack.caches import COMMIT, cache_of


def definition(name: str, tier: FakeTier, **more: Any) -> LevelDefinition:
    own: dict[str, Any] = {"rule": COMMIT, "capacity_blocks": 64, "policy": PrioritizedLRU()}
    settings = LevelSpec(tier).settings
    return LevelDefinition(name=name, tier=tier, settings=settings, required=True, **own | more)


def attacher(cache: SimCache) -> LevelAttacher:
    space = LAYOUT.namespace()
    return LevelAttacher(cache.stack, LAYOUT, space, lambda _: inline_blocking)


def tuning(level: Level, **more: Any) -> LevelTuning:
    found = LevelTuning(
        rule=level.rule,
        shares=NO_SHARES if level.index.tenants is None else level.index.tenants.shares,
        capacity_blocks=level.capacity_blocks,
        queue_blocks=level.settings.queue_blocks,
        calls=level.client.settings,
        endurance_bytes=None,
    )
    return replace(found, **more)


def lifecycle_of(cache: SimCache, level: Level) -> LevelLifecycle:
    return next(one for one in cache.stack.lifecycles if one.level is level)


async def tune(cache: SimCache, level: Level, **more: Any) -> None:
    tuner, wanted = LevelTuner(cache.stack), tuning(level, **more)
    if wanted.capacity_blocks > level.capacity_blocks:
        await tuner.grow(level, wanted.capacity_blocks)
    with cache.stack.lock:
        tuner.set(level, wanted)
        cache.stack.rejoin([*cache.stack.lifecycles])
    await tuner.follow(lifecycle_of(cache, level), wanted)


def only_below(cache: SimCache, keys: list[Any]) -> None:
    cache.stack.host.forget(keys, "evicted")


# ---- attach


@pytest.mark.parametrize("position", [0, 1])
async def test_an_attached_level_takes_blocks_and_serves_them(position: int) -> None:
    async with cache_of(LevelSpec(FakeTier(), OffloadRule()), slots=8) as cache:
        replay = Replay(cache)
        await attacher(cache).attach(definition("more", FakeTier()), position, "more")
        keys = cache.keys(1, 2, 3)
        assert cache.save(keys) == 3
        await cache.settle()
        only_below(cache, keys)
        assert await cache.load(keys) == ["more"] * 3
        assert [level.name for level in cache.levels][position] == "more"
        replay._held.setdefault("more", set())
        replay.check()


async def test_an_attached_level_brings_what_its_medium_has() -> None:
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True), COMMIT), slots=8) as cache:
        cache.save(cache.keys(1, 2))
    async with cache_of(slots=8) as cache:
        await attacher(cache).attach(definition("old", FakeTier(store=store, durable=True)), 0, "x")
        assert await cache.load(cache.keys(1, 2)) == ["old"] * 2


@pytest.mark.parametrize("on", ["open", "recover"])
async def test_a_level_that_does_not_open_leaves_the_stack_as_it_was(on: Operation) -> None:
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True), COMMIT), slots=8) as cache:
        cache.save(cache.keys(1, 2))
    async with cache_of(LevelSpec(FakeTier(), COMMIT), slots=8) as cache:
        before = [*cache.levels]
        tier = FakeTier([Fail(on=on, times=9)], store=store, durable=True)
        with pytest.raises(ConfigError):
            await attacher(cache).attach(definition("bad", tier), 0, "x")
        assert [*cache.levels] == before
        assert await cache.load(cache.keys(1, 2)) == []
        keys = cache.keys(7)
        cache.save(keys)
        await cache.settle()
        only_below(cache, keys)
        assert await cache.load(keys) == ["level1"]


async def test_an_attachment_that_is_cancelled_leaves_the_stack_as_it_was() -> None:
    async with cache_of(slots=8) as cache:
        tier = FakeTier([Hang(on="open")])
        task = asyncio.create_task(attacher(cache).attach(definition("bad", tier), 0, "x"))
        await asyncio.sleep(0.1)
        assert [level.name for level in cache.levels] == ["bad"]
        assert cache.manager.stats()["bad"]["left_out"] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not cache.levels
        tier.heal()


# ---- detach


async def test_a_detached_level_writes_what_is_queued_and_keeps_it() -> None:
    store = FakeStore()
    tier = FakeTier(store=store, durable=True, latency_s=0.1)
    async with cache_of(LevelSpec(tier, COMMIT), slots=8) as cache:
        replay, keys = Replay(cache), cache.keys(1, 2, 3)
        cache.save(keys)
        await attacher(cache).detach(cache.stack.lifecycles[0], "x", flush_s=10.0)
        assert not cache.levels
        assert len(next(iter(store.spaces.values()))) == 3
        assert await cache.load(keys) == ["host"] * 3
        only_below(cache, keys)
        assert await cache.load(keys) == []
        replay._held.pop("level1")
        again = FakeTier(store=store, durable=True)
        await attacher(cache).attach(definition("level1", again), 0, "x")
        assert await cache.load(keys) == ["level1"] * 3


async def test_a_load_from_a_level_that_is_detached_arrives() -> None:
    hold = Hold(on="get")
    async with cache_of(LevelSpec(FakeTier([hold]), COMMIT), slots=8) as cache:
        keys = cache.keys(1, 2, 3)
        cache.save(keys)
        await cache.settle()
        only_below(cache, keys)
        load = asyncio.create_task(cache.load(keys))
        await asyncio.sleep(0.05)
        detach = asyncio.create_task(
            attacher(cache).detach(cache.stack.lifecycles[0], "x", flush_s=10.0)
        )
        await asyncio.sleep(0.05)
        assert not cache.levels
        assert not detach.done()
        hold.let_go()
        assert await load == ["level1"] * 3
        await detach


@pytest.mark.parametrize("on", ["get", "put", "remove"])
async def test_a_level_that_hangs_is_detached_in_time(on: Operation) -> None:
    tier = FakeTier([Hang(on=on)])
    async with cache_of(LevelSpec(tier, COMMIT, 4), slots=8) as cache:
        keys = cache.keys(1, 2, 3)
        cache.save(keys)
        await asyncio.sleep(0.05)
        cache.manager.remove(keys[2:])
        only_below(cache, keys[:2])
        fetch = cache.manager.fetch(keys[:2], deadline_s=60.0)
        began = asyncio.get_running_loop().time()
        await attacher(cache).detach(cache.stack.lifecycles[0], "x", flush_s=1.0)
        assert asyncio.get_running_loop().time() - began < 12.0
        await asyncio.sleep(0.1)
        assert fetch.done
        fetch.release()
        assert not cache.levels
        tier.heal()


@pytest.mark.parametrize("how", ["remove", "purge", "clear"])
async def test_what_was_removed_while_a_level_was_detached_does_not_come_back(how: str) -> None:
    store = FakeStore()
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier, COMMIT), slots=8) as cache:
        keys, others = cache.keys(1, 2), cache.keys(5, 6)
        cache.save(keys, salt="me")
        cache.save(others)
        await cache.settle()
        await attacher(cache).detach(cache.stack.lifecycles[0], "x", flush_s=1.0)
        if how == "remove":
            cache.manager.remove(keys)
        elif how == "purge":
            for _ in cache.manager.purge("me"):
                pass
        else:
            cache.manager.clear()
        only_below(cache, [key for key in others if key in cache.stack.host.index])
        again = FakeTier(store=store, durable=True)
        await attacher(cache).attach(definition("level1", again), 0, "x")
        assert await cache.load(keys) == []
        assert await cache.load(others) == ([] if how == "clear" else ["level1"] * 2)


async def test_removals_that_a_dead_tier_owes_are_done_when_it_is_attached_again() -> None:
    store = FakeStore()
    tier = FakeTier(store=store, durable=True)
    async with cache_of(LevelSpec(tier, COMMIT), slots=8) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys)
        await cache.settle()
        tier.script.append(Fail(on="remove", times=None))
        cache.manager.remove(keys)
        await attacher(cache).detach(cache.stack.lifecycles[0], "x", flush_s=1.0)
        again = FakeTier(store=store, durable=True)
        await attacher(cache).attach(definition("level1", again), 0, "x")
        assert await cache.load(keys) == []


# ---- other settings


async def test_a_higher_threshold_evicts_what_is_below_it_and_nothing_else() -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT), slots=8) as cache:
        (level,) = cache.levels
        low, high = cache.keys(1, 2), cache.keys(3, 4)
        cache.save(low, priorities=[40, 40])
        cache.save(high, priorities=[80, 80])
        await cache.settle()
        await tune(cache, level, rule=replace(COMMIT, min_priority=60))
        await cache.settle()
        assert {*level.index} == {*high}
        assert level.stats.evicted == 2
        cache.save(cache.keys(9), priorities=[50])
        await cache.settle()
        assert {*level.index} == {*high}


async def test_a_write_in_flight_below_a_new_threshold_is_not_kept() -> None:
    hold = Hold(on="put")
    tier = FakeTier([hold])
    async with cache_of(LevelSpec(tier, COMMIT), slots=8) as cache:
        (level,) = cache.levels
        cache.save(cache.keys(1, 2), priorities=[40, 40])
        await asyncio.sleep(0.01)
        await tune(cache, level, rule=replace(COMMIT, min_priority=60))
        hold.let_go()
        await cache.settle()
        assert not [*level.index]
        assert not tier.records


async def test_a_host_threshold_sends_blocks_down() -> None:
    async with cache_of(LevelSpec(FakeTier(), OffloadRule(min_priority=0)), slots=8) as cache:
        keys, host = cache.keys(1, 2), cache.stack.host
        cache.save(keys, priorities=[40, 40])
        tuner = LevelTuner(cache.stack)
        wanted = HostTuning(
            rule=OffloadRule(min_priority=60), shares=NO_SHARES, reserve_blocks=host.reserve_blocks
        )
        with cache.stack.lock:
            tuner.set(host, wanted)
        await tuner.follow(None, wanted)
        await cache.settle()
        assert not [*host.index]
        assert await cache.load(keys) == ["level1"] * 2


@pytest.mark.parametrize("capacity", [1, 3, 5, 9])
@pytest.mark.parametrize("hole", [False, True])
async def test_a_smaller_capacity_evicts_exactly(capacity: int, hole: bool) -> None:
    tier = FakeTier(batch_max=2)
    async with cache_of(LevelSpec(tier, COMMIT, 9), slots=16) as cache:
        (level,) = cache.levels
        for n in range(9):
            cache.save(cache.keys(n))
            await cache.settle()
        if hole:
            cache.manager.remove([*cache.keys(1), *cache.keys(2)])
            await cache.settle()
        held = [n for n in range(9) if not (hole and n in {1, 2})]
        only_below(cache, [cache.keys(n)[0] for n in held])
        await tune(cache, level, capacity_blocks=capacity)
        await cache.settle()
        kept = held[max(0, len(held) - capacity) :]
        assert {*level.index} == {cache.keys(n)[0] for n in kept}, "least recently used go first"
        assert level.capacity_blocks == level.places.capacity == capacity
        assert all((level.index.place(key) or 0) < capacity for key in level.index)
        assert tier.context.capacity_blocks == capacity
        for n in kept:
            assert await cache.load(cache.keys(n)) == ["level1"]


async def test_a_larger_capacity_is_used() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT, 2), slots=16) as cache:
        (level,) = cache.levels
        await tune(cache, level, capacity_blocks=5)
        for n in range(9):
            cache.save(cache.keys(n))
        await cache.settle()
        assert len(level.index) == 5


@pytest.mark.parametrize("policies", [(PrioritizedLRU, Adaptive), (Adaptive, PrioritizedLRU)])
async def test_another_policy_takes_over_held_and_pinned_blocks(policies: Any) -> None:
    old, new = policies
    spec = LevelSpec(FakeTier(), COMMIT, 200, policy=old())
    async with cache_of(spec, slots=200, policy=old()) as cache:
        (level,) = cache.levels
        for n in range(100):
            cache.save(cache.keys(n), priorities=[n % 3 + 40])
        await cache.settle()
        fetch = cache.manager.fetch([*cache.keys(7)])
        victims = [level.index.priority(p) for p in level.index.victims()]
        host = cache.stack.host
        tuner = LevelTuner(cache.stack)
        changing = asyncio.create_task(tune(cache, level, policy=new()))
        wanted = HostTuning(
            rule=host.rule, shares=NO_SHARES, reserve_blocks=host.reserve_blocks, policy=new()
        )
        host_changing = asyncio.create_task(tuner.follow(None, wanted))
        await asyncio.sleep(0)
        assert [level.index.priority(p) for p in level.index.victims()] == victims
        cache.save(cache.keys(500))  # in the middle
        cache.manager.remove(cache.keys(3))
        cache.manager.check()
        await changing
        await host_changing
        cache.manager.check()
        assert level.index.orders_like(new())
        assert host.index.orders_like(new())
        order = [level.index.priority(p) for p in level.index.victims()]
        assert order == sorted(order), "the lowest priority still goes first"
        fetch.release()
        await cache.settle()
        cache.manager.check()
        assert len([*host.index.victims()]) == len(host.index)


async def test_a_smaller_quota_evicts_what_is_above_it() -> None:
    spec = LevelSpec(FakeTier(), COMMIT, 40, shares=Shares(tenant=20))
    async with cache_of(spec, slots=40) as cache:
        (level,) = cache.levels
        mine, others = [cache.keys(n)[0] for n in range(12)], [cache.keys(100)[0]]
        for key in mine:
            cache.save([key], salt="me")
            await cache.settle()
        cache.save(others, salt="you")
        await cache.settle()
        await tune(cache, level, shares=Shares(tenant=5))
        await cache.settle()
        assert {*level.index} == {*mine[-5:], *others}
        await tune(cache, level, shares=NO_SHARES)
        cache.save([cache.keys(n)[0] for n in range(20, 30)], salt="me")
        await cache.settle()
        assert len(level.index) == 16


async def test_a_quota_where_there_was_none() -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT, 40), slots=40) as cache:
        (level,) = cache.levels
        mine = [cache.keys(n)[0] for n in range(12)]
        for key in mine:
            cache.save([key], salt="me")
            await cache.settle()
        await tune(cache, level, shares=Shares(tenant=4, raised=2))
        assert {*level.index} == {*mine[-4:]}


async def test_a_new_ttl_limits_what_is_held() -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT), slots=8) as cache:
        (level,) = cache.levels
        cache.save(cache.keys(1))
        await cache.settle()
        await tune(cache, level, rule=replace(COMMIT, ttl_s=5.0))
        only_below(cache, cache.keys(1))
        assert await cache.load(cache.keys(1)) == ["level1"]
        only_below(cache, cache.keys(1))
        await asyncio.sleep(6.0)
        assert await cache.load(cache.keys(1)) == []


async def test_write_through_begins_and_ends() -> None:
    async with cache_of(LevelSpec(FakeTier(), OffloadRule()), slots=8) as cache:
        (level,) = cache.levels
        cache.save(cache.keys(1))
        await cache.settle()
        assert not [*level.index]
        await tune(cache, level, rule=COMMIT)
        cache.save(cache.keys(2))
        await cache.settle()
        assert {*level.index} == {*cache.keys(2)}
        await tune(cache, level, rule=OffloadRule())
        cache.save(cache.keys(3))
        await cache.settle()
        assert {*level.index} == {*cache.keys(2)}
