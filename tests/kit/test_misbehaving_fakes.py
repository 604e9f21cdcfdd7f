"""Fakes misbehave as their scripts say, and notice a level that calls them too soon."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.errors import TierError
from kvladder.testing.fakes import Block, Fail, FakeTier, Raise, Wrong
from kvladder.testing.fixtures import SampleBlocks
from kvladder.testing.sim import SimThreads
from kvladder.testing.stacks import LAYOUT, LevelSpec
from tests.stack.caches import COMMIT, cache_of


@pytest.mark.parametrize(
    ("step", "said"),
    [("long", [True] * 3), ("short", [True]), ("nothing", None), ("words", ["yes", "yes"])],
)
async def test_a_wrong_answer_comes_after_the_effect(step, said) -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier)) as cache:
        blocks = SampleBlocks(cache.arena, LAYOUT, 2, cache.manager.namespace)
        items = blocks.some(0, 1)
        tier.script.append(Wrong(step, on="put"))
        assert await tier.put(blocks.writes(items)) == said
        assert len(tier.records) == 2
        assert await tier.contains(blocks.refs(items)) == [True, True]
        blocks.close()
        await tier.remove(blocks.refs(items))


async def test_synchronous_calls_take_only_steps_that_name_them() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier)):
        tier.script += [Raise(ValueError), Raise(KeyError, on="gauges")]
        assert tier.spare(b"") > 0
        with pytest.raises(KeyError):
            tier.gauges()
        with pytest.raises(ValueError, match="scripted"):
            await tier.contains([])


async def test_a_blocked_call_keeps_its_thread_until_it_is_given_up() -> None:
    threads, block = SimThreads(1), Block()
    first = asyncio.ensure_future(threads(block.happen))
    await asyncio.sleep(1.0)
    second = asyncio.ensure_future(threads(lambda: "served"))
    await asyncio.sleep(1.0)
    assert not second.done()
    first.cancel()
    assert await second == "served"
    assert not first.done()
    block.let_go()
    await asyncio.wait({first})
    assert first.cancelled()


async def test_a_call_too_soon_after_failures_is_noted() -> None:
    tier = FakeTier([Fail(on="put", times=3)], patience=(2, 10.0))
    async with cache_of(LevelSpec(tier, COMMIT)):
        for _ in range(2):
            with pytest.raises(TierError):
                await tier.put([])
        await tier.remove([])
        with pytest.raises(AssertionError, match="while the breaker is open"):
            await tier.put([])
        await asyncio.sleep(10.0)
        with pytest.raises(TierError):
            await tier.put([])
        tier.violations.clear()
