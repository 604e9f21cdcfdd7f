"""The suite for tiers finds out each kind of tier that breaks a rule."""

from __future__ import annotations

import os
import sys

import pytest

BROKEN = '''
import asyncio
from functools import partial

import pytest

from kvladder.errors import TierError
from kvladder.testing import FakeStore, FakeTier, TierTests
from kvladder.tiers.label import LABEL_BYTES, Labels, RecoveredBlock, told
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

    async def put(self, writes):
        for write in writes:
            self._blocks[write.key] = write.label(), write.view[: write.length]
        return [True] * len(writes)


class Truncates(Memory):
    async def get(self, reads):
        found = await super().get(reads)
        for read, ok in zip(reads, found):
            if ok:
                read.view[self.context.layout.block_bytes - 1] ^= 1
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
        for read in items:  # and makes a label that is right for it
            label, data = self._blocks.get(self._at.get(read.place), (b"", b""))
            read.view[: len(data)] = data
            context = self.context
            labels = Labels(context.namespace, context.layout.block_bytes, verify=True)
            if data:
                read.came(labels.pack(read.key, data), len(data))
        return [read.place in self._at for read in items]


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
            yield [RecoveredBlock(item.key, item.place) for item in batch]


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
        yield [RecoveredBlock(one.key, one.place, one.facts) for one in self.records.values()]


class MakesLabels(FakeTier):
    """Serves damage: it makes a label that is right for what it has read."""

    def _sound(self, read):
        record = self._record(read)
        if record is not None:
            context = self.context
            labels = Labels(context.namespace, context.layout.block_bytes, verify=True)
            data = bytes(read.view[: len(record.data)])
            read.came(labels.pack(read.key, data), len(data))
        return record is not None


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


class TestMakesLabels(Durable):
    tier_class = MakesLabels

    async def raw_corrupt(self, tier, ref):
        tier.corrupt(ref.key)


class TestSaysItSurvives(Broken):
    tier_class = Memory
    survives = True


class TestMakesNothing(TierTests):
    pass


class Strange(Memory):
    """Has views of its own about what lies there."""

    async def get(self, reads):
        self._require_open()
        return [self.one(read, *self._blocks.get(read.key, (b"", b""))) for read in reads]

    def one(self, read, label, data):
        if read.key not in self._blocks:
            return False
        read.view[: len(data)] = data[: len(read.view)]
        read.came(label, len(data))
        return True


class LiesAboutMisses(Strange):
    """Says that it has what it has not."""

    def one(self, read, label, data):
        super().one(read, label, data)
        read.came(label, len(data))
        return True


class TrueForNothing(Strange):
    """What it cannot read is there, too."""

    def one(self, read, label, data):
        if read.key in self._blocks and len(label) != LABEL_BYTES:
            return True
        return super().one(read, label, data)


class RaisesForCut(Strange):
    def one(self, read, label, data):
        if 0 < len(label) < LABEL_BYTES:
            raise TierError("a label is cut")
        return super().one(read, label, data)


class RaisesForAnother(Strange):
    def one(self, read, label, data):
        said = told(label)
        if said is not None and said.key != read.key:
            raise TierError("another block")
        return super().one(read, label, data)


class RaisesForForeign(Strange):
    def one(self, read, label, data):
        said = told(label)
        if said is not None and said.namespace != self.context.namespace:
            raise TierError("another namespace")
        return super().one(read, label, data)


class RaisesForNoise(Strange):
    def one(self, read, label, data):
        if len(label) == LABEL_BYTES and told(label) is None:
            raise TierError("noise")
        return super().one(read, label, data)


class TrustsLabels(Strange):
    """Says that as much came as a label says."""

    def one(self, read, label, data):
        found, said = super().one(read, label, data), told(label)
        if said is not None and len(data) < said.length:
            read.came(label, said.length)
        return found


class Overflows(Strange):
    def one(self, read, label, data):
        if data:
            read.view[: len(data)] = data
        return super().one(read, label, data)


class ForgetsSteps(Strange):
    """Keeps the head of a label, and makes the rest anew."""

    def one(self, read, label, data):
        found, said = super().one(read, label, data), told(label)
        if said is not None and any(label[128:568]):
            labels = Labels(said.namespace, said.length, verify=bool(said.checksum))
            read.came(labels.pack(said.key, data[: said.length], said.facts), len(data))
        return found


class AnswersByItsCheck(Strange):
    """Checks by itself, and answers with an error what is refused."""

    def one(self, read, label, data):
        found = super().one(read, label, data)
        if found and not read.check() and len(data) == 6000 and told(label) is not None:
            raise TierError("refused")
        return found


class TestLiesAboutMisses(Broken):
    tier_class = LiesAboutMisses

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestTrueForNothing(Broken):
    tier_class = TrueForNothing

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestRaisesForCut(Broken):
    tier_class = RaisesForCut

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestRaisesForAnother(Broken):
    tier_class = RaisesForAnother

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestRaisesForForeign(Broken):
    tier_class = RaisesForForeign

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestRaisesForNoise(Broken):
    tier_class = RaisesForNoise

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestTrustsLabels(Broken):
    tier_class = TrustsLabels

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestOverflows(Broken):
    tier_class = Overflows

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestForgetsSteps(Broken):
    tier_class = ForgetsSteps

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestAnswersByItsCheck(Broken):
    tier_class = AnswersByItsCheck

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]


class TestStrange(Broken):
    tier_class = Strange

    async def raw_put(self, tier, ref, label, data):
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier, ref):
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]
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
    "MakesLabels": "a_damaged_block_is_a_miss",
    "SaysItSurvives": "declares_what_it_is",
    "MakesNothing": "absent_blocks_are_misses",
    "AnswersByItsCheck": "a_damaged_block_is_a_miss",
}

FINDS_ALONE = {
    "LiesAboutMisses": "nothing_comes_of_what_is_not_there",
    "TrueForNothing": "a_label_that_is_cut_is_a_miss",
    "RaisesForCut": "a_label_that_is_cut_is_a_miss",
    "RaisesForAnother": "the_label_of_another_block_is_a_miss",
    "RaisesForForeign": "a_label_of_another_namespace_is_a_miss",
    "RaisesForNoise": "noise_is_a_miss",
    "TrustsLabels": "a_block_that_is_cut_is_a_miss_without_a_checksum_too",
    "Overflows": "a_block_that_is_too_long_is_a_miss",
    "ForgetsSteps": "keeps_lengths_and_what_codecs_did",
}
"""Faults that only one test of the suite finds."""

LONGEST = 2000
"""Characters of a line; pytest compares two blocks for minutes to show how they differ."""


@pytest.mark.slow
def test_each_broken_rule_is_found(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("CI", "1")  # pytest shows whole values there
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
    for name, test in FINDS_ALONE.items():
        own = [line.split("::test_")[1] for line in bad if f"::Test{name}::" in line]
        assert {one.split("[")[0] for one in own} == {test}, name
    assert not [line for line in bad if "::TestStrange::" in line], "it is only strange"
    assert max(map(len, lines)) < LONGEST, "the bytes of blocks are shown"
