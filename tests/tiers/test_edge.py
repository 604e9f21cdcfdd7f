"""The codecs of a level: the suite through them, and damage, room and order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvladder.errors import TierFull
from kvladder.keys import BlockKey
from kvladder.testing.fakes import FakeTier, Full, Hold
from kvladder.testing.fixtures import MakeTier, Opener, SampleBlock, SampleBlocks
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.base import ChecksumCodec, Subject
from kvladder.tiers.codecs.zstd import ZstdCodec
from kvladder.tiers.context import TierContext
from kvladder.tiers.files.options import FilesOptions
from kvladder.tiers.files.tier import FilesTier
from kvladder.tiers.label import Outcome, Read, Ref
from kvladder.tiers.memory import MemoryTier
from tests.kit.disk import FakeDisk, InlinePool
from tests.tiers.coded import SCRATCH, CodedTests, CodedTier


class EasyBlocks(SampleBlocks):
    """Blocks that shrink."""

    def data(self, block: SampleBlock) -> bytes:
        return (block.key * self._size)[: self._size]


class CountingDisk(FakeDisk):
    """Counts the bytes that it reads and writes."""

    moved = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        moved = super().preadv(fd, buffers, offset)
        self.moved += moved
        return moved

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        moved = super().pwritev(fd, buffers, offset)
        self.moved += moved
        return moved


class Touchy(ZstdCodec):
    """Raises for one block where None would do."""

    id = 60001
    encodes_not: BlockKey | None = None
    decodes_not: BlockKey | None = None

    def __init__(self, fault: type[Exception]) -> None:
        super().__init__()
        self._fault = fault

    def encode(
        self, data: memoryview, target: memoryview, subject: Subject
    ) -> tuple[memoryview, bytes] | None:
        if subject.key == self.encodes_not:
            raise self._fault("not this one")
        return super().encode(data, target, subject)

    def decode(
        self, data: memoryview, params: bytes, target: memoryview, subject: Subject
    ) -> memoryview | None:
        if subject.key == self.decodes_not:
            raise self._fault("nor this one")
        return super().decode(data, params, target, subject)


class Shrinking(CodedTests):
    @pytest.fixture
    def blocks(self, arena, layout, namespace, capacity):
        blocks = EasyBlocks(arena, layout, capacity, namespace)
        yield blocks
        blocks.close()


class TestCodedMemory(CodedTests, TierTests):
    @pytest.fixture
    def make(self, codecs) -> MakeTier:
        return lambda: CodedTier(MemoryTier(), codecs())


class TestShrinkingMemory(Shrinking, TierTests):
    @pytest.fixture
    def make(self, codecs) -> MakeTier:
        return lambda: CodedTier(MemoryTier(), codecs())


class TestShrinkingFiles(Shrinking, TierTests):
    survives = True

    @pytest.fixture
    def capacity(self) -> int:
        return 16

    @pytest.fixture
    def make(self, codecs, tmp_path) -> MakeTier:
        disk = FakeDisk(tmp_path)
        options = FilesOptions(path=str(tmp_path / "kv"))
        return lambda: CodedTier(FilesTier(options, disk=disk, pool=InlinePool()), codecs())


class TestFilesWithRoomToSpare(TestShrinkingFiles):
    """The unused rest of the slots of large blocks is neither written nor read."""

    @pytest.fixture
    def block_bytes(self) -> int:
        return 300_000

    @pytest.fixture
    def make(self, codecs, tmp_path) -> MakeTier:
        self.disk = CountingDisk(tmp_path)
        options = FilesOptions(path=str(tmp_path / "kv"))
        return lambda: CodedTier(FilesTier(options, disk=self.disk, pool=InlinePool()), codecs())

    @pytest.mark.parametrize("codecs", ["zstd"], indirect=True)
    async def test_encoded_blocks_move_few_bytes_to_the_disk(
        self, opened: Opener, blocks: SampleBlocks
    ) -> None:
        tier = await opened()
        before = self.disk.moved
        items = await blocks.put(tier, *range(8))
        assert self.disk.moved - before < 8 * 10_000
        assert all(await blocks.get(tier, items))
        assert self.disk.moved - before < 2 * 8 * 10_000
        tier = await opened()
        assert all(await blocks.get(tier, items)), "after a restart their whole slots are read"


class TestCodedFiles(CodedTests, TierTests):
    survives = True
    real = True

    @pytest.fixture
    def capacity(self) -> int:
        return 16

    @pytest.fixture
    def make(self, codecs, tmp_path) -> MakeTier:
        options = FilesOptions(path=str(tmp_path / "kv"))
        return lambda: CodedTier(FilesTier(options), codecs())


class TestEdge(Shrinking, TierTests):
    """The tier below can be inspected, damaged and held."""

    test_a_damaged_block_is_a_miss: Any = None

    @pytest.fixture
    def make(self, codecs) -> MakeTier:
        return lambda: CodedTier(FakeTier(checks=False), codecs())

    @pytest.fixture
    def codecs(self):
        return lambda: [ZstdCodec(), ChecksumCodec()]

    async def raw_corrupt(self, tier: Tier, ref: Ref) -> None:
        assert isinstance(tier, CodedTier)
        assert isinstance(tier.inner, FakeTier)
        tier.inner.corrupt(ref.key)

    async def test_stored_blocks_are_smaller(self, tier: CodedTier, blocks: SampleBlocks) -> None:
        (item,) = await blocks.put(tier, 0)
        assert isinstance(tier.inner, FakeTier)
        stored = tier.inner.stored(item.key)
        assert stored is not None
        assert len(stored) == tier.pipeline.encoded_bytes < 600

    async def test_a_batch_larger_than_the_scratch_is_stored_in_parts(
        self, tier: CodedTier, blocks: SampleBlocks
    ) -> None:
        items = await blocks.put(tier, *range(8))
        assert isinstance(tier.inner, FakeTier)
        assert tier.inner.batches("put") == [SCRATCH, SCRATCH, 8 - 2 * SCRATCH]
        assert all(await blocks.get(tier, items))

    async def test_a_put_waits_for_free_scratch(
        self, tier: CodedTier, blocks: SampleBlocks
    ) -> None:
        inner = tier.inner
        assert isinstance(inner, FakeTier)
        hold = Hold(on="put")
        inner.script.append(hold)
        first, second = blocks.some(0, 1, 2), blocks.some(3)
        blocks.fill([*first, *second])
        putting = asyncio.create_task(tier.pipeline.put(blocks.writes(first)))
        await asyncio.sleep(1.0)
        waiting = asyncio.create_task(tier.pipeline.put(blocks.writes(second)))
        await asyncio.sleep(1.0)
        assert inner.batches("put") == [3]
        hold.let_go()
        assert await putting == [True] * 3
        assert await waiting == [True]

    async def test_a_cancelled_wait_takes_no_scratch(
        self, tier: CodedTier, blocks: SampleBlocks
    ) -> None:
        inner = tier.inner
        assert isinstance(inner, FakeTier)
        hold = Hold(on="put")
        inner.script.append(hold)
        items = blocks.some(0, 1, 2)
        blocks.fill(blocks.some(*range(5)))
        putting = asyncio.create_task(tier.pipeline.put(blocks.writes(items)))
        await asyncio.sleep(1.0)
        waiting = [
            asyncio.create_task(tier.pipeline.put(blocks.writes(blocks.some(n)))) for n in (3, 4)
        ]
        await asyncio.sleep(1.0)
        waiting[0].cancel()
        hold.let_go()
        assert await putting == [True] * 3
        assert await waiting[1] == [True]
        await blocks.put(tier, *range(8))

    async def test_a_full_tier_keeps_its_stored_blocks(
        self, tier: CodedTier, blocks: SampleBlocks
    ) -> None:
        inner = tier.inner
        assert isinstance(inner, FakeTier)
        items = blocks.some(*range(8))
        blocks.fill(items)
        inner.script.append(Full(times=1))
        with pytest.raises(TierFull):
            await tier.pipeline.put(blocks.writes(items))
        held = Hold(on="put", times=1)
        inner.script.append(held)
        putting = asyncio.create_task(tier.pipeline.put(blocks.writes(items)))
        await asyncio.sleep(1.0)
        inner.script.append(Full(times=1))
        held.let_go()
        assert await putting == [True] * SCRATCH + [False] * (8 - SCRATCH)

    async def test_damage_below_the_codecs_is_a_counted_miss(
        self, tier: CodedTier, blocks: SampleBlocks
    ) -> None:
        items = await blocks.put(tier, 0, 1, 2)
        await self.raw_corrupt(tier, items[1].ref)
        assert await blocks.get(tier, items) == [True, False, True]
        assert tier.pipeline.refused == {Outcome.CORRUPT: 1}

    async def test_a_reader_without_codecs_reads_encoded_blocks(
        self, tier: CodedTier, blocks: SampleBlocks, context: TierContext
    ) -> None:
        items = await blocks.put(tier, 0)
        known = {codec.id: codec for codec in (ZstdCodec(), ChecksumCodec())}
        assert isinstance(tier.inner, FakeTier)
        reader = CodedTier(FakeTier(checks=False, store=tier.inner.store), [], find=known.get)
        await reader.open(context)
        assert await blocks.get(reader, items) == [True]

    async def test_unknown_codecs_are_misses_and_counted(
        self, tier: CodedTier, blocks: SampleBlocks, context: TierContext
    ) -> None:
        items = await blocks.put(tier, 0)
        assert isinstance(tier.inner, FakeTier)
        reader = CodedTier(FakeTier(checks=False, store=tier.inner.store), [ChecksumCodec()])
        await reader.open(context)
        assert await blocks.get(reader, items) == [False]
        assert reader.pipeline.refused == {Outcome.UNREADABLE: 1}

    async def test_a_tier_that_checks_is_not_checked_twice(
        self, blocks: SampleBlocks, context: TierContext
    ) -> None:
        for checks in (True, False):
            tier = CodedTier(FakeTier(checks=checks), [ChecksumCodec()])
            threads: list[object] = []

            async def run(function: Any, *arguments: Any, threads: Any = threads) -> Any:
                threads.append(function)
                return await context.run_blocking(function, *arguments)

            await tier.open(replace(context, run_blocking=run))
            items = await blocks.put(tier, 0)
            assert await blocks.get(tier, items) == [True]
            assert len(threads) == (not checks)

    async def test_a_block_that_never_arrived_is_damage(
        self, blocks: SampleBlocks, context: TierContext
    ) -> None:
        class Lies(FakeTier):
            async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
                return [True] * len(reads)

        tier = CodedTier(Lies(), [ChecksumCodec()])
        await tier.open(context)
        items = await blocks.put(tier, 0, 1)
        assert await blocks.get(tier, items) == [False, False]
        assert tier.pipeline.refused == {Outcome.CORRUPT: 2}

    @pytest.mark.parametrize("fault", [ValueError, AssertionError, IndexError])
    async def test_a_codec_that_raises_costs_one_block(
        self, blocks: SampleBlocks, context: TierContext, fault: type[Exception]
    ) -> None:
        items, said = blocks.some(*range(8)), list[str]()
        codec, inner = Touchy(fault), FakeTier(checks=False)
        tier = CodedTier(inner, [codec, ChecksumCodec()])
        await tier.open(replace(context, say=said.append))
        blocks.fill(items)
        codec.encodes_not = items[2].key
        assert await tier.pipeline.put(blocks.writes(items)) == [n != 2 for n in range(8)]
        assert inner.stored(items[2].key) is None
        assert len(said) == 1
        codec.encodes_not, codec.decodes_not = None, items[5].key
        assert await tier.pipeline.put(blocks.writes(items[2:3])) == [True]
        assert await blocks.get(tier, items) == [n != 5 for n in range(8)]
        assert tier.pipeline.refused == {Outcome.UNREADABLE: 1}
        then = "the block is skipped, the debug log says more"
        assert said == [f"a codec raised {fault.__name__}: {then}"] * 2
        codec.encodes_not = items[0].key
        batches = inner.batches("put")
        assert await tier.pipeline.put(blocks.writes(items[:1])) == [False]
        assert inner.batches("put") == batches, "there is nothing to put"
