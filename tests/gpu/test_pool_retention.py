"""Cases R: priorities by token range, their durations, and the blocks that they keep."""

from __future__ import annotations

import pytest

from kvladder.policy.retention import Retention, RetentionRange
from tests.gpu.engine import Engine, priority_of

Range = tuple[int, int | None, int]


def retention(*ranges: Range, decode: int = 35, duration_s: float | None = None) -> Retention:
    held = tuple(RetentionRange(start, end, p, duration_s) for start, end, p in ranges)
    return Retention(held, decode_priority=decode, decode_duration_s=duration_s)


def priorities(engine: Engine) -> list[int]:
    return [block.priority for event in engine.pool.snapshot() for block in event.blocks]


@pytest.mark.parametrize(
    "ranges",
    [
        pytest.param([(0, None, 80), (64, 128, 80)], id="R-1"),
        pytest.param([(0, 64, 80), (64, 32, 80)], id="R-2"),
        pytest.param([(0, 64, 80), (30, 128, 80)], id="R-3"),
        pytest.param([(0, 64, 101)], id="R-4 above"),
        pytest.param([(0, 64, -1)], id="R-4 below"),
    ],
)
def test_r1_to_r4_wrong_ranges_never_reach_the_pool(ranges: list[Range]) -> None:
    engine = Engine(8)
    with pytest.raises(ValueError, match=r"range|priority"):
        engine.run(range(4), retention=retention(*ranges))
    assert engine.pool.free == 8
    assert len(engine.pool._ledger.index) == 0


@pytest.mark.parametrize(
    ("block", "tokens", "ranges", "expected"),
    [
        pytest.param(64, 256, [(0, 64, 80), (64, 128, 50)], [80, 50, 35, 35], id="R-5"),
        pytest.param(32, 127, [(0, 63, 80), (63, 127, 30)], [80, 80, 30, 30], id="R-6"),
        pytest.param(32, 128, [(0, 1, 80), (1, 2, 5)], [80, 35, 35, 35], id="R-7"),
        pytest.param(256, 192, [(0, 128, 80)], [80], id="R-8"),
        pytest.param(64, 192, [(0, 65, 80), (65, 129, 30)], [80, 80, 30], id="R-9"),
        pytest.param(64, 256, [(0, 64, 80), (129, None, 50)], [80, 35, 35, 50], id="R-10"),
        pytest.param(64, 256, [(0, 64, 80), (66, 67, 50)], [80, 35, 35, 35], id="R-11"),
    ],
)
def test_r5_to_r11_a_block_takes_the_range_of_its_first_token(
    block: int, tokens: int, ranges: list[Range], expected: list[int]
) -> None:
    engine = Engine(8, block_tokens=block)
    engine.run(range(tokens), retention=retention(*ranges))
    assert priorities(engine) == expected


def test_r15_a_request_at_20_loses_to_the_blocks_of_90_and_35_but_not_to_10() -> None:
    engine = Engine(4)
    first = engine.begin(range(8), retention=retention((0, 4, 90), (4, 8, 10)))
    second = engine.begin(range(8, 16))
    engine.release(first)
    engine.release(second)
    engine.run(range(16, 24), retention=retention((0, None, 20)))
    assert engine.run(range(8, 16)) == 4
    assert engine.run(range(8)) == 4
    assert engine.run(range(16, 24)) == 0


def test_r18_a_duration_survives_offload_and_plain_reuse_and_ends_on_time() -> None:
    engine = Engine(4, host=4)
    engine.run(range(4), retention=retention((0, None, 80), duration_s=0.005))
    [key] = engine.keys(range(4))
    engine.clock.now_s = 0.002
    engine.pool.evict(1)
    assert key in engine.host.blocks
    assert engine.host.offered[0].until_s == 0.005
    assert engine.run(range(5)) == 4
    assert engine.host.brought == [key]
    engine.clock.now_s = 0.004
    assert engine.run(range(5)) == 4
    assert priority_of(engine.pool, key) == 80
    engine.clock.now_s = 0.005
    assert priority_of(engine.pool, key) == 35
    engine.check()


def test_r18_a_priority_below_the_default_stays_when_its_retention_expires() -> None:
    engine = Engine(4)
    engine.run(range(4), retention=retention((0, None, 10), duration_s=0.005))
    [key] = engine.keys(range(4))
    engine.clock.now_s = 1.0
    assert priority_of(engine.pool, key) == 10


def test_only_a_new_explicit_retention_arms_the_duration_again() -> None:
    engine = Engine(4)
    engine.run(range(4), retention=retention((0, None, 80), duration_s=1.0))
    [key] = engine.keys(range(4))
    engine.clock.now_s = 0.9
    engine.run(range(5), retention=retention((4, None, 60)))
    engine.clock.now_s = 1.0
    assert priority_of(engine.pool, key) == 35
    engine.run(range(5), retention=retention((0, None, 70), duration_s=1.0))
    engine.clock.now_s = 1.9
    assert priority_of(engine.pool, key) == 70
    engine.run(range(5), retention=retention((0, None, 90)))
    engine.clock.now_s = 99.0
    assert priority_of(engine.pool, key) == 90


def test_a_duration_begins_when_the_block_can_be_reused() -> None:
    engine = Engine(4)
    wanted = retention((0, None, 80), duration_s=1.0)
    sequence = engine.sequences.begin(range(6), retention=wanted)
    engine.clock.now_s = 5.0
    engine.compute(sequence)
    engine.clock.now_s = 7.0
    engine.release(sequence)
    whole, tail = priorities(engine)
    assert priority_of(engine.pool, engine.keys(range(4))[0]) == 35
    assert (whole, tail) == (80, 80)
    assert priorities(engine) == [35, 80]
    engine.clock.now_s = 8.0
    engine.pool._retainer.expire()
    assert priorities(engine) == [35, 35]


def test_blocks_filled_while_decoding_take_the_decode_priority_not_the_range() -> None:
    engine = Engine(8)
    wanted = retention((0, None, 80), decode=20, duration_s=1.0)
    engine.run(range(6), range(6, 18), retention=wanted)
    assert priorities(engine) == [80, 80, 20, 20, 20]
    engine.clock.now_s = 1.0
    engine.pool._retainer.expire()
    assert priorities(engine) == [35, 35, 20, 20, 20]
    engine.check()


def test_the_decode_priority_has_its_own_duration() -> None:
    engine = Engine(8)
    wanted = Retention((RetentionRange(0, None, 80, None),), 90, 2.0)
    engine.run(range(6), range(6, 18), retention=wanted)
    for now_s, decoded in ((1.0, 90), (2.0, 35)):
        engine.clock.now_s = now_s
        engine.pool._retainer.expire()
        assert priorities(engine) == [80, 80, decoded, decoded, decoded]


def test_an_expired_block_takes_its_place_by_its_last_use() -> None:
    engine = Engine(3)
    engine.run(range(4), retention=retention((0, None, 80), duration_s=1.0))
    engine.run(range(100, 104))
    engine.run(range(200, 204))
    engine.clock.now_s = 1.0
    engine.pool.evict(1)
    assert [len(engine.pool.match(engine.keys(range(s, s + 4)))) for s in (0, 100)] == [0, 1]


def test_a_block_below_a_cheap_ancestor_is_offered_with_its_floor() -> None:
    engine = Engine(4, host=4)
    engine.run(range(8), retention=retention((0, 4, 5), (4, 8, 90)))
    engine.pool.evict(2)
    assert [(v.priority, v.floor) for v in engine.host.offered] == [(5, 5), (90, 5)]
    assert not engine.host.blocks
