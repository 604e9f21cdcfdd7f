"""Cases O: to the tiers and back, with copies that end at once, late, in any order, or fail."""

from __future__ import annotations

from itertools import permutations
from typing import get_type_hints

import pytest

from kvladder.errors import NotHeld, NotReady
from kvladder.gpu.pool.below import Below, Victim
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.tree.index import PrefixIndex
from kvladder.gpu.tree.names import DeviceSlot, NodeId
from kvladder.policy.offload import OffloadRule
from kvladder.policy.retention import Retention, RetentionRange
from tests.gpu.engine import Engine

ANY = OffloadRule(min_priority=0)


def land(engine: Engine) -> None:
    """Complete all copies in flight."""
    while engine.host.flights:
        engine.host.complete(min(engine.host.flights))


def test_o1_a_prefix_is_served_from_both_levels() -> None:
    engine = Engine(4, host=4, partial="copy")
    assert engine.run(range(12)) == 0
    assert engine.run(range(100, 112)) == 0
    assert len(engine.host.blocks) == 2
    assert engine.run(range(4), [4, 5, 6, 7, 0, 0]) == 3
    engine.pool.evict(2)
    assert engine.run([*range(8), 0, 0]) == 9
    assert engine.pool.stats.onboarded > 0


def test_o1_a_block_with_children_below_is_kept_and_not_taken_over() -> None:
    engine = Engine(4, host=4)
    engine.run(range(12))
    engine.run(range(100, 112))
    assert engine.run(range(4), [4, 5, 6, 7, 0, 0]) == 0
    assert engine.run([*range(8), 0, 0]) >= 8


def test_a_host_block_gets_a_device_copy_when_it_is_recomputed() -> None:
    engine = Engine(4, host=4, delayed=True)
    engine.run(range(8))
    engine.pool.evict(1)
    sequence = engine.begin([0, 1, 2, 3, 9])
    engine.sequences.rewind(sequence, 1)
    engine.sequences.append(sequence, range(4, 9))
    land(engine)
    assert len(engine.pool.match(engine.keys(range(8)))) == 1
    engine.compute(sequence)
    assert len(engine.pool.match(engine.keys(range(8)))) == 2
    engine.release(sequence)
    copied = len(engine.host.copied)
    engine.pool.evict(2)
    assert [v.tokens for v in engine.host.copied[copied:]] == [1]  # the host has the other block


def test_a_part_of_a_block_below_is_claimed_under_its_own_salt() -> None:
    """The host checks the salt of each claim: it becomes the owner of a shared tier's block."""
    engine = Engine(4, host=4, partial="copy")
    engine.run(range(8), salt="a")
    engine.pool.evict(2)
    assert engine.run([*range(6), 0, 0], salt="a") == 6


@pytest.mark.parametrize("inclusive", [False, True])
def test_o3_after_a_second_offload_the_host_has_the_newest_bytes(inclusive: bool) -> None:
    engine = Engine(4, host=4, inclusive=inclusive)
    engine.run(range(4))
    [key] = engine.keys(range(4))
    engine.pool.evict(1)
    before = engine.host.blocks[key].kv
    assert engine.run(range(5)) == 4
    assert (key in engine.host.blocks) == inclusive
    [slot] = engine.pool.match([key])
    assert engine.device.kv[slot] == before
    if not inclusive:
        engine.device.kv[slot] = [b"newest"] * 4
    engine.pool.evict(4)
    assert engine.host.blocks[key].kv == (before if inclusive else [b"newest"] * 4)
    assert len(engine.host.copied) == (2 if inclusive else 3)  # the tail of the second run too


def test_o4_two_blocks_in_flight_never_share_a_host_slot() -> None:
    engine = Engine(4, host=2, rule=ANY, delayed=True)
    for start in (0, 100, 200):
        engine.run(range(start, start + 4))
    engine.pool.evict(3)
    flying = [kept.slot for kept in engine.host.blocks.values() if kept.flying]
    assert sorted(flying) == [0, 1]
    assert engine.pool.stats.evicted == 3
    assert len(engine.pool._moves.leaving) == 2
    land(engine)
    assert engine.pool.free == 4
    engine.check()


