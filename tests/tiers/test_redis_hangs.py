"""One of several servers that takes connections and answers nothing, beside others that do."""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from redis.crc import key_slot

from kvladder.testing.redisserver import RedisServer, start_cluster
from kvladder.tiers.base import Item
from kvladder.tiers.redis import servers as redisservers
from kvladder.tiers.redis.tier import RedisTier
from kvladder.tiers.redis.url import RedisOptions
from tests.tiers.redistests import PATIENT, clustered, key_of, watched
from tests.tiers.test_redis_faults import cache_over, keys, load, stored, wait_for
from tests.tiers.test_redis_refused import refused
from tests.tiers.test_redis_values import Values

pytestmark = pytest.mark.slow
TIMEOUT_S = 5.0


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


@contextmanager
def unconcerned(folder):
    """The servers of a cluster that take a silent one for well, and go on."""
    with clustered(folder) as servers:
        for server in servers:
            server.configure(cluster_node_timeout=600_000)
        yield servers


class TestNode(Values):
    """One node of three is silent: the others' blocks are found and stored in time."""

    @pytest.fixture
    def servers(self, tmp_path):
        with unconcerned(tmp_path) as servers:
            yield servers

    @pytest.fixture
    def raw(self, servers):
        return None

    @pytest.fixture
    def options(self, servers):
        return RedisOptions(url=servers[0].url, cluster=True, connect_timeout=PATIENT)

    @pytest.fixture
    async def tier(self, options, context):
        tier = RedisTier(options)
        await tier.open(replace(context, timeout_s=TIMEOUT_S))
        yield tier
        await tier.aclose()

    async def test_costs_its_own_blocks_and_no_more(self, tier, blocks, servers):
        items = await blocks.put(tier, *range(24))
        fresh = blocks.items(*range(24, 40))
        blocks.fill(fresh)
        owners = {int(server.port): set(server.run("KEYS", "kvladder:*")) for server in servers}
        silent = servers[1]
        mine = owners[silent.port]
        others = [key_of(tier, item) not in mine for item in items]
        assert 0 < sum(others) < len(items)
        silent.pause()
        try:
            for call in (tier.get, tier.contains, tier.get):
                assert [*map(bool, await asyncio.wait_for(call(items), TIMEOUT_S))] == others
            assert set(await tier.get(items)) == {True, None}, "what the silent one has is not lost"
            stored = await asyncio.wait_for(tier.put(fresh), TIMEOUT_S)
            assert 0 < sum(stored) < len(fresh)
            found = await asyncio.wait_for(tier.get(fresh), TIMEOUT_S)
            assert [*map(bool, found)] == list(stored)
        finally:
            silent.resume()
        for _ in range(600):
            if all(await tier.contains(items)):
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("never asked again")

    async def test_is_waited_for_once_in_a_while(self, tier, blocks, servers, monkeypatch):
        monkeypatch.setattr(redisservers, "SILENT_S", 3600.0)
        items = await blocks.put(tier, *range(24))
        servers[1].pause()
        try:
            await asyncio.wait_for(tier.contains(items), 60)
            (silent,) = tier._servers._silent
            assert silent.port == int(servers[1].port)
            asked: list[object] = []
            monkeypatch.setattr(tier._servers._nodes[silent], "exchange", asked.append)
            for _ in range(3):
                await tier.contains(items)
            assert asked == []
        finally:
            servers[1].resume()


def test_a_cache_finds_what_the_others_have(tmp_path):
    patient = {"cluster": True, "timeout": "5 s", "deadline": "20 s"}
    with unconcerned(tmp_path) as servers:
        with cache_over(servers[0].url, **patient) as first:
            stored(first, keys("who has what is learnt"))
            wanted, silent = _ending_elsewhere(first.stack.levels[0].tier, servers)
            stored(first, wanted)
        with cache_over(servers[0].url, **patient) as second:
            silent.pause()
            assert load(second, wanted)[0] == len(wanted) - 1
            assert second.stats()["redis"]["timeouts"] == 0
            silent.resume()
            wait_for(lambda: load(second, wanted)[0] == len(wanted))
            second.stack.host.remove(wanted)
            silent.pause()
            assert load(second, wanted)[0] == len(wanted) - 1
            counts = second.stats()["redis"]
            assert (counts["misses"], counts["removals"], counts["corrupt"]) == (0, 0, 0)
            assert counts["errors"] > 0
            assert second.lookup(wanted).total == len(wanted), "it is known still"


def _ending_elsewhere(tier, servers):
    """A prefix of which only the last block is on a certain server."""
    for number in range(1000):
        wanted = keys(number, 1, 2, 3)
        names = [key_of(tier, Item(key, 0)) for key in wanted]
        *heads, last = (tier._servers._owners[key_slot(name)] for name in names)
        if last not in heads:
            return wanted, next(server for server in servers if server.port == last.port)
    raise AssertionError
