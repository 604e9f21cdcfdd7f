"""The fake tier keeps every rule while its script is empty, and breaks rules on order."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from kvladder.testing.engines.faults import Cold, ColdTier, NoOptions, SharedColdTier
from kvladder.testing.fakes import FakeStore, FakeTier, Record
from kvladder.testing.fixtures import MakeTier
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.tiers import TierTests
from kvladder.tiers.base import Tier
from kvladder.tiers.label import NO_FACTS, Ref


class TestFake(TierTests):
    @pytest.fixture
    def make(self) -> MakeTier:
        return partial(FakeTier, random=Random(1), latency_s=0.001, mean_s=0.01)

    async def raw_get(self, tier: Tier, ref: Ref) -> bytes | None:
        assert isinstance(tier, FakeTier)
        return tier.stored(ref.key)

    async def raw_put(self, tier: Tier, ref: Ref, label: bytes, data: bytes) -> None:
        assert isinstance(tier, FakeTier)
        tier.records[ref.place] = Record(*ref, NO_FACTS, label, data)

    async def raw_corrupt(self, tier: Tier, ref: Ref) -> None:
        assert isinstance(tier, FakeTier)
        tier.corrupt(ref.key)


class TestDurableFake(TestFake):
    survives = True

    @pytest.fixture
    def make(self) -> MakeTier:
        return partial(FakeTier, store=FakeStore(), durable=True, mean_s=1.0)


class TestCold(TestDurableFake):
    """The tier below a connector in ``ConnectorTests``."""

    @pytest.fixture
    def make(self) -> MakeTier:
        tier_class: type[ColdTier] = Cold().tier_class
        return partial(tier_class, NoOptions())


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

    async def raw_corrupt(self, tier, ref) -> None:
        tier.corrupt(ref.key)

    async def test_purge_removes_one_salt_or_all(self, tier, blocks) -> None:
        salted = [item.of(salt=b"8 bytes!") for item in blocks.some(0, 1)]
        await blocks.store(tier, salted)
        others = await blocks.put(tier, 2)
        told: list[tuple[int, int]] = []
        assert await tier.purge(b"8 bytes!", lambda *numbers: told.append(numbers)) == 2
        assert told == [(2, 2)]
        assert await blocks.contains(tier, [*salted, *others]) == [False, False, True]
        assert await tier.purge(None, lambda *_: None) == 1


class TestSharedCold(TestSharedFake):
    """The tier that engines share in ``HintTests``."""

    @pytest.fixture
    def make(self):
        tier_class = Cold(is_shared=True).tier_class
        assert issubclass(tier_class, SharedColdTier)
        return partial(tier_class, NoOptions())
