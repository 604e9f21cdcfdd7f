"""The conformance suite for tiers: the rules for every tier, as tests to inherit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from kvladder.errors import ConfigError, TierError
from kvladder.keys import BlockKey
from kvladder.testing.cancel import cancel_at
from kvladder.testing.fixtures import LabelTests, MakeTier, Opener, SampleBlocks
from kvladder.tiers.base import Tier
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import LABEL_BYTES, Labels, Outcome, RecoveredBlock, Ref


class TierTests(LabelTests):
    """Conformance tests. Inherit, name the class ``Test...`` and define a fixture ``make``::

        class TestMine(TierTests):
            survives = True

            @pytest.fixture
            def make(self, tmp_path):
                return lambda: MyTier(MyTier.Options(path=str(tmp_path)))

    ``make`` returns a function. The function makes a tier that is not opened yet. All tiers of one
    test use the same medium, which is empty at first.
    """

    # ---- declarations

    def test_declares_what_it_is(self, make: MakeTier) -> None:
        tier = make()
        assert tier.batch_max >= 1
        assert tier.durable == self.survives

    async def test_describes_itself_in_text(self, tier: Tier) -> None:
        assert all(isinstance(part, str) for row in tier.describe().items() for part in row)

    async def test_examines_what_it_is_to_open_and_leaves_it(
        self, make: MakeTier, opened: Opener, blocks: SampleBlocks
    ) -> None:
        warnings: list[str] = []
        facts = await make().examine(1 << 30, warnings.append)
        assert all(isinstance(part, str) for row in facts.items() for part in row)
        assert all(isinstance(warning, str) for warning in warnings)
        items = await blocks.put(await opened(), 0, 1)
        await opened.close()
        await make().examine(1 << 30, warnings.append)
        await opened()
        assert {kept.key for kept in opened.recovered} == (
            {item.key for item in items} if self.survives else set()
        )

    # ---- round trips

    async def test_batches_of_every_size_round_trip(self, tier: Tier, blocks: SampleBlocks) -> None:
        for size in range(tier.batch_max + 1):
            items = await blocks.put(tier, *range(size))
            assert await blocks.contains(tier, items) == [True] * size
            assert await blocks.get(tier, items) == [True] * size
            await blocks.remove(tier, items)

    async def test_fills_all_its_places(self, tier: Tier, blocks: SampleBlocks) -> None:
        step = tier.batch_max
        batches = [range(i, min(i + step, blocks.count)) for i in range(0, blocks.count, step)]
        for batch in batches:
            await blocks.put(tier, *batch)
        for batch in batches:
            assert all(await blocks.get(tier, blocks.some(*batch)))

    @pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 65536])
    async def test_blocks_of_any_length_round_trip(self, tier: Tier, blocks: SampleBlocks) -> None:
        items = await blocks.put(tier, 0, blocks.count - 1)
        assert await blocks.get(tier, items) == [True, True]

    async def test_absent_blocks_are_misses(self, tier: Tier, blocks: SampleBlocks) -> None:
        assert await blocks.get(tier, blocks.some(0, 1)) == [False, False]
        assert await blocks.contains(tier, blocks.some(0, 1)) == [False, False]

    async def test_results_have_the_order_of_the_batch(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        await blocks.put(tier, 3, 0, 4)
        asked = blocks.some(4, 1, 0, 2, 3)
        assert await blocks.get(tier, asked) == [True, False, True, False, True]
        assert await blocks.contains(tier, asked) == [True, False, True, False, True]

    async def test_a_block_can_be_got_into_any_slot(self, tier: Tier, blocks: SampleBlocks) -> None:
        items = await blocks.put(tier, 0, 1)
        moved = [item._replace(slot=blocks.slots[7 - item.place]) for item in items]
        assert await blocks.get(tier, moved) == [True, True]
        assert await blocks.get(tier, items) == [True, True]

    @pytest.mark.parametrize("byte", [0x00, 0xFF])
    async def test_blocks_of_equal_bytes(
        self, tier: Tier, blocks: SampleBlocks, context: TierContext, byte: int
    ) -> None:
        """Check that no value of a block's bytes, e.g. all zeros, makes the block a miss."""
        size = context.layout.block_bytes
        items = blocks.some(0)
        context.arena.view(items[0].slot)[:size] = bytes([byte]) * size
        assert list(await tier.put(blocks.writes(items))) == [True]
        blocks.poison(items)
        reads = blocks.reads(items)
        assert list(await tier.get(reads)) == [True]
        assert reads[0].check()
        same = blocks.bytes_in(items[0].slot)[:size] == bytes([byte]) * size
        assert same, "wrong bytes"

    # ---- slots

    async def test_put_reads_only(self, tier: Tier, blocks: SampleBlocks) -> None:
        items = blocks.batch(tier)
        blocks.fill(items)
        before = [blocks.bytes_in(slot) for slot in blocks.slots]
        await tier.put(blocks.writes(items))
        changed = [
            slot
            for slot, old in zip(blocks.slots, before, strict=True)
            if blocks.bytes_in(slot) != old
        ]
        assert not changed, "the tier wrote into slots that it was to read"

    async def test_get_writes_its_own_slots_only(self, tier: Tier, blocks: SampleBlocks) -> None:
        await blocks.put(tier, 1, 3)
        others = blocks.some(0, 2, 4)
        blocks.fill(others)
        assert await blocks.get(tier, blocks.some(1, 3)) == [True, True]
        assert all(blocks.right(item) for item in others)

    async def test_what_is_done_to_a_slot_later_changes_nothing(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        items = await blocks.put(tier, 0, 1)
        blocks.poison(items)
        assert await blocks.get(tier, items) == [True, True]
        blocks.poison(items)
        assert await blocks.get(tier, items) == [True, True]

    # ---- remove

    async def test_removed_blocks_are_misses(self, tier: Tier, blocks: SampleBlocks) -> None:
        items = await blocks.put(tier, 0, 1, 2)
        await blocks.remove(tier, items[1:2])
        assert await blocks.get(tier, items) == [True, False, True]
        assert await blocks.contains(tier, items) == [True, False, True]

    async def test_remove_may_be_repeated(self, tier: Tier, blocks: SampleBlocks) -> None:
        items = await blocks.put(tier, 0)
        for _ in range(3):
            await blocks.remove(tier, items)
        await blocks.remove(tier, blocks.some(1))
        assert await blocks.get(tier, items) == [False]

    async def test_remove_spares_another_block_at_the_place(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        items = await blocks.put(tier, 0)
        await tier.remove([Ref(blocks.key(1), items[0].place)])
        assert await blocks.get(tier, items) == [True]

    async def test_empty_batches(self, tier: Tier) -> None:
        assert list(await tier.get([])) == []
        assert list(await tier.put([])) == []
        assert list(await tier.contains([])) == []
        await tier.remove([])

    # ---- places

    async def test_a_place_that_is_put_again_never_gives_wrong_bytes(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        (old,) = await blocks.put(tier, 0)
        (new,) = await blocks.store(tier, [blocks.some(1)[0]._replace(place=old.place)])
        await blocks.get(tier, [old])
        assert await blocks.get(tier, [new]) == [True]

    @pytest.mark.parametrize("place", [0, 5])
    async def test_a_removed_block_may_come_back_anywhere(
        self, tier: Tier, blocks: SampleBlocks, place: int
    ) -> None:
        (old,) = await blocks.put(tier, 0)
        await blocks.remove(tier, [old])
        again = await blocks.store(tier, [old._replace(place=place)])
        assert await blocks.get(tier, again) == [True]

    # ---- access to the medium without the tier

    async def test_stores_what_an_independent_reader_finds(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        items = await blocks.put(tier, 0, 1)
        for item in items:
            same = await self.raw_get(tier, item.ref) == blocks.data(item)
            assert same, "wrong bytes"
        await blocks.remove(tier, items[:1])
        same = await self.raw_get(tier, items[1].ref) == blocks.data(items[1])
        assert same, "wrong bytes"

    async def test_finds_what_an_independent_writer_stored(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        items = blocks.some(0, 1)
        for item in items:
            await self.raw_put(tier, item.ref, blocks.label(item), blocks.data(item))
        assert await blocks.get(tier, items) == [True, True]

    async def test_a_damaged_block_is_a_miss(self, tier: Tier, blocks: SampleBlocks) -> None:
        items = await blocks.put(tier, 0, 1, 2)
        await self.raw_corrupt(tier, items[1].ref)
        assert await blocks.get(tier, items) == [True, False, True]
        assert blocks.refused == {Outcome.CORRUPT: 1}, "the damage is not counted"

    async def test_a_damaged_block_can_be_put_again(self, tier: Tier, blocks: SampleBlocks) -> None:
        items = await blocks.put(tier, 0)
        await self.raw_corrupt(tier, items[0].ref)
        await blocks.remove(tier, items)
        await blocks.store(tier, items)
        assert await blocks.get(tier, items) == [True]

    async def test_a_shared_tier_replaces_what_is_of_no_use(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        if not tier.shared:
            pytest.skip("the tier is not shared")
        kept, damaged = await blocks.put(tier, 0, 1)
        await self.raw_corrupt(tier, damaged.ref)
        assert await blocks.get(tier, [kept, damaged]) == [True, False]
        again = [item._replace(replace=True) for item in (kept, damaged)]
        await blocks.store(tier, again)
        assert await blocks.get(tier, [kept, damaged]) == [True, True]

    async def test_a_block_of_a_shared_tier_is_a_miss_once_it_has_expired(
        self, tier: Tier, blocks: SampleBlocks, context: TierContext
    ) -> None:
        """Allow both answers: the server expired the block, or ``Read.check`` refused it."""
        if not tier.shared:
            pytest.skip("the tier is not shared: its level expires blocks")
        wall, own = context.clock.wall, blocks.labels
        blocks.labels = Labels(own.namespace, own.block_bytes, verify=True, wall=wall)
        over, lasting = blocks.some(0, 1)
        items = [over.of(expires_wall_s=wall() - 10.0), lasting.of(expires_wall_s=wall() + 1e5)]
        blocks.fill(items)
        assert list(await tier.put(blocks.writes(items)))[1] is True
        assert await blocks.get(tier, items) == [False, True]
        assert +blocks.refused in ({}, {Outcome.EXPIRED: 1}), "an expired block counts as damage"

    async def test_a_shared_tier_is_purged_of_one_salt_or_of_all(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        if not tier.shared:
            pytest.skip("the tier is not shared")
        salted = [block.of(salt=b"8 bytes!") for block in blocks.some(0, 1)]
        await blocks.store(tier, salted)
        others = await blocks.put(tier, 2)
        told: list[tuple[int, int]] = []

        def progress(done: int, total: int) -> None:
            told.append((done, total))

        assert await tier.purge(b"8 bytes!", progress) == 2
        assert await blocks.get(tier, [*salted, *others]) == [False, False, True]
        assert await tier.purge(None, progress) == 1
        assert all(0 <= done <= total for done, total in told)
        assert await blocks.get(tier, others) == [False]

    async def test_a_purge_of_a_salt_removes_blocks_whose_salt_cannot_be_read(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        """A damaged label hides whose block it is: a purge of its salt must not spare it."""
        if not tier.shared:
            pytest.skip("the tier is not shared")
        salted, other = blocks.some(0, 1)
        salted, other = salted.of(salt=b"8 bytes!"), other.of(salt=b"another!")
        await blocks.store(tier, [salted, other])
        label = bytearray(blocks.label(salted))
        label[LABEL_BYTES // 2] ^= 1
        await self.raw_put(tier, salted.ref, bytes(label), blocks.data(salted))

        def progress(done: int, total: int) -> None:
            assert 0 <= done <= total

        assert await tier.purge(b"8 bytes!", progress) == 1
        assert await blocks.contains(tier, [salted, other]) == [False, True]
        assert await blocks.get(tier, [other]) == [True]

    async def test_a_survey_tells_what_lies_on_the_medium(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        if not tier.surveys:
            pytest.skip("the tier does not survey its medium")

        async def found(salt: bytes | None) -> list[BlockKey]:
            return sorted([key async for batch in tier.survey(salt) for key in batch])

        assert await found(None) == []
        salted = [block.of(salt=b"8 bytes!") for block in blocks.some(0, 1)]
        await blocks.store(tier, salted)
        others = await blocks.put(tier, 2)
        both = [block.key for block in salted]
        assert await found(b"8 bytes!") == sorted(both)
        assert await found(b"") == [others[0].key]
        assert await found(b"no such!") == []
        assert await found(None) == sorted([*both, others[0].key])
        await blocks.remove(tier, salted[:1])
        if tier.erases:  # a forgotten block counts until it is overwritten
            assert await found(b"8 bytes!") == sorted(both)
            await tier.erase(b"8 bytes!", 0)
        assert await found(b"8 bytes!") == both[1:]

    # ---- cancellation

    async def test_a_cancelled_get_leaves_its_slots_alone(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        items = await blocks.store(tier, blocks.batch(tier))
        for suspension in count(1):
            reached = await cancel_at(tier.get(blocks.reads(items)), suspension)
            blocks.poison(items)
            poisoned = [blocks.bytes_in(item.slot) for item in items]
            await self.settle()
            same = [blocks.bytes_in(item.slot) for item in items] == poisoned
            assert same, "the tier wrote into a slot"
            assert all(await blocks.get(tier, items))
            if not reached:
                break

    async def test_a_cancelled_put_stores_the_right_bytes_or_none(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        items = blocks.batch(tier)
        for suspension in count(1):
            blocks.fill(items)
            reached = await cancel_at(tier.put(blocks.writes(items)), suspension)
            blocks.poison(items)
            await self.settle()
            await blocks.get(tier, items)
            await blocks.remove(tier, items)
            await blocks.store(tier, items)
            assert all(await blocks.get(tier, items))
            await blocks.remove(tier, items)
            if not reached:
                break

    async def test_a_cancelled_remove_can_be_repeated(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        for suspension in count(1):
            items = await blocks.put(tier, 0, 1)
            reached = await cancel_at(tier.remove(blocks.refs(items[:1])), suspension)
            await blocks.remove(tier, items[:1])
            assert await blocks.get(tier, items) == [False, True]
            if not reached:
                break

    async def test_a_cancelled_contains_changes_nothing(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        items = await blocks.store(tier, blocks.batch(tier))
        for suspension in count(1):
            reached = await cancel_at(tier.contains(blocks.refs(items)), suspension)
            assert all(await blocks.contains(tier, items))
            if not reached:
                break

    # ---- calls that overlap

    async def test_gets_may_overlap(self, tier: Tier, blocks: SampleBlocks) -> None:
        items = await blocks.store(tier, blocks.batch(tier))
        copies = [
            [item._replace(slot=blocks.slots[2 * n + item.place]) for item in items]
            for n in range(4)
        ]
        results = await asyncio.gather(*(tier.get(blocks.reads(copy)) for copy in copies))
        assert all(all(found) for found in results)
        assert all(blocks.right(item) for copy in copies for item in copy)

    async def test_calls_for_other_blocks_may_overlap(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        held = await blocks.put(tier, 0)
        gone = await blocks.put(tier, 1)
        new = blocks.some(2)
        blocks.fill(new)
        found, _, stored, known = await asyncio.gather(
            blocks.get(tier, held),
            tier.remove(blocks.refs(gone)),
            tier.put(blocks.writes(new)),
            tier.contains(blocks.refs(held)),
        )
        assert (found, list(stored), list(known)) == ([True], [True], [True])
        assert await blocks.get(tier, [*held, *gone, *new]) == [True, False, True]

    async def test_puts_may_overlap(self, tier: Tier, blocks: SampleBlocks) -> None:
        batches = [blocks.some(n) for n in range(min(8, blocks.count))]
        for batch in batches:
            blocks.fill(batch)
        await asyncio.gather(*(tier.put(blocks.writes(batch)) for batch in batches))
        for batch in batches:
            assert await blocks.get(tier, batch) == [True]

    async def test_a_get_that_meets_a_remove_is_right_or_a_miss(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        for _ in range(8):
            items = await blocks.put(tier, 0)
            await asyncio.gather(tier.remove(blocks.refs(items)), blocks.get(tier, items))
            assert await blocks.get(tier, items) == [False]

    # ---- closing

    async def test_may_be_closed_twice(self, tier: Tier, blocks: SampleBlocks) -> None:
        await blocks.put(tier, 0)
        await tier.aclose()
        await tier.aclose()

    async def test_after_the_end_there_are_only_tier_errors(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        items = await blocks.put(tier, 0)
        await tier.aclose()
        reads, writes, refs = blocks.reads(items), blocks.writes(items), blocks.refs(items)
        for call in (
            lambda: tier.get(reads),
            lambda: tier.put(writes),
            lambda: tier.remove(refs),
            lambda: tier.contains(refs),
        ):
            with pytest.raises(TierError):
                await call()

    async def test_calls_under_way_end_when_it_is_closed(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        await blocks.put(tier, 0, 1)
        new = blocks.some(2)
        blocks.fill(new)
        get = asyncio.create_task(blocks.get(tier, blocks.some(0)))
        put = asyncio.ensure_future(tier.put(blocks.writes(new)))
        remove = asyncio.create_task(tier.remove(blocks.refs(blocks.some(1))))
        await asyncio.sleep(0)
        await tier.aclose()
        results = await asyncio.gather(get, put, remove, return_exceptions=True)
        strange = [r for r in results if isinstance(r, BaseException)]
        assert all(isinstance(r, TierError | asyncio.CancelledError) for r in strange), results

    # ---- the next start

    async def test_finds_at_the_next_start_what_was_stored_and_no_more(
        self, opened: Opener, blocks: SampleBlocks
    ) -> None:
        tier = await opened()
        assert opened.recovered == []
        items = await blocks.put(tier, 0, 4, 2)
        await blocks.remove(tier, items[1:2])
        if tier.durable and not tier.shared:
            await tier.sync()
        tier = await opened()
        self.only_if_it_survives(opened)
        assert [kept.place for kept in opened.recovered] == [0, 2]
        assert [kept.key for kept in opened.recovered] == [items[0].key, items[2].key]
        assert await blocks.get(tier, items) == [True, False, True]
        assert await blocks.get(tier, [items[2], items[0]]) == [True, True]

    async def test_finds_what_was_stored_again_after_several_starts(
        self, opened: Opener, blocks: SampleBlocks
    ) -> None:
        for number in range(4):
            tier = await opened()
            assert len(opened.recovered) == (number if self.survives else 0)
            await blocks.put(tier, number)
        tier = await opened()
        self.only_if_it_survives(opened)
        assert [kept.place for kept in opened.recovered] == [0, 1, 2, 3]
        for number in range(4):
            assert await blocks.get(tier, blocks.some(number)) == [True]

    async def test_keeps_what_is_said_of_a_block(
        self, opened: Opener, blocks: SampleBlocks, context: TierContext
    ) -> None:
        tier = await opened()
        wall_s = context.clock.wall() + 1e5
        first, second, third = blocks.some(0, 1, 2)
        items = [
            first.of(priority=0, floor=0, salt=b"\xff" * 8),
            second.of(priority=100, floor=35, expires_wall_s=wall_s, terms=7),
            third.of(priority=80, floor=80, salt=b"\x00salted\x00", terms=1),
        ]
        await blocks.store(tier, items)
        await opened()
        self.only_if_it_survives(opened)
        told = opened.recovered
        found = [kept._replace(facts=kept.facts._replace(expires_wall_s=None)) for kept in told]
        assert found == [
            RecoveredBlock(*item.ref, item.of(expires_wall_s=None).facts) for item in items
        ]
        expiries = [kept.facts.expires_wall_s for kept in told]
        assert expiries[0] is expiries[2] is None
        assert expiries[1] is not None
        assert wall_s - 1.0 <= expiries[1] <= wall_s

    async def test_finds_the_newest_block_of_a_place(
        self, opened: Opener, blocks: SampleBlocks
    ) -> None:
        tier = await opened()
        (old,) = await blocks.put(tier, 0)
        await blocks.remove(tier, [old])
        (new,) = await blocks.store(tier, [blocks.some(1)[0]._replace(place=old.place)])
        tier = await opened()
        self.only_if_it_survives(opened)
        assert [kept.key for kept in opened.recovered] == [new.key]
        assert await blocks.get(tier, [new]) == [True]
        assert await blocks.get(tier, [old]) == [False]

    async def test_finds_no_place_beyond_its_capacity(
        self, opened: Opener, blocks: SampleBlocks, context: TierContext, capacity: int
    ) -> None:
        tier = await opened()
        await blocks.put(tier, 0, capacity - 1)
        tier = await opened(replace(context, capacity_blocks=capacity - 1))
        self.only_if_it_survives(opened)
        assert [kept.place for kept in opened.recovered] == [0]
        assert await blocks.get(tier, blocks.some(0)) == [True]

    async def test_keeps_its_blocks_when_it_is_resized(
        self, opened: Opener, blocks: SampleBlocks, context: TierContext, capacity: int
    ) -> None:
        tier = await opened(replace(context, capacity_blocks=capacity - 1))
        if not tier.resizes:
            with pytest.raises(TierError):
                await tier.resize(capacity)
            return
        kept = await blocks.put(tier, 0)
        await tier.resize(capacity)
        more = await blocks.put(tier, capacity - 1)
        assert await blocks.get(tier, [*kept, *more]) == [True, True]
        await tier.remove(blocks.refs(more))
        await tier.resize(capacity - 1)
        assert await blocks.get(tier, kept) == [True]
        tier = await opened(context)
        if self.survives:
            assert [block.place for block in opened.recovered] == [0]
            assert await blocks.get(tier, kept) == [True]

    async def test_another_namespace_finds_nothing(
        self, opened: Opener, blocks: SampleBlocks, context: TierContext
    ) -> None:
        tier = await opened()
        items = await blocks.put(tier, 0)
        other = replace(context, namespace=context.layout.namespace(salt="another"))
        try:
            tier = await opened(other)
        except ConfigError:  # the tier may also refuse a medium that has another namespace
            return
        assert opened.recovered == []
        blocks.labels = Labels(other.namespace, other.layout.block_bytes, verify=True)
        assert await blocks.get(tier, items) == [False]
