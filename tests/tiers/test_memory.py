"""The reference tier keeps every rule."""

from __future__ import annotations

import pytest

from kvladder.testing.fixtures import MakeTier
from kvladder.testing.tiers import TierTests
from kvladder.tiers.memory import MemoryTier


class TestMemory(TierTests):
    @pytest.fixture
    def make(self) -> MakeTier:
        return MemoryTier
