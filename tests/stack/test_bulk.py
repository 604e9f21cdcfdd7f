"""Bulk operations on blocks have the same effect as single ones."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from kvladder import keys
from kvladder.policy import eviction
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeTier
from kvladder.testing.sim import SimLoop
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading import plan, reads
from kvladder.tiers.ladder.loading.fetch import Fetch
from kvladder.tiers.ladder.records import index
from tests.stack.caches import COMMIT, cache_of

KINDS: dict[str, tuple[tuple[OffloadRule, ...], dict[str, Any]]] = {
    "host alone": ((), {}),
    "a level below": ((COMMIT,), {}),
    "a level that gets what leaves": ((OffloadRule(),), {}),
    "two of them": ((OffloadRule(), COMMIT), {}),
    "a level that wants what is hit": ((OffloadRule(when="commit", min_hits=2),), {}),
    "blocks that expire": ((COMMIT,), {"host": OffloadRule(ttl_s=5.0)}),
}


def everything(cache: SimCache) -> dict[str, Any]:
    """All that is known of each level, by key, and all that was counted."""
    found: dict[str, Any] = {"stats": cache.manager.stats()}
    levels: list[HostLevel | Level] = [cache.stack.host, *cache.levels]
    for level in levels:
        held = level.index
        places = {key: held.place(key) or 0 for key in held}
        found[level.name] = {
            "blocks": {key: held.meta(place) for key, place in places.items()},
            "pins": {key: held.pins(place) for key, place in places.items()},
            "expires": {key: held.expires_s(place) for key, place in places.items()},
            "order": [held.key_at(place) for place in held.victims()],
        }
    return found


async def play(cache: SimCache, seed: int) -> list[Any]:
    """Apply random operations to prefixes, many of them equal."""
    draw = Random(seed)
    seen: list[Any] = []
    open_fetches: list[Fetch] = []
    for _ in range(60):
        some = cache.keys(draw.randrange(4), *range(draw.choice([1, 5, 39, 60])))
        what = draw.randrange(8)
        if what < 3:
            higher = [PRIORITY_DEFAULT + 5] * len(some)
            options: list[dict[str, Any]] = [{}, {}, {"priorities": higher}, {"ttl_s": 9.0}]
            seen.append(cache.save(some, **draw.choice(options)))
        elif what < 5:
            fetch = cache.manager.fetch(some)
            seen.append(list(fetch.planned))
            open_fetches.append(fetch)
        elif what == 5 and open_fetches:
            fetch = open_fetches.pop(draw.randrange(len(open_fetches)))
            for key, slot in zip(fetch.keys, fetch.slots, strict=False):
                assert bytes(cache.arena.view(slot)[:64]) == cache.payload(key)
            fetch.release()
        elif what == 6:
            cache.manager.remove(draw.sample(some, 1))
        else:
            await asyncio.sleep(draw.choice([0.5, 3.0]))
        cache.manager.check()
        seen.append(everything(cache))
    for fetch in open_fetches:
        fetch.release()
    seen.append(everything(cache))
    return seen


async def run(kind: str, seed: int) -> list[Any]:
    rules, options = KINDS[kind]
    levels = [LevelSpec(FakeTier(), rule, capacity_blocks=256) for rule in rules]
    async with cache_of(*levels, slots=100, **options) as cache:
        return await play(cache, seed)


@pytest.mark.slow
@pytest.mark.product("kind", "seed")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_bulk_operations_match_single_ones(
    monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    found: list[list[Any]] = []
    for least, small in ((2, -1 if seed % 2 else keys.SMALL), (10**9, keys.SMALL)):
        monkeypatch.setattr(keys, "SMALL", small)  # below it, books are as those of large levels
        for module in (plan, reads, eviction, index):
            monkeypatch.setattr(module, "BULK_MIN", least)
        with asyncio.Runner(loop_factory=lambda: SimLoop(seed)) as runner:
            found.append(runner.run(run(kind, seed)))
    at_once, one_by_one = found
    for step, (one, other) in enumerate(zip(at_once, one_by_one, strict=True)):
        assert one == other, step
