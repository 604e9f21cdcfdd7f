"""The fake tier keeps every rule as long as its script is empty, and breaks them as told."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from xxhash import xxh3_128_digest

from kvladder.testing.fakes import FakeStore, FakeTier, Record
from kvladder.testing.fixtures import MakeTier
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Item, Tier


class TestFake(TierTests):
    @pytest.fixture
    def make(self) -> MakeTier:
        return partial(FakeTier, random=Random(1), latency_s=0.001, mean_s=0.01)

    async def raw_get(self, tier: Tier, item: Item) -> bytes | None:
        assert isinstance(tier, FakeTier)
        return tier.stored(item.key)

    async def raw_put(self, tier: Tier, item: Item, data: bytes) -> None:
        assert isinstance(tier, FakeTier)
        tier.records[item.place] = Record(item, data, xxh3_128_digest(data))

    async def raw_corrupt(self, tier: Tier, item: Item) -> None:
        assert isinstance(tier, FakeTier)
        tier.corrupt(item.key)


class TestDurableFake(TestFake):
    survives = True

    @pytest.fixture
    def make(self) -> MakeTier:
        return partial(FakeTier, store=FakeStore(), durable=True, mean_s=1.0)


class TestSmallBatches(TestFake):
    @pytest.fixture
    def make(self) -> MakeTier:
        return partial(FakeTier, batch_max=1)
