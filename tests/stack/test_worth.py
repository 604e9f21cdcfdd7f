"""Fetching or computing: at whatever speed of a tier, no request waits longer than it gains."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import pytest

from kvladder.arena import NO_SLOT
from kvladder.keys import BlockKey
from kvladder.policy.fetch_cost import (
    GRACE_S,
    TRIAL_BLOCKS,
    TRIAL_EVERY,
    AvoidedCompute,
    CostEstimate,
)
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeStore, FakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.tiers.base import Tier
from kvladder.tiers.label import Read, Ref
from kvladder.tiers.ladder.loading.fetch import Fetch

Link = Literal["calls", "lines", "wire"]
"""The source of delay: each call, each block on its connection, or each on the only one."""

BLOCK_S = 0.020
"""Seconds to compute a block."""
MOST = 1.1 + 1e-9
"""The README's promise, relative to the time without a cache."""
BESIDE_S = 0.002
"""The additional seconds of that promise."""
STEP_S = 0.002
"""The interval at which an engine polls a fetch."""
SPEEDS = [1e-5, 1e-4, 1e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 1.0, 10.0, 100.0]


class Paced(FakeTier):
    """Reads take ``block_s`` a call or block, questions ``answer_s``."""

    block_s = 0.0
    answer_s = 0.0
    link: Link = "calls"
    wire: asyncio.Lock

    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        if self.link == "wire":
            for _ in reads:
                async with self.wire:
                    await asyncio.sleep(self.block_s)
        else:
            await asyncio.sleep(self.block_s * (1 if self.link == "calls" else len(reads)))
        return await super().get(reads)

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        await asyncio.sleep(self.answer_s)
        return await super().contains(blocks)


class PacedShared(Paced, SharedFakeTier):
    """A paced shared tier, filled by others."""


class Engine:
    """Computes the blocks that the cache does not deliver in time, one request at a time."""

    def __init__(self, cache: SimCache, tier: Paced, *, own_tokens: int = 0) -> None:
        self.cache = cache
        self.tier = tier
        self.own_tokens = own_tokens
        """The number of each prompt's tokens behind its whole blocks."""
        self.hits = 0

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def serve(self, prompt: int, blocks: int = 32) -> float:
        """Return the time to first token, relative to the time without a cache."""
        began = self.now
        fetch = self.cache.manager.fetch(self.keys(prompt, blocks))
        return await self.compute(fetch, began)

    @staticmethod
    def keys(prompt: int, blocks: int) -> list[BlockKey]:
        return SimCache.keys(prompt, *range(1, blocks))

    async def compute(self, fetch: Fetch, began: float) -> float:
        while not fetch.done:  # noqa: ASYNC110 - an engine asks at every step
            await asyncio.sleep(STEP_S)
        self.hits, blocks = fetch.blocks, len(fetch.keys)
        left = (blocks - self.hits) * LAYOUT.block_tokens + self.own_tokens
        seconds = left * BLOCK_S / LAYOUT.block_tokens
        await asyncio.sleep(seconds)
        self.cache.manager.prefilled(left, seconds)
        fetch.release()
        alone_s = (blocks + self.own_tokens / LAYOUT.block_tokens) * BLOCK_S
        return (self.now - began - BESIDE_S - STEP_S) / alone_s


async def opened(
    tier: Paced, prompts: Sequence[int], *, blocks: int = 32, slots: int = 128
) -> tuple[SimCache, Engine]:
    """Return a cache over a tier with the blocks of these prompts."""
    tier.wire = asyncio.Lock()
    if not isinstance(tier, SharedFakeTier):
        filled = FakeTier(store=tier.store)
        first = await SimCache.open(spec(filled), slots=len(prompts) * blocks + 64)
        for prompt in prompts:
            first.save(Engine.keys(prompt, blocks))
        await first.settle()
        await first.aclose()
    cache = await SimCache.open(spec(tier), slots=slots)
    if isinstance(tier, SharedFakeTier):
        for prompt in prompts:
            tier.others_put({key: SimCache.payload(key) for key in Engine.keys(prompt, blocks)})
    return cache, Engine(cache, tier)


