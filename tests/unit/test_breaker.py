"""The circuit breaker opens, tries again, and has a way back."""

from __future__ import annotations

from kvladder.tiers.ladder.calling.breaker import Breaker, BreakerSettings

SETTINGS = BreakerSettings(failures=2, retry_s=5.0, retry_max_s=15.0)


def opened() -> Breaker:
    breaker = Breaker(SETTINGS)
    breaker.failure(0.0)
    assert breaker.state == "closed"
    breaker.failure(0.0)
    return breaker


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_a_trial() -> None:
    breaker = opened()
    assert breaker.state == "open"
    assert not breaker.begin(4.9)
    assert breaker.retry_in_s(3.0) == 2.0
    assert breaker.begin(5.0)
    assert breaker.state == "trial"
    assert not breaker.allows(5.0), "one call decides"
    breaker.success()
    assert breaker.state == "closed"
    assert breaker.retry_in_s(0.0) == 0.0
    assert breaker.begin(5.0)


def test_a_success_in_between_resets_the_count() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(5):
        breaker.failure(0.0)
        breaker.success()
    assert breaker.state == "closed"
    assert breaker.opened == 0


def test_each_failed_trial_doubles_the_wait_up_to_its_maximum() -> None:
    breaker, now, waits = opened(), 0.0, list[float]()
    for _ in range(4):
        waits.append(breaker.retry_in_s(now))
        now += waits[-1]
        assert breaker.begin(now)
        breaker.failure(now)
    assert waits == [5.0, 10.0, 15.0, 15.0]
    now += breaker.retry_in_s(now)
    assert breaker.begin(now)
    breaker.success()
    breaker.failure(now)
    breaker.failure(now)
    assert breaker.retry_in_s(now) == 5.0


def test_calls_that_fail_while_it_is_open_change_nothing() -> None:
    breaker = opened()
    breaker.failure(4.0)
    assert breaker.retry_in_s(4.0) == 1.0
    assert breaker.opened == 1


def test_an_abandoned_trial_counts_for_nothing_and_the_next_call_is_the_trial() -> None:
    breaker = opened()
    assert breaker.begin(5.0)
    breaker.give_up()
    assert breaker.state == "open"
    assert breaker.begin(5.0)
    breaker.failure(5.0)
    assert breaker.retry_in_s(5.0) == 10.0
    breaker = Breaker(SETTINGS)
    breaker.give_up()
    assert breaker.state == "closed"
