"""Fetches and saves that their owner loses: their slots are released, with a warning."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import pytest

import kvladder
from kvladder.manager import BatchedFetch, CacheManager, Fetch, Save
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeTier
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.testing.steps import Hold

SLOTS = 16
FIRST = SimCache.keys(1, *range(1, SLOTS))
OTHERS = SimCache.keys(2, *range(1, SLOTS))


async def filled(*levels: LevelSpec) -> SimCache:
    """Return a cache with ``FIRST`` in all its slots and its levels."""
    cache = await SimCache.open(*levels, slots=SLOTS)
    cache.save(FIRST)
    await cache.settle()
    return cache


def lost_fetch(manager: CacheManager) -> None:
    fetch: Fetch = manager.fetch(FIRST)
    assert fetch.done
    assert fetch.blocks == SLOTS


def lost_set(manager: CacheManager) -> None:
    fetch = manager.fetch_set(FIRST)
    assert fetch.done
    assert len(fetch.found) == SLOTS


def lost_save(manager: CacheManager) -> None:
    manager.remove(FIRST)
    save: Save = manager.save(FIRST)
    assert len(save.slots) == SLOTS


def lost_paced(manager: CacheManager) -> None:
    fetches: list[BatchedFetch] = []
    for half in (FIRST[:8], FIRST[8:]):  # which is as much as pieces may hold
        fetches.append(manager.fetch_paced(half))
        fetches[-1].ready  # noqa: B018 - it is what asks
    assert fetches[0].count


LOST = [lost_fetch, lost_set, lost_save, lost_paced]


@pytest.mark.parametrize("lose", LOST)
async def test_lost_fetches_and_saves_are_released_with_a_warning(
    lose: Callable[[CacheManager], None], caplog: pytest.LogCaptureFixture
) -> None:
    cache = await filled()
    manager = cache.manager
    with pytest.warns(ResourceWarning, match="was not released: call release"):
        lose(manager)
    with caplog.at_level(logging.WARNING):
        save = manager.save(OTHERS)
    assert len(save.slots) == SLOTS
    save.abort()
    assert "was garbage-collected before its release" in caplog.text
    assert manager.stats()["loop"]["unreleased"] >= 1
    paced = manager.fetch_paced(OTHERS)
    assert paced.ready  # none is before it
    paced.close()
    cache.manager.check()
    await cache.aclose()


async def test_a_lost_fetch_is_released_once_its_blocks_have_arrived() -> None:
    hold = Hold(on="get")
    tier = FakeTier()
    cache = await filled(LevelSpec(tier, OffloadRule(when="commit"), capacity_blocks=64))
    cache.save(OTHERS)
    await cache.settle()
    tier.script.append(hold)
    fetch = cache.manager.fetch(FIRST)
    assert not fetch.done
    del fetch
    hold.let_go()
    with pytest.warns(ResourceWarning):
        await cache.settle()
    assert cache.manager.stats()["loop"]["unreleased"] == 1
    assert cache.stack.host.index.pinned == 0
    cache.manager.check()
    await cache.aclose()


async def test_a_fetch_may_be_lost_while_the_lock_is_held() -> None:
    """A collection of garbage may begin anywhere."""
    cache = await filled()
    fetch = cache.manager.fetch(FIRST)
    assert fetch.done
    with cache.stack.lock, pytest.warns(ResourceWarning):
        del fetch
    assert cache.manager.stats()["loop"]["unreleased"] == 1
    assert cache.stack.host.index.pinned == 0
    await cache.aclose()


@pytest.mark.slow
async def test_released_or_empty_fetches_are_not_lost() -> None:
    cache = await filled()
    manager = cache.manager
    fetch, missing, save = manager.fetch(FIRST), manager.fetch(OTHERS), manager.save(FIRST)
    assert fetch.done
    assert missing.done
    fetch.release()
    paced = manager.fetch_paced(FIRST)
    assert paced.ready
    paced.close()
    del fetch, missing, save, paced
    gc.collect()
    assert manager.stats()["loop"]["unreleased"] == 0
    await cache.aclose()


def test_closing_reports_unreleased_fetches_and_saves() -> None:
    layout = kvladder.Layout(block_tokens=4, block_bytes=4096, fields={"model": "m"})
    stack = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}]}
    said: list[str] = []
    with kvladder.open_cache(stack, layout=layout) as cache:
        cache.save(FIRST).commit()
        fetch = cache.fetch(FIRST[:3])
        assert fetch.wait()
        cache.remove(FIRST[4:6])
        save = cache.save(FIRST[4:6])

        class Releasing(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())
                fetch.release()  # or the arena stays mapped
                save.abort()

        handler, logger = Releasing(), logging.getLogger("kvladder")
        logger.addHandler(handler)
        try:
            cache.close()
        finally:
            logger.removeHandler(handler)
    (text,) = said
    assert text.startswith("closing: 3 blocks of fetches and 2 of saves were not released")