def spec(tier: Tier) -> LevelSpec:
    return LevelSpec(tier, OffloadRule(when="commit"), capacity_blocks=4096)


def made(kind: str, speed_s: float, link: Link, **options: float) -> Paced:
    store = FakeStore()
    tier: Paced = PacedShared(store=store) if kind == "shared" else Paced(store=store, durable=True)
    tier.block_s, tier.link = speed_s, link
    tier.answer_s = options.get("answer_s", 0.0)
    return tier


@pytest.mark.product("kind", "link", "speed_s")
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("link", ["calls", "lines", "wire"])
@pytest.mark.parametrize("speed_s", SPEEDS)
async def test_no_speed_of_a_tier_makes_requests_slower(
    kind: str, link: Link, speed_s: float
) -> None:
    """The prompts have one length or several."""
    for lengths in ([32], [16, 64, 40, 24]):
        cache, engine = await opened(made(kind, speed_s, link), range(16), blocks=64, slots=384)
        times = [await engine.serve(at, lengths[at % len(lengths)]) for at in range(16)]
        assert max(times[2:]) <= MOST, times
        await cache.aclose()


@pytest.mark.product("kind", "speed_s", "blocks", "own")
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("speed_s", SPEEDS)
@pytest.mark.parametrize("blocks", [3, 15, 16, 31])
@pytest.mark.parametrize("own", [0, 10])
async def test_no_speed_of_a_tier_slows_requests_too_short_to_learn_from(
    kind: str, speed_s: float, blocks: int, own: int
) -> None:
    """Prompts have 12 to 124 tokens, ``own`` of them new: a sample would take all blocks."""
    cache, engine = await opened(made(kind, speed_s, "calls"), range(16), blocks=blocks)
    engine.own_tokens = own
    times = [await engine.serve(at, blocks) for at in range(16)]
    assert max(times[2:]) <= MOST, times
    await cache.aclose()


@pytest.mark.slow
@pytest.mark.product("kind", "link")
@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("link", ["calls", "lines", "wire"])
async def test_blocks_of_a_fast_tier_are_served(kind: str, link: Link) -> None:
    """Except for the sample that one request computes to measure the time."""
    for speed_s in (1e-5, 1e-4, 5e-4):
        lengths = [32, 64, 16, 5, 48, 1]
        cache, engine = await opened(made(kind, speed_s, link), range(16), blocks=64, slots=384)
        hits: list[int] = []
        for at in range(16):
            await engine.serve(at, lengths[at % len(lengths)])
            hits.append(lengths[at % len(lengths)] - engine.hits)
        sampled = [[]] if 64 * speed_s <= GRACE_S else [[], [32]]
        assert [missing for missing in hits if missing] in sampled, hits
        stats = cache.manager.stats()["level1"]
        assert (stats["slower"], stats["sampled"]) == (0, sum(hits))
        await cache.aclose()


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("slow_s", [0.1, 1.0, 100.0])
async def test_a_tier_that_recovers_is_used_again(kind: str, slow_s: float) -> None:
    """This takes a bounded number of requests, and none of them waits for the trials."""
    tier = made(kind, slow_s, "lines")
    cache, engine = await opened(tier, range(40), slots=256)
    for at in range(12):
        await engine.serve(at)
    reads = tier.batches("get")
    assert engine.hits == 0
    assert sum(reads[-2:]) <= 2 * TRIAL_BLOCKS, "trials are small"
    await asyncio.sleep(3600)  # so that no work is in flight
    tier.block_s = 0.0001
    served: list[int] = []
    for at in range(12, 12 + 3 * TRIAL_EVERY):
        assert await engine.serve(at) <= MOST
        served.append(engine.hits)
    assert served[-TRIAL_EVERY:] == [32] * TRIAL_EVERY, served
    await cache.aclose()


