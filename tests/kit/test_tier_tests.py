"""The suite for tiers finds out each kind of tier that breaks a rule."""

from __future__ import annotations

import os
import sys

import pytest

BROKEN = '''
import asyncio
from functools import partial

import pytest

from kvladder.testing import FakeStore, FakeTier, TierTests
from kvladder.tiers.base import Item
from kvladder.tiers.memory import MemoryTier


class Memory(MemoryTier):
    batch_max = 5


class Broken(TierTests):
    tier_class = None

    @pytest.fixture
    def make(self):
        return self.tier_class


class Aliases(Memory):
    """Keeps a view of the slot instead of a copy."""

    async def put(self, items):
        size = self.context.layout.block_bytes
        for item in items:
            self._blocks[item.key] = self.context.arena.view(item.slot)[:size]
        return [True] * len(items)

    async def aclose(self):
        await super().aclose()


class Truncates(Memory):
    async def get(self, items):
        found = await super().get(items)
        for item, ok in zip(items, found):
            if ok:
                self.context.arena.view(item.slot)[self.context.layout.block_bytes - 1] = 0xA5
        return found


class Sorts(Memory):
    async def get(self, items):
        return sorted(await super().get(items), reverse=True)


class SaysLess(Memory):
    async def contains(self, items):
        return [item.key in self._blocks for item in items if item.key in self._blocks]


class KeepsRemoved(Memory):
    async def remove(self, items):
        pass


class GoesByPlace(Memory):
    """Gives whatever lies at the place."""

    def __init__(self):
        super().__init__()
        self._at = {}

    async def put(self, items):
        self._at.update({item.place: item.key for item in items})
        return await super().put(items)

    async def get(self, items):
        return await super().get([item._replace(key=self._at.get(item.place)) for item in items])


class RaisesKeyError(Memory):
    async def remove(self, items):
        for item in items:
            del self._blocks[item.key]


class WorksOn(Memory):
    """Does not notice that it was closed."""

    async def aclose(self):
        pass


class ClosesOnce(Memory):
    async def aclose(self):
        assert not self._closed
        await super().aclose()


class WritesLater(Memory):
    """A cancelled get goes on in the background."""

    async def get(self, items):
        async def later():
            await asyncio.sleep(1)
            return await Memory.get(self, items)

        task = asyncio.get_running_loop().create_task(later())
        return await asyncio.shield(task)


class ReadsLater(Memory):
    """A cancelled put goes on in the background, with what the slot holds by then."""

    async def put(self, items):
        async def later():
            await asyncio.sleep(1)
            return await Memory.put(self, items)

        task = asyncio.get_running_loop().create_task(later())
        return await asyncio.shield(task)


class Spills(Memory):
    """Writes into the next slot too."""

    async def get(self, items):
        found = await super().get(items)
        for item, ok in zip(items, found):
            if ok and item.slot + 1 < self.context.arena.slots:
                self.context.arena.view(item.slot + 1)[0] ^= 1
        return found


class Leases(Memory):
    async def get(self, items):
        self.context.arena.share([item.slot for item in items])
        return await super().get(items)


class OneAtATime(Memory):
    async def get(self, items):
        assert not getattr(self, "busy", False)
        self.busy = True
        try:
            await asyncio.sleep(0.1)
            return await super().get(items)
        finally:
            self.busy = False


class TestAliases(Broken):
    tier_class = Aliases


class TestTruncates(Broken):
    tier_class = Truncates


class TestSorts(Broken):
    tier_class = Sorts


class TestSaysLess(Broken):
    tier_class = SaysLess


class TestKeepsRemoved(Broken):
    tier_class = KeepsRemoved


class TestGoesByPlace(Broken):
    tier_class = GoesByPlace


class TestRaisesKeyError(Broken):
    tier_class = RaisesKeyError


class TestWorksOn(Broken):
    tier_class = WorksOn


class TestClosesOnce(Broken):
    tier_class = ClosesOnce


class TestWritesLater(Broken):
    tier_class = WritesLater


class TestReadsLater(Broken):
    tier_class = ReadsLater


class TestSpills(Broken):
    tier_class = Spills


class TestLeases(Broken):
    tier_class = Leases


class TestOneAtATime(Broken):
    tier_class = OneAtATime


class Durable(TierTests):
    survives = True
    tier_class = FakeTier

    @pytest.fixture
    def make(self):
        return partial(self.tier_class, store=FakeStore(), durable=True)


class ForgetsMeta(FakeTier):
    async def recover(self):
        async for batch in super().recover():
            yield [Item(item.key, item.place) for item in batch]


class TellsNewestFirst(FakeTier):
    async def recover(self):
        found = [item async for batch in super().recover() for item in batch]
        yield found[::-1]


class TellsTooMuch(FakeTier):
    async def remove(self, items):
        for item in items:
            self._forgotten.add(item.key)

    async def recover(self):
        self._forgotten.clear()
        async for batch in super().recover():
            yield batch


class SharesNamespaces(FakeTier):
    @property
    def records(self):
        return self.store.spaces.setdefault(b"", {})


class IgnoresCapacity(FakeTier):
    async def recover(self):
        yield [record.item for record in self.records.values()]


class ServesDamage(FakeTier):
    def _sound(self, item):
        return self._record(item) is not None


class TestForgetsMeta(Durable):
    tier_class = ForgetsMeta


class TestTellsNewestFirst(Durable):
    tier_class = TellsNewestFirst


class TestTellsTooMuch(Durable):
    tier_class = TellsTooMuch


class TestSharesNamespaces(Durable):
    tier_class = SharesNamespaces


class TestIgnoresCapacity(Durable):
    tier_class = IgnoresCapacity


class TestServesDamage(Durable):
    tier_class = ServesDamage

    async def raw_corrupt(self, tier, item):
        tier.corrupt(item.key)


class TestSaysItSurvives(Broken):
    tier_class = Memory
    survives = True


class TestMakesNothing(TierTests):
    pass
'''

