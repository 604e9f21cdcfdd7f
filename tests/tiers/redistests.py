"""What the tests of the Redis tier have in common: servers for a module, values behind its back."""

from __future__ import annotations

import struct
from contextlib import contextmanager
from functools import partial

import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvladder.testing import TierTests
from kvladder.testing.redisserver import RedisServer, start_cluster
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions
from kvladder.tiers.redis.value import HEADER_BYTES
from kvladder.units import Duration

PATIENT = Duration(20)
"""A machine that is busy with other tests is slow to shake hands."""


def key_of(tier, item):
    """Spelled out, so that a change of names is noticed."""
    return b"kvladder:%s:{%s}" % (
        tier.context.namespace.hex()[:32].encode(),
        item.key.hex().encode(),
    )


def value_of(tier, item, data, *, version=1, magic=b"kvlb"):
    """A value as another program would write it."""
    fields = struct.pack(
        "<4sBBHQ32s32sBB8s16s512s",
        magic,
        version,
        1,
        0,
        len(data),
        item.key,
        tier.context.namespace,
        item.priority,
        item.floor,
        b"",
        xxh3_128_digest(data),
        b"",
    )
    return fields + struct.pack("<Q", xxh3_64_intdigest(fields)) + data


def knows_all(sentinel):
    others, replicas = (sentinel.run("SENTINEL", what, "kv") for what in ("SENTINELS", "REPLICAS"))
    return (len(others), len(replicas)) == (2, 1)


@contextmanager
def clustered(folder):
    """The three servers of a cluster."""
    servers = start_cluster(folder)
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()


@contextmanager
def watched(folder):
    """A master, its replica, and three Sentinels that watch over them."""
    with RedisServer(folder) as master, RedisServer(folder) as replica:
        replica.run("REPLICAOF", "127.0.0.1", master.port)
        sentinels = [RedisServer(folder, mode="--sentinel") for _ in range(3)]
        for sentinel in sentinels:
            sentinel.run("SENTINEL", "MONITOR", "kv", "127.0.0.1", master.port, 2)
            sentinel.run("SENTINEL", "SET", "kv", "down-after-milliseconds", 300)
            sentinel.run("SENTINEL", "SET", "kv", "failover-timeout", 2000)
        for sentinel in sentinels:
            sentinel.wait_for(partial(knows_all, sentinel))
        yield master, replica, sentinels
        for sentinel in sentinels:
            sentinel.kill()


class RedisTierTests(TierTests):
    """The suite for tiers against whatever the fixture ``servers`` starts."""

    real = True

    @pytest.fixture
    def options(self, servers):
        return RedisOptions(url=servers[0].url, connect_timeout=PATIENT)

    @pytest.fixture
    def make(self, servers, options):
        for server in servers:
            server.run("FLUSHALL")
        return lambda: RedisTier(options)

    @pytest.fixture
    def raw(self, servers):
        """Runs a command where the key, its first argument, is."""
        client = servers[0].client()
        yield client.execute_command
        client.close()

    @pytest.fixture(autouse=True)
    def _raw(self, raw):
        self.run = raw

    async def raw_get(self, tier, item):
        value = self.run("GET", key_of(tier, item))
        return None if value is None else value[HEADER_BYTES:]

    async def raw_put(self, tier, item, data):
        self.run("SET", key_of(tier, item), value_of(tier, item, data))

    async def raw_corrupt(self, tier, item):
        key = key_of(tier, item)
        end = self.run("STRLEN", key) - 1
        last = self.run("GETRANGE", key, end, end)
        self.run("SETRANGE", key, end, bytes([last[0] ^ 1]))

    async def test_purge_removes_one_salt_or_all_of_the_namespace(self, tier, blocks, context):
        salted = [item._replace(salt=b"8 bytes!") for item in blocks.items(0, 1)]
        await blocks.store(tier, salted)
        others = await blocks.put(tier, 2)
        stranger = b"kvladder:%032d:{%064d}" % (0, 0)
        self.run("SET", stranger, b"another namespace")
        told: list[tuple[int, int]] = []
        assert await tier.purge(b"8 bytes!", lambda *numbers: told.append(numbers)) == 2
        assert told
        assert all(0 <= done <= total for done, total in told)
        assert await blocks.get(tier, [*salted, *others]) == [False, False, True]
        assert await tier.purge(None, lambda *_: None) == 1
        assert await blocks.get(tier, others) == [False]
        assert self.run("GET", stranger) == b"another namespace"
