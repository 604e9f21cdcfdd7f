"""Cases E: the order of eviction, offloadable blocks, and wrong calls that change nothing."""

from __future__ import annotations

import pytest

from kvladder.errors import BlocksBusy, ConfigError, NotHeld, OutOfBlocks, PoolError
from kvladder.gpu.pool.commit import Content
from kvladder.gpu.pool.pool import ROOT, PoolSettings
from kvladder.gpu.tree.names import DeviceSlot
from kvladder.keys import BlockKey
from kvladder.policy.offload import OffloadRule
from kvladder.policy.retention import Retention, RetentionRange
from tests.gpu.engine import Engine, priority_of


def at(priority: int, duration_s: float | None = None) -> Retention:
    return Retention((RetentionRange(0, None, priority, duration_s),))


def on_device(engine: Engine, tokens: range) -> int:
    return len(engine.pool.match(engine.keys(tokens)))


def test_e1_fresh_and_claimed_counts() -> None:
    engine = Engine(8, host=4)
    assert (engine.pool.free, len(engine.host.free)) == (8, 4)
    engine.run(range(4))
    slots = engine.pool.allocate(1)
    assert (engine.pool.free, len(engine.host.free)) == (7, 4)
    engine.pool.evict(1)
    assert (engine.pool.free, len(engine.host.free)) == (7, 3)
    engine.pool.release(slots)
    engine.check()


def test_e2_a_claimed_block_is_not_handed_out_again() -> None:
    engine = Engine(8)
    slots = [engine.pool.allocate(1)[0] for _ in range(8)]
    assert sorted(slots) == list(range(8))
    with pytest.raises(OutOfBlocks):
        engine.pool.allocate(1)


def test_e3_a_block_released_to_the_front_is_next_and_others_are_not() -> None:
    engine = Engine(8)
    [first] = engine.pool.allocate(1)
    engine.pool.release([first], front=True)
    assert engine.pool.allocate(1) == [first]
    engine.pool.release([first])
    assert engine.pool.allocate(1) != [first]


def test_e3_a_cached_block_released_to_the_front_goes_next() -> None:
    engine = Engine(8)
    for start in (0, 100, 200):
        engine.run(range(start, start + 4))
    slots = engine.pool.acquire(engine.keys(range(200, 204)))
    engine.pool.release(slots, front=True)
    engine.pool.evict(1)
    assert [on_device(engine, range(s, s + 4)) for s in (0, 100, 200)] == [1, 1, 0]


def test_e3_cached_blocks_released_to_the_front_go_in_the_order_of_their_release() -> None:
    engine = Engine(8)
    starts = (0, 100, 200)
    for start in (300, *starts):
        engine.run(range(start, start + 4))
    slots = [slot for s in starts for slot in engine.pool.acquire(engine.keys(range(s, s + 4)))]
    engine.pool.release(slots, front=True)
    for gone in (1, 2, 3):
        engine.pool.evict(1)
        held = [on_device(engine, range(s, s + 4)) for s in (*starts, 300)]
        assert held == [0] * gone + [1] * (4 - gone)


def test_e4_blocks_released_as_b2_then_b1_leave_in_this_order_after_the_others() -> None:
    engine = Engine(8)
    [b1], [b2] = engine.pool.allocate(1), engine.pool.allocate(1)
    engine.pool.release([b2])
    engine.pool.release([b1])
    others = engine.pool.allocate(6)
    assert not {b1, b2} & set(others)
    assert [engine.pool.allocate(1), engine.pool.allocate(1)] == [[b2], [b1]]


def test_e5_the_priority_of_the_last_retention_decides_about_the_offload() -> None:
    engine = Engine(8, host=4)
    engine.run(range(4))
    engine.pool.evict(1)
    assert len(engine.host.blocks) == 1
    assert engine.run(range(5), retention=at(5)) == 4
    assert not engine.host.blocks
    engine.pool.evict(8)
    assert not engine.host.blocks
    assert len(engine.pool._ledger.index) == 0


def test_e6_priority_5_goes_before_priority_80() -> None:
    engine = Engine(8)
    engine.run(range(4), retention=at(80))
    engine.run(range(100, 104), retention=at(5))
    engine.pool.evict(1)
    assert (on_device(engine, range(4)), on_device(engine, range(100, 104))) == (1, 0)


def test_all_blocks_of_the_lowest_priority_go_before_any_of_the_next() -> None:
    """The order of release and the number of requested blocks do not matter."""
    engine = Engine(12)
    given = [80, 5, 35, 5, 80, 35, 5, 0, 100, 0, 5, 80]
    for number, priority in enumerate(given):
        engine.run(range(100 * number, 100 * number + 4), retention=at(priority))
    left = sorted(given)
    for count in (1, 3, 1, 4, 2):
        engine.pool.evict(count)
        del left[:count]
        here = [p for n, p in enumerate(given) if on_device(engine, range(100 * n, 100 * n + 4))]
        assert sorted(here) == left


