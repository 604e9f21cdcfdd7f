"""Helpers shared by the tests of the Redis tier: servers for a module, access to values."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest

from kvladder.testing import TierTests
from kvladder.testing.redisserver import RedisServer
from kvladder.tiers.label import LABEL_BYTES
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions
from kvladder.units import Duration

PATIENT = Duration(20)
"""A machine that is busy with other tests is slow to shake hands."""


def key_of(tier, block):
    """Spelled out, so that a change of names is noticed."""
    return b"kvladder:1:%s:{%s}" % (
        tier.context.namespace.hex()[:32].encode(),
        block.key.hex().encode(),
    )


def knows_all(sentinel):
    others, replicas = (sentinel.run("SENTINEL", what, "kv") for what in ("SENTINELS", "REPLICAS"))
    return (len(others), len(replicas)) == (2, 1)


@contextmanager
def watched(folder, settings=(), *, reached_at=lambda server: server.port):
    """A master, its replica, and three Sentinels that watch over them.

    ``reached_at`` returns the port at which all others reach a server: its own, or a proxy's.
    """
    with RedisServer(folder, settings) as master, RedisServer(folder, settings) as replica:
        for server in (master, replica):
            server.configure(replica_announce_port=reached_at(server))
            server.run("CONFIG", "REWRITE")  # a restart reads it
        replica.run("REPLICAOF", "127.0.0.1", reached_at(master))
        sentinels = [RedisServer(folder, mode="--sentinel") for _ in range(3)]
        for sentinel in sentinels:
            sentinel.run("SENTINEL", "MONITOR", "kv", "127.0.0.1", reached_at(master), 2)
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

    async def raw_get(self, tier, ref):
        value = self.run("GET", key_of(tier, ref))
        return None if value is None else value[LABEL_BYTES:]

    async def raw_put(self, tier, ref, label, data):
        self.run("SET", key_of(tier, ref), label + data)

    async def raw_corrupt(self, tier, ref):
        key = key_of(tier, ref)
        end = self.run("STRLEN", key) - 1
        last = self.run("GETRANGE", key, end, end)
        self.run("SETRANGE", key, end, bytes([last[0] ^ 1]))

    async def test_another_namespace_is_left_alone_by_a_purge(self, tier, blocks):
        await blocks.put(tier, 0)
        stranger = b"kvladder:1:%032d:{%064d}" % (0, 0)
        self.run("SET", stranger, b"another namespace")
        told: list[tuple[int, int]] = []
        assert await tier.purge(b"8 bytes!", lambda *numbers: told.append(numbers)) == 0
        assert told
        assert await tier.purge(None, lambda *_: None) == 1
        assert self.run("GET", stranger) == b"another namespace"

    async def test_another_version_is_left_alone_but_by_a_purge(self, tier, blocks):
        """The owner of its blocks is unknown: a purge of one salt must not spare them."""
        salted, other = blocks.some(0, 1)
        name = key_of(tier, salted)
        strangers = [name.replace(b":1:", version) for version in (b":", b":2:", b":old:")]
        for salt in (b"8 bytes!", None):
            await blocks.store(tier, [salted.of(salt=b"8 bytes!"), other])
            for stranger in strangers:
                self.run("SET", stranger, b"of another version")
            assert await blocks.get(tier, [salted, other]) == [True, True]
            await blocks.remove(tier, [salted])
            await blocks.store(tier, [salted.of(salt=b"8 bytes!")])
            assert [self.run("EXISTS", stranger) for stranger in strangers] == [1, 1, 1]
            assert await tier.purge(salt, lambda *_: None) == (4 if salt else 5)
            assert [self.run("EXISTS", stranger) for stranger in strangers] == [0, 0, 0]
