"""Sessions: which blocks are whose, and what ends with them."""

from __future__ import annotations

from random import Random

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.sessions import LATER, Sessions


def keys(*names: int) -> list[BlockKey]:
    return [BlockKey(name.to_bytes(32)) for name in names]


def test_a_session_ends_with_what_it_brought_in_and_nobody_else_used() -> None:
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


def test_what_was_there_before_a_session_outlasts_it() -> None:
    sessions = Sessions()
    sessions.brought(None, keys(1, 2))
    sessions.use("a", [keys(1, 2, 3)])
    assert sessions.end("a") == []


def test_what_a_request_without_a_session_uses_outlasts_the_one_that_brought_it_in() -> None:
    sessions = Sessions()
    sessions.brought("a", keys(1, 2, 3, 4))
    sessions.use("a", [keys(1, 2, 3, 4)])
    sessions.met(None, keys(1))
    sessions.brought(None, keys(2))
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


def test_as_many_are_remembered_as_there_is_room_for() -> None:
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
