"""The Redis tier behind codecs, against a real server."""

from __future__ import annotations

import pytest

from kvladder.testing import TierTests
from kvladder.testing.fixtures import MakeTier
from kvladder.testing.redisserver import RedisServer
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions
from tests.tiers.coded import CodedTier
from tests.tiers.redistests import PATIENT
from tests.tiers.test_edge import Shrinking

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class TestCodedRedis(Shrinking, TierTests):
    real = True

    @pytest.fixture
    def make(self, codecs, server) -> MakeTier:
        server.run("FLUSHALL")
        options = RedisOptions(url=server.url, connect_timeout=PATIENT)
        return lambda: CodedTier(RedisTier(options), codecs())

    @pytest.mark.parametrize("codecs", ["zstd", "encrypted"], indirect=True)
    async def test_encoded_values_are_smaller(self, tier, blocks, server):
        await blocks.put(tier, 0)
        (name,) = server.run("KEYS", "*")
        assert server.run("STRLEN", name) < 1200
