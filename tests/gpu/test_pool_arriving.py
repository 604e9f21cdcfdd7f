"""A block that is complete in one slot while a copy still brings it to another."""

from __future__ import annotations

import pytest

from kvladder.gpu.pool.pool import Partial
from kvladder.gpu.requests.sequence import KVSequence
from kvladder.policy.offload import OffloadRule
from tests.gpu.engine import Engine


def engine(partial: Partial, text: int = 8) -> Engine:
    """Return an engine with a text of this length in host, and nothing of it on the device."""
    made = Engine(12, host=8, delayed=True, rule=OffloadRule(min_priority=0), partial=partial)
    made.run(range(text))
    made.pool.evict(12)
    land(made)
    made.poison()
    return made


def land(engine: Engine, *, ok: bool = True) -> None:
    while engine.host.flights:
        engine.host.complete(min(engine.host.flights), ok=ok)


def race(engine: Engine) -> tuple[KVSequence, KVSequence]:
    """Let one request compute the blocks that the other waits for, and finish first."""
    ours = engine.sequences.begin(range(9), cached_max=0)
    theirs = engine.sequences.begin(range(9))
    assert theirs.waits
    engine.compute(ours)
    return ours, theirs


@pytest.mark.parametrize("partial", ["off", "take", "copy"])
@pytest.mark.parametrize("ok", [True, False])
def test_a_request_that_computes_a_block_in_flight_keeps_its_own_bytes(
    partial: Partial, ok: bool
) -> None:
    e = engine(partial)
    ours, theirs = race(e)
    assert ours.ready
    e.verify(ours)
    land(e, ok=ok)
    assert (ours.lost, theirs.lost) == (False, not ok)
    e.verify(ours)
    if ok:
        e.compute(theirs)
    for sequence in (ours, theirs):
        e.release(sequence)
    assert e.run(range(9)) == 8


def test_a_complete_block_is_served_at_once_though_a_copy_is_in_flight() -> None:
    e = engine("off")
    ours, theirs = race(e)
    later = e.sequences.begin(range(9))
    assert later.ready
    assert later.table[:2] == ours.table[:2]
    e.verify(later)
    for sequence in (ours, theirs, later):
        e.release(sequence)
    land(e)


def test_the_second_copy_of_a_block_keeps_no_slot() -> None:
    e = engine("off")
    ours, theirs = race(e)
    assert e.pool.used == 6
    land(e)
    assert theirs.table[:2] == ours.table[:2]
    assert e.pool.used == 4
    for sequence in (theirs, ours):
        e.compute(sequence)
        e.release(sequence)


def test_an_answer_may_be_computed_while_a_tier_loads_the_same_blocks() -> None:
    e = engine("off", text=12)
    ours = e.begin(range(3))
    e.generate(ours, range(3, 7))
    theirs = e.sequences.begin(range(9))
    e.generate(ours, [7, 8])
    e.verify(ours)
    land(e)
    e.verify(ours)
    e.compute(theirs)
    for sequence in (ours, theirs):
        e.release(sequence)


def test_a_block_in_flight_does_not_match_for_a_caller_that_cannot_wait() -> None:
    e = engine("off")
    waiting = e.sequences.begin(range(9))
    keys = e.keys(range(8))
    assert e.pool.match(keys) == e.pool.acquire(keys) == []
    land(e)
    held = e.pool.acquire(keys)
    assert held == waiting.table[:2]
    e.pool.release(held)
    e.release(waiting)
