"""Errors of a Redis tier at the start, and errors of its settings before that."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress

import pytest

import kvladder
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.testing.redisserver import RedisServer, certificates, free_ports, redis_cluster
from kvladder.tiers.redis.url import Address, RedisOptions, parse_url
from tests.kit import starts

SECRET = "hunter2"
LAYOUT = Layout(block_tokens=16, block_bytes=6000)


def stack(**redis):
    level = {"type": "redis", "capacity": "64 MiB", **redis}
    return {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, level]}


def refused(**redis):
    """The error with which a cache that requires this tier does not open; see ``starts``."""
    # a quota depends on the size of a block, which is not known before
    error = starts.refused(stack(**redis), LAYOUT, foretold="quota" not in redis)
    assert SECRET not in str(error)
    return error


# ---- settings


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"url": "http://here"}, "url"),
        ({"url": "redis://"}, "url"),
        ({"url": "redis://:hunter2@here:port"}, "url"),
        ({"url": "redis://here:0"}, "url"),
        ({"url": "redis://here:70000"}, "url"),
        ({"url": "redis://here/first"}, "url"),
        ({"url": "redis://here?ssl=on"}, "url"),
        ({"url": "redis://::1"}, "url"),
        ({"url": "unix://relative"}, "url"),
        ({"url": "redis://one,two"}, "url"),
        ({"url": "redis://one/3", "cluster": True}, "url"),
        ({"url": "unix:///run/redis.sock", "cluster": True}, "cluster"),
        ({"url": "unix:///run/redis.sock", "sentinel": "kv"}, "sentinel"),
        ({"url": "redis://one", "cluster": True, "sentinel": "kv"}, "cluster"),
        ({"url": "redis://me:hunter2@here", "password": SECRET}, "username"),
        ({"url": "redis://me:hunter2@here", "password_file": "/etc/hosts"}, "password_file"),
        ({"url": "redis://here", "password": SECRET, "password_file": "/etc"}, "password_file"),
        ({"url": "redis://here", "sentinel_password": SECRET}, "sentinel_password"),
        ({"url": "redis://here", "ca": "/etc/hosts"}, "ca"),
        ({"url": "rediss://here", "ca": "/nowhere"}, "ca"),
        ({"url": "rediss://here", "certificate": "/etc/hosts"}, "certificate_key"),
        ({"url": "redis://here", "connections": 0}, "connections"),
        ({"url": "redis://here", "ttls": {"high": "1 h"}}, "ttls"),
        ({"url": "redis://here", "ttls": {"101": "1 h"}}, "ttls"),
        ({"url": "redis://here", "ttls": {"50": "soon"}}, "ttls"),
        ({}, "url"),
        ({"url": "redis://here", "sentinal": "kv"}, "sentinal"),
    ],
)
def test_contradictory_settings_are_refused(settings, path):
    with pytest.raises(ConfigError) as caught:
        load_config(stack(**settings), env={})
    assert caught.value.path.startswith(f"tiers[1].{path}"), caught.value
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "addresses", "db", "user"),
    [
        ("redis://here", [("here", 6379)], 0, ("", "")),
        ("redis://:pass@here:7000/2", [("here", 7000)], 2, ("", "pass")),
        ("rediss://me:p%40ss@one:1,two", [("one", 1), ("two", 6379)], 0, ("me", "p@ss")),
        ("redis://[::1]:7,[::2]", [("::1", 7), ("::2", 6379)], 0, ("", "")),
        ("unix:///run/my%20redis.sock?db=4", [("/run/my redis.sock", 0)], 4, ("", "")),
    ],
)
def test_a_url_is_parsed(url, addresses, db, user):
    found = parse_url(url)
    assert found.addresses == tuple(Address(*address) for address in addresses)
    assert (found.db, (found.username, found.password)) == (db, user)
    assert found.tls == url.startswith("rediss")


@pytest.mark.parametrize(
    ("one", "other", "value"),
    [
        ({"url": "redis://me:hunter2@here/0"}, {"url": "rediss://here:6379"}, "here:6379/0"),
        ({"url": "redis://here/1"}, {"url": "redis://here/2"}, ""),
        ({"url": "unix:///run/my%20redis"}, {"url": "unix:///run/my redis"}, "/run/my redis/0"),
        (
            {"url": "redis://a,b", "cluster": True},
            {"url": "redis://b,c", "cluster": True},
            "b:6379/0",
        ),
        (
            {"url": "redis://a,b", "sentinel": "one"},
            {"url": "redis://b", "sentinel": "one"},
            "one at b:26379/0",
        ),
        ({"url": "redis://a", "sentinel": "one"}, {"url": "redis://a", "sentinel": "two"}, ""),
    ],
)
def test_two_levels_on_one_server_are_refused(one, other, value):
    source = stack(**one)
    source["tiers"].append(source["tiers"][1] | {"name": "second", "sentinel": ""} | other)
    if not value:
        load_config(source, env={})
        return
    with pytest.raises(ConfigError) as caught:
        load_config(source, env={})
    assert caught.value.path == "tiers[2].url"
    assert caught.value.message == f"{value!r} is already the url of tiers[1]"
    assert "url of its own" in caught.value.hint


def test_a_priority_has_the_ttl_of_the_highest_threshold_below_it():
    source = stack(url="redis://here", ttls={"0": "1 h", "50": "1 d"})
    options = load_config(source, env={}).levels[0].options
    assert isinstance(options, RedisOptions)
    assert [options.ttl_s(priority) for priority in (0, 49, 50, 100)] == [3600, 3600, 86400, 86400]
    assert RedisOptions(url="redis://here").ttl_s(50) is None


def test_secrets_are_not_shown():
    config = load_config(stack(url=f"redis://me:{SECRET}@here"), env={})
    also = load_config(
        stack(url="redis://here", sentinel="kv", password=SECRET, sentinel_password=SECRET), env={}
    )
    assert SECRET not in config.describe(LAYOUT) + also.describe(LAYOUT)


# ---- servers


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    settings = [("requirepass", SECRET)]
    with RedisServer(tmp_path_factory.mktemp("redis"), settings) as server:
        yield server


pytestmark = pytest.mark.slow


def test_a_missing_server_is_reported():
    port = free_ports(1)[0]
    error = refused(url=f"redis://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in error.message
    assert starts.REQUIRED in error.hint
    assert "check that the server runs" in error.hint


@pytest.mark.parametrize(
    ("text", "path", "why"),
    [
        (None, "password_file", "No such file"),
        ("", "password_file", "a line is empty"),
        ("wrong\nalso\n", "password", "refuses the login: WRONGPASS"),
    ],
)
def test_a_file_without_the_password_is_reported(server, tmp_path, text, path, why):
    file = tmp_path / "password"
    if text is not None:
        file.write_text(text)
    error = refused(url=f"redis://127.0.0.1:{server.port}", password_file=str(file))
    assert error.path.endswith(f"].{path}")
    assert why in error.message


@pytest.mark.parametrize("user", ["", "default:wrong@", "nobody:hunter2@"])
def test_a_wrong_user_or_password_is_reported(server, user):
    error = refused(url=f"redis://{user}127.0.0.1:{server.port}")
    assert error.path.endswith("].password")
    address = f"127.0.0.1:{server.port}"
    if user:
        assert error.message.startswith(f"{address} refuses the login: WRONGPASS ")
    else:
        assert error.message == f"{address} requires a password, but none is set"
        assert 'password: "${REDIS_PASSWORD}"' in error.hint
    assert "replies" not in str(error), "nothing is wrong with its protocol"


def test_a_sentinel_that_requires_a_password_is_reported(tmp_path):
    with RedisServer(tmp_path, [("requirepass", SECRET)], mode="--sentinel") as sentinel:
        error = refused(url=f"redis://127.0.0.1:{sentinel.port}", sentinel="kv")
        assert "requires a password, but none is set (set sentinel_password: " in error.message


def test_a_user_without_permissions_is_reported(server):
    server.run("ACL", "SETUSER", "weak", "on", ">weak", "~*", "+hello", "+client", password=SECRET)
    error = refused(url=f"redis://weak:weak@127.0.0.1:{server.port}")
    assert "permission" in error.message.lower()


def test_tls_to_a_server_without_it_is_reported(server):
    error = refused(url=f"rediss://:{SECRET}@127.0.0.1:{server.port}")
    assert "TLS" in error.message


def test_a_missing_tls_setting_is_reported(tmp_path):
    with RedisServer(tmp_path, tls=certificates(tmp_path / "tls")) as server:
        error = refused(url=f"redis://127.0.0.1:{server.port}")
        assert "127.0.0.1" in error.message
        error = refused(url=server.url)
        assert "certificate" in error.message.lower()
        other = certificates(tmp_path / "other")
        error = refused(url=server.url, ca=str(other / "ca.crt"))
        assert "certificate" in error.message.lower()


def test_a_cluster_configured_as_one_server_and_the_reverse_are_reported(server, tmp_path):
    with redis_cluster(tmp_path, 1) as (node,):
        error = refused(url=node.url)
        assert error.hint == "set cluster: true"
    error = refused(url=f"redis://:{SECRET}@127.0.0.1:{server.port}", cluster=True)
    assert error.path.endswith(".cluster")


@pytest.mark.parametrize("is_silent", [False, True])
def test_any_node_of_a_cluster_suffices_at_the_start(tmp_path, is_silent):
    with redis_cluster(tmp_path, 1) as (node,), socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if is_silent:
            other.listen()
        url = f"redis://127.0.0.1:{other.getsockname()[1]},127.0.0.1:{node.port}"
        source = stack(url=url, cluster=True, connect_timeout="20 s")
        with kvladder.open_cache(source, layout=LAYOUT) as cache:
            assert cache._stack.levels[0].tier.describe()["version"] != "not known yet"


def test_a_sentinel_configured_as_a_server_and_the_reverse_are_reported(server, tmp_path):
    with RedisServer(tmp_path, mode="--sentinel") as sentinel:
        error = refused(url=sentinel.url)
        assert error.hint == "set sentinel to the master's name"
        error = refused(url=sentinel.url, sentinel="unheard-of")
        assert "unheard-of" in error.message
    error = refused(url=f"redis://127.0.0.1:{server.port}", sentinel="kv", sentinel_password=SECRET)
    assert "kv" in error.message


class Scripted:
    """A server that answers each connection's messages with its replies, and then hangs up.

    It answers echoes, and starts again with each further client.
    """

    def __init__(self, *replies):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._replies = replies
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self):
        self._thread.start()
        return self

    def _serve(self):
        while True:
            try:
                taken, _ = self._socket.accept()
            except OSError:  # the end
                return
            with taken, suppress(OSError):
                for reply in self._replies:
                    echo = re.search(rb"ECHO\r\n(.*\r\n)", taken.recv(65536), re.DOTALL)
                    taken.sendall(reply + (echo[1] if echo else b""))
                taken.recv(65536)

    def __exit__(self, *_):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


HELLO = (
    b"%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$5\r\nproto\r\n:3\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n"
)


def test_a_server_too_old_for_resp3_is_refused():
    with Scripted(b"-ERR unknown command 'HELLO'\r\n$0\r\n\r\n") as old:
        error = refused(url=f"redis://127.0.0.1:{old.port}")
    assert "6.2" in error.hint


def test_a_server_older_than_the_minimum_is_refused():
    info = b"redis_version:6.0.16\r\nredis_mode:standalone\r\n"
    with Scripted(HELLO + b"$%d\r\n%b\r\n" % (len(info), info)) as old:
        error = refused(url=f"redis://127.0.0.1:{old.port}")
    assert "6.0.16" in error.message
    assert "6.2" in error.hint


@pytest.mark.parametrize(
    "reply",
    [b":5\r\n", b"*1\r\n:1\r\n", b"+OK\r\n", b"%1\r\n$18\r\nproto-max-bulk-len\r\n+much\r\n"],
)
def test_a_server_may_answer_anything_about_its_settings(reply):
    info = b"redis_version:7.2.0\r\nredis_mode:standalone\r\n"
    login = HELLO + b"$%d\r\n%b\r\n" % (len(info), info)
    with Scripted(login, reply) as odd:
        source = stack(url=f"redis://127.0.0.1:{odd.port}", required=True)
        with kvladder.open_cache(source, layout=LAYOUT) as cache:
            told = cache._stack.levels[0].tier.describe()["value"]
        assert told == "at most 536870912 bytes"


def test_a_foreign_server_and_a_silent_one_are_reported():
    with Scripted(b"HTTP/1.1 400 Bad Request\r\n\r\n") as other:
        error = refused(url=f"redis://127.0.0.1:{other.port}")
    assert str(other.port) in error.message
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        error = refused(url=f"redis://127.0.0.1:{port}", connect_timeout="200 ms")
    assert "0.2 s" in error.message
