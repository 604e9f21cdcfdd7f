"""Caches over real Redis servers that are killed, stopped, slow, moved or overrun."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
import redis

import kvladder
from kvladder.layout import Layout
from kvladder.runtime import Runtime
from kvladder.testing.proxy import SlowNetwork
from kvladder.testing.redisserver import RedisServer, redis_cluster
from tests.kit import traffic
from tests.kit.traffic import forgotten, keys, loaded, save, stored
from tests.patience import until
from tests.tiers.redistests import watched

pytestmark = pytest.mark.slow
LAYOUT = Layout(block_tokens=16, block_bytes=64 << 10, fields={"model": "faults"})
QUICK = {"timeout": "300 ms", "breaker": {"failures": 2, "retry": "200 ms", "retry_max": "200 ms"}}
PATIENCE = {"deadline": "1 m", "timeout": "1 m", "connect_timeout": "1 m"}
"""Settings where nothing is slow on purpose."""
LATE_S = 20.0
"""No load with a deadline of a second takes as long, even if the fault lasts longer."""


@contextmanager
def cache_over(url, *, layout=LAYOUT, salt="", slots=32, deadline="1 s", **settings):
    """A cache with a small host level over Redis."""
    level = {"type": "redis", "url": url, "capacity": "64 MiB", "when": "commit", **QUICK}
    source = {
        "arena": {"size": slots * layout.slot_bytes},
        "block": {"salt": salt},
        "fetch": {"deadline": deadline, "budget": "100 %"},
        "tiers": [{"type": "host"}, level | settings],
    }
    with kvladder.open_cache(source, layout=layout) as cache:
        yield cache


def payload(key):
    return key * (LAYOUT.block_bytes // len(key))


def load(cache, wanted):
    """Return how many leading blocks arrive, each checked, and how long that takes."""
    came = loaded(cache, wanted)
    assert not came.wrong_bytes
    return came.blocks, came.took_s


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path) as server:
        yield server


def test_two_caches_share_blocks_that_no_other_cache_sees(server):
    wanted = keys(1, 2, 3)
    with cache_over(server.url, **PATIENCE) as first, cache_over(server.url, **PATIENCE) as second:
        stored(first, wanted)
        assert load(second, [*wanted, *keys(9)])[0] == 3
        stats = second.stats()["redis"]
        assert (stats["found"], stats["hits"], stats["stored"]) == (3, 3, 0)
        other = Layout(block_tokens=16, block_bytes=64 << 10, fields={"model": "another"})
        for others in ({"layout": other}, {"salt": "secret"}):
            with cache_over(server.url, **PATIENCE, **others) as stranger:
                assert load(stranger, wanted)[0] == 0
                assert stranger.stats()["redis"]["corrupt"] == 0
        second.remove(wanted[1:])
        until(second.idle)
        forgotten(first, wanted)
        assert load(first, wanted)[0] == 1


class Traffic(traffic.Traffic):
    """Saves and loads eight prefixes, and asserts that none is wrong or late."""

    def turn(self, number):
        wanted = keys(number % 8, *range(4))
        self.load(wanted)
        if number % 3 == 0:
            save(self.cache, wanted)
        if number % 5 == 0:
            forgotten(self.cache, wanted)

    def __exit__(self, *_):
        super().__exit__()
        assert not self.wrong_bytes
        assert self.slowest_s < LATE_S


def redis_hits(cache):
    return cache.stats()["redis"]["hits"]


def test_a_server_killed_and_restarted_under_load_is_used_again(server):
    with cache_over(server.url) as cache, Traffic(cache) as users:
        until(lambda: redis_hits(cache) > 20)
        server.kill()
        until(lambda: cache.stats()["redis"]["breaker_open"])
        users.more()
        server.start()
        before = redis_hits(cache)
        until(lambda: redis_hits(cache) > before + 20)


def test_a_server_stopped_for_half_a_minute_is_used_again(server):
    with cache_over(server.url) as cache, Traffic(cache) as users:
        until(lambda: redis_hits(cache) > 20)
        server.pause()
        end_s = time.monotonic() + 30
        try:
            until(lambda: cache.stats()["redis"]["breaker_open"])
            found, took_s = load(cache, keys(100, 1))
            assert found == 0
            assert took_s < LATE_S
            while time.monotonic() < end_s:
                users.more()
        finally:
            server.resume()
        before = redis_hits(cache)
        until(lambda: redis_hits(cache) > before + 20)
        assert cache.stats()["redis"]["timeouts"] > 0


def test_a_server_without_room_for_clients_is_used_again(server):
    with cache_over(server.url, **PATIENCE) as cache:
        stored(cache, keys(1, 2))
        server.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        forgotten(cache, keys(1, 2))
        assert load(cache, keys(1, 2))[0] == 2, "a connection that was closed is made again"


@pytest.fixture
def runtime():
    runtime = Runtime()
    yield runtime
    runtime.close()


@pytest.fixture
def network(server, runtime):
    network = SlowNetwork(server.port)
    runtime.call(network.__aenter__())
    yield network
    runtime.call(network.__aexit__())


def url_of(network):
    return f"redis://127.0.0.1:{network.port}"


def filled(server, count):
    """Store a prefix of this number of blocks, on a direct way, and return its keys."""
    wanted = keys(*range(count))
    with cache_over(server.url, **PATIENCE) as cache:
        stored(cache, wanted)
    return wanted


def test_a_slow_network_delivers_the_batches_that_arrive_in_time(server, network):
    wanted = filled(server, 24)
    with cache_over(url_of(network), timeout="10 s") as cache:
        network.bytes_per_s = 150e3  # ten seconds for all of it
        found, took_s = load(cache, wanted)
        assert found == 0, "all of one batch, or nothing"
        assert 0.9 < took_s < LATE_S
        network.bytes_per_s = 0
        until(lambda: load(cache, wanted)[0] == 24)
        network.latency_s = 0.005
        forgotten(cache, wanted)
        until(lambda: load(cache, wanted)[0] == 24)


def test_a_silent_or_broken_network_costs_only_misses(server, network):
    wanted = filled(server, 8)
    with cache_over(url_of(network)) as cache:
        until(lambda: load(cache, wanted)[0] == 8)
        for trouble in (network.swallow, network.cut):
            forgotten(cache, wanted)
            trouble()
            assert load(cache, wanted)[1] < LATE_S
            network.deliver()
            until(lambda: load(cache, wanted)[0] == 8)
        network.refusing = True
        network.cut()
        forgotten(cache, wanted)
        assert load(cache, wanted)[0] == 0
        network.refusing = False
        until(lambda: load(cache, wanted)[0] == 8)


@pytest.mark.parametrize("stray", [b"+OK\r\n", b":4722\r\n", b"$-1\r\n", b"$3\r\nabc\r\n"])
def test_a_stray_reply_costs_a_connection_and_no_block(server, network, stray):
    wanted = filled(server, 24)
    with cache_over(url_of(network), connections=1) as cache:
        for _ in range(3):
            forgotten(cache, wanted)
            network.stray = stray
            until(lambda: load(cache, wanted)[0] == 24)
            assert not network.stray
        assert len(server.run("KEYS", "kvladder:*{*")) == 24
        counted = cache.stats()["redis"]
        assert (counted["corrupt"], counted["misses"]) == (0, 0)


def test_the_statistics_include_figures_of_the_server(server):
    server.configure(maxmemory=64 << 20)
    with cache_over(server.url, **PATIENCE) as cache:
        stored(cache, keys(1, 2, 3))
        until(lambda: "server_used_bytes" in cache.stats()["redis"])
        stats = cache.stats()["redis"]
        assert stats["server_max_bytes"] == 64 << 20
        assert 0 < stats["server_used_bytes"] < 64 << 20
        assert stats["server_evicted"] == 0


def test_a_server_that_cannot_save_refuses_writes_and_is_read(tmp_path):
    wanted = keys(1, 2, 3)
    with (
        RedisServer(tmp_path, [("save", "900 1")]) as server,
        cache_over(server.url, **PATIENCE) as cache,
    ):
        stored(cache, wanted)
        (server.folder / "dump.rdb" / "in its way").mkdir(parents=True)
        server.run("BGSAVE")
        server.wait_for(
            lambda: server.run("INFO", "persistence")["rdb_last_bgsave_status"] == "err"
        )
        save(cache, keys(4))
        until(lambda: cache.stats()["redis"].get("dropped_failed") == 1)
        forgotten(cache, wanted)
        until(lambda: load(cache, wanted)[0] == 3)
        assert cache.stats()["redis"]["stored"] == 3


def test_a_full_server_takes_new_blocks_in_place_of_old_ones(server):
    used = server.run("INFO", "memory")["used_memory"]
    server.configure(maxmemory_policy="noeviction", maxmemory=used + (2 << 20))
    with cache_over(server.url, slots=256, **PATIENCE) as cache:
        stored(cache, keys(*range(48)))
        assert cache.stats()["redis"]["errors"] == 0
        assert cache.stats()["redis"]["blocks"] < 48
        for number in range(100, 110):
            stored(cache, keys(number))
        forgotten(cache, [keys(number)[0] for number in range(100, 110)])
        assert sum(load(cache, keys(number))[0] for number in range(100, 110)) > 5
        assert cache.stats()["redis"]["evicted"] > 5


# ---- fail-over, slots on the move, many clients


@pytest.fixture
def replicated(tmp_path):
    with watched(tmp_path) as servers:
        yield servers


def promoted(server):
    """Return whether a replica is the master now; a promotion by a Sentinel kills its clients."""
    try:
        return server.run("INFO", "replication")["role"] == "master"
    except redis.ConnectionError:
        return False


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_the_replica_takes_over_when_the_master_is_gone(replicated, how):
    master, replica, sentinels = replicated
    url = "redis://" + ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
    with cache_over(url, sentinel="kv") as cache, Traffic(cache) as users:
        until(lambda: redis_hits(cache) > 20)
        getattr(master, how)()
        try:
            until(lambda: promoted(replica))
            before, stats = redis_hits(cache), cache.stats()["redis"]
            until(lambda: redis_hits(cache) > before + 20)
            until(lambda: cache.stats()["redis"]["stored"] >= stats["stored"])
            users.more()
        finally:
            master.resume()


def test_slots_that_move_under_load_are_followed(tmp_path):
    with redis_cluster(tmp_path) as servers:
        ids = [server.run("CLUSTER", "MYID").decode() for server in servers]
        with cache_over(servers[0].url, cluster=True, **PATIENCE) as cache, Traffic(cache):
            until(lambda: redis_hits(cache) > 20)
            source, target = servers[0], servers[1]
            names = source.run("KEYS", "kvladder:*")[:6]
            for slot in {source.run("CLUSTER", "KEYSLOT", name) for name in names}:
                target.run("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
                source.run("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
                for name in source.run("CLUSTER", "GETKEYSINSLOT", slot, 100):
                    time.sleep(0.02)  # its gets are answered with ASK in between
                    source.run("MIGRATE", "127.0.0.1", target.port, name, 0, 1000)
                for server in (target, source, servers[2]):
                    server.run("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
            before = redis_hits(cache)
            until(lambda: redis_hits(cache) > before + 20)
            assert cache.stats()["redis"]["errors"] == 0
        assert names


def test_a_cluster_node_that_is_killed_and_comes_back_is_used_again(tmp_path):
    numbers = range(40)
    with redis_cluster(tmp_path) as servers:
        for server in servers:
            server.configure(cluster_require_full_coverage="no")
        with (
            cache_over(servers[0].url, cluster=True, slots=128) as cache,
            Traffic(cache) as users,
        ):
            for number in numbers:
                stored(cache, keys(number))
            servers[2].kill()
            forgotten(cache, [keys(number)[0] for number in numbers])
            until(lambda: cache.stats()["redis"]["errors"])
            users.more()
            servers[2].start()
            until(lambda: sum(load(cache, keys(number))[0] for number in numbers) > 15)


def test_sixty_four_clients_are_served_at_once(server):
    """Each has its own cache, loop and connections; all share one interpreter."""
    failures = []

    def client(number):
        try:
            with cache_over(server.url, slots=8, **PATIENCE) as cache:
                for turn in range(4):
                    wanted = keys((number + turn) % 16, 1, 2)
                    load(cache, wanted)
                    save(cache, wanted)
                    until(cache.idle)
                    forgotten(cache, wanted)
                    assert load(cache, wanted)[0] == 3
        except Exception as error:  # noqa: BLE001 - the main thread says what it was
            failures.append(error)

    threads = [threading.Thread(target=client, args=[number]) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert server.run("DBSIZE") == 16 * 3