FINDS = {
    "Aliases": "what_is_done_to_a_slot_later_changes_nothing",
    "Truncates": "batches_of_every_size_round_trip",
    "Sorts": "results_have_the_order_of_the_batch",
    "SaysLess": "results_have_the_order_of_the_batch",
    "KeepsRemoved": "removed_blocks_are_misses",
    "GoesByPlace": "a_place_that_is_put_again_never_gives_wrong_bytes",
    "RaisesKeyError": "remove_may_be_repeated",
    "WorksOn": "after_the_end_there_are_only_tier_errors",
    "ClosesOnce": "may_be_closed_twice",
    "WritesLater": "a_cancelled_get_leaves_its_slots_alone",
    "ReadsLater": "a_cancelled_put_stores_the_right_bytes_or_none",
    "Spills": "get_writes_its_own_slots_only",
    "Leases": "batches_of_every_size_round_trip",
    "OneAtATime": "gets_may_overlap",
    "ForgetsMeta": "keeps_what_is_said_of_a_block",
    "TellsNewestFirst": "finds_at_the_next_start_what_was_stored_and_no_more",
    "TellsTooMuch": "finds_at_the_next_start_what_was_stored_and_no_more",
    "SharesNamespaces": "another_namespace_finds_nothing",
    "IgnoresCapacity": "finds_no_place_beyond_its_capacity",
    "ServesDamage": "a_damaged_block_is_a_miss",
    "SaysItSurvives": "declares_what_it_is",
    "MakesNothing": "absent_blocks_are_misses",
}


@pytest.mark.slow
def test_each_broken_rule_is_found(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    pytester.makepyfile(BROKEN)
    options = ("-p", "kvladder.testing.plugin", "-p", "no:cacheprovider", "-q", "-rfE")
    lines = pytester.runpytest_subprocess(*options).outlines
    bad = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    missed = {
        name: test
        for name, test in FINDS.items()
        if not any(f"::Test{name}::test_{test}" in line for line in bad)
    }
    assert not missed, "\n".join(lines)
