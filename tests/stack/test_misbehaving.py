"""Tiers that break every rule: the level survives, and logs and counts the faults."""

from __future__ import annotations

import asyncio
from inspect import signature
from math import nan
from pathlib import Path
from typing import Any

import pytest

from kvladder import manager
from kvladder.runtime import Runtime
from kvladder.testing.fakes import Block, Fail, FakeTier, Hang, Raise, Wrong
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import SimThreads
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.codecs.base import ChecksumCodec
from kvladder.tiers.codecs.pipeline import PipelineSettings
from kvladder.tiers.ladder.calling import breaker
from kvladder.tiers.ladder.calling.calls import BEHIND_CALLS_MAX, CALLS_TIMEOUT_S
from kvladder.tiers.ladder.calling.client import CLOSE_TIMEOUT_S
from kvladder.tiers.ladder.definition import LevelSettings
from tests.kit.mirror import MirrorCodec
from tests.stack.caches import COMMIT, QUICK, cache_of, flushed

README = Path(__file__).parents[2] / "README.md"
ANSWERS = (Wrong("long"), Wrong("short"), Wrong("nothing"), Wrong("words"))
ERRORS = (SystemExit, KeyboardInterrupt, GeneratorExit, BaseException, asyncio.CancelledError)


def counts(cache: SimCache) -> dict[str, Any]:
    return cache.manager.stats()["level1"]


@pytest.mark.parametrize("step", [*ANSWERS, *map(Raise, ERRORS)], ids=repr)
@pytest.mark.parametrize("operation", ["put", "get", "contains"])
async def test_a_call_with_a_wrong_answer_fails_as_a_whole(step: Any, operation: str) -> None:
    step.on, step.times = operation, 1
    tier = SharedFakeTier([step])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK), slots=4) as cache:
        keys = cache.keys(1, 2)
        tier.others_put({key: cache.payload(key) for key in cache.keys(7)})
        cache.save(keys)
        await cache.settle()
        assert [key in cache.levels[0].index for key in keys] == [operation != "put"] * 2
        left = [key for key in keys if tier.stored(key)]  # by a put that answers nonsense, too
        cache.save(cache.keys(3, 4, 5, 6))
        await cache.settle()
        assert len(await cache.load(keys)) == (0 if operation == "get" else len(left))
        assert len(await cache.load(cache.keys(7))) == (1 if operation != "contains" else 0)
        assert (counts(cache)["errors"], counts(cache)["task_failures"]) == (1, 0)
        await asyncio.sleep(2.0)
        cache.save(keys)
        await cache.settle()
        cache.save(cache.keys(3, 4, 5, 6))
        await cache.settle()
        assert len(await cache.load(keys)) == 2, "and the next call is a good one"
        assert len(await cache.load(cache.keys(7))) == 1


