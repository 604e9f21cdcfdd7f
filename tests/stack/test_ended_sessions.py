"""The blocks that the end of a session removes, and those that another request has kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvladder.manager import CacheManager
from kvladder.policy.offload import OffloadRule
from kvladder.testing.fakes import FakeTier
from kvladder.testing.stacks import LevelSpec, SimCache

SYSTEM = SimCache.keys(*range(1, 5))
CHAT = SimCache.keys(*range(1, 9))[4:]


def fetched(manager: CacheManager) -> None:
    manager.fetch(SYSTEM).release()


def fetched_for_another(manager: CacheManager) -> None:
    manager.fetch(SYSTEM, session="b").release()


def fetched_as_a_set(manager: CacheManager) -> None:
    manager.fetch_set(SYSTEM).release()


def touched(manager: CacheManager) -> None:
    manager.touch(SYSTEM)


def offered(manager: CacheManager) -> None:
    manager.save(SYSTEM).abort()


async def ended(use: Callable[[CacheManager], None], *, first: bool = False) -> list[int]:
    """Return how many blocks of both parts each level has once their session has ended.

    Another request uses the first part; with ``first`` it was there before the session.
    """
    tier = FakeTier()
    cache = await SimCache.open(LevelSpec(tier, OffloadRule(when="commit")), slots=16)
    manager = cache.manager
    if first:
        cache.save(SYSTEM, priorities=[100] * len(SYSTEM))
    cache.save([*SYSTEM, *CHAT], session="a")
    await cache.settle()
    use(manager)
    manager.sessions.use("a", [[*SYSTEM, *CHAT]])
    manager.end_session("a")
    await cache.settle()
    left = [*manager.lookup(SYSTEM), *manager.lookup(CHAT)]
    cache.manager.check()
    await cache.aclose()
    return left


@pytest.mark.parametrize("use", [fetched, fetched_for_another, fetched_as_a_set, touched, offered])
async def test_blocks_used_by_another_request_outlast_their_session(
    use: Callable[[CacheManager], None],
) -> None:
    assert await ended(use) == [len(SYSTEM), len(SYSTEM), 0, 0]


async def test_blocks_used_only_by_a_session_leave_every_level_with_it() -> None:
    assert await ended(lambda _: None) == [0, 0, 0, 0]


async def test_blocks_pinned_before_a_session_outlast_it() -> None:
    assert await ended(lambda _: None, first=True) == [len(SYSTEM), len(SYSTEM), 0, 0]
