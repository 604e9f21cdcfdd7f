"""Each block that a request asks for and does not get has exactly one reason, with real levels."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvladder.keys import BlockKey
from kvladder.metrics import MissCause, Missed
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import Shares
from kvladder.testing.fakes import Delay, Fail, FakeStore, FakeTier, Hold
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.tiers.ladder.records.ghosts import GhostTable
from tests.stack.caches import COMMIT, QUICK, cache_of, flushed


async def missed(
    cache: SimCache, keys: list[BlockKey], *, deadline_s: float = 60.0, **told: Any
) -> tuple[Missed, ...]:
    """Return why a request does not get all of these blocks, as its own answer says."""
    before = counted(cache)
    fetch = cache.manager.fetch(keys, deadline_s=deadline_s, **told)
    while not fetch.done:  # noqa: ASYNC110 - an engine asks at every step
        await asyncio.sleep(0.01)
    fetch.check()
    fetch.release()
    assert counted(cache) - before == sum(one.blocks for one in fetch.missed)
    return fetch.missed


def counted(cache: SimCache) -> int:
    found = cache.manager.stats()["misses"]
    blocks = sum(sum(each.values()) for each in found["blocks"].values())
    tokens = sum(sum(each.values()) for each in found["tokens"].values())
    assert tokens == blocks * LAYOUT.block_tokens
    return blocks


async def test_a_block_that_was_never_saved_was_never_seen() -> None:
    async with cache_of() as cache:
        cache.save(cache.keys(1, 2))
        assert await missed(cache, cache.keys(1, 2)) == ()
        assert await missed(cache, cache.keys(1, 2, 3, 4)) == (Missed("", "never_seen", 2),)
        assert cache.manager.stats()["misses"]["blocks"] == {"none": {"never_seen": 2}}


async def test_blocks_behind_an_evicted_one_are_its_misses_as_far_as_they_were_here() -> None:
    async with cache_of(slots=3) as cache:
        cache.save(cache.keys(1, 2, 3))
        cache.save(cache.keys(7, 8))  # evicts the tail
        found = await missed(cache, cache.keys(1, 2, 3, 4))
        assert found == (Missed("host", "evicted", 2), Missed("", "never_seen", 1))


async def test_the_level_that_had_a_block_last_is_the_one_that_evicted_it() -> None:
    level = LevelSpec(FakeTier(), COMMIT, capacity_blocks=2)
    async with cache_of(level, slots=2) as cache:
        for number in range(3):
            cache.save(cache.keys(number, 9))
            await cache.settle()
        assert await missed(cache, cache.keys(0, 9)) == (Missed("level1", "evicted", 2),)


async def test_a_salt_at_its_quota_evicts_for_that_reason() -> None:
    shares = Shares(tenant=2)
    async with cache_of(slots=4, shares=shares) as cache:
        cache.save(cache.keys(1, 2), salt="a")
        cache.save(cache.keys(7, 8), salt="a")
        assert await missed(cache, cache.keys(1, 2)) == (Missed("host", "quota", 2),)


async def test_removed_and_expired_blocks_are_told_apart() -> None:
    async with cache_of() as cache:
        cache.save(cache.keys(1, 2))
        cache.save(cache.keys(7, 8), ttl_s=5.0)
        cache.manager.remove(cache.keys(1, 2))
        await asyncio.sleep(6.0)
        assert await missed(cache, cache.keys(1, 2)) == (Missed("host", "removed", 2),)
        assert await missed(cache, cache.keys(7, 8)) == (Missed("host", "expired", 2),)


async def test_a_block_below_every_threshold_and_one_without_room_are_told_apart() -> None:
    async with cache_of(slots=2) as cache:
        cache.save(cache.keys(1, 2), priorities=[10, 10])
        assert await missed(cache, cache.keys(1, 2)) == (Missed("", "threshold", 2),)
        held = cache.manager.save(cache.keys(7, 8))
        cache.save(cache.keys(5))
        assert await missed(cache, cache.keys(5)) == (Missed("host", "refused", 1),)
        assert await missed(cache, cache.keys(7, 8)) == (Missed("host", "saving", 2),)
        held.abort()


async def test_blocks_of_an_ended_session_leave_below_the_threshold() -> None:
    async with cache_of() as cache:
        cache.save(cache.keys(1, 2), session="chat")
        cache.manager.sessions.use("chat", [cache.keys(1, 2)])
        cache.manager.end_session("chat")
        assert await missed(cache, cache.keys(1, 2)) == (Missed("host", "threshold", 2),)


@pytest.mark.parametrize(
    ("harm", "reason"), [(FakeTier.forget, "lost"), (FakeTier.corrupt, "damaged")]
)
async def test_lost_and_damaged_blocks_are_told_apart(harm: Any, reason: Any) -> None:
    tier = FakeTier(store=await flushed((1, 2, 3)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        harm(tier, cache.keys(1, 2)[1])
        begun_s = asyncio.get_running_loop().time()
        for _ in range(2):  # the request that finds it, and a later one
            found = await missed(cache, cache.keys(1, 2, 3))
            assert found == (Missed("level1", reason, 2),)
        assert asyncio.get_running_loop().time() < begun_s + 1.0, "it is not waited for"


async def test_a_tier_that_fails_and_one_behind_its_breaker_are_told_apart() -> None:
    fails = Fail(on="get", times=None)
    tier = FakeTier([fails], store=await flushed((1, 2)), durable=True)
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        assert await missed(cache, cache.keys(1, 2)) == (Missed("level1", "failed", 2),)
        assert await missed(cache, cache.keys(1, 2)) == (Missed("level1", "failed", 2),)
        assert await missed(cache, cache.keys(1, 2)) == (Missed("level1", "unavailable", 2),)
        stats = cache.manager.stats()["misses"]["blocks"]
        assert stats == {"level1": {"failed": 4, "unavailable": 2}}


async def test_a_shared_tier_that_cannot_be_asked_may_have_the_block() -> None:
    tier = SharedFakeTier([Fail(on="contains", times=None)], store=FakeStore())
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        assert await missed(cache, cache.keys(1, 2)) == (Missed("", "never_seen", 2),)
        await missed(cache, cache.keys(3, 4))
        assert await missed(cache, cache.keys(5, 6)) == (Missed("level1", "unavailable", 2),)


async def test_a_block_that_comes_too_late_is_late_and_one_given_up_has_ended() -> None:
    hold = Hold(on="get")
    tier = FakeTier([hold, Delay(2.0, on="get")], store=await flushed((1, 2), (7, 8)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        given_up = cache.manager.fetch(cache.keys(1, 2))
        await hold.reached()
        given_up.release()
        assert given_up.missed == (Missed("level1", "ended", 2),)
        hold.let_go()
        found = await missed(cache, cache.keys(7, 8), deadline_s=0.5)
        assert found == (Missed("level1", "late", 2),)
        await asyncio.sleep(3.0)


async def test_slower_than_computing_is_a_reason_of_its_own() -> None:
    store = await flushed((1, 2, 3), (4, 5, 6), (7, 8, 9))
    tier = FakeTier([Delay(1.0, on="get", times=None)], store=store, durable=True)
    async with cache_of(LevelSpec(tier), slots=32) as cache:
        assert await missed(cache, cache.keys(1, 2, 3)) == ()
        cache.manager.prefilled(4096, 0.1)
        assert await missed(cache, cache.keys(4, 5, 6)) == (Missed("level1", "slower", 3),)
        await asyncio.sleep(10.0)


async def test_a_request_that_may_not_read_a_level_is_told_so() -> None:
    tier = FakeTier(store=await flushed((1, 2)), durable=True)
    async with cache_of(LevelSpec(tier)) as cache:
        cache.save(cache.keys(7, 8))
        found = await missed(cache, cache.keys(1, 2), levels=["host"])
        assert found == (Missed("level1", "levels", 2),)
        found = await missed(cache, cache.keys(7, 8), levels=["level1"])
        assert found == (Missed("host", "levels", 2),)


async def test_without_a_free_slot_the_reason_is_room() -> None:
    tier = FakeTier(store=await flushed((1, 2)), durable=True)
    async with cache_of(LevelSpec(tier, OffloadRule(when="never")), slots=2) as cache:
        held = cache.manager.save(cache.keys(7, 8))
        assert await missed(cache, cache.keys(1, 2)) == (Missed("host", "room", 2),)
        held.abort()


async def test_each_missing_block_of_a_set_has_its_own_reason_and_a_prefetch_has_none() -> None:
    async with cache_of(slots=2) as cache:
        cache.save(cache.keys(1))
        cache.manager.remove(cache.keys(1))
        cache.save(cache.keys(2))
        fetch = cache.manager.fetch_set([*cache.keys(1), *cache.keys(2), *cache.keys(3)])
        assert fetch.done
        fetch.release()
        stats = cache.manager.stats()["misses"]["blocks"]
        assert stats == {"host": {"removed": 1}, "none": {"never_seen": 1}}
        ahead = cache.manager.fetch(cache.keys(4, 5), is_use=False)
        assert ahead.done
        assert not ahead.missed
        assert cache.manager.stats()["misses"]["blocks"] == stats
        ahead.release()


async def test_looked_up_blocks_that_are_not_fetched_are_counted_by_cause() -> None:
    async with cache_of(slots=3) as cache:
        cache.save(cache.keys(1, 2))
        cache.manager.remove(cache.keys(1, 2)[1:])
        assert cache.manager.missed(cache.keys(1, 2, 3)[1:]) == (
            Missed("host", "removed", 1),
            Missed("", "never_seen", 1),
        )
        assert cache.manager.missed([]) == ()
        assert counted(cache) == 2


def test_ghosts_are_the_same_one_by_one_and_in_bulk_and_are_forgotten_when_replaced() -> None:
    keys = [SimCache.keys(number)[0] for number in range(400)]
    single, bulk, small = GhostTable(1 << 16), GhostTable(1 << 16), GhostTable(64)
    for start, reason in ((0, "evicted"), (200, "expired")):
        part = keys[start : start + 200]
        bulk.add(part, "nvme", reason)  # type: ignore[arg-type]
        for key in part:
            single.add([key], "nvme", reason)  # type: ignore[arg-type]
            small.add([key], "nvme", reason)  # type: ignore[arg-type]
    assert [*map(single.get, keys)] == [*map(bulk.get, keys)]
    assert bulk.get(keys[0]) == MissCause("nvme", "evicted")
    assert bulk.get(keys[399]) == small.get(keys[399]) == MissCause("nvme", "expired")
    assert sum(small.get(key) is not None for key in keys) <= 64
    assert bulk.get(SimCache.keys(1000)[0]) is None