@pytest.mark.parametrize("error", ERRORS[:-1])
async def test_errors_of_a_removal_or_a_close_are_contained(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    tier = FakeTier([Raise(error, on="remove"), Raise(error, on="aclose")])
    cache = await SimCache.open(LevelSpec(tier, COMMIT))
    cache.save(cache.keys(1))
    await cache.settle()
    cache.manager.remove(cache.keys(1))
    await cache.settle()
    assert not tier.records, "it was removed at the second try"
    await cache.aclose()
    assert "failed to remove: " in caplog.messages[0]
    assert "failed to close: " in caplog.messages[1]


async def test_synchronous_calls_of_a_tier_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    tier = FakeTier([Raise(SystemExit, on="spare"), Raise(KeyError, on="gauges")])
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()
        assert counts(cache)["dropped_quota"] == 2, "there may be a quota"
        cache.save(cache.keys(3, 4))
        await cache.settle()
        assert counts(cache)["stored"] == 2
        assert (counts(cache)["errors"], counts(cache)["task_failures"]) == (2, 0)
        assert len(caplog.messages) == 2


async def test_a_quota_that_is_no_number_is_a_failure() -> None:
    class Odd(FakeTier):
        def spare(self, salt: bytes) -> float:
            return nan

    async with cache_of(LevelSpec(Odd(), COMMIT)) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()
        assert (counts(cache)["dropped_quota"], counts(cache)["stored"]) == (2, 0)
        assert counts(cache)["errors"] == 1


async def test_a_cancelled_trial_is_repeated() -> None:
    tier = FakeTier([Fail(on="get", times=2), Hang(on="get")], store=await flushed((1,)))
    tier.durable = True
    async with cache_of(LevelSpec(tier, settings=QUICK)) as cache:
        level, keys = cache.levels[0], cache.keys(1)
        for _ in range(2):
            assert await cache.load(keys) == []
        await asyncio.sleep(5.0)
        with cache.stack.lock:
            place = level.index.place(keys[0])
            assert place is not None
            level.places.begin_reads([place])
            slots = cache.arena.lease(1) or []
        wanted = [level.client.pipeline.side.read(keys[0], place, slots[0])]
        trial = asyncio.ensure_future(level.client.get(wanted, lambda: level.read_ended(wanted)))
        await asyncio.sleep(0.1)
        assert level.client.states["get"] == "trial"
        trial.cancel()
        await asyncio.sleep(0.1)
        assert level.client.states["get"] == "open"
        assert await cache.load(keys) == ["level1"]
        cache.arena.release(slots)


async def test_a_codec_in_parts_is_not_misled_by_a_wrong_answer() -> None:
    pipeline = PipelineSettings((MirrorCodec(), ChecksumCodec()))
    tier = FakeTier([Wrong("short", on="put", times=2), Wrong("long", on="get")])
    spec = LevelSpec(tier, COMMIT, settings=LevelSettings(pipeline=pipeline))
    async with cache_of(spec) as cache:
        keys = cache.keys(1, 2, 3, 4, 5)
        for stored in (0, 0, 5):
            cache.save(cache.keys(1, 2, 3, 4, 5))
            await cache.settle()
            assert counts(cache)["stored"] == stored
            assert len(tier.records) == stored
            cache.manager.remove(keys) if not stored else None
            await cache.settle()
        tier.script[:] = [Wrong("words", on="get", times=1)]
        for loaded in (0, 5):
            with cache.stack.lock:
                cache.stack.host.remove(keys)
            assert len(await cache.load(keys)) == loaded, "not even a note was looked at"
        assert counts(cache)["misses"] == 0


async def test_a_writer_that_dies_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT, capacity_blocks=2)) as cache:
        level = cache.levels[0]
        victims, faults = level.index.victims, [1, 1, 1]

        def fragile() -> Any:
            if faults:
                raise ZeroDivisionError(faults.pop())
            return victims()

        level.index.victims = fragile  # type: ignore[method-assign]
        for number in range(12):
            cache.save(cache.keys(number))
            await asyncio.sleep(1.0)
        await cache.settle()
        assert counts(cache)["task_failures"] == 3
        assert counts(cache)["stored"] >= 8
        died = [text for text in caplog.messages if "died and is started again" in text]
        assert len(died) == 1, "the rate is bounded"


async def test_a_read_that_dies_is_a_miss_and_does_not_stop_others() -> None:
    tier = FakeTier(store=await flushed((1, 2), (3,)), durable=True)
    async with cache_of(LevelSpec(tier), fetch_blocks_max=2) as cache:
        level = cache.levels[0]
        touch, faults = level.index.touch, [1]

        def fragile(places: Any) -> None:
            if faults:
                raise ZeroDivisionError(faults.pop())
            touch(places)

        level.index.touch = fragile  # type: ignore[method-assign]
        first = cache.manager.fetch(cache.keys(1, 2), deadline_s=60.0)
        second = cache.manager.fetch(cache.keys(3), deadline_s=60.0)
        await asyncio.sleep(1.0)
        assert (first.done, first.blocks) == (True, 0)
        assert (second.done, second.blocks) == (True, 1)
        assert cache.manager.stats()["host"]["task_failures"] == 1
        first.release()
        second.release()


# ---- breakers by kind of call