async def test_a_tier_that_recovers_behind_a_faster_one_is_used_again() -> None:
    """Also by requests for which a part of the blocks is useless."""
    tiers = [made("own", 1e-4, "lines"), made("own", 0.1, "lines")]
    for tier, part in zip(tiers, (slice(16), slice(16, 32)), strict=True):
        first = await SimCache.open(spec(FakeTier(store=tier.store)), slots=40 * 32)
        for prompt in range(40):
            first.save(Engine.keys(prompt, 32)[part])
        await first.settle()
        await first.aclose()
    cache = await SimCache.open(*map(spec, tiers), slots=256)
    engine = Engine(cache, tiers[0])
    for at in range(4):
        await engine.serve(at)
    assert engine.hits == 16
    saves = AvoidedCompute(32 * LAYOUT.block_tokens, whole=True)
    tiers[1].block_s = 1e-4
    await asyncio.sleep(3600)
    for at in range(4, 4 + 3 * TRIAL_EVERY):
        fetch = cache.manager.fetch(engine.keys(at, 32), saves=saves)
        await engine.compute(fetch, engine.now)
    assert engine.hits == 32
    await cache.aclose()


async def test_a_trial_of_removed_blocks_does_no_harm() -> None:
    tier = made("own", 1.0, "lines")
    cache, engine = await opened(tier, range(20), slots=256)
    for at in range(4):
        await engine.serve(at)
    await asyncio.sleep(3600)
    for at in range(4, 4 + 2 * TRIAL_EVERY):
        fetch = cache.manager.fetch(engine.keys(at, 32))
        cache.manager.remove(engine.keys(at, 32))  # before the loop runs a trial
        await engine.compute(fetch, engine.now)
    assert cache.manager.stats()["host"]["task_failures"] == 0
    await cache.aclose()


async def test_few_requests_try_a_slow_tier() -> None:
    tier = made("own", 0.1, "lines")
    cache, engine = await opened(tier, range(40), slots=256)
    for at in range(3):
        await engine.serve(at)
    await asyncio.sleep(3600)
    tier.calls.clear()
    for at in range(3, 3 + 8 * TRIAL_EVERY):
        await engine.serve(at)
        await asyncio.sleep(60)
        assert engine.hits == 0
    assert tier.batches("get") == [TRIAL_BLOCKS] * 8
    assert cache.manager.stats()["level1"]["slower"] >= 8 * TRIAL_EVERY * 32
    await cache.aclose()


async def test_a_hanging_tier_delays_one_request_briefly() -> None:
    tier = made("own", 0.001, "lines")
    cache, engine = await opened(tier, range(40), slots=256)
    for at in range(4):
        await engine.serve(at)
    assert engine.hits == 32
    tier.block_s = 1e6
    times = [await engine.serve(at) for at in range(4, 40)]
    assert times[0] <= 2
    assert max(times[1:]) <= MOST, times
    await cache.aclose()


async def test_blocks_in_flight_for_another_request_are_joined_or_not_waited_for() -> None:
    """Single flight: two requests for one prompt, and one read of each block."""
    for speed_s, hits in ((0.0005, 32), (1.0, 0)):
        tier = made("own", speed_s, "lines")
        cache, engine = await opened(tier, range(20), slots=256)
        for at in range(3):
            await engine.serve(at)
        await asyncio.sleep(3600)
        began, tier_calls = engine.now, len(tier.calls)
        one = cache.manager.fetch(engine.keys(3, 32))
        two = cache.manager.fetch(engine.keys(3, 32))
        await engine.compute(one, began)
        assert (engine.hits, two.done) == (hits, True)
        await engine.compute(two, engine.now)
        assert engine.hits == hits
        keys = [key for call in tier.calls[tier_calls:] for key in call.keys]
        assert len(keys) == len(set(keys))
        await cache.aclose()


