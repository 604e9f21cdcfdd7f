"""The part of the suite for tiers that is about labels: what lies beside a block comes with it."""

from __future__ import annotations

from random import Random

import pytest

from kvladder.keys import Namespace
from kvladder.testing.fixtures import Block, Blocks, Opener, TierFixtures
from kvladder.tiers.base import Tier
from kvladder.tiers.label import (
    LABEL_BYTES,
    PARAMS_BYTES,
    STEPS_MAX,
    Coding,
    Labels,
    Outcome,
    packed_step,
)


def coded(block: Block, length: int, steps: int = 1) -> Block:
    """The block as if codecs had made so many bytes of it."""
    packed = b"".join(
        packed_step(1000 + number, bytes([255 - number]) * PARAMS_BYTES) for number in range(steps)
    )
    return block._replace(coding=Coding(length, packed))


class LabelTests(TierFixtures):
    """Part of ``TierTests``."""

    # ---- what is stored beside a block comes back

    async def test_keeps_lengths_and_what_codecs_did(self, tier: Tier, blocks: Blocks) -> None:
        for length, steps in ((1, 1), (4097, STEPS_MAX), (6000, 2)):
            first, *others = blocks.batch(tier)
            items = [coded(first, length, steps), *others]
            await blocks.store(tier, items)
            assert await blocks.get(tier, items) == [True] * len(items)
            await blocks.remove(tier, items)

    async def test_labels_survive(self, opened: Opener, blocks: Blocks) -> None:
        tier = await opened()
        items = await blocks.store(tier, [coded(blocks.some(0)[0], 10, STEPS_MAX)])
        tier = await opened()
        self.only_if_it_survives(opened)
        assert await blocks.get(tier, items) == [True]

    # ---- what it says

    async def test_nothing_comes_of_what_is_not_there(self, tier: Tier, blocks: Blocks) -> None:
        reads = blocks.reads(blocks.batch(tier))
        assert list(await tier.get(reads)) == [False] * len(reads)
        assert not any(read.has_come for read in reads)

    async def test_a_block_that_was_got_can_be_got_again(self, tier: Tier, blocks: Blocks) -> None:
        items = await blocks.put(tier, 0)
        for _ in range(3):
            assert await blocks.get(tier, items) == [True]
        assert not +blocks.refused

    # ---- what may lie there instead

    async def test_the_label_of_another_block_is_a_miss(self, tier: Tier, blocks: Blocks) -> None:
        other = blocks.some(2)[0]
        await self.lies_there(tier, blocks, blocks.label(other), blocks.data(other))
        assert +blocks.refused in ({}, {Outcome.STALE: 1})

    async def test_a_label_of_another_namespace_is_a_miss(
        self, tier: Tier, blocks: Blocks, namespace: Namespace
    ) -> None:
        (item,) = blocks.some(1)
        foreign = Labels(Namespace(namespace[::-1]), blocks.labels.block_bytes, verify=True)
        label = foreign.pack(item.key, blocks.data(item))
        await self.lies_there(tier, blocks, label, blocks.data(item))
        assert +blocks.refused in ({}, {Outcome.STALE: 1})

    @pytest.mark.parametrize("size", [0, 1, 127, LABEL_BYTES - 1])
    async def test_a_label_that_is_cut_is_a_miss(
        self, tier: Tier, blocks: Blocks, size: int
    ) -> None:
        label = blocks.label(blocks.some(1)[0])[:size]
        await self.lies_there(tier, blocks, label, b"")

    @pytest.mark.parametrize("size", [0, 1, 5999])
    async def test_a_block_that_is_cut_is_a_miss(
        self, tier: Tier, blocks: Blocks, size: int
    ) -> None:
        (item,) = blocks.some(1)
        await self.lies_there(tier, blocks, blocks.label(item), blocks.data(item)[:size])

    async def test_a_block_that_is_cut_is_a_miss_without_a_checksum_too(
        self, tier: Tier, blocks: Blocks
    ) -> None:
        if not self.ends:
            pytest.skip("nobody can tell where a block on its medium ends")
        own = blocks.labels
        blocks.labels = Labels(own.namespace, own.block_bytes, verify=False)
        (item,) = blocks.some(1)
        await self.lies_there(tier, blocks, blocks.label(item), blocks.data(item)[:-1])

    async def test_a_block_that_is_too_long_is_a_miss(self, tier: Tier, blocks: Blocks) -> None:
        (item,) = blocks.some(1)
        data = blocks.data(item) * 3
        label = Labels(blocks.labels.namespace, len(data), verify=True).pack(item.key, data)
        await self.lies_there(tier, blocks, label, data)

    async def test_noise_is_a_miss(self, tier: Tier, blocks: Blocks) -> None:
        noise = Random(1)
        for _ in range(5):
            await self.lies_there(tier, blocks, noise.randbytes(LABEL_BYTES), noise.randbytes(6000))

    async def lies_there(self, tier: Tier, blocks: Blocks, label: bytes, data: bytes) -> None:
        """One block of a batch is refused, the others come, and a put replaces what lay there."""
        items = await blocks.put(tier, *range(min(3, tier.batch_max)))
        bad = items[len(items) // 2]
        await self.raw_put(tier, bad.ref, label, data)
        assert await blocks.get(tier, items) == [item is not bad for item in items]
        if not tier.shared:
            await blocks.remove(tier, [bad])
        await blocks.store(tier, [bad._replace(replace=tier.shared)])
        assert await blocks.get(tier, items) == [True] * len(items)