@pytest.mark.parametrize("step", [Fail, Hang])
async def test_writes_that_keep_failing_open_their_breaker_though_removals_work(step: Any) -> None:
    tier = FakeTier([step(on="put", times=None)], store=await flushed((1,)), durable=True)
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        for number in range(10, 40):
            cache.save(cache.keys(number))
            await asyncio.sleep(1.1)
        level = cache.levels[0]
        assert len(tier.batches("put")) < 6
        assert len(tier.batches("remove")) > 1
        assert level.client.states | {"put": "open"} == level.client.states
        assert counts(cache)["breakers"] == {"get": 0, "put": 2, "remove": 0, "contains": 0}
        assert counts(cache)["breakers_opened"]["put"] >= 2
        assert await cache.load(cache.keys(1)) == ["level1"], "what it has is still served"
        assert level.client.states["put"] == "open", "a success of another kind tells nothing"
        tier.heal()
        await asyncio.sleep(60.0)
        cache.save(cache.keys(9))
        await cache.settle()
        assert tier.stored(cache.keys(9)[0])
        assert level.client.states["put"] == "closed"


async def test_reads_that_keep_failing_open_their_breaker_though_writes_work() -> None:
    tier = FakeTier([Fail(on="get", times=None)], store=await flushed((1,)), durable=True)
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        for number in range(10, 20):
            cache.save(cache.keys(number))
            await cache.load(cache.keys(1))
            await asyncio.sleep(0.1)
        assert len(tier.batches("get")) == 2
        assert counts(cache)["stored"] == 10
        assert cache.manager.lookup(cache.keys(1)) == (0, 0), "it is of no use to loads"


async def test_removals_that_keep_failing_cost_no_other_block() -> None:
    tier = FakeTier([Fail(on="remove", times=None)])
    spec = LevelSpec(tier, COMMIT, capacity_blocks=8, settings=QUICK)
    async with cache_of(spec, slots=4) as cache:
        for number in range(8):
            cache.save(cache.keys(number))
            await cache.settle()
        for number in range(8, 30):
            cache.save(cache.keys(number))
            await asyncio.sleep(0.5)
        assert len(cache.levels[0].index) >= 5, "few were to make room, and none was thrown away"
        assert counts(cache)["dropped_breaker"] > 10
        assert len(tier.batches("remove")) < 8
        tier.heal()
        await asyncio.sleep(60.0)
        cache.save(cache.keys(99))
        await cache.settle()
        assert tier.stored(cache.keys(99)[0])


async def test_a_block_is_not_written_again_before_its_delayed_removal() -> None:
    tier = SharedFakeTier([Fail(on="remove", times=2)])
    async with cache_of(LevelSpec(tier, COMMIT, settings=QUICK)) as cache:
        keys = cache.keys(1)
        tier.removable = {*keys}.__contains__
        cache.save(keys)
        await cache.settle()
        cache.manager.remove(keys)
        await asyncio.sleep(1.0)
        assert counts(cache)["breakers"]["remove"] == 2
        cache.save([*keys])
        cache.save(cache.keys(2))
        await asyncio.sleep(1.0)
        puts = [call.keys for call in tier.calls if call.operation == "put"]
        assert puts == [tuple(keys), tuple(cache.keys(2))]
        await asyncio.sleep(20.0)
        assert tier.stored(keys[0]) is None


# ---- abandoned calls


async def test_abandoned_calls_are_bounded_and_the_level_recovers(caplog) -> None:
    tier = FakeTier(store=await flushed((1,)), durable=True, batch_max=1)
    spec = LevelSpec(tier, COMMIT, capacity_blocks=1024, settings=QUICK)
    async with cache_of(spec, slots=128) as cache:
        tier.script.append(Block(on="put", times=None))
        tier.script.append(Block(on="remove", times=None))
        for number in range(2, 600):
            cache.save(cache.keys(number))
            await asyncio.sleep(2.0)
        assert tier.batches("put") == [1] * BEHIND_CALLS_MAX
        assert counts(cache)["calls_behind"] == BEHIND_CALLS_MAX
        assert counts(cache)["breaker_open"] == 1
        assert cache.manager.lookup(cache.keys(1)) == (0, 0), "nothing is asked of it"
        behind = "8 abandoned calls to tier level1 have not ended"
        assert any(behind in text for text in caplog.messages)
        tier.heal()
        await asyncio.sleep(100.0)
        assert counts(cache)["calls_behind"] == 0
        cache.save(cache.keys(1000))
        await cache.settle()
        assert tier.stored(cache.keys(1000)[0])
        assert await cache.load(cache.keys(1)) == ["level1"]


