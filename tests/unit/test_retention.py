"""Retention: the acceptance cases R-1 to R-11, decode blocks, durations, bad input."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT, PrioritizedLRU
from kvladder.policy.retention import Retention, RetentionRange, checked_priority
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.records.meta import BlockMeta

Range = tuple[int, int | None, int]


def retention(*ranges: Range, **options: float) -> Retention:
    made = tuple(RetentionRange(*given_) for given_ in ranges)
    return Retention(made, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param([(0, None, 80), (64, 128, 80)], id="R-1"),
        pytest.param([(0, 64, 80), (64, 32, 80)], id="R-2"),
        pytest.param([(0, 64, 80), (30, 128, 80)], id="R-3"),
        pytest.param([(64, 128, 80), (0, 64, 80)], id="out of order"),
        pytest.param([(0, 0, 80)], id="empty"),
        pytest.param([(-1, 4, 80)], id="negative"),
    ],
)
def test_ranges_that_overlap_or_are_reversed_are_refused(ranges: list[Range]) -> None:
    with pytest.raises(ValueError, match="range"):
        retention(*ranges)


@pytest.mark.parametrize("priority", [101, -1, True])
def test_r4_priorities_outside_0_to_100_are_refused(priority: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.100"):
        retention((0, None, priority))
    with pytest.raises(ValueError, match=r"0\.\.100"):
        Retention(decode_priority=priority)
    with pytest.raises(ValueError, match=r"0\.\.100"):
        Retention(default=priority)
    with pytest.raises(ValueError, match=r"0\.\.100"):
        checked_priority(priority)


@pytest.mark.parametrize(
    ("block", "tokens", "ranges", "expected"),
    [
        pytest.param(64, 256, [(0, 64, 80), (64, 128, 50)], [80, 50, None, None], id="R-5"),
        pytest.param(32, 127, [(0, 63, 80), (63, 127, 30)], [80, 80, 30, 30], id="R-6"),
        pytest.param(32, 128, [(0, 1, 80), (1, 2, 5)], [80, None, None, None], id="R-7"),
        pytest.param(256, 192, [(0, 128, 80)], [80], id="R-8"),
        pytest.param(64, 192, [(0, 65, 80), (65, 129, 30)], [80, 80, 30], id="R-9"),
        pytest.param(64, 256, [(0, 64, 80), (129, None, 50)], [80, None, None, 50], id="R-10"),
        pytest.param(64, 256, [(0, 64, 80), (66, 67, 50)], [80, None, None, None], id="R-11"),
        pytest.param(16, 0, [(0, None, 80)], [], id="no token"),
    ],
)
def test_a_block_takes_the_range_that_holds_its_first_token(
    block: int, tokens: int, ranges: list[Range], expected: list[int | None]
) -> None:
    kept = retention(*ranges)
    assert kept.explicit(block, tokens) == expected
    blocks = range(len(expected))
    found = kept.of_blocks(blocks, block_tokens=block, prompt_tokens=tokens)
    assert found == [(35 if one is None else one, None) for one in expected]


def test_only_prompt_blocks_take_ranges() -> None:
    kept = Retention(
        (RetentionRange(0, None, 80, 60.0),), decode_priority=10, decode_duration_s=5.0
    )
    found = kept.of_blocks(range(4), block_tokens=4, prompt_tokens=9)
    assert found == [(80, 60.0), (80, 60.0), (80, 60.0), (10, 5.0)]


def test_prompt_blocks_in_no_range_get_the_default_for_good() -> None:
    kept = retention((4, 8, 90), default=20)
    found = kept.of_blocks([2, 1, 0], block_tokens=4, prompt_tokens=12)
    assert found == [(20, None), (90, None), (20, None)]


def test_without_a_retention_every_block_has_the_default() -> None:
    found = Retention().of_blocks(range(3), block_tokens=4, prompt_tokens=8)
    assert found == [(PRIORITY_DEFAULT, None)] * 3


@pytest.mark.parametrize("duration_s", [-1.0, -1e-9])
def test_negative_durations_are_refused(duration_s: float) -> None:
    with pytest.raises(ValueError, match="duration"):
        RetentionRange(0, None, 80, duration_s)
    with pytest.raises(ValueError, match="duration"):
        Retention(decode_duration_s=duration_s)


@given(
    cuts=st.lists(st.integers(0, 300), min_size=2, unique=True),
    block=st.integers(1, 64),
    tokens=st.integers(0, 400),
)
def test_both_answers_agree_with_a_list_of_tokens(cuts: list[int], block: int, tokens: int) -> None:
    cuts.sort()
    ranges = [
        (start, end, number % 101)
        for number, (start, end) in enumerate(zip(cuts[::2], cuts[1::2], strict=False))
    ]
    kept = retention(*ranges)
    by_token: list[int | None] = [None] * tokens
    for start, end, priority in ranges:
        for token in range(start, min(end, tokens)):
            by_token[token] = priority
    expected = by_token[::block]
    assert kept.explicit(block, tokens) == expected
    found = kept.of_blocks(range(len(expected)), block_tokens=block, prompt_tokens=tokens)
    assert found == [(PRIORITY_DEFAULT if p is None else p, None) for p in expected]


# ---- durations: the index of a level keeps them


def index_with(priority: int, until_s: float) -> LevelIndex[int]:
    index = LevelIndex[int](PrioritizedLRU())
    index.insert([BlockKey(b"k")], [0], BlockMeta(priority, priority, until_s=until_s))
    return index


def test_e7_80_for_a_millisecond_is_35_two_milliseconds_later() -> None:
    index = index_with(80, 0.001)
    index.revert(0.0)
    assert index.meta(0).priority == 80
    index.revert(0.002)
    assert index.meta(0) == BlockMeta(PRIORITY_DEFAULT, 80)


def test_r18_expiry_never_promotes_and_survives_moving_and_reuse() -> None:
    index = index_with(10, 0.005)
    index.revert(1.0)
    assert index.meta(0).priority == 10
    host = index_with(80, 5.0)
    host.touch([0])
    host.pin([0])
    host.unpin([0])
    below = LevelIndex[int](PrioritizedLRU())
    below.insert([BlockKey(b"k")], [3], host.meta(0))
    below.revert(4.9)
    assert below.meta(3).priority == 80
    below.revert(5.0)
    assert below.meta(3) == BlockMeta(PRIORITY_DEFAULT, 80, until_s=inf)
