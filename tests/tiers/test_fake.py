"""The fake tier keeps every rule as long as its script is empty, and breaks them as told."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from xxhash import xxh3_128_digest

from kvladder.testing.fakes import FakeStore, FakeTier, Record
from kvladder.testing.fixtures import MakeTier
from kvladder.testing.shared import SharedFakeTier
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


class TestSharedFake(TierTests):
    @pytest.fixture
    def make(self):
        store = FakeStore()

        def make() -> SharedFakeTier:
            tier = SharedFakeTier(store=store)
            tier.removable = lambda _key: True
            return tier

        return make

    async def raw_corrupt(self, tier, item) -> None:
        tier.corrupt(item.key)

    async def test_purge_removes_one_salt_or_all(self, tier, blocks) -> None:
        salted = [item._replace(salt=b"8 bytes!") for item in blocks.items(0, 1)]
        await blocks.store(tier, salted)
        others = await blocks.put(tier, 2)
        told: list[tuple[int, int]] = []
        assert await tier.purge(b"8 bytes!", lambda *numbers: told.append(numbers)) == 2
        assert told == [(2, 2)]
        assert await blocks.contains(tier, [*salted, *others]) == [False, False, True]
        assert await tier.purge(None, lambda *_: None) == 1