def test_e7_80_for_a_millisecond_is_35_two_milliseconds_later() -> None:
    engine = Engine(8)
    engine.run(range(4), retention=at(80, 0.001))
    [key] = engine.keys(range(4))
    assert priority_of(engine.pool, key) == 80
    engine.clock.now_s = 0.002
    assert priority_of(engine.pool, key) == 35
    engine.check()


def test_e9_a_block_released_twice_raises_and_changes_nothing() -> None:
    engine = Engine(8)
    [slot, other] = engine.pool.allocate(2)
    engine.pool.retain([slot])
    before = engine.pool._ledger.refs.held(), list(engine.pool._ledger.free)
    for wrong in ([other, slot, slot], [other, slot, DeviceSlot(99)]):
        with pytest.raises(NotHeld):
            engine.pool.release(wrong)
    assert before == (engine.pool._ledger.refs.held(), list(engine.pool._ledger.free))
    engine.pool.release([slot, other])
    engine.pool.release([slot])
    before = engine.pool._ledger.refs.held(), list(engine.pool._ledger.free)
    for wrong in ([slot], [slot, slot], [DeviceSlot(99)], [DeviceSlot(-1)]):
        with pytest.raises(NotHeld):
            engine.pool.release(wrong)
    assert before == (engine.pool._ledger.refs.held(), list(engine.pool._ledger.free))
    engine.check()


def test_e10_a_block_in_the_last_tier_is_never_offered_for_offload() -> None:
    engine = Engine(2, host=1)
    for start in (0, 100, 200):
        engine.run(range(start, start + 4))
    engine.pool.evict(2)
    assert len(engine.host.blocks) == 1
    assert len(engine.host.offered) == len({victim.key for victim in engine.host.offered}) == 3
    alone = Engine(2)
    alone.run(range(4))
    alone.pool.evict(1)
    assert alone.pool.stats.offloaded == 0


def test_e11_more_than_can_be_freed_raises_and_changes_nothing() -> None:
    engine = Engine(8, events_max=100)
    engine.run(range(8))
    held = engine.pool.allocate(3)
    engine.events.take()
    order = engine.pool._ledger.order.ordered()
    state = engine.pool._ledger.refs.held(), list(engine.pool._ledger.free), engine.pool.snapshot()
    with pytest.raises(OutOfBlocks) as caught:
        engine.pool.allocate(6)
    assert (caught.value.needed, caught.value.available) == (6, 5)
    with pytest.raises(OutOfBlocks):
        engine.begin(range(40))
    assert state == (
        engine.pool._ledger.refs.held(),
        list(engine.pool._ledger.free),
        engine.pool.snapshot(),
    )
    assert engine.pool._ledger.order.ordered() == order
    assert engine.events.take() == []
    engine.check()
    assert len(engine.pool.allocate(5)) == 5
    assert len(held) == 3


def test_e11_inner_blocks_cannot_be_freed_while_only_their_children_are_held() -> None:
    engine = Engine(4)
    engine.run(range(12))
    keys = engine.keys(range(12))
    slots = engine.pool.acquire(keys)
    engine.pool.release(slots[:2])
    order = engine.pool._ledger.order.ordered()
    with pytest.raises(OutOfBlocks):
        engine.pool.allocate(2)
    assert engine.pool._ledger.order.ordered() == order
    engine.check()
    assert engine.pool.evict(9) == 0
    engine.pool.release(slots[2:])
    assert len(engine.pool.allocate(4)) == 4
    engine.check()


def test_e12_a_threshold_is_inclusive() -> None:
    engine = Engine(8, host=4, rule=OffloadRule(min_priority=35))
    engine.run(range(4), retention=at(35))
    engine.run(range(100, 104), retention=at(34))
    engine.pool.evict(2)
    assert list(engine.host.blocks) == engine.keys(range(4))


def test_e13_leaves_go_first_whatever_their_ancestors_are_worth() -> None:
    engine = Engine(8)

    def request(start: int, prompt: int, decode: int) -> None:
        retention = Retention((RetentionRange(0, None, prompt),), decode_priority=decode)
        tokens = range(start, start + 12)
        engine.run(tokens, [start + 12, start + 13], retention=retention)

    request(0, 5, 90)
    request(100, 90, 5)
    assert engine.pool.cached == 8
    slots = engine.pool.allocate(3)
    engine.pool.release(slots)
    assert [on_device(engine, range(s, s + 12)) for s in (0, 100)] == [2, 3]
    assert engine.run(range(12)) == 8


def test_e14_after_the_lower_priority_is_empty_the_higher_one_gives() -> None:
    engine = Engine(4)
    engine.run(range(4), retention=at(20))
    engine.run(range(100, 104), retention=at(80))
    engine.pool.release(engine.pool.allocate(3))
    assert on_device(engine, range(4)) == 0
    engine.pool.release(engine.pool.allocate(4))
    assert engine.pool.cached == 0
    engine.check()


