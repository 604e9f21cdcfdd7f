"""Test an engine of your own on tiers that hang and fail: in simulated time, under pytest-asyncio.

Run it with ``pytest examples/test_with_fakes.py``, with ``--sim-seed 7`` for another order of
events. Each test takes milliseconds, whatever time goes by in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvladder.policy.offload import OffloadRule
from kvladder.testing import Delay, Fail, FakeTier, Hang, LevelSpec, SimCache

pytestmark = pytest.mark.sim_loop  # all async tests of this file run on the simulated loop
STEP_S = 0.02
PROMPT = range(6)
OTHERS = range(100, 108)


class Engine:
    """Takes from the cache what it has of a prompt, computes the other blocks, and saves them."""

    def __init__(self, cache: SimCache) -> None:
        self.cache = cache

    async def serve(self, prompt: range) -> int:
        """Serve a request; how many blocks had to be computed."""
        keys = self.cache.keys(*prompt)
        fetch = self.cache.manager.fetch(keys, deadline_s=1.0)
        while not fetch.done:  # noqa: ASYNC110 - an engine asks at every step
            await asyncio.sleep(STEP_S)
        for key, slot in zip(keys, fetch.slots, strict=False):
            assert bytes(self.cache.arena.view(slot)[:64]) == self.cache.payload(key)
        missing = len(keys) - len(fetch.slots)
        fetch.release()
        self.cache.save(keys)
        return missing


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest_asyncio.fixture
async def engine(tier: FakeTier) -> AsyncIterator[Engine]:
    """An engine over a host level of 8 blocks and a fake tier, which alone has the prompt."""
    cache = await SimCache.open(LevelSpec(tier, OffloadRule(when="commit")), slots=8)
    engine = Engine(cache)
    for prompt in (PROMPT, OTHERS):  # the second drives the first out of the host level
        assert await engine.serve(prompt) == len(prompt)
        await cache.settle()
    yield engine
    await cache.aclose()  # fails if the engine still claims a slot


async def test_what_the_tier_keeps_is_not_computed_again(engine: Engine) -> None:
    assert await engine.serve(PROMPT) == 0


async def test_a_tier_that_hangs_costs_the_deadline_and_no_more(
    engine: Engine, tier: FakeTier
) -> None:
    tier.script.append(Hang(on="get"))
    began_s = asyncio.get_running_loop().time()
    assert await engine.serve(PROMPT) == len(PROMPT)
    assert asyncio.get_running_loop().time() - began_s <= 1.0 + STEP_S


@pytest.mark.parametrize("fault", [Fail(on="get"), Delay(3600.0, on="get")], ids=["fail", "delay"])
async def test_a_tier_that_fails_is_a_miss(engine: Engine, tier: FakeTier, fault: Fail) -> None:
    tier.script.append(fault)
    assert await engine.serve(PROMPT) == len(PROMPT)
