"""Terms of requests: the levels of blocks, TTLs, salts, and purges."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import Delay, FakeStore, FakeTier, Hold, Record
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import EPOCH_S
from kvladder.testing.stacks import LevelSpec, SimCache
from tests.stack.caches import COMMIT, cache_of


def durable(store: FakeStore) -> LevelSpec:
    return LevelSpec(FakeTier(store=store, durable=True), COMMIT)


def purged(cache: SimCache, salt: str) -> dict[str, int]:
    *_, counts = cache.manager.purge(salt)
    return {name: count for name, count in counts.items() if count}


# ---- levels


async def test_a_block_for_host_alone_never_goes_below() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier), slots=2, reserve_blocks=2) as cache:
        cache.save(cache.keys(1, 2), levels=["host"])
        cache.save(cache.keys(3, 4))
        await cache.settle()
        assert await cache.load(cache.keys(1, 2)) == []
        cache.save(cache.keys(5, 6))
        await cache.settle()
        assert await cache.load(cache.keys(3, 4)) == ["level1"] * 2
        assert not any(tier.stored(key) for key in cache.keys(1, 2))


async def test_a_flush_keeps_to_the_levels_of_a_request() -> None:
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True))) as cache:
        cache.save(cache.keys(1, 2), levels={"host"})
        cache.save(cache.keys(3, 4))
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True))) as cache:
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)
        assert cache.manager.lookup(cache.keys(3, 4)) == (0, 2)


async def test_a_block_skips_the_levels_that_it_may_not_be_in() -> None:
    first, second = FakeTier(), FakeTier()
    async with cache_of(LevelSpec(first, COMMIT), LevelSpec(second, COMMIT)) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys, levels=["level2"])
        await cache.settle()
        assert cache.manager.lookup(keys) == (0, 2)
        assert first.records == {}
        assert await cache.load(keys) == ["level2"] * 2
        assert cache.manager.lookup(keys).host == 0, "it is not kept in host either"
        assert cache.save(cache.keys(3), levels=[]) == 0, "nowhere is nowhere"


async def test_after_a_restart_a_block_stays_where_it_was_allowed() -> None:
    store, below = FakeStore(), FakeTier()
    async with cache_of(durable(store)) as cache:
        cache.save(cache.keys(1, 2), levels=["host", "level1"])
        cache.save(cache.keys(3), levels=["level1"])
        cache.save(cache.keys(4))
        await cache.settle()
    again = LevelSpec(FakeTier(store=store, durable=True), COMMIT)
    async with cache_of(again, LevelSpec(below, COMMIT)) as cache:
        for path in ((1, 2), (3,), (4,)):
            assert await cache.load(cache.keys(*path)) == ["level1"] * len(path)
        assert cache.manager.lookup(cache.keys(1, 2)).host == 2
        assert cache.manager.lookup(cache.keys(3)).host == 0
        index = cache.levels[0].index
        metas = {
            path: index.meta(place).terms.levels
            for path in (2, 3, 4)
            if (place := index.place(cache.keys(*((1, 2) if path == 2 else (path,)))[-1]))
            is not None
        }
        assert metas == {2: 0b11, 3: 0b10, 4: -1}


async def test_a_block_saved_by_two_requests_has_the_wider_terms() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier), slots=2, reserve_blocks=2) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys, levels=["host"], ttl_s=5.0)
        cache.save(keys[:1])
        await asyncio.sleep(6.0)
        assert cache.manager.lookup(keys) == (1, 1)
        cache.save(cache.keys(3, 4))
        await cache.settle()
        cache.save(cache.keys(3, 4))
        await cache.settle()
        assert tier.stored(keys[0]) is not None


async def test_only_the_levels_of_a_request_are_read() -> None:
    tiers = [FakeTier(), FakeTier()]
    async with cache_of(*(LevelSpec(tier, COMMIT) for tier in tiers), slots=8) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys[:1], levels=["level1"])
        cache.save(keys[1:], levels=["level2"])
        await cache.settle()
        look = cache.manager.lookup
        assert look(keys, levels=["level1", "level2"]) == (0, 2)
        assert look(keys, levels=["level1"]) == (0, 1)
        assert look(keys, levels=["host", "level2"]) == (0, 0)
        fetch = cache.manager.fetch(keys, levels=["level1"])
        fetch2 = cache.manager.fetch(keys, levels=["level2"])
        await asyncio.sleep(1.0)
        assert (fetch.done, fetch.sources, fetch2.done, fetch2.sources) == (
            True, ["level1"], True, [],
        )  # fmt: skip
        fetch.release()
        fetch2.release()
        assert not any(call.operation == "get" for call in tiers[1].calls)


async def test_a_block_in_host_is_read_only_from_host() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        keys = cache.keys(1, 2)
        cache.save(keys)
        await cache.settle()
        assert cache.manager.lookup(keys, levels=["level1"]) == (0, 0)
        fetch = cache.manager.fetch(keys, levels=["level1"])
        assert (fetch.done, fetch.blocks) == (True, 0)
        fetch.release()
        assert cache.manager.lookup(keys, levels=["host"]) == (2, 2)


async def test_a_joined_load_ends_for_a_fetch_at_levels_that_it_may_not_read() -> None:
    first, second = FakeTier(), FakeTier()
    async with cache_of(LevelSpec(first, COMMIT), LevelSpec(second, COMMIT)) as cache:
        keys = cache.keys(1)
        cache.save(keys)
        await cache.settle()
        cache.stack.host.remove([keys[0]])
        first.script.append(Delay(0.5, on="get"))
        first.forget(*keys)
        narrow = cache.manager.fetch(keys, levels=["level1"])
        wide = cache.manager.fetch(keys)
        await asyncio.sleep(1.5)
        assert (narrow.done, narrow.blocks) == (True, 0)
        assert (wide.done, wide.sources) == (True, ["level2"])
        narrow.release()
        wide.release()


async def test_unknown_levels_are_an_error() -> None:
    async with cache_of() as cache:
        with pytest.raises(KeyError, match="disk"):
            cache.manager.save(cache.keys(1), levels=["disk"])


# ---- time


async def test_a_block_expires_in_every_level_at_its_requests_time() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1, 2), ttl_s=10.0)
        cache.save(cache.keys(3), ttl_s=20.0)
        await asyncio.sleep(9.9)
        assert cache.manager.lookup(cache.keys(1, 2)) == (2, 2)
        await asyncio.sleep(0.2)
        assert list(cache.stack.host.index) == list(cache.levels[0].index) == cache.keys(3)
        assert [record.key for record in tier.records.values()] == cache.keys(3)
        stats = cache.manager.stats()
        assert stats["host"]["expired"] == stats["level1"]["expired"] == 2
        await asyncio.sleep(10.0)
        assert len(cache.stack.host.index) == len(tier.records) == 0


async def test_without_levels_below_host_blocks_expire_too() -> None:
    async with cache_of() as cache:
        cache.save(cache.keys(1), ttl_s=1.0)
        await asyncio.sleep(1.1)
        assert cache.arena.free == cache.arena.slots


async def test_the_earlier_of_two_ttls_counts_in_a_level() -> None:
    rule = OffloadRule(when="commit", ttl_s=5.0)
    async with cache_of(LevelSpec(FakeTier(), rule)) as cache:
        cache.save(cache.keys(1), ttl_s=10.0)
        cache.save(cache.keys(2), ttl_s=2.0)
        await cache.settle()
        ends = [cache.levels[0].find(key) for key in (*cache.keys(1), *cache.keys(2))]
        assert None not in ends
        await asyncio.sleep(3.0)
        assert cache.levels[0].find(cache.keys(2)[0]) is None
        await asyncio.sleep(3.0)
        assert cache.levels[0].find(cache.keys(1)[0]) is None
        assert cache.manager.lookup(cache.keys(1)).host == 1


async def test_the_ttl_of_a_request_continues_over_a_restart() -> None:
    store = FakeStore()
    async with cache_of(durable(store)) as cache:
        cache.save(cache.keys(1), ttl_s=10.0)
        cache.save(cache.keys(2))
        await cache.settle()
        await asyncio.sleep(4.0)
    async with cache_of(durable(store)) as cache:
        assert cache.manager.lookup(cache.keys(1)).total == 1
        assert await cache.load(cache.keys(1)) == ["level1"]
        await asyncio.sleep(6.0)
        assert cache.manager.lookup(cache.keys(1)) == (0, 0), "the copy in host expires, too"
        assert cache.manager.lookup(cache.keys(2)).total == 1


@pytest.mark.parametrize("rule", [COMMIT, OffloadRule(when="commit", ttl_s=10.0)])
async def test_blocks_that_expired_between_runs_do_not_come_back(rule: OffloadRule) -> None:
    """The clock is set back later; by then the tier has forgotten the block."""
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True), rule)) as cache:
        cache.save(cache.keys(1), ttl_s=10.0 if rule.ttl_s is None else None)
        cache.save(cache.keys(2), ttl_s=100.0)
        await cache.settle()
    for epoch_s, left in ((EPOCH_S + 50, 1), (EPOCH_S, 1), (EPOCH_S + 200, 0), (EPOCH_S, 0)):
        tier = FakeTier(store=store, durable=True)
        async with cache_of(LevelSpec(tier, COMMIT), epoch_s=epoch_s) as cache:
            assert cache.manager.lookup(cache.keys(1)).total == 0
            assert cache.manager.lookup(cache.keys(2)).total == (left if rule is COMMIT else 0)
            await cache.settle()
            assert len(tier.records) == len(cache.levels[0].index)


async def test_a_block_that_expires_in_flight_does_not_arrive() -> None:
    tier = FakeTier()
    hold = Hold(on="put")
    tier.script.append(hold)
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1), ttl_s=1.0)
        await hold.reached()
        await asyncio.sleep(2.0)
        hold.let_go()
        await cache.settle()
        assert len(cache.levels[0].index) == len(tier.records) == 0
        save = cache.manager.save(cache.keys(2), ttl_s=1.0)
        await asyncio.sleep(2.0)
        save.commit()
        assert cache.arena.free == cache.arena.slots


async def test_a_fetch_keeps_the_slot_of_a_block_that_expires() -> None:
    async with cache_of() as cache:
        cache.save(cache.keys(1), ttl_s=1.0)
        fetch = cache.manager.fetch(cache.keys(1))
        await asyncio.sleep(2.0)
        assert fetch.done
        assert cache.manager.lookup(cache.keys(1)) == (0, 0)
        assert bytes(cache.arena.view(fetch.slots[0])[:64]) == cache.payload(cache.keys(1)[0])
        fetch.release()
        assert cache.arena.free == cache.arena.slots


async def test_expiry_times_of_removed_blocks_are_not_kept() -> None:
    async with cache_of(slots=4) as cache:
        for number in range(500):
            cache.save(cache.keys(number), ttl_s=1e6)
            cache.manager.check()
        ends = cache.stack.host.index._terms.ends  # pyright: ignore[reportPrivateUsage]
        assert len(ends._heap) <= 64 + 2 * 4 + 1  # pyright: ignore[reportPrivateUsage]


# ---- salts


async def test_a_purge_removes_a_salt_everywhere_and_nothing_else() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1, 2), salt="tenant")
        cache.save(cache.keys(3), salt="another")
        cache.save(cache.keys(4))
        await cache.settle()
        assert purged(cache, "tenant") == {"host": 2, "level1": 2}
        assert purged(cache, "tenant") == {}
        assert cache.manager.removals == 2, "not gone from the tier yet"
        await cache.settle()
        assert cache.manager.removals == 0
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)
        assert sorted(record.key for record in tier.records.values()) == sorted(
            cache.keys(3) + cache.keys(4)
        )
        assert cache.save(cache.keys(1, 2), salt="tenant") == 2, "later ones are welcome"
        with pytest.raises(ValueError, match="empty"):
            cache.manager.purge("")


async def test_a_purge_reaches_blocks_in_flight() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT), slots=8) as cache:
        cache.save(cache.keys(1), salt="tenant", levels=["level1"])
        await cache.settle()
        reading, writing = Hold(on="get"), Hold(on="put")
        tier.script += [reading, writing]
        cache.save(cache.keys(2), salt="tenant", levels=["level1"])
        fetch = cache.manager.fetch(cache.keys(1))
        late = cache.manager.save(cache.keys(3), salt="tenant")
        await reading.reached()
        await writing.reached()
        cache.save(cache.keys(4), salt="tenant", levels=["level1"])  # waits behind it
        assert purged(cache, "tenant") == {"level1": 1}
        late.commit()
        reading.let_go()
        writing.let_go()
        await cache.settle()
        assert (fetch.done, fetch.blocks) == (True, 0)
        fetch.release()
        assert len(cache.stack.host.index) == len(cache.levels[0].index) == len(tier.records) == 0


async def test_no_block_of_a_salt_is_stored_during_its_purge() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT), slots=8) as cache:
        cache.save(cache.keys(1), salt="tenant")
        await cache.settle()
        first, second = cache.manager.purge("tenant"), cache.manager.purge("tenant")
        next(first), next(second)
        assert cache.save(cache.keys(2), salt="tenant") == 0
        assert cache.save(cache.keys(3), salt="another") == 1
        list(first)
        assert cache.save(cache.keys(2), salt="tenant") == 0, "the second one goes on"
        second.close()  # type: ignore[attr-defined]
        assert cache.save(cache.keys(2), salt="tenant") == 1


async def test_a_salt_is_found_after_a_restart() -> None:
    store = FakeStore()
    async with cache_of(durable(store)) as cache:
        cache.save(cache.keys(1, 2), salt="tenant")
        cache.save(cache.keys(3))
    async with cache_of(durable(store)) as cache:
        assert await cache.load(cache.keys(1)) == ["level1"]
        assert purged(cache, "tenant") == {"host": 1, "level1": 2}
    async with cache_of(durable(store)) as cache:
        assert cache.manager.lookup(cache.keys(1)) == (0, 0)
        assert cache.manager.lookup(cache.keys(3)) == (0, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"priorities": [101]},
        {"priorities": [35.5]},
        {"priorities": [35], "durations_s": [float("nan")]},
        {"durations_s": [-1.0]},
        {"ttl_s": float("nan")},
        {"ttl_s": -1.0},
    ],
    ids=str,
)
async def test_invalid_priorities_and_durations_are_refused(wrong: dict[str, Any]) -> None:
    async with cache_of() as cache:
        with pytest.raises(ValueError, match="expected"):
            cache.manager.save(cache.keys(1), **wrong)
        assert cache.arena.free == cache.arena.slots


# ---- clocks and tiers that do not keep to them


class Careless(SharedFakeTier):
    """Lets nothing expire."""

    def at(self, key: BlockKey, place: int) -> Record | None:
        return FakeTier.at(self, key, place)


@pytest.mark.parametrize("checks", [True, False])
async def test_expired_blocks_of_a_shared_tier_are_not_served(*, checks: bool) -> None:
    store = FakeStore()
    async with cache_of(LevelSpec(Careless(store=store), COMMIT)) as cache:
        keys = cache.keys(1, 2, 3)
        cache.save(keys[:1])
        cache.save(keys[:2], ttl_s=5.0)
        cache.save(keys)
        await cache.settle()
        loop = asyncio.get_running_loop()
    tier = Careless(store=store, checks=checks)
    epoch_s = EPOCH_S + loop.time() + 6.0
    async with cache_of(LevelSpec(tier, COMMIT), epoch_s=epoch_s) as cache:
        assert await cache.load(keys) == ["level1"]
        assert cache.manager.stats()["level1"]["corrupt"] == 0
        assert cache.manager.stats()["level1"]["foreign"] == 0
        cache.save(keys)
        await cache.settle()
        cache.stack.host.remove(keys)
        assert await cache.load(keys) == ["level1"] * 3, "it is replaced by who saves it again"


@pytest.mark.parametrize("own", [True, False])
async def test_a_clock_that_ran_ahead_keeps_no_block_longer_than_a_ttl(*, own: bool) -> None:
    """A block stored a century ahead expires one TTL after the clock was corrected."""
    store, century_s = FakeStore(), 3.2e9
    rule = OffloadRule(when="commit", ttl_s=60.0)
    for ahead_s in (century_s, 0.0):
        level = LevelSpec(FakeTier(store=store, durable=True), rule)
        async with cache_of(level, epoch_s=EPOCH_S + ahead_s) as cache:
            keys = cache.keys(1, 2)
            if ahead_s:
                cache.save(keys, **({"ttl_s": 30.0} if own else {}))
                await cache.settle()
                continue
            assert await cache.load(keys) == ["level1"] * 2
            cache.stack.host.remove(keys)
            await asyncio.sleep(58.0)
            assert await cache.load(keys) == ["level1"] * 2
            cache.stack.host.remove(keys)
            await asyncio.sleep(2.0)
            assert await cache.load(keys) == []
