"""Far ends that announce themselves in a real Redis, and caches that find them there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvladder.cli.check import check
from kvladder.config.settings import ExportConfig
from kvladder.errors import ConfigError, TierError
from kvladder.testing.redisserver import RedisServer, free_ports, program

pytest.importorskip("nixl", reason="the extra nixl is not installed")

from kvladder.tiers.nixl import roster as module
from kvladder.tiers.nixl.curve import read_keys
from kvladder.tiers.nixl.roster import Entry, Roster, listed, require_url
from kvladder.tiers.nixl.tier import NixlOptions
from tests.export.test_served import BLOCKS, Engine, all_come, run
from tests.kit.served import Server
from tests.patience import PATIENCE_S, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.crash,
    pytest.mark.skipif(program() is None, reason="there is no redis-server"),
]
PUBLIC = "k" * 40
KEY = f"kvladder:far-ends:{PUBLIC}"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest_asyncio.fixture
async def roster(redis: RedisServer) -> AsyncIterator[Roster]:
    redis.run("FLUSHALL")
    roster = Roster(redis.url, lambda: [PUBLIC])
    yield roster
    await roster.aclose()


def entry(run: str = "first", **more: Any) -> Entry:
    return Entry(address="10.0.0.7:1", run=run, writable=True, block_bytes=1, **more)


@pytest.mark.real
class TestList:
    async def test_an_announced_cache_is_listed_until_it_leaves(self, roster: Roster) -> None:
        assert await roster.read() == {}
        assert await roster.announce("a", entry(), first=True)
        assert await roster.announce("b", entry("other"), first=True)
        found = await roster.read()
        assert {name: one.run for name, one in found.items()} == {"a": "first", "b": "other"}
        await roster.leave("a", "another one that had this name")
        assert sorted(await roster.read()) == ["a", "b"]
        await roster.leave("a", "first")
        assert [*await roster.read()] == ["b"]

    async def test_a_silent_cache_is_dropped_from_the_list(
        self, roster: Roster, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "TTL_S", 0.2)
        await roster.announce("a", entry(), first=True)
        monkeypatch.undo()
        async with asyncio.timeout(PATIENCE_S):
            while await roster.read():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert redis.run("HLEN", KEY) == 1
        await roster.announce("b", entry(), first=True)
        assert redis.run("HKEYS", KEY) == [b"b"], "and swept by who comes next"
        assert 0 < redis.run("TTL", KEY) <= module.KEPT_S

    async def test_the_latest_of_two_caches_with_one_name_is_listed(
        self, roster: Roster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert await roster.announce("a", entry("first"), first=True)
        assert await roster.announce("a", entry("second"), first=True)
        for _ in range(3):
            assert not await roster.announce("a", entry("first"))
            assert await roster.announce("a", entry("second"))
        await roster.leave("a", "first")
        assert (await roster.read())["a"].run == "second"
        await roster.leave("a", "second")
        assert await roster.announce("a", entry("first")), "it is free again"

    async def test_invalid_entries_are_ignored_and_counted(
        self, roster: Roster, redis: RedisServer
    ) -> None:
        await roster.announce("good", entry(), first=True)
        plain = msgspec.to_builtins(entry(until_s=1e12))
        bad: dict[bytes | str, bytes] = {
            "text": b"\xff\x00",
            "list": b"[]",
            "fields": b"{}",
            "kind": msgspec.json.encode({**plain, "writable": "yes"}),
            "address": msgspec.json.encode({**plain, "address": "a b:c"}),
            "size": msgspec.json.encode({**plain, "block_bytes": -1}),
            "long": msgspec.json.encode({**plain, "more": "x" * 2000}),
            "end": msgspec.json.encode({**plain, "until_s": None}),
            "a name": msgspec.json.encode(plain),
            b"\xff": msgspec.json.encode(plain),
            "": msgspec.json.encode(plain),
        }
        for name, value in bad.items():
            redis.run("HSET", KEY, name, value)
        assert [*await roster.read()] == ["good"]
        assert roster.ignored == len(bad)
        redis.run("HSET", KEY, "more", msgspec.json.encode({**plain, "more": "of a later version"}))
        assert [*await roster.read()] == ["good", "more"]

    async def test_an_invalid_list_is_an_error(self, roster: Roster, redis: RedisServer) -> None:
        many = [text for n in range(module.ENTRIES_MAX + 1) for text in (f"n{n}", "x")]
        redis.run("HSET", KEY, *many)
        with pytest.raises(TierError, match="1025 far ends, expected 1024 or fewer"):
            await roster.read()
        redis.run("SET", KEY, "text")
        with pytest.raises(TierError, match="WRONGTYPE"):
            await roster.read()

    async def test_a_silent_redis_is_an_error_within_the_timeout(self, tmp_path: Path) -> None:
        with pytest.raises(TierError, match=r"redis://127\.0\.0\.1:1: "):
            await listed("redis://127.0.0.1:1", [PUBLIC])
        with RedisServer(tmp_path) as stopped:
            stopped.pause()
            with pytest.raises(TierError, match="no answer within 2 s|[Tt]imeout"):
                await listed(stopped.url, [PUBLIC])

    async def test_missing_permissions_are_reported_without_a_secret(
        self, roster: Roster, redis: RedisServer
    ) -> None:
        assert await roster.read() == {}
        redis.run("ACL", "SETUSER", "reader", "on", ">geheim", "~kvladder:*", "+@read", "+time")
        where = redis.url.replace("//", "//{}@")
        for user, call in (
            ("reader:falsch", Roster.read),
            ("reader:geheim", lambda one: one.announce("a", entry(), first=True)),
        ):
            barred = Roster(where.format(user), lambda: [PUBLIC])
            with pytest.raises(ConfigError, match="denies access") as refused:
                await call(barred)
            assert "geheim" not in str(refused.value)
            assert "falsch" not in str(refused.value)
            await barred.aclose()
        assert await listed(where.format("reader:geheim"), [PUBLIC]) == {}


# ---- settings


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "no servers, peers or roster"),
        (
            {"roster": "redis://h", "peers": ("h:1",)},
            "roster: cannot be combined with servers or peers",
        ),
        ({"roster": "http://u:geheim@h"}, "roster: not the URL of a Redis (expected redis://"),
        ({"roster": "redis://u:geheim@h:port"}, "roster: not the URL of a Redis"),
        ({"roster": "redis://u:geheim@h?geheim=1"}, "roster: not the URL of a Redis"),
    ],
)
def test_a_level_with_wrong_settings_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        NixlOptions(keys="k", **given)
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"listen": "0.0.0.0:1", "roster": "redis://h"}, "host: missing (expected the host"),
        ({"listen": "h:1", "roster": "redis://h", "host": "h:1"}, "host: 'h:1' (expected a host"),
        (
            {"listen": "h:1", "name": "a"},
            "name: has no effect without export.roster (set export.roster too",
        ),
        ({"listen": "h:1", "roster": "geheim"}, "roster: not the URL of a Redis"),
        ({"roster": "redis://h"}, "listen: missing"),
    ],
)
def test_an_export_with_wrong_settings_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        ExportConfig(**{"keys": "k", **given} if "listen" in given else given)
    assert "geheim" not in str(refused.value)


def test_no_repr_shows_the_user_of_a_url() -> None:
    url = "redis://u:geheim@h:1/2"
    require_url(url)
    for one in (
        NixlOptions(keys="k", roster=url),
        ExportConfig(listen="h:1", keys="k", roster=url),
    ):
        assert "geheim" not in repr(one)
        assert "redis://***@h:1/2" in repr(one)


# ---- servers and engines


class Found(Engine):
    """An engine that finds far ends by the list."""

    def __init__(self, redis: str, keys: Path, **more: Any) -> None:
        level = {"name": "far", "type": "nixl", "roster": redis, "capacity": "64 MiB"}
        level |= {"keys": str(keys / "client.keys"), "when": "commit", "timeout": "5 s", **more}
        super().__init__(level)
        self._next = 1000

    def sees(self, there: int) -> bool:
        """Return whether it has this number of far ends, as of its last use of them."""
        self._next += BLOCKS
        self.save(self._next)
        self.cache.remove(self.keys(self._next))  # so that there is room for every call
        until(self.cache.idle)
        return bool(self.stats().get("far_ends_connected") == self.stats()["far_ends"] == there)


def test_servers_come_and_go_and_engines_follow(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis:
        roster = redis.url
        with Server(tmp_path / "a", roster=roster, name="a", when="commit") as one:
            keys = one.keys
            until(lambda: one.stats()["export"].get("announced") == 1)
            with Found(roster, keys) as engine:
                until(lambda: engine.sees(1))
                engine.save()
                with Server(tmp_path / "b", keys=keys, roster=roster) as two:
                    until(lambda: engine.sees(2))
                    listing = check(two.file).text
                    assert f"announced {two.address}, a" in listing
                    assert two.stop() == 0, "it takes leave"
                until(lambda: engine.sees(1))
                key = redis.run("KEYS", "kvladder:far-ends:*")[0]
                assert redis.run("HKEYS", key) == [b"a"]

                # killed, and a server with its name and disk at another address
                until(lambda: one.stats()["files"]["blocks"] == BLOCKS)
                one.kill()
                (port,) = free_ports(1)
                one.stack["export"]["listen"] = f"127.0.0.1:{port}"
                one._start()
                until(lambda: engine.sees(1))
                engine.forget()
                until(lambda: engine.load() != [])
                assert {*engine.load()} <= {"far", "host"}

                # the list is unavailable for a while, and then empty
                redis.kill()
                engine.forget()
                until(lambda: engine.sees(1))
                redis.start()
                with Found(roster, keys) as another:
                    until(lambda: another.sees(1))

                # killed without a restart; how long it stays in the list depends on the time
                one.kill()
                public = read_keys(str(keys / "client.keys")).peers[0]
                until(lambda: not asyncio.run(listed(roster, [public])))


def test_obstacles_to_announcing_are_reported(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path) as redis,
        Server(tmp_path / "a", roster="redis://127.0.0.1:1") as server,
    ):
        until(lambda: server.stats()["export"].get("announced") == 0)
        file = server.file.read_text()
        assert "warning: export.roster: redis://127.0.0.1:1: " in check(server.file).text
        secret = redis.url.replace("//", "//u:geheim@")
        server.kill()
        server.file.write_text(file.replace("redis://127.0.0.1:1", secret))
        for command in ("check", "serve"):
            ended = run(command, str(server.file))
            assert ended.returncode == 2
            assert "export.roster: redis://***@127.0.0.1" in ended.stderr
            assert "denies access" in ended.stderr
            assert "geheim" not in ended.stderr + ended.stdout


def test_an_engine_starts_without_the_list_and_opens_the_level_later(
    tmp_path: Path,
) -> None:
    with RedisServer(tmp_path) as redis, Server(tmp_path / "a", roster=redis.url) as server:
        redis.kill()
        breaker = {"retry": "100 ms", "retry_max": "100 ms"}
        with Found(redis.url, server.keys, breaker=breaker) as engine:
            assert "far is left out: it failed to open: " in engine.cache.describe()
            assert engine.stats()["left_out"] == 1
            redis.start()
            until(lambda: not engine.stats()["left_out"])
            until(lambda: engine.sees(1))
        secret = redis.url.replace("//", "//u:geheim@")
        with pytest.raises(ConfigError, match=r"tiers\[1\]\.roster: .* denies access") as told:
            Found(secret, server.keys)
        assert "geheim" not in str(told.value)


def test_engines_find_each_other_and_not_themselves(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis, Server(tmp_path / "a") as made:
        export = {"listen": "127.0.0.1:0", "keys": str(made.keys / "server.keys")}
        level = {"name": "far", "type": "nixl", "roster": redis.url, "capacity": "64 MiB"}
        level |= {"keys": str(made.keys / "client.keys"), "when": "never"}
        export |= {"roster": redis.url}
        with Engine(level, export=export) as one, Engine(level, export=export) as two:
            one.save()
            until(lambda: all_come(two))
            assert two.stats()["far_ends"] == 1
            assert two.stats()["far_ends_unfit"] == 0
            model = {"fingerprint": "another"}
            with Engine(level, export=export, model=model) as other:
                assert other.load() == []
                assert one.stats("export")["sessions"] == 1, "the other is no peer"
