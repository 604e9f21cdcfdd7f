"""The NIXL tier against a real far end, over real agents."""

from __future__ import annotations

import itertools

import pytest

from kvladder.testing import TierTests
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier
from tests.kit.far import Far

TESTS = itertools.count()
pytest.importorskip("nixl", reason="the extra nixl is not installed")


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    with Far(tmp_path_factory.mktemp("far")) as far:
        yield far


def options(far, **more):
    return NixlOptions(servers=(far.address,), keys=far.keys, **more)


class TestNixl(TierTests):
    real = True

    @pytest.fixture(autouse=True)
    def _far(self, far):
        self.far = far

    @pytest.fixture
    def namespace(self, layout):
        """One per test: they share a far end."""
        return layout.namespace(salt=f"test {next(TESTS)}")

    @pytest.fixture
    def make(self, far):
        return lambda: IsolatedTier(NixlTier, options(far))

    async def raw_get(self, tier, ref):
        return self.far("stored", tier.context.namespace, ref.key)

    async def raw_put(self, tier, ref, label, data):
        self.far("store", tier.context.namespace, ref.key, label, data)

    async def raw_corrupt(self, tier, ref):
        self.far("damage", tier.context.namespace, ref.key)
