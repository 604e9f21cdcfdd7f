"""What the conformance suite for tiers works with, and the part of it that is about labels."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from random import Random
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import pytest
import pytest_asyncio

from kvladder.arena import NO_SLOT, Arena, Slot
from kvladder.keys import BlockKey, Namespace
from kvladder.layout import Layout
from kvladder.runtime import BlockingPool, SystemClock
from kvladder.testing.sim import SimClock, inline_blocking
from kvladder.tiers.base import Tier
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import (
    LABEL_BYTES,
    NO_FACTS,
    PARAMS_BYTES,
    STEPS_MAX,
    Buffer,
    Coding,
    Facts,
    Labels,
    LevelRead,
    Outcome,
    RecoveredBlock,
    Ref,
    SlotAccess,
    Write,
    packed_step,
)

T = TypeVar("T")
MakeTier = Callable[[], Tier]
POISON = 0xA5
SETTLE_S = 0.02
"""How long a real tier is given to do what it must not do any more."""


class SampleBlock(NamedTuple):
    """A block of a test: what it is, where it lies, and the slot to put it from or get it into."""

    key: BlockKey
    place: int
    slot: Slot = NO_SLOT
    facts: Facts = NO_FACTS
    coding: Coding | None = None
    """What codecs are said to have done to it; then only so many of its bytes are stored."""
    replace: bool = False

    @property
    def ref(self) -> Ref:
        """What a tier is told of it that need not move it."""
        return Ref(self.key, self.place)

    def of(self, **facts: Any) -> SampleBlock:
        """The block with other facts."""
        return self._replace(facts=self.facts._replace(**facts))


class WatchedRead(LevelRead):
    """Knows whether anything came."""

    has_come = False

    def came(self, label: Buffer, length: int) -> None:
        """As of any read."""
        assert isinstance(length, int)
        self.has_come = True
        super().came(label, length)


class SampleBlocks:
    """Blocks to put into a tier under test: number n has place n and a slot of its own.

    Holds a claim on every slot while the test lasts, as a level does while a call lasts, and does
    with labels what a level does.
    """

    def __init__(
        self, arena: Arena, layout: Layout, count: int, namespace: Namespace, *, verify: bool = True
    ) -> None:
        self.count = count
        self.labels = Labels(namespace, layout.block_bytes, verify=verify)
        """Of the level that the tier is under."""
        self.refused = Counter[Outcome]()
        """What came from the tier and was of no use, by the reason."""
        self._arena = arena
        self._size = layout.block_bytes
        leased = arena.lease(count)
        assert leased is not None
        self.slots = leased

    @staticmethod
    def key(number: int) -> BlockKey:
        """The key of a block."""
        return BlockKey(hashlib.sha256(b"block %d" % number).digest())

    def data(self, block: SampleBlock) -> bytes:
        """The bytes that belong to a key, as many as are stored."""
        data = Random(block.key).randbytes(self._size)
        return data if block.coding is None else data[: block.coding.length]

    def label(self, block: SampleBlock) -> bytes:
        """The label that belongs to them."""
        return self.labels.pack(block.key, self.data(block), block.facts, block.coding)

    def batch(self, tier: Tier) -> list[SampleBlock]:
        """A batch of two blocks, if the tier takes that many."""
        return self.some(*range(min(2, tier.batch_max)))

    def some(self, *numbers: int) -> list[SampleBlock]:
        """Blocks, each at its own place with its own slot."""
        return [SampleBlock(self.key(n), n, self.slots[n]) for n in numbers]

    def writes(self, blocks: Sequence[SampleBlock]) -> list[Write]:
        """What a level has a tier put."""
        view = self._arena.view
        return [
            Write(
                self.labels,
                b.ref,
                b.slot,
                view(b.slot),
                b.facts,
                coding=b.coding,
                replace=b.replace,
            )
            for b in blocks
        ]

    def reads(self, blocks: Sequence[SampleBlock]) -> list[WatchedRead]:
        """What a level has a tier get."""
        side = SlotAccess(self.labels, self._arena.view)
        return [WatchedRead(side, b.key, b.place, b.slot) for b in blocks]

    def refs(self, blocks: Sequence[SampleBlock]) -> list[Ref]:
        """What a level has a tier remove, or asks of it."""
        return [block.ref for block in blocks]

    def fill(self, blocks: Sequence[SampleBlock]) -> None:
        """Write into each slot what belongs to its key; what follows it in the slot is poison."""
        self.poison(blocks)
        for block in blocks:
            data = self.data(block)
            self._arena.view(block.slot)[: len(data)] = data

    def poison(self, blocks: Sequence[SampleBlock]) -> None:
        """Overwrite the slots, as their next owner would."""
        for block in blocks:
            self._arena.view(block.slot)[:] = bytes([POISON]) * self._arena.slot_bytes

    def bytes_in(self, slot: Slot) -> bytes:
        """A slot's bytes, those after the block too."""
        return bytes(self._arena.view(slot))

    def right(self, block: SampleBlock) -> bool:
        """Whether the slot holds what belongs to the key."""
        data = self.data(block)
        return self.bytes_in(block.slot)[: len(data)] == data

    async def put(self, tier: Tier, *numbers: int) -> list[SampleBlock]:
        """Have the tier store blocks, in batches that it takes."""
        return await self.store(tier, self.some(*numbers))

    async def store(self, tier: Tier, blocks: list[SampleBlock]) -> list[SampleBlock]:
        """Fill the slots of ``blocks`` and have the tier store them."""
        self.fill(blocks)
        for batch in batched(tier, blocks):
            assert list(await tier.put(self.writes(batch))) == [True] * len(batch)
        return blocks

    async def get(self, tier: Tier, blocks: Sequence[SampleBlock]) -> list[bool | None]:
        """What a level makes of the tier's answers; fails if they break a rule.

        True only for the right bytes; False for what is not there, or was refused.
        """
        self.poison(blocks)
        found: list[bool | None] = []
        for batch in batched(tier, blocks):
            reads = self.reads(batch)
            answers = list(await tier.get(reads))
            assert len(answers) == len(batch)
            assert set(map(type, answers)) <= {bool, NoneType}
            found += [self._said(*one) for one in zip(batch, reads, answers, strict=True)]
        return found

    def _said(self, block: SampleBlock, read: WatchedRead, said: bool | None) -> bool | None:
        """What a level makes of one answer."""
        what = f"the block of place {block.place}"
        assert read.has_come or not said, f"it says that {what} is there, and nothing came"
        before, _ = read.verdict
        if said or before is not None:
            is_good = read.check()
            outcome, coding = read.verdict
            assert outcome is not None
            if not is_good:
                self.refused[outcome] += 1
                return False
            assert coding == (block.coding or self.labels.whole), f"another label of {what}"
            assert not said or self.right(block), f"wrong bytes for {what}"
        return said

    async def contains(self, tier: Tier, blocks: Sequence[SampleBlock]) -> list[bool]:
        """What the tier says it has."""
        found: list[bool] = []
        for batch in batched(tier, self.refs(blocks)):
            found += await tier.contains(batch)
        assert len(found) == len(blocks)
        return found

    async def remove(self, tier: Tier, blocks: Sequence[SampleBlock]) -> None:
        """Have the tier forget blocks."""
        for batch in batched(tier, self.refs(blocks)):
            await tier.remove(batch)

    def close(self) -> None:
        """Check that the tier left the claims alone, and give them up."""
        assert [self._arena.claims(slot) for slot in self.slots] == [1] * self.count
        self._arena.release(self.slots)


