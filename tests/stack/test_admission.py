"""A level with ``admit: adaptive`` in a stack: what it leaves out, and of whom that is told."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import RefusalReason
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from tests.stack.caches import cache_of

ADMIT = OffloadRule(admit="adaptive")


class Noting(Adaptive):
    """Notes what it is told of refusals."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[bytes, str]] = []

    def refused(self, keys: object, reason: RefusalReason) -> None:
        assert isinstance(keys, list)
        self.noted += [(key, reason) for key in keys]


def follow(cache: SimCache, rule: int) -> None:
    gate = cache.levels[0].gate
    assert gate is not None
    gate.admission.rule = rule


async def ask(cache: SimCache, *tokens: int) -> int:
    """Ask for a prompt, and save the rest of it."""
    keys = cache.keys(*tokens)
    fetch = cache.manager.fetch(keys)
    await cache.settle()
    assert fetch.done
    found = fetch.blocks
    fetch.release()
    cache.save(keys)
    await cache.settle()
    return found


async def test_blocks_asked_for_once_are_left_out_and_this_is_told() -> None:
    policy = Noting()
    async with cache_of(
        LevelSpec(FakeTier(), ADMIT, 40, policy=policy), slots=8, reserve_blocks=8
    ) as cache:
        follow(cache, 1)
        for prompt in range(10):
            assert await ask(cache, 100 * prompt, 1, 2, 3) == 0
        stats = cache.manager.stats()["level1"]
        assert stats["stored"] == 0
        assert stats["dropped_admission"] == len(policy.noted) == 40
        assert {reason for _, reason in policy.noted} == {"admission"}


async def test_a_block_that_was_left_out_is_offered_again_once_it_is_used() -> None:
    """Host holds it, and its reserve has had it offered and left out."""
    async with cache_of(LevelSpec(FakeTier(), ADMIT, 40), slots=4, reserve_blocks=4) as cache:
        follow(cache, 1)
        assert await ask(cache, 7, 8) == 0
        assert cache.manager.stats()["level1"]["dropped_admission"] == 2
        assert await ask(cache, 7, 8) == 2
        await ask(cache, 9)  # host looks at its next victims
        assert cache.manager.stats()["level1"]["stored"] == 2
        assert cache.levels[0].holds(cache.keys(7, 8)[1])


async def test_raised_blocks_are_always_taken() -> None:
    async with cache_of(LevelSpec(FakeTier(), ADMIT, 40), slots=4, reserve_blocks=4) as cache:
        follow(cache, 2)
        cache.save(cache.keys(1, 2), priorities=[80, 36])
        cache.save(cache.keys(3))
        await cache.settle()
        stats = cache.manager.stats()["level1"]
        assert (stats["stored"], stats["dropped_admission"]) == (2, 1)


async def test_below_two_levels_it_hears_what_leaves_the_second() -> None:
    levels = LevelSpec(FakeTier(), capacity_blocks=4), LevelSpec(FakeTier(), ADMIT, 40)
    async with cache_of(*levels, slots=8, reserve_blocks=4) as cache:
        gate = cache.levels[1].gate
        assert gate is not None
        assert cache.stack.host.on_evicted is None
        for prompt in range(6):
            await ask(cache, 100 * prompt, 1)
        assert cache.manager.stats()["level2"]["stored"] > 0
        gate.admission.rule = 1
        before = cache.manager.stats()["level2"]["stored"]
        for prompt in range(6, 12):
            await ask(cache, 100 * prompt, 1)
        stats = cache.manager.stats()["level2"]
        assert stats["stored"] == before
        assert stats["dropped_admission"] > 0


async def test_bytes_written_in_a_day_are_counted_from_the_start() -> None:
    async with cache_of(LevelSpec(FakeTier(), OffloadRule(when="commit")), slots=8) as cache:
        began_s = cache.stack.shared.clock.now()
        cache.save(cache.keys(1, 2, 3))
        await cache.settle()
        early = cache.manager.stats()["level1"]
        assert early["written_bytes_day"] == early["written_bytes"] * 24  # as if in an hour
        await asyncio.sleep(7200)
        stats = cache.manager.stats()["level1"]
        passed_s = cache.stack.shared.clock.now() - began_s
        assert stats["written_bytes"] == 3 * cache.arena.slot_bytes
        assert stats["written_bytes_day"] == pytest.approx(
            stats["written_bytes"] / passed_s * 86400
        )