async def test_hosts_part_is_served_while_the_rest_is_computed() -> None:
    tier = made("own", 0.1, "lines")
    cache, engine = await opened(tier, range(20), slots=256)
    new = engine.keys(3, 8)
    cache.manager.fetch(new).release()
    await asyncio.sleep(3600)
    assert cache.manager.lookup(new).host == 8
    for at in range(4):
        await engine.serve(at)
    assert engine.hits == 8
    await cache.aclose()


async def test_late_answers_are_kept_without_being_waited_for() -> None:
    """The second request for a prompt uses the answer to the first one's probe."""
    tier = made("shared", 0.0, "calls", answer_s=0.1)
    cache, engine = await opened(tier, range(20), slots=256)
    times = [await engine.serve(at) for at in range(8)]
    assert max(times[2:]) <= 1, times
    assert engine.hits == 0
    assert await engine.serve(7) < 0.2
    assert engine.hits == 32
    await cache.aclose()


async def test_a_fetch_that_waits_behind_other_prompts_may_take_longer() -> None:
    """The tier may use the time in which the engine computes other prompts."""
    tier = made("own", 0.025, "wire")
    cache, engine = await opened(tier, range(20), slots=256)
    for at in range(3):
        await engine.serve(at)
    for behind, hits in ((0, 0), (1024, 32)):
        saves = AvoidedCompute(32 * LAYOUT.block_tokens, behind=behind)
        fetch = cache.manager.fetch(engine.keys(3 + behind % 7, 32), saves=saves)
        await engine.compute(fetch, engine.now)
        assert engine.hits == hits
    await cache.aclose()


async def test_a_useless_part_of_a_prefix_is_not_fetched() -> None:
    """Blocks that are worth something only together, because of a window, are not judged alone."""
    tier = made("own", 0.025, "lines")
    cache, engine = await opened(tier, range(20), slots=256)
    for at in range(3):
        await engine.serve(at)
    keys = engine.keys(4, 4)
    for tokens, hits in ((4 * LAYOUT.block_tokens, 0), (256, 4)):
        fetch = cache.manager.fetch(keys, saves=AvoidedCompute(tokens, whole=True))
        await engine.compute(fetch, engine.now)
        assert engine.hits == hits
    await cache.aclose()


async def test_arrived_blocks_extend_patience_once_they_lead_the_prefix() -> None:
    cache, engine = await opened(made("own", 0.0, "calls"), [0], slots=8)
    shared, loader = cache.stack.shared, cache.stack.loader
    slots = cache.arena.lease(2) or []
    fetch = Fetch(engine.keys(0, 4), stack=loader, shared=shared, deadline_s=engine.now + 10.0)
    patience = CostEstimate(1.0, 0.0, whole=False).patience(0, 4, engine.now)
    fetch.patience = patience
    with shared.lock:
        fetch.extend([NO_SLOT] * 4, ["level1"] * 4)
    await asyncio.sleep(0.3)
    with shared.lock:
        fetch.arrived([1], [slots[1]], "level1")
        assert not fetch.queues_for([2], patience.end_s(0)), "of no use before the first is here"
        fetch.arrived([0], [slots[0]], "level1")
    await asyncio.sleep(2.0)
    assert not fetch.done
    await asyncio.sleep(patience.end_s(2) - engine.now)
    assert (fetch.done, fetch.blocks) == (True, 2)
    fetch.release()
    await cache.aclose()


async def test_an_engine_without_compute_times_waits_until_the_deadline() -> None:
    tier = made("own", 1.0, "calls")
    cache, engine = await opened(tier, range(4), slots=256)
    for at in range(3):
        began = engine.now
        fetch = cache.manager.fetch(engine.keys(at, 32), deadline_s=3.0)
        while not fetch.done:  # noqa: ASYNC110 - an engine asks at every step
            await asyncio.sleep(STEP_S)
        assert (fetch.blocks, round(engine.now - began, 1)) == (32, 1.0)
        fetch.release()
    await cache.aclose()
