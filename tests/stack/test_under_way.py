"""Blocks in flight while they are forgotten are not stored."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.keys import BlockKey, salt_digest
from kvladder.testing.fakes import Fail, FakeTier, Hang, Hold
from kvladder.testing.stacks import LevelSpec, SimCache
from tests.stack.caches import COMMIT, QUICK, cache_of, flushed


async def forget(cache: SimCache, how: str) -> None:
    """Forget all that there is, or all of the only salt."""
    if how == "reset":
        cache.manager.reset()
    elif how == "clear":
        cache.manager.clear()
    else:
        list(cache.manager.purge("tenant"))
    while cache.manager.resetting:  # noqa: ASYNC110 - an engine asks at every step
        await asyncio.sleep(0.01)


WAYS = pytest.mark.parametrize("how", ["reset", "clear", "purge"])


@WAYS
async def test_blocks_being_saved_are_forgotten(how: str) -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT)) as cache:
        saving = cache.manager.save(cache.keys(1, 2), salt="tenant")
        await forget(cache, how)
        saving.commit()
        await cache.settle()
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)


@WAYS
async def test_blocks_being_written_are_forgotten(how: str) -> None:
    writing = Hold(on="put", after=True)
    tier = FakeTier([writing], batch_max=1)
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1, 2), salt="tenant")
        await writing.reached()
        await forget(cache, how)
        writing.let_go()
        await cache.settle()
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)
        assert not tier.records


@WAYS
async def test_blocks_being_loaded_are_forgotten(how: str) -> None:
    tier, reading = FakeTier(), Hold(on="get", after=True)
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1, 2), salt="tenant")
        await cache.settle()
        with cache.stack.lock:
            cache.stack.host.remove(cache.keys(1, 2))
        tier.script.append(reading)
        fetch = cache.manager.fetch(cache.keys(1, 2))
        await reading.reached()
        await forget(cache, how)
        reading.let_go()
        await asyncio.sleep(1)
        assert (fetch.done, fetch.blocks) == (True, 0)
        fetch.release()
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)


async def test_blocks_are_accepted_again_only_after_a_clear_has_ended() -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT)) as cache:
        cache.save(cache.keys(1))
        await cache.settle()
        clearing = cache.stack.clear()
        next(clearing)
        assert cache.save(cache.keys(2)) == 0
        list(clearing)
        assert cache.save(cache.keys(2)) == 1
        await cache.settle()
        assert cache.levels[0].stats.stored == 2


async def test_a_load_begun_during_a_purge_of_its_salt_is_forgotten() -> None:
    tier, reading = FakeTier(), Hold(on="get", after=True)
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(7))
        cache.save(cache.keys(1, 2), salt="tenant")
        await cache.settle()
        with cache.stack.lock:
            cache.stack.host.remove(cache.keys(1, 2))
        tier.script.append(reading)
        purging = cache.manager.purge("tenant")
        assert next(purging) == {"host": 0, "level1": 0}
        fetch = cache.manager.fetch(cache.keys(1, 2))
        await reading.reached()
        assert [*purging][-1] == {"host": 0, "level1": 2}
        reading.let_go()
        await asyncio.sleep(1)
        assert (fetch.done, fetch.blocks) == (True, 0)
        fetch.release()
        assert cache.manager.lookup(cache.keys(1, 2)) == (0, 0)


async def test_no_block_waits_for_a_tier_with_an_open_breaker() -> None:
    """Waiting blocks would keep slots from others."""
    tier = FakeTier([Fail(on="put", times=2)], batch_max=1)
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        cache.save(cache.keys(*range(6)))
        await asyncio.sleep(1.0)
        level = cache.levels[0]
        assert not level.writable
        assert (len(tier.batches("put")), level.queued) == (2, 0)
        assert level.stats.as_dict(8)["dropped_breaker"] == 4


async def test_the_next_victims_are_written_once_a_tier_recovers() -> None:
    """Although no call saves or loads anything meanwhile."""
    tier = FakeTier(store=await flushed((99,)), durable=True)
    async with cache_of(LevelSpec(tier, settings=QUICK), reserve_blocks=4) as cache:
        level = cache.levels[0]
        with cache.stack.lock:
            for _ in range(2):
                level.client.breakers["put"].failure(cache.stack.shared.clock.now())
        cache.stack._lifecycles[0].writer.wake()  # as after a call that failed
        cache.save(cache.keys(*range(8)))
        await asyncio.sleep(1.0)
        assert not tier.batches("put")
        await asyncio.sleep(60.0)
        assert level.stats.stored == 4


@pytest.mark.parametrize("salt", ["tenant", "another"])
async def test_a_recall_of_a_salt_leaves_other_salts_alone(salt: str) -> None:
    """Their writes may be queued, in flight or abandoned, or an abandoned removal may exist."""
    late, slow = Hang(on="put", stubborn=True), Hold(on="put")
    lost = Hang(on="remove", stubborn=True)
    tier = FakeTier([lost], batch_max=2)
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK), slots=64) as cache:
        level = cache.levels[0]
        pairs = [(cache.keys(n)[0], cache.keys(n + 1)[0]) for n in (1, 3, 5, 7)]

        def save(pair: tuple[BlockKey, BlockKey]) -> None:
            for key, its in zip(pair, ("tenant", "another"), strict=True):
                cache.save([key], salt=its)

        save(pairs[0])
        await cache.settle()
        cache.manager.remove(pairs[0])
        await asyncio.sleep(2.0)
        tier.script += [late, slow]
        save(pairs[1])
        await asyncio.sleep(2.0)
        save(pairs[2])
        await slow.reached()
        save(pairs[3])
        assert level.client.behind == 2
        assert (level.is_writing, len(level.write_queue)) == (True, 2)
        at = ("tenant", "another").index(salt)
        digest = salt_digest(cache.manager.namespace, salt)
        with cache.stack.lock:
            found = level.recall([key for pair in pairs for key in pair], digest)
        assert not found & {pair[1 - at] for pair in pairs}
        assert pairs[2][at] in found, "it is being written"
        level.check()
        slow.let_go()
        await cache.settle()
        here = [[key in level.index for key in pair] for pair in pairs]
        theirs = [at == 1, at == 0]
        assert here == [[False, False], [False, False], theirs, theirs]
        lost.let_go()
        late.let_go()
        await asyncio.sleep(10.0)
        assert level.removals == 0
        assert len(tier.records) == 2
