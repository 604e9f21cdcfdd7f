"""The fake tier follows its script, and reports callers that break the rules of a tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from kvladder.arena import Arena, Slot
from kvladder.errors import TierError, TierFull
from kvladder.layout import Layout
from kvladder.testing.fakes import (
    Delay,
    Fail,
    FakeStore,
    FakeTier,
    Full,
    Hang,
    Hold,
    ShortRead,
)
from kvladder.testing.fixtures import SampleBlocks
from kvladder.testing.sim import SimClock, inline_blocking
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import Outcome

LAYOUT = Layout(block_tokens=4, block_bytes=100)
COUNT = 8


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(COUNT + 1, LAYOUT.slot_bytes)
    yield arena
    arena.close()


@pytest.fixture
def blocks(arena: Arena) -> Iterator[SampleBlocks]:
    blocks = SampleBlocks(arena, LAYOUT, COUNT, LAYOUT.namespace())
    yield blocks
    blocks.close()


@pytest.fixture
async def tier(arena: Arena) -> AsyncIterator[FakeTier]:
    clock = SimClock(asyncio.get_running_loop())
    tier = FakeTier(latency_s=1.0, durable=True)
    context = TierContext(arena, LAYOUT, LAYOUT.namespace(), COUNT, clock, inline_blocking)
    await tier.open(context)
    yield tier
    await tier.aclose()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_fake_records_its_calls(tier: FakeTier, blocks: SampleBlocks) -> None:
    items = await blocks.put(tier, 0, 1)
    await blocks.get(tier, items[:1])
    await tier.remove(blocks.refs(items))
    asked = [(call.operation, len(call.keys), call.at_s) for call in tier.calls]
    assert asked == [("open", 0, 0.0), ("put", 2, 0.0), ("get", 1, 1.0), ("remove", 2, 2.0)]
    assert tier.batches("put") == [2]


async def test_steps_are_taken_by_the_calls_they_are_for(
    tier: FakeTier, blocks: SampleBlocks
) -> None:
    tier.script += [Delay(10.0, on="get"), Fail(on="put", times=2), Delay(5.0, on="put")]
    items = blocks.some(0)
    for _ in range(2):
        with pytest.raises(TierError, match="scripted"):
            await tier.put(blocks.writes(items))
    assert now() == 0.0
    await blocks.store(tier, items)
    assert now() == 6.0
    assert await blocks.get(tier, items) == [True]
    assert now() == 17.0
    assert tier.script == []


@pytest.mark.parametrize("after", [False, True])
async def test_a_failure_may_come_before_or_after_the_effect(
    tier: FakeTier, blocks: SampleBlocks, *, after: bool
) -> None:
    tier.script.append(Fail(after=after, temporary=False, times=None))
    items = blocks.some(0)
    blocks.fill(items)
    with pytest.raises(TierError) as failure:
        await tier.put(blocks.writes(items))
    assert not failure.value.temporary
    assert (tier.stored(items[0].key) is not None) == after
    tier.heal()
    assert await blocks.get(tier, items) == [after]


async def test_a_full_fake_raises_tier_full(tier: FakeTier, blocks: SampleBlocks) -> None:
    tier.script.append(Full())
    items = blocks.some(0)
    with pytest.raises(TierFull):
        await tier.put(blocks.writes(items))
    assert tier.stored(items[0].key) is None


async def test_the_store_keeps_lost_and_damaged_blocks(
    tier: FakeTier, blocks: SampleBlocks
) -> None:
    items = await blocks.put(tier, 0, 1, 2)
    tier.forget(items[0].key)
    tier.corrupt(items[1].key)
    assert await blocks.get(tier, items) == [False, False, True]
    assert list(await tier.contains(blocks.refs(items))) == [False, True, True]
    assert blocks.refused == {Outcome.CORRUPT: 1}
    assert tier.stored(items[0].key) == blocks.data(items[0])
    await blocks.store(tier, items)
    assert await blocks.get(tier, items) == [True, True, True]


async def test_a_short_read_is_caught_by_the_checksum(tier: FakeTier, blocks: SampleBlocks) -> None:
    items = await blocks.put(tier, 0)
    tier.script.append(ShortRead())
    assert await blocks.get(tier, items) == [False]
    half = blocks.bytes_in(items[0].slot)[:50]
    assert half == blocks.data(items[0])[:50]
    assert await blocks.get(tier, items) == [True]


async def test_a_slot_holds_half_a_block_while_it_is_read(
    tier: FakeTier, blocks: SampleBlocks
) -> None:
    items = await blocks.put(tier, 0)
    blocks.poison(items)
    reading = asyncio.ensure_future(tier.get(blocks.reads(items)))
    await asyncio.sleep(0.5)
    seen = blocks.bytes_in(items[0].slot)
    assert seen[:50] == blocks.data(items[0])[:50]
    assert set(seen[50:]) == {0xA5}
    assert list(await reading) == [True]


async def test_a_call_is_held_between_two_lines_of_another(
    tier: FakeTier, blocks: SampleBlocks
) -> None:
    items = await blocks.put(tier, 0)
    hold = Hold(on="get")
    tier.script.append(hold)
    reading = asyncio.create_task(blocks.get(tier, items))
    await hold.reached()
    assert tier.held
    await tier.remove(blocks.refs(items))
    hold.let_go()
    assert await reading == [False]
    assert not tier.held


async def test_a_hang_ends_by_cancellation_healing_or_closing(
    tier: FakeTier, blocks: SampleBlocks
) -> None:
    items = await blocks.put(tier, 0)
    for end in ("cancel", "heal", "close"):
        tier.script.append(Hang(on="get"))
        reading = asyncio.ensure_future(tier.get(blocks.reads(items)))
        await asyncio.sleep(1e6)
        assert not reading.done()
        if end == "cancel":
            reading.cancel()
        elif end == "heal":
            tier.heal()
        else:
            await tier.aclose()
        (result,) = await asyncio.gather(reading, return_exceptions=True)
        kinds = {"cancel": asyncio.CancelledError, "heal": list, "close": TierError}
        assert isinstance(result, kinds[end])


async def test_a_stubborn_hang_does_its_work_after_it_was_cancelled(
    tier: FakeTier, blocks: SampleBlocks
) -> None:
    items = blocks.some(0)
    blocks.fill(items)
    hang = Hang(on="put", stubborn=True)
    tier.script.append(hang)
    writing = asyncio.ensure_future(tier.put(blocks.writes(items)))
    await hang.reached()
    for _ in range(3):
        writing.cancel()
        await asyncio.sleep(1.0)
    assert not writing.done()
    hang.let_go()
    await asyncio.wait({writing})
    assert writing.cancelled()
    assert tier.stored(items[0].key) == blocks.data(items[0])


async def test_a_store_outlives_its_tier_and_a_copy_outlives_a_crash(
    tier: FakeTier, blocks: SampleBlocks
) -> None:
    await blocks.put(tier, 0, 1)
    copy = tier.store.copy()
    await blocks.put(tier, 2)
    for store, count in ((tier.store, 3), (copy, 2), (FakeStore(), 0)):
        other = FakeTier(store=store, durable=True)
        await other.open(tier.context)
        found = [item.place async for batch in other.recover() for item in batch]
        assert found == list(range(count))
        await other.aclose()


# ---- rules that a level must keep


async def test_a_slot_without_a_claim_is_noted(
    tier: FakeTier, arena: Arena, blocks: SampleBlocks
) -> None:
    items = [blocks.some(0)[0]._replace(slot=Slot(COUNT))]
    with pytest.raises(AssertionError):
        await tier.put(blocks.writes(items))
    assert tier.violations == ["a slot without a claim"]


async def test_invalid_batches_are_noted(tier: FakeTier, blocks: SampleBlocks) -> None:
    tier.batch_max = 2
    first, second = blocks.some(0, 1)
    batches = [
        blocks.some(0, 1, 2),
        [first, first],
        [first, second._replace(place=0)],
        [first._replace(place=COUNT)],
    ]
    for batch in batches:
        with pytest.raises(AssertionError):
            await tier.get(blocks.reads(batch))
    assert tier.violations == [
        "3 > batch_max in a get",
        "a key twice in a get",
        "a place twice in a get",
        "a place beyond the capacity",
    ]


@pytest.mark.parametrize(
    ("first", "second", "allowed"),
    [
        ("get", "get", True),
        ("get", "remove", True),
        ("put", "get", False),
        ("get", "put", False),
        ("put", "put", False),
        ("put", "remove", False),
        ("remove", "put", False),
    ],
)
async def test_calls_that_must_not_overlap_are_noted(
    tier: FakeTier, blocks: SampleBlocks, first: str, second: str, *, allowed: bool
) -> None:
    items = await blocks.put(tier, 0)
    tier.script.append(Delay(1.0))
    asked = {"get": blocks.reads, "put": blocks.writes, "remove": blocks.refs}
    under_way = asyncio.ensure_future(getattr(tier, first)(asked[first](items)))
    await asyncio.sleep(0.5)
    call = getattr(tier, second)(asked[second](items))
    results = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(results[0], AssertionError) != allowed
    assert bool(tier.violations) != allowed
    await under_way
