"""Fixtures of the conformance suite for tiers, and the suite's tests of labels."""

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
    Write,
    packed_step,
)

T = TypeVar("T")
MakeTier = Callable[[], Tier]
POISON = 0xA5
SETTLE_S = 0.02
"""Seconds in which a real tier could still do something that it must not do after a call."""


class SampleBlock(NamedTuple):
    """A block of a test: its key and place, and the slot to put it from or get it into."""

    key: BlockKey
    place: int
    slot: Slot = NO_SLOT
    facts: Facts = NO_FACTS
    coding: Coding | None = None
    """Pretended work of codecs, or None; with it, only ``coding.length`` bytes are stored."""
    replace: bool = False

    @property
    def ref(self) -> Ref:
        """Key and place, as calls that move no bytes take them."""
        return Ref(self.key, self.place)

    def of(self, **facts: Any) -> SampleBlock:
        """Return a copy of the block with other facts."""
        return self._replace(facts=self.facts._replace(**facts))


class WatchedRead(LevelRead):
    """A read that records whether the tier called ``came``."""

    has_come: bool = False

    def came(self, label: Buffer, length: int) -> None:
        """Note the call, and do what every read does."""
        assert isinstance(length, int)
        self.has_come = True
        super().came(label, length)


class SampleBlocks:
    """Blocks to put into a tier under test: block n has place n and a slot of its own.

    Acts for the level: makes and checks labels, and holds a claim on every slot. A level holds
    its claims during a call, this class during the whole test.
    """

    def __init__(
        self, arena: Arena, layout: Layout, count: int, namespace: Namespace, *, verify: bool = True
    ) -> None:
        self.count = count
        self.labels = Labels(namespace, layout.block_bytes, verify=verify)
        """Makes and checks labels, as the tier's level would."""
        self.refused = Counter[Outcome]()
        """Number of blocks that the tier delivered and the check refused, by reason."""
        self._arena = arena
        self._size = layout.block_bytes
        leased = arena.lease(count)
        assert leased is not None
        self.slots = leased

    @staticmethod
    def key(number: int) -> BlockKey:
        """Return the key of block ``number``."""
        return BlockKey(hashlib.sha256(b"block %d" % number).digest())

    def data(self, block: SampleBlock) -> bytes:
        """Return the bytes to store for the block; they follow from its key."""
        data = Random(block.key).randbytes(self._size)
        return data if block.coding is None else data[: block.coding.length]

    def label(self, block: SampleBlock) -> bytes:
        """Return the label for the block's bytes."""
        return self.labels.pack(block.key, self.data(block), block.facts, block.coding)

    def batch(self, tier: Tier) -> list[SampleBlock]:
        """Return a batch of two blocks, or of one if the tier takes no more."""
        return self.some(*range(min(2, tier.batch_max)))

    def some(self, *numbers: int) -> list[SampleBlock]:
        """Return the blocks of these numbers, each with its own place and slot."""
        return [SampleBlock(self.key(n), n, self.slots[n]) for n in numbers]

    def writes(self, blocks: Sequence[SampleBlock]) -> list[Write]:
        """Return the argument of ``put`` for these blocks."""
        view = self._arena.view
        return [
            Write(
                self.labels,
                *b.ref,
                b.slot,
                view(b.slot),
                b.facts,
                coding=b.coding,
                replace=b.replace,
            )
            for b in blocks
        ]

    def reads(self, blocks: Sequence[SampleBlock]) -> list[WatchedRead]:
        """Return the argument of ``get`` for these blocks."""
        view = self._arena.view
        return [WatchedRead(self.labels, *b.ref, b.slot, view(b.slot)) for b in blocks]

    def refs(self, blocks: Sequence[SampleBlock]) -> list[Ref]:
        """Return the argument of ``remove`` or ``contains`` for these blocks."""
        return [block.ref for block in blocks]

    def fill(self, blocks: Sequence[SampleBlock]) -> None:
        """Write each block's bytes into its slot, and poison into the rest of the slot."""
        self.poison(blocks)
        for block in blocks:
            data = self.data(block)
            self._arena.view(block.slot)[: len(data)] = data

    def poison(self, blocks: Sequence[SampleBlock]) -> None:
        """Overwrite the slots, as their next owner would."""
        for block in blocks:
            self._arena.view(block.slot)[:] = bytes([POISON]) * self._arena.slot_bytes

    def bytes_in(self, slot: Slot) -> bytes:
        """Return all bytes of a slot, including those after the block."""
        return bytes(self._arena.view(slot))

    def right(self, block: SampleBlock) -> bool:
        """Return whether the block's slot holds the block's bytes."""
        data = self.data(block)
        return self.bytes_in(block.slot)[: len(data)] == data

    async def put(self, tier: Tier, *numbers: int) -> list[SampleBlock]:
        """Store the blocks of these numbers in the tier, in batches of at most ``batch_max``."""
        return await self.store(tier, self.some(*numbers))

    async def store(self, tier: Tier, blocks: list[SampleBlock]) -> list[SampleBlock]:
        """Fill the slots of ``blocks``, store them in the tier and return them."""
        self.fill(blocks)
        for batch in batched(tier, blocks):
            assert list(await tier.put(self.writes(batch))) == [True] * len(batch)
        return blocks

    async def get(self, tier: Tier, blocks: Sequence[SampleBlock]) -> list[bool | None]:
        """Get blocks, and return what a level concludes; fail if an answer breaks a rule.

        True means that the right bytes came. False means that the block is absent or was refused.
        None means that the tier could not tell.
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
        """Return what a level concludes from one answer."""
        what = f"the block of place {block.place}"
        assert read.has_come or not said, f"the tier reports {what} and delivered nothing"
        before, _ = read.verdict
        if said or before is not None:
            is_good = read.check()
            outcome, coding = read.verdict
            assert outcome is not None
            if not is_good:
                self.refused[outcome] += 1
                return False
            assert coding == (block.coding or self.labels.whole), f"wrong label for {what}"
            assert not said or self.right(block), f"wrong bytes for {what}"
        return said

    async def contains(self, tier: Tier, blocks: Sequence[SampleBlock]) -> list[bool]:
        """Return which of the blocks the tier says it has."""
        found: list[bool] = []
        for batch in batched(tier, self.refs(blocks)):
            found += await tier.contains(batch)
        assert len(found) == len(blocks)
        return found

    async def remove(self, tier: Tier, blocks: Sequence[SampleBlock]) -> None:
        """Remove the blocks from the tier, in batches of at most ``batch_max``."""
        for batch in batched(tier, self.refs(blocks)):
            await tier.remove(batch)

    def close(self) -> None:
        """Check that the tier changed no claim, and release the claims."""
        assert [self._arena.claims(slot) for slot in self.slots] == [1] * self.count
        self._arena.release(self.slots)


def batched(tier: Tier, blocks: Sequence[T]) -> list[Sequence[T]]:
    """Split ``blocks`` into batches of at most ``batch_max``; no batch if there are no blocks."""
    step = tier.batch_max
    return [blocks[start : start + step] for start in range(0, len(blocks), step)]


class Opener:
    """Opens tiers on the medium of this test; each call first closes the tier opened before."""

    def __init__(self, make: MakeTier, context: TierContext) -> None:
        self._make = make
        self._context = context
        self._tier: Tier | None = None
        self.recovered: list[RecoveredBlock] = []
        """Blocks that ``recover`` of the last opened tier yielded."""

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
        """Close the open tier, if there is one."""
        if self._tier is not None:
            await self._tier.aclose()
            self._tier = None


class TierFixtures:
    """Fixtures of ``TierTests``, and the attributes and methods that a subclass may override."""

    pytestmark = pytest.mark.sim_loop

    real = False
    """True to run on a real loop with threads, for tiers that do real I/O."""
    survives = False
    """True if a tier recovers the blocks that an earlier one stored on the same medium."""
    ends = True
    """True if the medium knows where a block ends. A block cut short is then detected even
    without a checksum."""

    async def raw_get(self, tier: Tier, ref: Ref) -> bytes | None:
        """Read a block's bytes without the tier; override it to have ``put`` checked."""
        pytest.skip("raw_get is not overridden")

    async def raw_put(self, tier: Tier, ref: Ref, label: bytes, data: bytes) -> None:
        """Store this label and data for a block without the tier, valid or not.

        Override it to have ``get`` checked.
        """
        pytest.skip("raw_put is not overridden")

    async def raw_corrupt(self, tier: Tier, ref: Ref) -> None:
        """Damage a stored block on its medium; override it to have damage detection checked."""
        pytest.skip("raw_corrupt is not overridden")

    # ---- fixtures

    @pytest.fixture
    def make(self) -> MakeTier:
        """Return a function that makes a tier on the medium of this test; must be overridden."""
        raise NotImplementedError("give the class a fixture `make` that returns a function")

    @pytest.fixture
    def block_bytes(self) -> int:
        """Return the size of a block in bytes; the default does not fill the slot."""
        return 6000

    @pytest.fixture
    def layout(self, block_bytes: int) -> Layout:
        """Return the layout of the blocks."""
        return Layout(block_tokens=16, block_bytes=block_bytes)

    @pytest.fixture
    def namespace(self, layout: Layout) -> Namespace:
        """Return the namespace of all blocks; a few tests use another one."""
        return layout.namespace(salt="suite")

    @pytest.fixture
    def capacity(self, make: MakeTier) -> int:
        """Return the tier's capacity in blocks."""
        return max(8, 3 * make().batch_max)

    @pytest.fixture
    def arena(self, layout: Layout, capacity: int) -> Iterator[Arena]:
        """Yield an arena with one slot per block; check afterwards that no claim is left."""
        arena = Arena.create(capacity, layout.slot_bytes)
        yield arena
        free = arena.free
        arena.close()
        assert free == arena.slots, "a slot is still claimed"

    @pytest_asyncio.fixture
    async def context(
        self, arena: Arena, layout: Layout, namespace: Namespace, capacity: int
    ) -> AsyncIterator[TierContext]:
        """Yield the context that tiers are opened with."""
        if self.real:
            pool = BlockingPool(4, "kvladder-suite")
            yield TierContext(arena, layout, namespace, capacity, SystemClock(), pool.run)
            pool.close(timeout_s=5.0)
        else:
            clock = SimClock(asyncio.get_running_loop())
            yield TierContext(arena, layout, namespace, capacity, clock, inline_blocking)

    @pytest_asyncio.fixture
    async def opened(self, make: MakeTier, context: TierContext) -> AsyncIterator[Opener]:
        """Yield an opener of tiers on this test's medium; close its last tier afterwards."""
        opener = Opener(make, context)
        yield opener
        await opener.close()

    @pytest_asyncio.fixture
    async def tier(self, opened: Opener) -> Tier:
        """Return an opened, empty tier."""
        return await opened()

    @pytest.fixture
    def blocks(
        self, arena: Arena, layout: Layout, namespace: Namespace, capacity: int
    ) -> Iterator[SampleBlocks]:
        """Yield one block per place of the tier; release their slots afterwards."""
        blocks = SampleBlocks(arena, layout, capacity, namespace)
        yield blocks
        blocks.close()

    async def settle(self) -> None:
        """Wait long enough for forbidden late effects of a call to show."""
        await asyncio.sleep(SETTLE_S if self.real else 1000.0)

    def only_if_it_survives(self, opened: Opener) -> None:
        """Skip the rest of a test unless ``survives``; check that other tiers recover nothing."""
        if not self.survives:
            assert opened.recovered == []
            pytest.skip("the tier does not survive")


def coded(block: SampleBlock, length: int, steps: int = 1) -> SampleBlock:
    """Return the block as if ``steps`` codecs had encoded it to ``length`` bytes."""
    packed = b"".join(
        packed_step(1000 + number, bytes([255 - number]) * PARAMS_BYTES) for number in range(steps)
    )
    return block._replace(coding=Coding(length, packed))


class LabelTests(TierFixtures):
    """The tests of ``TierTests`` about labels."""

    # ---- labels come back

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

    # ---- answers

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

    # ---- wrong or damaged data on the medium

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
            pytest.skip("the medium does not know where a block ends")
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
        """Check that of a batch this block alone is refused, and that a put replaces it."""
        items = await blocks.put(tier, *range(min(3, tier.batch_max)))
        bad = items[len(items) // 2]
        await self.raw_put(tier, bad.ref, label, data)
        assert await blocks.get(tier, items) == [item is not bad for item in items]
        if not tier.shared:
            await blocks.remove(tier, [bad])
        await blocks.store(tier, [bad._replace(replace=tier.shared)])
        assert await blocks.get(tier, items) == [True] * len(items)
