"""Sessions: which blocks are whose, and what ends with them."""

from __future__ import annotations

from random import Random

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.sessions import Sessions


def keys(*names: int) -> list[BlockKey]:
    return [BlockKey(name.to_bytes(32)) for name in names]


def test_what_ends_with_a_session_is_what_no_other_has() -> None:
    sessions = Sessions()
    sessions.use("a", [keys(1, 2)])
    sessions.use("a", [keys(1, 2, 3)], "salt")
    sessions.use("b", [keys(1, 9)])
    assert sessions.last("a") == ([keys(1, 2, 3)], "salt")
    assert sessions.end("a") == keys(2, 3)
    assert sessions.end("b") == keys(1, 9)
    sessions.check()


def test_a_session_that_ended_is_refused() -> None:
    sessions = Sessions()
    sessions.use("a", [keys(1)])
    sessions.end("a")
    for call in (sessions.end, sessions.last, sessions.require_open):
        with pytest.raises(ValueError, match="session 'a' has ended: expected the name of another"):
            call("a")
    with pytest.raises(ValueError, match="has ended"):
        sessions.use("a", [keys(1)])
    for call in (sessions.end, sessions.last):
        with pytest.raises(ValueError, match="session 'b' is not known: expected one that had a"):
            call("b")


def test_as_many_are_remembered_as_there_is_room_for() -> None:
    sessions = Sessions(sessions_max=3, blocks_max=10)
    draw = Random(1)
    for _ in range(500):
        name = str(draw.randrange(12))
        try:
            if draw.random() < 0.2:
                sessions.end(name)
            else:
                sessions.use(name, [keys(*(draw.randrange(30) for _ in range(4)))])
                assert sessions.last(name)
        except ValueError:
            pass
        sessions.check()
    sessions.use("large", [keys(*range(100, 150))])
    assert len(sessions) == 1, "it stays, its end is still to come"
    assert sessions.end("large") == keys(*range(100, 150))
    sessions.check()