def test_o5_a_partial_copy_waits_until_its_source_has_arrived() -> None:
    engine = Engine(6, host=4, partial="copy", delayed=True)
    engine.run(range(8))
    engine.pool.evict(2)
    land(engine)
    first = engine.begin([*range(8), 8])
    assert len(first.waits) == 1
    second = engine.sequences.begin([0, 1, 2, 3, 4, 5, 99])
    assert second.cached == 6
    [copy] = second.copies
    assert {copy.after} == first.waits == second.waits
    assert not second.ready
    with pytest.raises(NotReady):
        engine.sequences.append(second, [1])
    land(engine)
    engine.compute(second)
    engine.compute(first)
    engine.release(first)
    engine.release(second)


@pytest.mark.parametrize("host", [0, 1])
def test_o7_a_block_that_no_tier_takes_is_dropped_with_one_removed_event(host: int) -> None:
    engine = Engine(2, host=host, events_max=100, delayed=True)
    high = Retention((RetentionRange(0, None, 90),))
    engine.run(range(100, 104), retention=high)
    engine.pool.evict(1)  # its copy is in flight, so the host is full and cannot evict it
    [key] = engine.keys(range(4))
    engine.run(range(4))
    engine.events.take()
    engine.pool.evict(1)
    assert [type(e).__name__ for e in engine.events.take()] == ["PoolRemoved"]
    assert key not in engine.pool._ledger.index


def test_o8_a_logical_id_is_no_address_by_type() -> None:
    match, find = get_type_hints(BlockPool.match), get_type_hints(PrefixIndex.find)
    assert match["return"] == list[DeviceSlot]
    assert find["return"] == NodeId | None
    assert get_type_hints(Victim)["slot"] is DeviceSlot
    hints = [get_type_hints(getattr(Below, name)) for name in ("claim", "onboard", "remove")]
    assert all(NodeId not in hint.values() for hint in hints)
    assert DeviceSlot is not NodeId  # and mypy refuses one for the other


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_o9_copies_may_end_in_any_order(order: tuple[int, ...]) -> None:
    engine = Engine(4, host=4, delayed=True)
    for start in (0, 100, 200):
        engine.run(range(start, start + 4))
        engine.pool.evict(1)
    tickets = sorted(engine.host.flights)
    assert engine.pool.used == 3
    for at in order:
        engine.host.complete(tickets[at])
        engine.check()
    assert engine.pool.used == 0
    running = [engine.sequences.begin(range(start, start + 5)) for start in (0, 100)]
    tickets = sorted(engine.host.flights)
    for at in order:
        if at < len(tickets):
            engine.host.complete(tickets[at])
    for sequence in running:
        assert sequence.cached == 4
        engine.compute(sequence)
        engine.release(sequence)


# ---- further of the same kind


def test_a_block_matched_during_its_offload_stays() -> None:
    engine = Engine(8, host=4, delayed=True)
    engine.run(range(8))
    engine.pool.evict(2)
    sequence = engine.begin(range(6))
    assert sequence.cached == 4
    assert len(engine.pool._moves.leaving) == 1
    land(engine)
    engine.check()
    assert engine.pool.stats.evicted == 1
    engine.release(sequence)
    assert len(engine.pool.match(engine.keys(range(4)))) == 1
    copied = len(engine.host.copied)
    engine.pool.evict(8)
    assert all(v.key not in engine.keys(range(4)) for v in engine.host.copied[copied:])
    engine.check()


def test_a_block_acquired_during_its_offload_stays() -> None:
    engine = Engine(8, host=4, delayed=True)
    engine.run(range(8))
    engine.pool.evict(2)
    keys = engine.keys(range(8))
    slots = engine.pool.acquire(keys)
    assert len(slots) == len(keys)
    assert engine.pool.leaving == 0
    assert engine.pool.stats.evicted == 0
    land(engine)
    engine.check()
    assert engine.pool.match(keys) == slots
    engine.pool.release(slots)
    engine.check()


def test_a_failed_offload_loses_only_its_block() -> None:
    engine = Engine(4, host=4, delayed=True, events_max=100)
    engine.run(range(4))
    engine.pool.evict(1)
    engine.events.take()
    engine.host.complete(min(engine.host.flights), ok=False)
    assert engine.pool.free == 4
    assert [type(e).__name__ for e in engine.events.take()] == ["PoolRemoved"]
    assert engine.pool.stats.lost == 1
    assert engine.run(range(5)) == 0


