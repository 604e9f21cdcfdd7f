"""The user recommended by docs/how-to/redis.md has exactly the necessary rights."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import redis

from kvladder.testing.redisserver import RedisServer, redis_cluster
from tests.kit.traffic import forgotten, keys, save, stored
from tests.patience import until
from tests.tiers.test_redis_faults import PATIENCE, cache_over, load
from tests.tiers.test_redis_quota import flat, quota, salted, settled
from tests.tiers.test_redis_refused import refused

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "redis.md"


def allow(server):
    """Make the user of the documentation, without rights that a server does not know yet."""
    *known, newer = PAGE.read_text().partition("user kv ")[2].partition("```")[0].split("\n  ")
    assert "no-touch" in newer
    assert known[0].startswith("on >password")
    with suppress(redis.ResponseError):
        server.run("ACL", "SETUSER", "kv", *" ".join([*known, newer]).split())
        return
    server.run("ACL", "SETUSER", "kv", *" ".join(known).split())


@pytest.mark.parametrize("cluster", [False, True])
def test_the_user_of_the_documentation_can_do_all_that_is_needed(tmp_path, cluster):
    with ExitStack() as started:
        if cluster:
            servers = started.enter_context(redis_cluster(tmp_path))
        else:
            servers = [started.enter_context(RedisServer(tmp_path))]
        for server in servers:
            allow(server)
        url = f"redis://kv:password@127.0.0.1:{servers[0].port}"
        settings = {"cluster": cluster, **quota(tenant=4, namespace=40)}
        with cache_over(url, **settings) as one, cache_over(url, **settings) as two:
            settled(one, two)
            stored(one, keys(1, 2, 3))
            assert salted(one, flat(*range(10, 16)), "tenant") == 4
            assert load(two, keys(1, 2, 3))[0] == 3
            two.remove(keys(1, 2, 3)[2:])
            list(one.purge("tenant"))
            until(lambda: one.idle() and two.idle())
            until(lambda: "namespace_bytes" in one.stats()["redis"])
            left = sum(len(server.run("KEYS", "kvladder:*{*")) for server in servers)
            assert left == 2
            two.clear()
            until(two.idle)
            for cache in (one, two):
                assert cache.stats()["redis"]["errors"] == 0
                assert "server_used_bytes" in cache.stats()["redis"]
        for server in servers:
            assert server.run("DBSIZE") == 0
            denied = [dict(entry) for entry in server.run("ACL", "LOG")]
            # a missing permission not yet noticed does no harm
            assert not [entry for entry in denied if b"client" not in entry[b"object"]], denied
        with pytest.raises(redis.exceptions.NoPermissionError):
            servers[0].run("FLUSHALL", username="kv", password="password")


@pytest.mark.parametrize("in_url", [False, True])
def test_a_name_without_a_password_is_that_user_and_not_the_default_one(tmp_path, in_url):
    with RedisServer(tmp_path) as server:
        server.run("ACL", "SETUSER", "kv", "on", "nopass", "~kvladder:*", "resetchannels", "+@all")
        server.run("ACL", "SETUSER", "other", "on", ">password", "~*", "resetchannels", "+@all")
        url = server.url.replace("//", "//kv@") if in_url else server.url
        with cache_over(url, **({} if in_url else {"username": "kv"})) as cache:
            stored(cache, keys(1, 2))
            users = {c["user"] for c in server.client().client_list() if c["name"] == "kvladder"}
        assert users == {"kv"}
        assert refused(url=server.url, username="other").path.endswith(".password")


def test_a_lost_right_and_a_changed_password_cost_only_misses(tmp_path):
    with RedisServer(tmp_path) as server:
        allow(server)
        url = f"redis://kv:password@127.0.0.1:{server.port}"
        with cache_over(url, **PATIENCE) as cache:
            stored(cache, keys(1, 2))
            for taken, given in ((["-getrange"], ["+getrange"]), (["resetpass"], [">password"])):
                server.run("ACL", "SETUSER", "kv", *taken)
                server.run("CLIENT", "KILL", "USER", "kv")
                forgotten(cache, keys(1, 2))
                before = cache.stats()["redis"]["errors"]
                assert load(cache, keys(1, 2))[0] == 0
                assert cache.stats()["redis"]["errors"] > before
                server.run("ACL", "SETUSER", "kv", *given)
                until(lambda: load(cache, keys(1, 2))[0] == 2)


def test_a_password_changes_while_a_cache_uses_it(tmp_path):
    file = tmp_path / "password"
    file.write_text("password\n")
    with RedisServer(tmp_path) as server:
        allow(server)
        url = f"redis://kv@127.0.0.1:{server.port}"
        with cache_over(url, password_file=str(file), **PATIENCE) as cache:
            stored(cache, keys(1, 2))
            file.write_text("newer\npassword\n")

            def serves():
                server.run("CLIENT", "KILL", "USER", "kv")
                forgotten(cache, keys(1, 2))
                return load(cache, keys(1, 2))[0] == 2

            assert serves(), "the new one does not count yet, so the old one is tried"
            server.run("ACL", "SETUSER", "kv", "resetpass", ">newer")
            assert serves()
            file.write_text("newer\n")
            assert serves()
            assert cache.stats()["redis"]["errors"] == 0


def test_a_server_that_starts_later_is_used(tmp_path):
    with RedisServer(tmp_path) as server:
        server.kill()
        with cache_over(server.url) as cache:
            assert load(cache, keys(1, 2))[0] == 0
            server.start()
            until(lambda: not cache.stats()["redis"]["breaker_open"])
            save(cache, keys(3, 4))
            until(lambda: cache.stats()["redis"]["stored"] == 2)
