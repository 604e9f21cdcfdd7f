"""Events are bounded and say what they lost; recurring notices are said once a minute."""

from __future__ import annotations

import logging

import pytest

from kvladder.events import EventBuffer, Overflow, Removed, Stored
from kvladder.keys import BlockKey
from kvladder.metrics import LevelStats
from kvladder.notices import Notices

A, B = BlockKey(b"a" * 32), BlockKey(b"b" * 32)


def test_events_come_once_and_in_order() -> None:
    buffer = EventBuffer(10)
    buffer.stored("host", [A, B])
    buffer.removed("host", [A], "evicted")
    buffer.stored("host", [])
    assert buffer.take() == [Stored("host", (A, B)), Removed("host", (A,), "evicted")]
    assert buffer.take() == []


def test_v_5_a_full_buffer_reports_how_many_it_lost() -> None:
    buffer = EventBuffer(2)
    for key in (A, B, A):
        buffer.stored("host", [key])
    assert buffer.take() == [Overflow(1), Stored("host", (B,)), Stored("host", (A,))]
    assert buffer.take() == []


def test_nothing_is_collected_with_events_off() -> None:
    buffer = EventBuffer(0)
    buffer.stored("host", [A])
    buffer.removed("host", [A], "removed")
    assert buffer.take() == []


def test_a_fault_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
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


def test_statistics_are_plain_numbers() -> None:
    stats = LevelStats()
    stats.stored += 3
    stats.dropped["queue"] += 2
    flat = stats.as_dict()
    assert flat["stored"] == 3
    assert flat["dropped_queue"] == 2
    assert all(isinstance(value, int | float) for value in flat.values())