def test_exactly_as_much_is_evicted_as_is_needed() -> None:
    engine = Engine(8)
    engine.run(range(24))
    engine.pool.allocate(5)
    assert engine.pool.stats.evicted == 3
    assert on_device(engine, range(24)) == 3


def test_a_block_that_is_held_is_not_evicted_until_it_is_released() -> None:
    engine = Engine(3)
    engine.run(range(8))
    slots = engine.pool.acquire(engine.keys(range(8)))
    assert len(slots) == 2
    assert engine.pool.free == 1
    engine.run(range(100, 104))
    with pytest.raises(OutOfBlocks):
        engine.pool.allocate(2)
    assert on_device(engine, range(8)) == 2
    for wrong in ([slots[0], slots[0]], [DeviceSlot(2)]):
        with pytest.raises(NotHeld):
            engine.pool.release(wrong)
    engine.pool.release(slots)
    with pytest.raises(NotHeld):
        engine.pool.release(slots)
    assert len(engine.pool.allocate(3)) == 3
    engine.check()


def test_a_prefix_that_a_request_holds_is_not_evicted_for_it() -> None:
    engine = Engine(3)
    engine.run(range(8))
    with pytest.raises(OutOfBlocks):
        engine.run(range(16))
    assert on_device(engine, range(8)) == 2
    engine.run(range(12))
    engine.check()


def test_a_slot_that_is_being_offloaded_is_not_handed_out() -> None:
    engine = Engine(2, host=4, delayed=True)
    engine.run(range(8))
    with pytest.raises(BlocksBusy):
        engine.pool.allocate(1)
    assert engine.pool.used == 1
    with pytest.raises(BlocksBusy):
        engine.begin(range(100, 108))
    for ticket in sorted(engine.host.flights):
        engine.host.complete(ticket)
    assert len(engine.pool.allocate(2)) == 2
    engine.check()


def test_slots_that_only_copies_hold_are_waited_for() -> None:
    engine = Engine(4)
    held = engine.pool.allocate(3)
    engine.pool.copying(held[:2])
    with pytest.raises(BlocksBusy):
        engine.pool.allocate(3)
    with pytest.raises(OutOfBlocks) as failure:  # one is held by a request
        engine.pool.allocate(4)
    assert type(failure.value) is OutOfBlocks
    engine.pool.copies_ended(held[:2])
    with pytest.raises(OutOfBlocks) as failure:
        engine.pool.allocate(3)
    assert type(failure.value) is OutOfBlocks
    engine.pool.release(held)
    engine.check()


@pytest.mark.parametrize("tokens", [0, 1, 3, 12, -4])
def test_a_block_size_that_is_no_power_of_two_above_1_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        PoolSettings(8, tokens)


def test_wrong_settings_and_counts_are_refused() -> None:
    for wrong in ({"blocks": 0}, {"partial": "half"}):
        with pytest.raises(ConfigError):
            PoolSettings(**{"blocks": 8, "block_tokens": 4, **wrong})  # type: ignore[arg-type]
    engine = Engine(8)
    with pytest.raises(ValueError, match="expected 0 or more"):
        engine.pool.allocate(-1)
    with pytest.raises(ValueError, match="expected 0 or more"):
        engine.pool.evict(-1)
    with pytest.raises(NotHeld):
        engine.pool.retain([DeviceSlot(0)])


def test_a_wrong_commit_is_refused_before_anything_changed() -> None:
    engine = Engine(8)
    a, b = engine.pool.allocate(2)
    one, two = BlockKey(b"1" * 32), BlockKey(b"2" * 32)

    def content(*keys: BlockKey) -> Content:
        return Content(keys, ROOT, ROOT.key, bytes(16 * len(keys)))

    with pytest.raises(NotHeld):
        engine.pool.commit([DeviceSlot(7)], content(one))
    with pytest.raises(PoolError):
        engine.pool.commit([a, a], content(one, two))
    with pytest.raises(PoolError):
        engine.pool.commit([a, b], content(one, one))
    with pytest.raises(ValueError, match="slots"):
        engine.pool.commit([a, b], content(one))
    assert len(engine.pool._ledger.index) == 0
    assert engine.pool.commit([a], content(one)) == [a]
    assert engine.pool.commit([a], content(one)) == [a]
    with pytest.raises(PoolError):
        engine.pool.commit([a], content(two))
    unknown = Content([two], ROOT, BlockKey(b"9" * 32), bytes(16))
    assert engine.pool.commit([b], unknown) is None
    assert len(engine.pool._ledger.index) == 1
    engine.check()


def test_a_shared_block_or_one_with_followers_is_not_taken_over() -> None:
    engine = Engine(8)
    engine.run(range(8))
    first, second = engine.keys(range(8))
    with pytest.raises(NotHeld):
        engine.pool.serving.take_over(second)
    slots = engine.pool.acquire([first, second])
    with pytest.raises(PoolError):
        engine.pool.serving.take_over(first)
    assert engine.pool.serving.take_over(second) == slots[1]
    with pytest.raises(NotHeld):
        engine.pool.serving.take_over(second)
    engine.check()