def batched(tier: Tier, blocks: Sequence[T]) -> list[Sequence[T]]:
    """The blocks in batches that the tier takes; no batch if there are none."""
    step = tier.batch_max
    return [blocks[start : start + step] for start in range(0, len(blocks), step)]


class Opener:
    """Opens a tier on the medium of this test; the one before it is closed first."""

    def __init__(self, make: MakeTier, context: TierContext) -> None:
        self._make = make
        self._context = context
        self._tier: Tier | None = None
        self.recovered: list[RecoveredBlock] = []
        """What the tier opened last said that it has."""

    async def __call__(self, context: TierContext | None = None) -> Tier:
        await self.close()
        tier = self._make()
        await tier.open(context or self._context)
        self._tier = tier
        self.recovered = []
        async for batch in tier.recover():
            self.recovered += batch
        return tier

    async def close(self) -> None:
        """Close the tier that is open."""
        if self._tier is not None:
            await self._tier.aclose()
            self._tier = None


class TierFixtures:
    """The fixtures of ``TierTests``, and what a subclass may declare."""

    pytestmark = pytest.mark.sim_loop

    real = False
    """Whether to run on a real loop with threads: for tiers that really wait for something."""
    survives = False
    """Whether a tier finds again what an earlier one on its medium stored."""
    ends = True
    """Whether its medium tells where a block ends, if its label says that there is more."""

    async def raw_get(self, tier: Tier, ref: Ref) -> bytes | None:
        """Read a block behind the tier's back; override it to have ``put`` checked by it."""
        pytest.skip("there is no raw_get")

    async def raw_put(self, tier: Tier, ref: Ref, label: bytes, data: bytes) -> None:
        """Have this lie there for a block, whatever it is; override it to have ``get`` checked."""
        pytest.skip("there is no raw_put")

    async def raw_corrupt(self, tier: Tier, ref: Ref) -> None:
        """Damage a stored block on its medium; override it to have checks checked."""
        pytest.skip("there is no raw_corrupt")

    # ---- fixtures

    @pytest.fixture
    def make(self) -> MakeTier:
        """A function that makes a tier on the medium of this test; must be overridden."""
        raise NotImplementedError("give the class a fixture `make` that returns a function")

    @pytest.fixture
    def block_bytes(self) -> int:
        """Bytes of a block: by default they do not fill its slot."""
        return 6000

    @pytest.fixture
    def layout(self, block_bytes: int) -> Layout:
        """What the blocks are."""
        return Layout(block_tokens=16, block_bytes=block_bytes)

    @pytest.fixture
    def namespace(self, layout: Layout) -> Namespace:
        """Of all blocks, but where a test says so."""
        return layout.namespace(salt="suite")

    @pytest.fixture
    def capacity(self, make: MakeTier) -> int:
        """How many blocks the tier is told to hold."""
        return max(8, 3 * make().batch_max)

    @pytest.fixture
    def arena(self, layout: Layout, capacity: int) -> Iterator[Arena]:
        """An arena with a slot for each block."""
        arena = Arena.create(capacity, layout.slot_bytes)
        yield arena
        free = arena.free
        arena.close()
        assert free == arena.slots, "somebody still claims a slot"

    @pytest_asyncio.fixture
    async def context(
        self, arena: Arena, layout: Layout, namespace: Namespace, capacity: int
    ) -> AsyncIterator[TierContext]:
        """What the tier is opened with."""
        if self.real:
            pool = BlockingPool(4, "kvladder-suite")
            yield TierContext(arena, layout, namespace, capacity, SystemClock(), pool.run)
            pool.close(timeout_s=5.0)
        else:
            clock = SimClock(asyncio.get_running_loop())
            yield TierContext(arena, layout, namespace, capacity, clock, inline_blocking)

    @pytest_asyncio.fixture
    async def opened(self, make: MakeTier, context: TierContext) -> AsyncIterator[Opener]:
        """Opens tiers one after the other on one medium."""
        opener = Opener(make, context)
        yield opener
        await opener.close()

    @pytest_asyncio.fixture
    async def tier(self, opened: Opener) -> Tier:
        """An opened, empty tier."""
        return await opened()

    @pytest.fixture
    def blocks(
        self, arena: Arena, layout: Layout, namespace: Namespace, capacity: int
    ) -> Iterator[SampleBlocks]:
        """As many blocks as the tier has places."""
        blocks = SampleBlocks(arena, layout, capacity, namespace)
        yield blocks
        blocks.close()

    async def settle(self) -> None:
        """Give the tier time to do what it must not do any more."""
        await asyncio.sleep(SETTLE_S if self.real else 1000.0)

    def only_if_it_survives(self, opened: Opener) -> None:
        """The rest of a test is for tiers that find what was stored; others find nothing."""
        if not self.survives:
            assert opened.recovered == []
            pytest.skip("it does not survive")