def test_a_failed_onboarding_is_a_miss_for_every_waiting_request() -> None:
    engine = Engine(8, host=4, delayed=True)
    engine.run(range(8))
    engine.pool.evict(2)
    land(engine)
    waiting = [engine.sequences.begin([*range(8), last]) for last in (50, 60)]
    assert [len(s.waits) for s in waiting] == [1, 1]
    engine.host.complete(min(engine.host.flights), ok=False)
    for sequence in waiting:
        assert sequence.lost
        with pytest.raises(NotReady, match="a block did not arrive"):
            engine.sequences.commit(sequence, 9)
        engine.release(sequence)
    assert len(engine.pool._ledger.index) == 0
    assert engine.run([*range(8), 50]) == 0
    engine.check()


def test_a_request_that_leaves_while_its_blocks_arrive_keeps_their_slots_busy() -> None:
    engine = Engine(4, host=4, delayed=True)
    engine.run(range(8))
    engine.pool.evict(2)
    land(engine)
    sequence = engine.sequences.begin(range(9))
    engine.release(sequence)
    assert engine.pool.used == 2
    land(engine)
    assert engine.pool.used == 0
    assert len(engine.pool.match(engine.keys(range(8)))) == 2
    engine.check()


def test_a_block_dropped_by_the_tiers_removes_its_followers_with_an_event_each() -> None:
    engine = Engine(4, host=4, events_max=100)
    engine.run(range(12))
    engine.pool.evict(3)
    engine.events.take()
    first = engine.keys(range(4))
    engine.host.remove(first)
    engine.pool.forgotten(first)
    assert [type(e).__name__ for e in engine.events.take()] == ["PoolRemoved"] * 3
    assert not engine.host.blocks
    assert len(engine.pool._ledger.index) == 0
    engine.check()


def test_children_below_stay_reachable_while_their_parent_is_somewhere() -> None:
    engine = Engine(4, host=4)
    engine.run(range(12))
    engine.pool.evict(2)
    assert len(engine.pool.match(engine.keys(range(12)))) == 1
    assert engine.run(range(13)) == 12
    engine.check()


def test_blocks_known_only_to_the_tiers_are_found_there() -> None:
    engine = Engine(4, host=4, events_max=100)
    engine.run(range(12))
    engine.pool.evict(3)
    blocks = engine.host.blocks
    engine.host.blocks = {}
    engine.pool.reset()
    engine.host.blocks = blocks  # as after a restart: the tier has them, the index does not
    assert engine.run(range(13)) == 12
    assert engine.pool.stats.onboarded == 3
    engine.check()


def test_claims_are_released_when_there_is_no_room() -> None:
    engine = Engine(2, host=4)
    engine.run(range(8))
    engine.pool.evict(2)
    held = engine.pool.allocate(1)
    for _ in range(3):
        with pytest.raises(Exception, match="blocks are needed"):
            engine.begin(range(9))
    assert all(kept.claims == 0 for kept in engine.host.blocks.values())
    engine.pool.release(held)
    engine.check()


def test_the_tail_of_a_prompt_is_loaded_and_stays_below() -> None:
    engine = Engine(4, host=4, inclusive=True)
    engine.run(range(6), [6, 7])
    engine.pool.evict(2)
    assert sorted(v.tokens for v in engine.host.offered) == [3, 4]
    assert engine.run([0, 1, 2, 3, 4, 9]) == 5
    assert any(len(block.tokens) == 3 for e in engine.pool.snapshot() for block in e.blocks)
    engine.check()


def test_a_copy_that_is_not_in_flight_cannot_land() -> None:
    engine = Engine(4, host=4)
    with pytest.raises(NotHeld):
        engine.pool.landed(7)  # type: ignore[arg-type]


def test_the_tiers_learn_of_hits() -> None:
    engine = Engine(4, host=4)
    engine.run(range(4))
    engine.run(range(5))
    engine.run(range(5))
    engine.pool.evict(4)
    assert {v.hits for v in engine.host.offered if v.tokens == 4} == {2}
