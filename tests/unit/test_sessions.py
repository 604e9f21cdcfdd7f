"""Sessions: the owner of each block, and the blocks that end with a session."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from threading import Event, RLock

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.sessions import LATER, Sessions


def keys(*names: int) -> list[BlockKey]:
    return [BlockKey(name.to_bytes(32)) for name in names]


def test_ending_a_session_returns_the_blocks_that_only_it_used() -> None:
    sessions = Sessions()
    sessions.brought("a", keys(1, 2))
    sessions.use("a", [keys(1, 2)])
    sessions.brought("a", keys(3))
    sessions.use("a", [keys(1, 2, 3)], "salt")
    sessions.brought("b", keys(9))
    sessions.use("b", [keys(1, 9)])
    assert sessions.last("a") == ([keys(1, 2, 3)], "salt")
    assert sessions.owned("a") == sessions.end("a") == keys(2, 3)
    assert sessions.end("b") == keys(9), "it did not bring in the other one"
    sessions.check()


def test_blocks_present_before_a_session_outlast_it() -> None:
    sessions = Sessions()
    sessions.brought(None, keys(1, 2))
    sessions.use("a", [keys(1, 2, 3)])
    assert sessions.end("a") == []


def test_blocks_used_without_a_session_outlast_the_session() -> None:
    sessions = Sessions()
    sessions.brought("a", keys(1, 2, 3, 4))
    sessions.use("a", [keys(1, 2, 3, 4)])
    sessions.met(None, keys(1))
    sessions.brought(None, keys(2))
    sessions.saved(LATER, keys(3), keys(3))
    sessions.met(LATER, keys(3))
    sessions.met("a", keys(3))
    assert sessions.end("a") == keys(3, 4)
    sessions.check()


def test_a_session_that_ended_is_refused() -> None:
    sessions = Sessions()
    sessions.use("a", [keys(1)])
    sessions.end("a")
    for call in (sessions.end, sessions.last, sessions.owned, sessions.require_open):
        with pytest.raises(ValueError, match="session 'a' has ended: expected a new name"):
            call("a")
    with pytest.raises(ValueError, match="has ended"):
        sessions.use("a", [keys(1)])
    sessions.brought("b", keys(1))  # its first request is not over
    for call in (sessions.end, sessions.last):
        with pytest.raises(
            ValueError, match="session 'b' is not known: expected one with a finished"
        ):
            call("b")


def test_remembered_sessions_and_blocks_are_bounded() -> None:
    sessions = Sessions(sessions_max=3, blocks_max=10)
    draw = Random(1)
    for _ in range(1000):
        name = str(draw.randrange(12))
        some = keys(*(draw.randrange(30) for _ in range(4)))
        try:
            chance = draw.random()
            if chance < 0.2:
                sessions.end(name)
            elif chance < 0.4:
                sessions.brought(draw.choice((name, None)), some)
            elif chance < 0.5:
                sessions.met(draw.choice((name, None)), some)
            else:
                sessions.use(name, [some])
                assert sessions.last(name)
        except ValueError:
            pass
        sessions.check()
    sessions.brought("large", keys(*range(100, 150)))
    sessions.use("large", [keys(*range(100, 150))])
    assert len(sessions) == 1, "it stays, its end is still to come"
    assert sessions.end("large") == keys(*range(100, 150))
    sessions.check()


@pytest.mark.slow
def test_a_purge_in_another_thread_loses_no_count() -> None:
    sessions, over = Sessions(lock=RLock()), Event()
    runs = [keys(*range(100 * n, 100 * n + 100)) for n in range(20)]

    def purge() -> None:
        while not over.is_set():
            with suppress(ValueError):
                sessions.purge("one")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(1) as threads:
        purges = threads.submit(purge)
        try:
            for _ in range(1000):
                for run in runs:
                    sessions.brought("one", run)
                    sessions.use("one", [run])
        finally:
            over.set()
            sys.setswitchinterval(before)
    purges.result()
    sessions.check()