def coded(block: SampleBlock, length: int, steps: int = 1) -> SampleBlock:
    """The block as if codecs had made so many bytes of it."""
    packed = b"".join(
        packed_step(1000 + number, bytes([255 - number]) * PARAMS_BYTES) for number in range(steps)
    )
    return block._replace(coding=Coding(length, packed))


class LabelTests(TierFixtures):
    """Part of ``TierTests``."""

    # ---- what is stored beside a block comes back

    async def test_keeps_lengths_and_what_codecs_did(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        for length, steps in ((1, 1), (4097, STEPS_MAX), (6000, 2)):
            first, *others = blocks.batch(tier)
            items = [coded(first, length, steps), *others]
            await blocks.store(tier, items)
            assert await blocks.get(tier, items) == [True] * len(items)
            await blocks.remove(tier, items)

    async def test_labels_survive(self, opened: Opener, blocks: SampleBlocks) -> None:
        tier = await opened()
        items = await blocks.store(tier, [coded(blocks.some(0)[0], 10, STEPS_MAX)])
        tier = await opened()
        self.only_if_it_survives(opened)
        assert await blocks.get(tier, items) == [True]

    # ---- what it says

    async def test_nothing_comes_of_what_is_not_there(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        reads = blocks.reads(blocks.batch(tier))
        assert list(await tier.get(reads)) == [False] * len(reads)
        assert not any(read.has_come for read in reads)

    async def test_a_block_that_was_got_can_be_got_again(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        items = await blocks.put(tier, 0)
        for _ in range(3):
            assert await blocks.get(tier, items) == [True]
        assert not +blocks.refused

    # ---- what may lie there instead

    async def test_the_label_of_another_block_is_a_miss(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        other = blocks.some(2)[0]
        await self.lies_there(tier, blocks, blocks.label(other), blocks.data(other))
        assert +blocks.refused in ({}, {Outcome.STALE: 1})

    async def test_a_label_of_another_namespace_is_a_miss(
        self, tier: Tier, blocks: SampleBlocks, namespace: Namespace
    ) -> None:
        (item,) = blocks.some(1)
        foreign = Labels(Namespace(namespace[::-1]), blocks.labels.block_bytes, verify=True)
        label = foreign.pack(item.key, blocks.data(item))
        await self.lies_there(tier, blocks, label, blocks.data(item))
        assert +blocks.refused in ({}, {Outcome.STALE: 1})

    @pytest.mark.parametrize("size", [0, 1, 127, LABEL_BYTES - 1])
    async def test_a_label_that_is_cut_is_a_miss(
        self, tier: Tier, blocks: SampleBlocks, size: int
    ) -> None:
        label = blocks.label(blocks.some(1)[0])[:size]
        await self.lies_there(tier, blocks, label, b"")

    @pytest.mark.parametrize("size", [0, 1, 5999])
    async def test_a_block_that_is_cut_is_a_miss(
        self, tier: Tier, blocks: SampleBlocks, size: int
    ) -> None:
        (item,) = blocks.some(1)
        await self.lies_there(tier, blocks, blocks.label(item), blocks.data(item)[:size])

    async def test_a_block_that_is_cut_is_a_miss_without_a_checksum_too(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        if not self.ends:
            pytest.skip("nobody can tell where a block on its medium ends")
        own = blocks.labels
        blocks.labels = Labels(own.namespace, own.block_bytes, verify=False)
        (item,) = blocks.some(1)
        await self.lies_there(tier, blocks, blocks.label(item), blocks.data(item)[:-1])

    async def test_a_block_that_is_too_long_is_a_miss(
        self, tier: Tier, blocks: SampleBlocks
    ) -> None:
        (item,) = blocks.some(1)
        data = blocks.data(item) * 3
        label = Labels(blocks.labels.namespace, len(data), verify=True).pack(item.key, data)
        await self.lies_there(tier, blocks, label, data)

    async def test_noise_is_a_miss(self, tier: Tier, blocks: SampleBlocks) -> None:
        noise = Random(1)
        for _ in range(5):
            await self.lies_there(tier, blocks, noise.randbytes(LABEL_BYTES), noise.randbytes(6000))

    async def lies_there(self, tier: Tier, blocks: SampleBlocks, label: bytes, data: bytes) -> None:
        """One block of a batch is refused, the others come, and a put replaces what lay there."""
        items = await blocks.put(tier, *range(min(3, tier.batch_max)))
        bad = items[len(items) // 2]
        await self.raw_put(tier, bad.ref, label, data)
        assert await blocks.get(tier, items) == [item is not bad for item in items]
        if not tier.shared:
            await blocks.remove(tier, [bad])
        await blocks.store(tier, [bad._replace(replace=tier.shared)])
        assert await blocks.get(tier, items) == [True] * len(items)
