"""The reference tier keeps every rule."""

from __future__ import annotations

import pytest

from kvladder.testing.fixtures import MakeTier
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Tier
from kvladder.tiers.label import Ref
from kvladder.tiers.memory import MemoryTier


class TestMemory(TierTests):
    @pytest.fixture
    def make(self) -> MakeTier:
        return MemoryTier

    async def raw_get(self, tier: Tier, ref: Ref) -> bytes | None:
        assert isinstance(tier, MemoryTier)
        return tier._blocks[ref.key][1]

    async def raw_put(self, tier: Tier, ref: Ref, label: bytes, data: bytes) -> None:
        assert isinstance(tier, MemoryTier)
        tier._blocks[ref.key] = label, data

    async def raw_corrupt(self, tier: Tier, ref: Ref) -> None:
        assert isinstance(tier, MemoryTier)
        label, data = tier._blocks[ref.key]
        tier._blocks[ref.key] = label, bytes([data[0] ^ 1]) + data[1:]
