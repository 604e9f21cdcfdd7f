"""Events are bounded and report their losses; recurring notices are logged once a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvladder.events import Overflow, Removed, Stored
from kvladder.keys import BlockKey
from kvladder.metrics import Histogram, LevelStats
from kvladder.notices import Notices
from kvladder.tiers.ladder.base_level import EventBuffer

A, B = BlockKey(b"a" * 32), BlockKey(b"b" * 32)


def never(function: object) -> None:
    raise AssertionError(f"nobody listens: {function}")


def test_events_come_once_and_in_order() -> None:
    buffer = EventBuffer(10, post=never)
    buffer.stored("host", [A, B])
    buffer.removed("host", [A], "evicted")
    buffer.stored("host", [])
    assert buffer.take() == [Stored("host", (A, B)), Removed("host", (A,), "evicted")]
    assert buffer.take() == []


def test_v_5_a_full_buffer_reports_how_many_it_lost() -> None:
    buffer = EventBuffer(2, post=never)
    for key in (A, B, A):
        buffer.stored("host", [key])
    assert buffer.take() == [Overflow(1), Stored("host", (B,)), Stored("host", (A,))]
    assert buffer.take() == []


def test_nothing_is_collected_with_events_off() -> None:
    buffer = EventBuffer(0, post=never)
    buffer.stored("host", [A])
    buffer.removed("host", [A], "removed")
    assert buffer.take() == []


def test_listeners_are_called_once_for_all_that_happens_before_it() -> None:
    posted: list[Callable[[], object]] = []
    heard: list[str] = []
    buffer = EventBuffer(10, post=posted.append)

    def listener() -> None:
        heard.append("once")
        buffer.stored("host", [B])  # it is reported again

    buffer.listen(listener)
    buffer.stored("host", [])
    assert not posted
    buffer.stored("host", [A])
    buffer.removed("host", [A], "removed")
    assert heard == []
    posted.pop()()
    assert heard == ["once"]
    assert len(posted) == 1
    buffer.ignore(listener)
    posted.pop()()
    buffer.stored("host", [A])
    assert heard == ["once"]
    assert not posted


def test_a_follower_sees_each_block_once_until_it_takes_them() -> None:
    buffer = EventBuffer(0, post=never)
    changes = buffer.follow()
    buffer.stored("host", [A])
    buffer.removed("host", [A], "removed")
    changes.add([B])
    assert A in changes
    assert list(changes.take()) == [A, B]
    assert A not in changes
    buffer.unfollow(changes)
    buffer.unfollow(changes)
    buffer.stored("host", [A])
    assert list(changes.take()) == []


def test_a_fault_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    times = [0.0, 1.0, 59.0, 61.0, 61.0]
    notices = Notices(lambda: times.pop(0))
    with caplog.at_level(logging.WARNING, "kvladder"):
        for _ in range(4):
            notices.say("nvme", "it failed")
        notices.say("redis", "another")
    assert [record.message for record in caplog.records] == [
        "it failed",
        "it failed (2 more like this in the last 61 s)",
        "another",
    ]


def test_nothing_is_logged_while_the_lock_is_held(caplog: pytest.LogCaptureFixture) -> None:
    posted: list[tuple[object, ...]] = []
    is_held = True
    notices = Notices(lambda: 0.0, held=lambda: is_held, post=lambda *call: posted.append(call))
    with caplog.at_level(logging.WARNING, "kvladder"):
        notices.say("nvme", "it failed")
        assert not caplog.records
        is_held = False
        notices.say("redis", "it failed, too")
        ((log, *arguments),) = posted
        assert callable(log)
        log(*arguments)
    assert [record.message for record in caplog.records] == ["it failed, too", "it failed"]


def test_statistics_are_plain_numbers() -> None:
    stats = LevelStats()
    stats.stored += 3
    for priority in (35, 39, 100):
        stats.drop("queue", priority)
    stats.drop("full", 0)
    found = stats.as_dict(8)
    assert found["stored"] == 3
    assert (found["dropped_queue"], found["dropped_full"]) == (3, 1)
    assert found.pop("dropped") == {"queue": {"30": 2, "100": 1}, "full": {"0": 1}}
    assert set(found.pop("stored_call_s")) == {"le", "counts", "sum"}
    assert set(found.pop("loaded_call_s")) == {"le", "counts", "sum"}
    assert all(isinstance(value, int | float) for value in found.values())


def test_a_value_is_counted_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1, 10))
    for value in (0.5, 1, 2, 11):
        histogram.observe(value)
    assert histogram.as_dict() == {"le": [1, 10], "counts": [2, 1, 1], "sum": 14.5}
