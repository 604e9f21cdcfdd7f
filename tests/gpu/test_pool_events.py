"""Cases V: the reported events, which suffice to reconstruct the index."""

from __future__ import annotations

import pytest

from kvladder.gpu.pool.events import (
    Created,
    PoolEvents,
    PoolOverflow,
    PoolRemoved,
    PoolStored,
    Updated,
)
from kvladder.policy.retention import Retention, RetentionRange
from tests.gpu.engine import Engine, Indexed, replay


def test_v1_construction_is_reported_once() -> None:
    engine = Engine(8, host=4, events_max=10)
    assert engine.events.take() == [Created(1, 0, 4, {"gpu": 8, "host": 4})]
    assert engine.events.take() == []
    silent = Engine(8, host=4)
    silent.run(range(9))
    silent.pool.evict(2)
    assert silent.events.take() == []
    assert not silent.events.enabled(0)
    with pytest.raises(ValueError, match="events"):
        PoolEvents(-1)


def test_v2_the_event_of_a_prompt_describes_its_stored_blocks() -> None:
    engine = Engine(8, events_max=10)
    engine.events.take()
    sequence = engine.begin(range(10), lora="42", salt="s")
    [event] = engine.events.take()
    assert isinstance(event, PoolStored)
    keys = engine.keys(range(8), lora="42", salt="s")
    assert (event.parent, event.lora, event.salt, event.level) == (None, "42", "s", "gpu")
    assert [b.key for b in event.blocks] == keys
    assert [b.tokens for b in event.blocks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [b.priority for b in event.blocks] == [35, 35]
    engine.generate(sequence, [10])
    engine.release(sequence)
    [event] = engine.events.take()
    assert isinstance(event, PoolStored)
    assert event.parent == keys[-1]
    assert [b.tokens for b in event.blocks] == [(8, 9)]
    again = engine.begin(range(10), lora="42", salt="s")
    taken = engine.events.take()
    assert [type(event) for event in taken] == [PoolRemoved]  # the tail was taken over
    engine.generate(again, [10])
    engine.release(again)
    assert len(engine.events.take()) == 1


def test_v2_storing_the_same_again_emits_nothing() -> None:
    engine = Engine(8, events_max=10, partial="copy")
    engine.run(range(10), [10], lora="42")
    engine.events.take()
    engine.run(range(10), [10], lora="42")
    assert engine.events.take() == []


def test_v4_an_offload_an_onboarding_and_a_drop_emit_their_events() -> None:
    engine = Engine(2, host=2, events_max=100)
    shared = engine.begin(range(4))
    engine.release(shared)
    [key] = engine.keys(range(4))
    engine.events.take()
    engine.pool.evict(1)
    engine.release(engine.begin([*range(4), 9]), store=False)
    [out, back] = engine.events.take()
    assert isinstance(out, Updated)
    assert isinstance(back, Updated)
    assert (out.key, out.level) == (key, ("gpu", "tiers"))
    assert (back.key, back.level) == (key, ("tiers", "gpu"))
    low = Retention((RetentionRange(0, None, 10),))
    engine.release(engine.begin([*range(4), 9], retention=low), store=False)
    [changed] = engine.events.take()
    assert isinstance(changed, Updated)
    assert changed.priority == (35, 10)
    engine.pool.evict(1)
    [gone] = engine.events.take()
    assert isinstance(gone, PoolRemoved)
    assert (gone.key, gone.why) == (key, "evicted")


def test_v4_a_block_that_was_never_stored_is_never_removed() -> None:
    engine = Engine(2, events_max=100)
    engine.events.take()
    engine.release(engine.begin([1, 2, 3]), store=False)
    engine.pool.release(engine.pool.allocate(2))
    assert engine.events.take() == []


def test_v5_an_overflow_says_how_many_events_were_lost() -> None:
    engine = Engine(8, events_max=3)
    for start in range(0, 600, 100):
        engine.run(range(start, start + 4))
    overflow, *rest = engine.events.take()
    assert overflow == PoolOverflow(4, 4)
    assert [event.id for event in rest] == [5, 6, 7]
    assert engine.events.last_id == 7
    engine.run(range(700, 704))
    assert [event.id for event in engine.events.take()] == [8]


def test_v5_a_snapshot_resynchronises_after_an_overflow() -> None:
    engine = Engine(8, events_max=2, host=2)
    for start in range(0, 1000, 100):
        engine.run(range(start, start + 6), lora=str(start % 3))
        engine.pool.evict(1)
    index: Indexed = {}
    replay(list(engine.pool.snapshot()), index)
    engine.events.take()
    engine.run(range(5000, 5003))
    replay(engine.events.take(), index)
    now: Indexed = {}
    replay(list(engine.pool.snapshot()), now)
    assert now == index
    assert {event.lora for event in engine.pool.snapshot()} <= {"0", "1", "2", ""}


def test_v9_replaying_a_long_run_gives_the_index() -> None:
    engine = Engine(6, host=3, events_max=10_000, partial="copy")
    index: Indexed = {}
    for turn in range(60):
        engine.run([turn % 3, *range(turn % 11), turn % 5], [turn % 2] * (turn % 4))
        if turn % 7 == 0:
            engine.pool.remove(engine.keys([turn % 3, 0, 1, 2]))
    replay(engine.events.take(), index)
    now: Indexed = {}
    replay(list(engine.pool.snapshot()), now)
    assert now == index
    engine.pool.reset()
    replay(engine.events.take(), index)
    assert index == {}


def test_pool_events_name_no_level_below_the_device() -> None:
    engine = Engine(4, host=4, events_max=10)
    engine.run(range(4))
    engine.pool.evict(1)
    assert [event.level for event in engine.pool.snapshot()] == ["tiers"]
    engine.events.take()
    [key] = engine.keys(range(4))
    engine.pool.forgotten([key, *engine.keys(range(50, 54))])
    [event] = engine.events.take()
    assert isinstance(event, PoolRemoved)
    assert (event.key, event.why) == (key, "evicted")
