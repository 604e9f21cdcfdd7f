"""Measurements of tiers and of computing, and the decisions based on them."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.policy.fetch_cost import (
    ANYTHING,
    ENDS_MAX,
    FORGET,
    GRACE_S,
    STEPS,
    TRIAL_EVERY,
    AvoidedCompute,
    CostEstimate,
    Curve,
    FetchCostModel,
    LevelRun,
    Pace,
    RequestTimestamp,
    stretches,
)


def measured(*points: tuple[int, float]) -> Pace:
    """Return a pace with these measurements of blocks and seconds, one read after the other."""
    pace, now_s = Pace(), 0.0
    for blocks, seconds in points:
        mark = pace.asked(blocks, now_s)
        now_s += seconds
        pace.came(mark, blocks, now_s, found=True)
    return pace


def test_a_curve_interpolates_and_guesses_the_best_beyond() -> None:
    curve = Curve()
    assert (curve.at(8), curve.within(8)) == (None, None)
    curve.add(8, 1.0)
    curve.add(32, 2.0)
    assert [curve.at(n) for n in (4, 8, 20, 32, 1000)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert (curve.within(8), curve.within(32)) == (1.0, 2.0)
    assert curve.within(20) == pytest.approx(3.75)
    assert curve.within(64) == pytest.approx(10.0)


def test_a_curve_restarts_at_a_jump_and_averages_smaller_changes() -> None:
    curve = Curve()
    curve.add(8, 1.0)
    curve.add(64, 4.0)
    curve.add(8, 2.0)
    assert (curve.at(8), curve.at(64)) == (1.5, 4.0)
    curve.add(8, 0.01)
    assert (curve.at(8), curve.at(64)) == (0.01, 0.01)


def test_old_measurements_are_forgotten() -> None:
    curve = Curve()
    curve.add(64, 1.0)
    for _ in range(FORGET):
        curve.add(8, 1.0)
    assert curve.within(64) != 1.0


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-5, 100)), min_size=1, max_size=40))
def test_a_curve_stays_within_its_measurements(points: list[tuple[int, float]]) -> None:
    curve = Curve()
    for amount, seconds in points:
        curve.add(amount, seconds)
        longest = max(seconds for _, seconds in points)
        for n in (1, amount, 10_000):
            found = curve.at(n)
            assert found is not None
            assert 0 < found <= longest * (1 + 1e-9)


def test_reads_in_flight_count_as_ahead_and_hanging_ones_as_slow() -> None:
    pace = measured((8, 1.0))
    assert pace.seconds(4, 1.0) == 0.5
    pace.asked(8, 1.0)
    assert pace.ahead == 8
    assert pace.seconds(8, 1.5) == 1.0
    assert pace.seconds(8, 100.0) == 99.0
    pace.came(RequestTimestamp(100.0, 8), 4, 100.0, found=False)
    assert pace.seconds(8, 100.5) == 1.0, "something has come: it does not hang any more"
    fresh = Pace()
    assert (fresh.seconds(8, 5.0), fresh.within(8)) == (None, inf)
    fresh.asked(8, 5.0)
    assert fresh.seconds(8, 6.0) == 1.0


def test_an_abandoned_read_counts_with_at_least_its_time() -> None:
    pace = measured((8, 1.0))
    pace.came(pace.asked(8, 1.0), 8, 1.001, found=False)
    assert pace.seconds(8, 2.0) == 1.0, "a miss says nothing of how fast blocks come"
    pace.came(pace.asked(8, 2.0), 8, 7.0, found=False)
    assert pace.seconds(8, 7.0) == 5.0


def test_an_idle_slow_level_is_tried_by_one_fetch_in_every_few() -> None:
    pace = measured((8, 1.0))
    assert [pace.spurn() for _ in range(2 * TRIAL_EVERY)].count(True) == 2
    mark = pace.asked(8, 1.0)
    assert not any(pace.spurn() for _ in range(2 * TRIAL_EVERY))
    pace.came(mark, 8, 2.0, found=True)
    assert pace.spurn()


def choose(*runs: LevelRun, end: int, block_s: float = 0.1, behind_s: float = 0.0) -> int:
    return CostEstimate(block_s, behind_s, whole=False).choose(stretches(runs), end, 100.0)[0]


def test_blocks_slower_to_load_than_to_compute_are_left_out() -> None:
    fast, slow, unknown = measured((8, 0.1)), measured((8, 4.0)), Pace()
    assert choose(LevelRun(2, 8, fast), end=10) == 10
    assert choose(LevelRun(2, 8, slow), end=10) == 2
    assert choose(LevelRun(2, 8, unknown), end=10) == 10
    assert choose(LevelRun(0, 8, fast), LevelRun(8, 8, slow), end=16) == 8
    assert choose(LevelRun(0, 8, slow), LevelRun(8, 8, fast), end=16) == 0
    assert choose(LevelRun(0, 8, slow), end=100) == 100, "what follows is in host memory"
    assert choose(LevelRun(2, 8, slow), end=10, behind_s=6.0) == 10
    mixed = LevelRun(0, 8, fast), LevelRun(8, 1, measured((1, 0.9)))
    assert choose(*mixed, end=9) == 8
    assert choose(*mixed, end=9, behind_s=1.0) == 9, "until then the engine is busy"


def test_a_fetch_must_save_a_fifth_of_the_time_of_computing() -> None:
    assert choose(LevelRun(0, 8, measured((8, 0.63))), end=8) == 8
    assert choose(LevelRun(0, 8, measured((8, 0.65))), end=8) == 0
    estimate = CostEstimate(0.1, 0.0, whole=False)
    assert [estimate.worth(8, seconds) for seconds in (0.63, 0.65, 0.81)] == [True, False, False]


def test_with_many_alternating_levels_not_every_end_is_examined() -> None:
    paces = [Pace(), Pace()]
    runs = [LevelRun(at, 1, paces[at % 2]) for at in range(1000)]
    found = stretches(runs)
    assert len(found) <= ENDS_MAX
    assert [part[0].first for part in found[:3]] == [0, 32, 64]
    assert [(run.first, run.new) for run in found[0]] == [(0, 16), (1, 16)]
    assert sum(run.new for part in found for run in part) == 1000
    assert stretches(runs[:ENDS_MAX]) == [[run] for run in runs[:ENDS_MAX]]
    assert stretches([]) == []


def test_a_part_is_worthless_where_only_the_whole_is_useful() -> None:
    runs = [LevelRun(0, 8, measured((8, 0.1))), LevelRun(8, 8, measured((8, 4.0)))]
    assert CostEstimate(0.1, 0.0, whole=True).choose(stretches(runs), 16, 100.0)[0] == 0
    assert CostEstimate(0.4, 0.0, whole=True).choose(stretches(runs), 16, 100.0)[0] == 16
    assert CostEstimate(0.1, 0.0, whole=True).patience(0, 16, 0.0).block_s == 0


def test_patience_grows_with_arrivals_and_ends_with_the_compute_time() -> None:
    estimate = CostEstimate(0.1, 0.0, whole=False)
    patience = estimate.patience(2, 12, 50.0)
    assert patience.end_s(0) == patience.end_s(2) == pytest.approx(50.1 + GRACE_S)
    assert patience.end_s(7) == pytest.approx(50.6 + GRACE_S)
    assert estimate.trusting(patience, 10, 0.2, 50.0).end_s(2) == pytest.approx(50.5)
    assert estimate.trusting(patience, 10, 0.7, 50.0).end_s(2) == pytest.approx(51.0)


def test_steps_of_few_tokens_are_a_bound_until_longer_ones_are_known() -> None:
    worth = FetchCostModel()
    worth.prefilled(0, 1.0)
    assert worth.estimate(AvoidedCompute(100), 10) is None
    worth.prefilled(10, 0.1)
    estimate = worth.estimate(AvoidedCompute(100), 10)
    assert estimate is not None
    assert estimate.worth(10, 0.79)
    assert not estimate.worth(10, 0.81)
    assert worth.sample(AvoidedCompute(1600), 100) == 16, "a bound is no measurement"
    worth.prefilled(64, 0.064)
    for _ in range(STEPS):
        worth.prefilled(1, 9.0)
    estimate = worth.estimate(AvoidedCompute(100), 10)
    assert estimate is not None
    assert not estimate.worth(10, 0.081)


def test_one_slow_step_does_not_change_the_estimate() -> None:
    worth = FetchCostModel()
    worth.prefilled(3, 9.0)
    for seconds in (1.0, 50.0, 1.0, 1.1):
        worth.prefilled(1000, seconds)
    estimate = worth.estimate(AvoidedCompute(100, behind=1000), 10)
    assert estimate is not None
    assert estimate.worth(10, 0.87)
    assert not estimate.worth(10, 0.89)


def test_many_short_steps_do_not_hide_the_time_of_long_prompts() -> None:
    """A GPU computes a hundred tokens in the time of one: long prompts must be measured."""
    worth = FetchCostModel()
    worth.prefilled(100, 0.0)
    short = worth.estimate(AvoidedCompute(8000), 500)
    assert short is not None, "better than nothing"
    assert not short.worth(500, 0.1)
    worth.prefilled(4000, 0.4)
    for _ in range(3 * STEPS):
        worth.prefilled(100, 0.0005)
    for saves, seconds, is_worth in (
        (AvoidedCompute(8000), 0.6, True),
        (AvoidedCompute(100), 0.005, False),
        (AvoidedCompute(100, behind=4000), 0.3, True),
    ):
        estimate = worth.estimate(saves, 10)
        assert estimate is not None
        assert estimate.worth(10, seconds) == is_worth


@pytest.mark.parametrize("seconds", [nan, inf, -1.0])
def test_impossible_times_are_not_measurements(seconds: float) -> None:
    worth = FetchCostModel()
    worth.prefilled(1000, seconds)
    assert worth.estimate(AvoidedCompute(100), 10) is None


def test_a_sample_is_computed_once_and_only_if_the_engine_reports_times() -> None:
    worth = FetchCostModel()
    assert worth.sample(AvoidedCompute(1600), 100) == 0
    worth.prefilled(0, 0.0)
    assert worth.sample(AvoidedCompute(100), 10) == 5, "nothing at all is known"
    assert worth.sample(AvoidedCompute(10), 1) == 1
    worth.prefilled(3, 0.1)
    assert worth.sample(AvoidedCompute(1600), 100) == 16
    assert worth.sample(AvoidedCompute(160), 10) == 5
    assert worth.sample(AvoidedCompute(100), 10) == 0, "too short to tell"
    assert worth.sample(AvoidedCompute(1600, whole=True), 100) == worth.sample(ANYTHING, 100) == 0
    worth.prefilled(64, 0.1)
    assert worth.sample(AvoidedCompute(1600), 100) == 0


def test_fetching_always_ignores_measurements() -> None:
    worth = FetchCostModel(always=True)
    worth.prefilled(1000, 0.001)
    assert worth.estimate(AvoidedCompute(100), 10) is None
    assert worth.sample(AvoidedCompute(1600), 100) == 0


def test_the_compute_time_is_reported_as_measured() -> None:
    worth = FetchCostModel()
    assert worth.seconds(100) is None
    worth.prefilled(100, 2.0)
    worth.prefilled(1000, 10.0)
    assert worth.seconds(50) == pytest.approx(1.0)
    assert worth.seconds(2000) == pytest.approx(20.0)
    assert FetchCostModel(always=True).seconds(1) is None