async def test_slots_of_abandoned_calls_are_bounded() -> None:
    tier = FakeTier([Block(on="get", times=None)], store=await flushed(*[(n,) for n in range(6)]))
    tier.durable = True
    async with cache_of(LevelSpec(tier, settings=QUICK), slots=8) as cache:
        for number in range(6):
            assert await cache.load(cache.keys(number)) == []
            await asyncio.sleep(20.0)
        assert len(tier.batches("get")) == 2
        assert cache.arena.free == 6
        cache.manager.remove(cache.keys(5))
        await asyncio.sleep(1.0)
        assert tier.stored(cache.keys(5)[0]), "it is left alone"
        tier.heal()
        await asyncio.sleep(1.0)
        assert cache.arena.free == 8
        assert not tier.stored(cache.keys(5)[0]), "what waited is done without further ado"


async def test_a_tier_with_hanging_threads_delays_no_other_level() -> None:
    pools: dict[str, SimThreads] = {}

    def threads(name: str) -> SimThreads:
        return pools.setdefault(name, SimThreads(2))

    coded = LevelSettings(pipeline=PipelineSettings((ChecksumCodec(),)))
    stuck, other = FakeTier([Block(on="put", times=None)]), FakeTier(checks=False)
    cache = await SimCache.open(
        LevelSpec(stuck, COMMIT),
        LevelSpec(other, COMMIT, settings=coded),
        threads=threads,
        slots=32,
    )
    for number in range(10):
        cache.save(cache.keys(number))
        await asyncio.sleep(0.5)
    stats = cache.manager.stats()["level2"]
    assert (stats["stored"], stats["timeouts"]) == (10, 0)
    assert set(pools) == {f"level{n}{codecs}" for n in (1, 2) for codecs in ("", "-codecs")}
    await cache.aclose()


# ---- the end


def test_closing_ends_within_the_promised_time() -> None:
    """After the flush the levels are closed, and then tasks that ignore cancellation."""
    deaf_s: float = signature(Runtime.close).parameters["timeout_s"].default
    assert manager.CLOSE_TIMEOUT_S >= CLOSE_TIMEOUT_S + 2 * CALLS_TIMEOUT_S
    assert manager.CLOSE_TIMEOUT_S + deaf_s <= 10
    assert "the flush's time plus ten seconds" in " ".join(README.read_text().split())


@pytest.mark.parametrize("operation", ["put", "get", "aclose", "remove"])
async def test_closing_takes_seconds_whatever_the_tiers_do(operation: Any, caplog) -> None:
    class Deaf(FakeTier):
        """A tier with hanging calls that do not end even with it."""

        def heal(self) -> None:
            pass

    loop = asyncio.get_running_loop()
    settings = LevelSettings(calls=breaker.CallSettings(timeout_s=300.0))
    tiers = [Deaf(store=await flushed((1,)), durable=True) for _ in range(3)]
    cache = await SimCache.open(*[LevelSpec(tier, COMMIT, settings=settings) for tier in tiers])
    cache.manager.remove(cache.keys(1)) if operation == "remove" else None
    for tier in tiers:
        tier.script.append(Hang(on=operation, times=None, stubborn=True))
    cache.save(cache.keys(2))
    fetch = cache.manager.fetch(cache.keys(1), deadline_s=1.0)
    await asyncio.sleep(2.0)
    fetch.release()
    began = loop.time()
    closing = asyncio.ensure_future(cache.stack.aclose(flush_timeout_s=1.0))
    await asyncio.wait({closing}, timeout=1.0 + CLOSE_TIMEOUT_S + 2 * CALLS_TIMEOUT_S + 0.1)
    assert closing.done()
    closing.result()
    assert operation == "remove" or loop.time() > began
    for tier in tiers:
        FakeTier.heal(tier)
    await asyncio.sleep(1.0)
    assert cache.arena.free == cache.arena.slots
    cache.arena.close()
