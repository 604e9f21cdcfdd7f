"""The page of the soak: what counts as a trouble, and which requests belong to a fault."""

from __future__ import annotations

from typing import Any

from benchmarks.soak.page import GIVEN_UP_S, Held, Outcome, Struck, faults_table, quiet
from benchmarks.soak.users import Asked


def outcome(**more: Any) -> Outcome:
    """Return a run of a minute: a fault from 10 to 14 s, whose level serves again at 16 s."""
    asked = [Asked("first", at, took, 0) for at, took in ((1, 0.1), (9, 2.0), (15, 0.5), (17, 0.1))]
    found = Outcome(
        minutes=1.0,
        seed=1,
        begun_s=0.0,
        alone_s=[0.1, 0.2, 0.3],
        asked=asked,
        wrong=0,
        failed=[],
        struck=[Struck("redis", "network", "cut", 10.0, 14.0, 16.0, 3, 0)],
        held=[Held("first", 20.0, 0, 90, 1 << 20)],
        served={"redis": 5},
    )
    return found._replace(**more)


def test_requests_of_a_fault_are_those_in_flight_until_the_level_serves_again() -> None:
    assert [one.begun_s for one in quiet(outcome())] == [1, 17]
    row = [cell.strip() for cell in faults_table(outcome())[-1].strip("|").split("|")]
    assert row[:3] == ["redis", "network", "cut"]
    rounds, requests, failed_calls, damaged, longest, times, median, _ = row[3:]
    assert (rounds, requests, failed_calls, damaged) == ("1", "2", "3", "0")
    assert (longest, times, median) == ("2,000 ms", "10.0", "2,000 ms")


def test_what_must_not_happen_is_told() -> None:
    assert outcome().troubles() == []
    late = Struck("redis", "network", "cut", 10.0, 14.0, None, 3, 0)
    held = Held("first", 20.0, 2, 90, 1 << 20)
    found = outcome(wrong=1, failed=["first: it has ended"], struck=[late], held=[held]).troubles()
    assert found == [
        "1 answers differ",
        "a request failed: first: it has ended",
        f"redis did not serve again within {GIVEN_UP_S:g} s: network cut",
        "first: 2 slots are held",
    ]
