"""Real servers, where one accepts connections and stays silent.

See test_redis_servers.py, too.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager

import pytest
from redis.crc import key_slot

from kvladder.testing.redisserver import redis_cluster
from kvladder.tiers.label import Ref
from kvladder.tiers.redis.url import RedisOptions
from tests.kit.traffic import keys, stored
from tests.patience import until
from tests.tiers.redistests import PATIENT, key_of, watched
from tests.tiers.test_redis_faults import cache_over, load
from tests.tiers.test_redis_refused import refused
from tests.tiers.test_redis_values import Values

pytestmark = pytest.mark.slow


@pytest.fixture
def silent():
    """Return the port of a silent server."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield listening.getsockname()[1]


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

    async def test_a_hanging_first_sentinel_is_skipped(self, tier, blocks):
        items = await blocks.put(tier, 0, 1)
        assert await blocks.get(tier, items) == [True, True]


def test_hanging_sentinels_are_reported_at_the_timeout(silent):
    url = f"redis://127.0.0.1:{silent}"
    error = refused(url=url, sentinel="kv", connect_timeout="50 ms")
    assert f"127.0.0.1:{silent}: no answer within 0.05 s" in error.message


@contextmanager
def unconcerned(folder):
    """Yield the servers of a cluster that treat a silent one as healthy and continue."""
    with redis_cluster(folder) as servers:
        for server in servers:
            server.configure(cluster_node_timeout=600_000)
        yield servers


def test_a_cache_finds_the_blocks_of_other_nodes_while_one_is_silent(tmp_path):
    patient = {"cluster": True, "timeout": "5 s", "deadline": "20 s"}
    with unconcerned(tmp_path) as servers:
        with cache_over(servers[0].url, **patient) as first:
            stored(first, keys("who has what is learnt"))
            wanted, silent = _ending_elsewhere(first._stack.levels[0].tier, servers)
            stored(first, wanted)
        with cache_over(servers[0].url, **patient) as second:
            silent.pause()
            assert load(second, wanted)[0] == len(wanted) - 1
            assert second.stats()["redis"]["timeouts"] == 0
            silent.resume()
            until(lambda: load(second, wanted)[0] == len(wanted))
            second._stack.host.remove(wanted)
            silent.pause()
            assert load(second, wanted)[0] == len(wanted) - 1
            counts = second.stats()["redis"]
            assert (counts["misses"], counts["removals"], counts["corrupt"]) == (0, 0, 0)
            assert counts["errors"] > 0
            assert second.lookup(wanted).total == len(wanted), "it is known still"


def _ending_elsewhere(tier, servers):
    """Return a prefix with only its last block on a certain server."""
    for number in range(1000):
        wanted = keys(number, 1, 2, 3)
        names = [key_of(tier, Ref(key, 0)) for key in wanted]
        *heads, last = (tier._servers._owners[key_slot(name)] for name in names)
        if last not in heads:
            return wanted, next(server for server in servers if server.port == last.port)
    raise AssertionError
