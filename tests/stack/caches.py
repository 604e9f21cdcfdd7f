"""Helpers shared by the tests of the stack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeStore, FakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.calling.breaker import BreakerSettings, CallSettings
from kvladder.tiers.ladder.definition import LevelSettings

COMMIT = OffloadRule(when="commit")
QUICK = LevelSettings(
    calls=CallSettings(timeout_s=1.0, breaker=BreakerSettings(failures=2, retry_s=5.0))
)


@asynccontextmanager
async def cache_of(*levels: LevelSpec, **options: Any) -> AsyncIterator[SimCache]:
    cache = await SimCache.open(*levels, **options)
    try:
        yield cache
        cache.manager.check()
    finally:
        for level in levels:
            if isinstance(level.tier, FakeTier):
                level.tier.heal()
        await cache.aclose()
        for level in levels:
            if isinstance(level.tier, FakeTier):
                assert level.tier.violations == []


async def flushed(*paths: tuple[int, ...]) -> FakeStore:
    """Return a durable store with these prefixes."""
    store = FakeStore()
    async with cache_of(LevelSpec(FakeTier(store=store, durable=True)), slots=32) as cache:
        for path in paths:
            cache.save(cache.keys(*path))
    return store
