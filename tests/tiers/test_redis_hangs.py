"""One of several servers that takes connections and answers nothing, beside others that do."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import pytest

from kvladder.testing.redisserver import RedisServer, start_cluster
from kvladder.tiers.redis import RedisTier
from kvladder.tiers.redisurl import RedisOptions
from tests.tiers.redistests import PATIENT, key_of, watched
from tests.tiers.test_redis_refused import refused
from tests.tiers.test_redis_values import Values

pytestmark = pytest.mark.slow


@pytest.fixture
def silent():
    """The port of a server that says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield listening.getsockname()[1]


async def given_up(call, after_s):
    """What came of a call that is cancelled after a while, as a level does; None if it was."""
    task = asyncio.create_task(call)
    await asyncio.wait({task}, timeout=after_s)
    task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


class TestSentinels(Values):
    @pytest.fixture
    def watchers(self, tmp_path):
        with watched(tmp_path) as found:
            yield found

    @pytest.fixture
    def servers(self, watchers):
        return [watchers[0]]

    @pytest.fixture
    def options(self, watchers, silent):
        ports = [silent, *(sentinel.port for sentinel in watchers[2])]
        url = "redis://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        return RedisOptions(url=url, sentinel="kv", connect_timeout=PATIENT)

    async def test_the_first_of_them_hangs(self, tier, blocks):
        items = await blocks.put(tier, 0, 1)
        assert await blocks.get(tier, items) == [True, True]


def test_all_sentinels_hang(silent):
    url = f"redis://127.0.0.1:{silent}"
    error = refused(url=url, sentinel="kv", connect_timeout="300 ms")
    assert f"127.0.0.1:{silent}: no answer within 0.3 s" in error.message


def replicates(server):
    return server.run("INFO", "replication").get("master_link_status") == "up"


def knows_all(server):
    """Whether it has heard of all four nodes of the cluster."""
    return b"cluster_known_nodes:4" in server.run("CLUSTER", "INFO")


class TestCluster(Values):
    @pytest.fixture
    def servers(self, tmp_path):
        servers = start_cluster(tmp_path)
        settings = [("cluster-enabled", "yes"), ("cluster-node-timeout", "2000")]
        servers.append(RedisServer(tmp_path, settings))
        try:
            first, replica = servers[0], servers[3]
            replica.run("CLUSTER", "MEET", "127.0.0.1", first.port)
            for server in servers:
                server.configure(repl_diskless_sync_delay=0, cluster_require_full_coverage="no")
                server.wait_for(partial(knows_all, server), 60)
            replica.run("CLUSTER", "REPLICATE", first.run("CLUSTER", "MYID"))
            replica.wait_for(partial(replicates, replica), 60)
            yield servers
        finally:
            for server in servers:
                server.kill()

    @pytest.fixture
    def raw(self, servers):
        return None

    @pytest.fixture
    def make(self, servers, options):
        return lambda: RedisTier(options)

    @pytest.fixture
    def options(self, servers):
        url = "redis://" + ",".join(f"127.0.0.1:{server.port}" for server in servers[:3])
        return RedisOptions(url=url, cluster=True, connect_timeout=PATIENT)

    async def test_a_node_that_hangs_longer_than_any_call_is_replaced(self, tier, blocks, servers):
        items = await blocks.put(tier, *range(32))
        first, replica = servers[0], servers[3]
        names = set(first.run("KEYS", "kvladder:*"))
        own = [item for item in items if key_of(tier, item) in names]
        assert own
        replica.wait_for(lambda: replica.run("DBSIZE") == len(own))
        first.pause()
        try:
            assert await given_up(tier.contains(own), 0.3) is None
            replica.run("CLUSTER", "FAILOVER", "TAKEOVER")
            for _ in range(100):
                found = await given_up(tier.contains(items), 0.5)
                if found is not None and all(found):
                    break
                await asyncio.sleep(0.1)
            else:
                pytest.fail("never learnt")
            assert replica.port in {address.port for address in await tier._servers.addresses()}
        finally:
            first.resume()
