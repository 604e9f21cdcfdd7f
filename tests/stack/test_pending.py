"""The states of pending reads, as simulations see them and as ``check`` asserts them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from kvladder.arena import Slot
from kvladder.testing.fakes import FakeTier, Hold
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.label import Write
from kvladder.tiers.ladder.loading import reads
from kvladder.tiers.ladder.loading.pending import NEXT, PendingRead, ReadState, become
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.states import reachable
from kvladder.tiers.ladder.writing.transit import PendingWrite
from tests.kit.soak import run_world
from tests.stack.caches import COMMIT, cache_of

WORLDS = 400
FIRST = (63, 107)
"""The worlds that took all steps when this was written; the others follow where they do not."""


def bare(state: ReadState) -> PendingRead:
    """Return a read of no level."""
    none: Any = None
    return PendingRead(none, none, 0, Slot(0), memoryview(b""), BlockMeta(), none, None, 0, state)


@pytest.mark.parametrize(("before", "after"), [*product(ReadState, repeat=2)])
def test_only_steps_of_the_table_can_be_taken(before: ReadState, after: ReadState) -> None:
    one = bare(before)
    if after in NEXT[before]:
        become([one], after)
        assert one.state is after
    else:
        with pytest.raises(AssertionError, match=f"{before.name} to {after.name}"):
            become([one], after)


def test_garbage_collection_does_not_see_blocks_on_their_way() -> None:
    none: Any = None
    write = Write(none, none, 0, Slot(0), memoryview(b""))
    queued = PendingWrite(none, Slot(0), BlockMeta(), 0.0)
    assert not any(map(gc.is_tracked, (bare(ReadState.READING), write, queued)))


def test_no_step_leads_on_from_the_end() -> None:
    final = [state for state in ReadState if not NEXT[state]]
    assert [*NEXT] == [*ReadState]
    assert final == [ReadState.LANDED, ReadState.REROUTED, ReadState.DROPPED]
    assert all(reachable(state, NEXT) == {state} for state in final)
    assert reachable(ReadState.RECALLED, NEXT) == {ReadState.RECALLED, ReadState.DROPPED}
    assert reachable(ReadState.READING, NEXT) == {*ReadState}


async def reading(cache: SimCache, tier: FakeTier) -> tuple[PendingRead, Hold]:
    """Begin to read a block, and hold its call."""
    cache.save(cache.keys(1))
    await cache.settle()
    with cache.stack.lock:
        cache.stack.host.remove(cache.keys(1))
    hold = Hold(on="get", after=True)
    tier.script.append(hold)
    fetch = cache.manager.fetch(cache.keys(1))
    await hold.reached()
    fetch.release()
    (one,) = cache.stack.loader.arrivals.values()
    cache.manager.check()
    return one, hold


async def test_check_finds_a_step_back_and_a_read_that_stays() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        one, hold = await reading(cache, tier)
        cache.manager.remove(cache.keys(1))
        assert one.state is ReadState.RECALLED
        cache.manager.check()
        one.state = ReadState.READING
        with pytest.raises(AssertionError, match="RECALLED to READING"):
            cache.manager.check()
        one.state = ReadState.DROPPED
        with pytest.raises(AssertionError):
            cache.manager.check()
        one.state = ReadState.RECALLED
        cache.manager.check()
        hold.let_go()
        await cache.settle()
        assert one.state is ReadState.DROPPED
        cache.manager.check()


async def test_check_finds_a_read_that_is_gone_and_has_not_ended() -> None:
    tier = FakeTier()
    async with cache_of(LevelSpec(tier, COMMIT)) as cache:
        one, hold = await reading(cache, tier)
        hold.let_go()
        await cache.settle()
        assert not cache.stack.loader.arrivals
        one.state = ReadState.READING
        with pytest.raises(AssertionError, match="READING"):
            cache.manager.check()
        one.state = ReadState.LANDED
        cache.manager.check()


@pytest.mark.slow
def test_simulations_take_every_step_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the table would have rows that nothing checks."""
    taken: set[tuple[ReadState, ReadState]] = set()

    def noted(blocks: Sequence[PendingRead], state: ReadState) -> None:
        taken.update((one.state, state) for one in blocks)
        become(blocks, state)

    monkeypatch.setattr(reads, "become", noted)
    table = {(before, after) for before in ReadState for after in NEXT[before]}
    for seed in (*FIRST, *range(WORLDS)):
        run_world(seed, kind="plain")
        if taken == table:
            return
    assert taken == table
