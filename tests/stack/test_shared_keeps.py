"""Only a user removes blocks from a shared tier: an engine's evicted blocks stay for others.

The tier of each test treats every other removal as a broken rule, which fails the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from kvladder.errors import PermissionDenied, TierFull
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import Fail, FakeStore, FakeTier, Full, Hang, Hold, Raise, Wrong
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.codecs.base import ChecksumCodec
from kvladder.tiers.codecs.pipeline import PipelineSettings
from kvladder.tiers.label import Write
from kvladder.tiers.ladder.definition import LevelSettings
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.places import FULL_RETRY_S
from tests.kit.mirror import MirrorCodec
from tests.stack.caches import COMMIT, QUICK, cache_of

COMMIT_50 = OffloadRule(when="commit", min_priority=50)


def known(cache: SimCache, *path: int) -> int:
    """Return how many blocks of a prefix the shared level has in its index."""
    return sum(key in cache.levels[0].index for key in cache.keys(*path))


async def stored(cache: SimCache, *path: int, **options: object) -> None:
    cache.save(cache.keys(*path), **options)
    await cache.settle()
    cache.stack.host.remove(cache.keys(*path))
    assert known(cache, *path) == len(path)


async def test_a_block_below_the_threshold_is_forgotten_only_locally() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT_50)) as cache:
        await stored(cache, 1, 2, priorities=[80, 80])
        with cache.stack.lock:
            for key in cache.keys(1, 2):
                cache.stack.used(key, BlockMeta(10, 10))
        await cache.settle()
        assert (known(cache, 1, 2), len(tier.records)) == (0, 2)
        assert await cache.load(cache.keys(1, 2)) == ["level1"] * 2, "it is still there"


@pytest.mark.parametrize("own", [True, False])
async def test_an_expired_block_is_left_to_the_tiers_own_expiry(own: bool) -> None:
    tier = SharedFakeTier()
    rule = OffloadRule(when="commit", ttl_s=None if own else 10.0)
    async with cache_of(LevelSpec(tier, rule)) as cache:
        others = cache.keys(1, 2)[1:]
        tier.others_put({key: cache.payload(key) for key in others})
        await stored(cache, 1, 2, ttl_s=10.0 if own else None)
        await asyncio.sleep(20.0)
        assert await cache.load(cache.keys(1, 2)) == []
        assert cache.manager.stats()["level1"]["expired"] > 0
        assert [tier.at(key, 0) is not None for key in cache.keys(1, 2)] == [False, True]


async def test_a_block_that_expires_during_its_write_is_not_held() -> None:
    holding = Hold(on="put", after=True)
    tier = SharedFakeTier([holding])
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1), ttl_s=1.0)
        await holding.reached()
        await asyncio.sleep(2.0)
        holding.let_go()
        await cache.settle()
        assert (known(cache, 1), cache.levels[0].places.taken) == (0, 0)
        assert cache.levels[0].stats.stored == 0, "it is not announced either"


@pytest.mark.parametrize("found", [True, False])
async def test_a_block_evicted_from_the_index_stays_in_the_tier(found: bool) -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT, capacity_blocks=2), slots=16) as cache:
        await stored(cache, 1, 2)
        if found:
            tier.others_put({key: cache.payload(key) for key in cache.keys(3, 4)})
            assert await cache.load(cache.keys(3, 4)) == ["level1"] * 2
        else:
            await stored(cache, 3, 4)
        assert (known(cache, 1, 2), known(cache, 3, 4), len(tier.records)) == (0, 2, 4)
        assert await cache.load(cache.keys(1, 2)) == ["level1"] * 2


@pytest.mark.parametrize("make", [Fail, Hang, lambda **how: Wrong("short", **how)])
@pytest.mark.parametrize("after", [True, False])
async def test_blocks_left_by_a_failed_write_are_served(
    make: Callable[..., Fail], *, after: bool
) -> None:
    tier = SharedFakeTier([make(on="put", after=after)])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(1, 2))
        await asyncio.sleep(5.0)
        assert known(cache, 1, 2) == 0
        assert cache.levels[0].places.taken == 0
        cache.stack.host.remove(cache.keys(1, 2))
        assert await cache.load(cache.keys(1, 2)) == ["level1"] * len(tier.records)
        await stored(cache, 3)


@pytest.mark.parametrize("purges", [True, False])
async def test_an_abandoned_write_restores_no_removed_block(purges: bool) -> None:
    late = Hang(on="put", stubborn=True)
    tier = SharedFakeTier([late])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        mine = cache.keys(1)
        tier.removable = {*mine}.__contains__
        cache.save(mine, salt="tenant")
        cache.save(cache.keys(2), salt="another")
        await asyncio.sleep(2.0)
        assert cache.levels[0].abandoned == 2
        if purges:
            list(cache.manager.purge("tenant"))
        else:
            cache.manager.remove(mine)
        await asyncio.sleep(1.0)
        assert cache.manager.removals > 0, "it is not over"
        late.let_go()
        await asyncio.sleep(10.0)
        assert cache.manager.removals == 0
        assert [tier.stored(key) is not None for key in (*mine, *cache.keys(2))] == [False, True]


class Refusing(SharedFakeTier):
    """Refuses all blocks, or has no room, and reports it late."""

    is_full = False

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        await asyncio.sleep(1.0)
        if self.is_full:
            raise TierFull("no room")
        return [False] * len(writes)


@pytest.mark.parametrize("is_full", [True, False])
async def test_a_block_removed_while_it_is_refused_is_removed_for_all_engines(
    is_full: bool,
) -> None:
    tier = Refusing()
    tier.is_full = is_full
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        mine = cache.keys(1)
        tier.removable = {*mine}.__contains__
        tier.others_put({key: cache.payload(key) for key in cache.keys(1, 2)})
        cache.save(cache.keys(1, 2))
        await asyncio.sleep(0.5)
        cache.manager.remove(mine)
        await cache.settle()
        assert cache.manager.removals == 0
        assert [tier.at(key, 0) is not None for key in cache.keys(1, 2)] == [False, True]


@pytest.mark.parametrize("after_s", [0.5, 1.5])
async def test_a_purge_of_all_reaches_writes_that_end_after_it(after_s: float) -> None:
    late = Hang(on="put", stubborn=True)
    tier = SharedFakeTier([late])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        tier.removable = lambda _key: True
        cache.save(cache.keys(1, 2))
        await asyncio.sleep(after_s)
        cache.manager.clear()
        await asyncio.sleep(10.0)
        late.let_go()
        await asyncio.sleep(10.0)
        assert (cache.manager.removals, tier.records) == (0, {})


async def test_bytes_that_one_engine_could_not_use_stay_for_other_engines() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        await stored(cache, 1, 2)
        fetch = cache.manager.fetch(cache.keys(1, 2))
        await asyncio.sleep(1.0)
        assert (fetch.done, fetch.blocks) == (True, 2)
        fetch.forget()
        await cache.settle()
        assert (known(cache, 1, 2), cache.manager.lookup(cache.keys(1, 2))) == (0, (0, 0))
        assert len(tier.records) == 2


async def test_a_reset_leaves_a_shared_tier_alone() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        await stored(cache, 1, 2)
        cache.manager.reset()
        await cache.settle()
        assert len(tier.records) == 2
        assert await cache.load(cache.keys(1, 2)) == ["level1"] * 2


@pytest.mark.parametrize("coded", [True, False])
async def test_a_damaged_block_is_replaced_when_it_is_put_again(coded: bool) -> None:
    pipeline = PipelineSettings((MirrorCodec(), ChecksumCodec()) if coded else ())
    tier = SharedFakeTier(checks=not coded)
    async with cache_of(
        LevelSpec(tier, COMMIT, settings=LevelSettings(pipeline=pipeline))
    ) as cache:
        await stored(cache, 1, 2)
        tier.corrupt(cache.keys(1)[0])
        assert await cache.load(cache.keys(1, 2)) == []
        assert len(tier.records) == 2, "somebody may have mended it meanwhile"
        await stored(cache, 1)
        cache.stack.host.remove(cache.keys(1, 2))
        assert await cache.load(cache.keys(1, 2)) == ["level1"] * 2


async def test_a_stored_undamaged_block_is_not_replaced() -> None:
    tier = SharedFakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        (key,) = cache.keys(1)
        tier.others_put({key: cache.payload(key)})
        before = tier.records[key]
        await stored(cache, 1)
        assert tier.records[key] is before


async def test_blocks_are_evicted_from_the_tier_only_when_it_is_full() -> None:
    tier = SharedFakeTier(batch_max=1)
    async with cache_of(LevelSpec(tier, COMMIT), slots=16) as cache:
        await stored(cache, 1, 2)
        tier.script.append(Full())
        cache.save(cache.keys(3))
        await cache.settle()
        await stored(cache, 4)
        assert len(tier.records) == 2


@pytest.mark.parametrize("held", [0, 2])
async def test_a_full_tier_costs_no_block_of_others(held: int) -> None:
    tier = SharedFakeTier(batch_max=1)
    async with cache_of(LevelSpec(tier, COMMIT, capacity_blocks=5), slots=16) as cache:
        own = range(1, 1 + held)
        if own:
            await stored(cache, *own)
        tier.script.append(Full())
        cache.save(cache.keys(7))
        await cache.settle()
        tier.others_put({key: cache.payload(key) for key in cache.keys(3, 4, 5)})
        assert await cache.load(cache.keys(3, 4, 5)) == ["level1"] * 3
        assert (known(cache, 3, 4, 5), known(cache, *own)) == (3, held)
        assert cache.levels[0].stats.evicted == 0, "they take no room that the tier lacks"
        cache.save(cache.keys(8))
        await cache.settle()
        assert len(tier.records) == 3 + held, "a new block takes the room of an old one"
        await asyncio.sleep(2 * FULL_RETRY_S)
        cache.save(cache.keys(9))
        await cache.settle()
        assert len(tier.records) == 4 + held


@pytest.mark.parametrize("purges", [True, False])
async def test_a_removal_without_rights_ends_at_once_and_is_counted(*, purges: bool) -> None:
    denials = [Raise(PermissionDenied, on=on, times=None) for on in ("remove", "purge")]
    tier = SharedFakeTier(denials)
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK), slots=16) as cache:
        tier.removable = lambda _: True
        await stored(cache, *range(6), salt="red")
        if purges:
            list(cache.manager.purge("red"))
        else:
            for key in cache.keys(*range(6)):
                cache.manager.remove([key])
                await asyncio.sleep(0.1)
        await cache.settle()
        assert cache.manager.removals == 0
        assert cache.levels[0].stats.denied == cache.manager.denied == (7 if purges else 6)
        assert cache.manager.stats()["level1"]["breaker_opened"] == 0
        assert len(tier.records) == 6
        assert known(cache, *range(6)) == 0
        assert await cache.load(cache.keys(0)) == ["level1"], "the server still has it"


async def test_a_private_tier_cannot_be_denied_a_removal() -> None:
    tier = FakeTier([Raise(PermissionDenied, on="remove", times=2)], store=FakeStore())
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        await stored(cache, 1)
        cache.manager.remove(cache.keys(1))
        await asyncio.sleep(3.0)
        assert (cache.manager.removals, cache.manager.denied) == (1, 0)
        await asyncio.sleep(30.0)
        assert (cache.manager.removals, tier.records) == (0, {})
