"""The Redis tier against real servers: the suite for tiers over every way to reach one."""

from __future__ import annotations

import pytest
import redis

from kvladder.testing.redisserver import RedisServer, certificates, redis_cluster
from kvladder.tiers.redis.url import RedisOptions
from tests.tiers.redistests import PATIENT, RedisTierTests, watched

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def standalone(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    folder = certificates(tmp_path_factory.mktemp("certificates"))
    with RedisServer(tmp_path_factory.mktemp("redis"), tls=folder) as server:
        yield server, folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory):
    with watched(tmp_path_factory.mktemp("sentinel")) as servers:
        yield servers


class TestRedis(RedisTierTests):
    @pytest.fixture
    def servers(self, standalone):
        return [standalone]


class TestRedisUnix(RedisTierTests):
    @pytest.fixture
    def servers(self, standalone):
        return [standalone]

    @pytest.fixture
    def options(self, standalone):
        return RedisOptions(url=f"unix://{standalone.path}?db=3", connect_timeout=PATIENT)

    @pytest.fixture
    def raw(self, standalone):
        client = standalone.client(db=3)
        yield client.execute_command
        client.close()


class TestRedisTls(RedisTierTests):
    @pytest.fixture
    def servers(self, tls):
        return [tls[0]]

    @pytest.fixture
    def options(self, tls):
        return RedisOptions(url=tls[0].url, ca=str(tls[1] / "ca.crt"), connect_timeout=PATIENT)


class TestRedisCluster(RedisTierTests):
    @pytest.fixture
    def servers(self, cluster):
        return cluster

    @pytest.fixture
    def options(self, cluster):
        return RedisOptions(url=cluster[0].url, cluster=True, connect_timeout=PATIENT)

    @pytest.fixture
    def raw(self, cluster):
        client = redis.RedisCluster(host="127.0.0.1", port=cluster[0].port)
        yield client.execute_command
        client.close()


class TestRedisSentinel(RedisTierTests):
    @pytest.fixture
    def servers(self, sentinels):
        return [sentinels[0]]

    @pytest.fixture
    def options(self, sentinels):
        url = "redis://" + ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels[2])
        return RedisOptions(url=url, sentinel="kv", connect_timeout=PATIENT)
