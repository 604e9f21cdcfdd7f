"""A prompt that fits an otherwise unused pool is admitted, whatever is cached in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvladder.errors import OutOfBlocks
from kvladder.gpu.pool.pool import Partial
from kvladder.policy.offload import OffloadRule
from tests.gpu.device import FULL, Model
from tests.gpu.engine import Engine

PARTIALS = pytest.mark.parametrize("partial", ["off", "take", "copy"])


@PARTIALS
@pytest.mark.parametrize("warm", [[0] * 4, [0, 0, 0, 0, 9, 9], [0, 5], [0] * 7 + [5]])
def test_a_prompt_that_fills_the_pool_and_shares_a_part_of_a_block(
    partial: Partial, warm: Sequence[int]
) -> None:
    e = Engine(8, partial=partial)
    e.run(warm)
    whole = e.begin([0] * 32)
    e.release(whole)


@PARTIALS
def test_a_prompt_that_fills_the_pool_over_tiers(partial: Partial) -> None:
    stack = {
        "arena": {"size": 16 * 4096},
        "gpu": {"partial": partial},
        "tiers": [{"type": "host"}],
    }
    model = Model(stack, FULL, blocks=8, context=32)
    model.run([1, 2, 3])
    model.run([1] * 32)
    model.settle()
    model.close()


def test_a_leaf_that_cannot_be_copied_is_taken_over_and_its_tokens_are_served() -> None:
    e = Engine(2, partial="copy")
    e.run([0] * 6)
    assert e.run([0] * 5 + [1, 1, 1]) == 5


def test_a_block_with_followers_is_recomputed_and_not_taken_over() -> None:
    e = Engine(3, partial="copy")
    e.run(range(9))
    assert e.run([0, 1, 2, *range(50, 59)]) == 0


@PARTIALS
@pytest.mark.parametrize("back", range(1, 8))
@pytest.mark.parametrize("host", [0, 1])
def test_the_only_request_rewinds_in_a_pool_that_it_fills(
    partial: Partial, back: int, host: int
) -> None:
    e = Engine(2, partial=partial, host=host, rule=OffloadRule(min_priority=0))
    only = e.begin(range(8))
    e.sequences.rewind(only, back)
    e.sequences.append(only, range(50, 50 + back))
    e.compute(only)
    e.release(only)
    assert e.pool.used == 0


@PARTIALS
@pytest.mark.parametrize("host", [0, 1])
def test_the_only_request_can_fill_a_pool_after_its_fork_has_computed(
    partial: Partial, host: int
) -> None:
    e = Engine(3, partial=partial, host=host, rule=OffloadRule(min_priority=0))
    only = e.sequences.begin([0] * 9)
    [other] = e.sequences.fork(only, 1)
    e.compute(other)
    e.check()
    e.release(other)
    e.sequences.append(only, [0])
    e.check()
    e.compute(only)
    e.verify(only)
    e.release(only)


@PARTIALS
def test_a_rewound_block_that_others_hold_is_never_written(partial: Partial) -> None:
    e = Engine(2, partial=partial)
    one = e.begin(range(8))
    [other] = e.sequences.fork(one, 1)
    e.sequences.rewind(one, 1)
    with pytest.raises(OutOfBlocks):
        e.sequences.append(one, [50])
    e.verify(other)
    e.release(other)
    e.sequences.append(one, [50])
    e.compute(one)


def test_followers_of_an_overwritten_block_are_forgotten_everywhere() -> None:
    e = Engine(2, host=2, rule=OffloadRule(min_priority=0), events_max=1000, partial="take")
    only = e.begin(range(8))
    e.sequences.rewind(only, 5)
    e.sequences.append(only, range(50, 55))
    e.compute(only)
    assert e.pool.present(e.keys(range(8))) == [False, False]
    e.release(only)
    assert e.run([0, 1, 2, *range(50, 55)]) == 7
