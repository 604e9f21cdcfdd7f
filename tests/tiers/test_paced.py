"""The tier of replays keeps every rule, and takes the time of a medium."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.replay.medium import PacedTier, Speeds
from kvladder.testing.fixtures import MakeTier, SampleBlocks
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Tier
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import Ref


class TestPaced(TierTests):
    @pytest.fixture
    def make(self) -> MakeTier:
        return lambda: PacedTier(Speeds(1e9, 1e8, 0.001), stored_bytes=6000, batch_max=8)

    async def raw_get(self, tier: Tier, ref: Ref) -> bytes | None:
        assert isinstance(tier, PacedTier)
        return tier._blocks[ref.key][1]

    async def raw_put(self, tier: Tier, ref: Ref, label: bytes, data: bytes) -> None:
        assert isinstance(tier, PacedTier)
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier: Tier, ref: Ref) -> None:
        assert isinstance(tier, PacedTier)
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]

    async def test_calls_share_the_bandwidth_of_each_direction(
        self, context: TierContext, blocks: SampleBlocks
    ) -> None:
        tier = PacedTier(Speeds(100.0, 50.0, 1.0), stored_bytes=100, batch_max=8)
        await tier.open(context)
        loop = asyncio.get_running_loop()
        some, others = blocks.some(0, 1), blocks.some(2)
        begun_s = loop.time()
        await asyncio.gather(tier.put(blocks.writes(some)), tier.put(blocks.writes(others)))
        assert loop.time() - begun_s == pytest.approx(6 + 1)  # 300 bytes, and one latency
        begun_s = loop.time()
        await asyncio.gather(tier.get(blocks.reads(some)), tier.get(blocks.reads(others)))
        assert loop.time() - begun_s == pytest.approx(3 + 1)
        await tier.aclose()
