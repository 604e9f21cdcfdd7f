"""Values under a block's key on a real server: fuzzed, foreign, evicted, expired, in parts."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvladder.arena import Arena
from kvladder.errors import TierError, TierFull, Unavailable
from kvladder.layout import Layout
from kvladder.runtime import SystemClock
from kvladder.testing.fixtures import SampleBlocks
from kvladder.testing.redisserver import RedisServer
from kvladder.testing.sim import inline_blocking
from kvladder.tiers.context import TierContext
from kvladder.tiers.label import LABEL_BYTES, VERSION, Coding, Labels, Outcome, packed_step
from kvladder.tiers.redis.quota import scan
from kvladder.tiers.redis.tier import PART_MS, RedisTier
from kvladder.tiers.redis.url import RedisOptions
from kvladder.units import Duration
from tests.tiers.redistests import PATIENT, RedisTierTests, key_of

pytestmark = pytest.mark.slow
BLOCK = 3000
VOLATILE = ["volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"]
"""Policies that evict only values with a time to live."""


@pytest.fixture(scope="module")
def standalone(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def one_by_one(tier, blocks):
    for number in range(blocks.count):
        await blocks.put(tier, number)


class Values(RedisTierTests):
    """The fixtures of the suite, without its tests."""

    @pytest.fixture
    def servers(self, standalone):
        standalone.configure(maxmemory=0)
        return [standalone]


for _name in [name for name in dir(Values) if name.startswith("test_")]:
    setattr(Values, _name, None)


class TestValues(Values):
    async def test_values_of_other_types_are_counted_misses(self, tier, blocks):
        items = blocks.some(0, 1, 2, 3)
        self.run("LPUSH", key_of(tier, items[0]), "a list")
        self.run("SET", key_of(tier, items[1]), "")
        self.run("SET", key_of(tier, items[2]), "text")
        self.run("HSET", key_of(tier, items[3]), "a", "hash")
        assert await blocks.contains(tier, items) == [False] * 4
        assert await blocks.get(tier, items) == [False] * 4
        assert blocks.refused == {Outcome.CORRUPT: 3}, "nothing tells an empty value from none"
        await blocks.store(tier, [item._replace(replace=True) for item in items])
        assert await blocks.get(tier, items) == [True] * 4

    async def test_a_foreign_value_in_the_place_of_a_block_is_replaced(self, tier, blocks):
        """Also by an engine that never read it: a save suffices to repair a damaged server."""
        items = blocks.some(*range(8))
        key = [key_of(tier, item) for item in items]
        self.run("LPUSH", key[0], "a list")
        self.run("HSET", key[1], "a", "hash")
        self.run("SADD", key[2], "a set")
        self.run("XADD", key[3], "*", "a", "stream")
        self.run("SET", key[4], "")
        self.run("SET", key[5], b"x" * (LABEL_BYTES - 1))
        self.run("SETRANGE", key[6], 1 << 20, "too long")
        await blocks.store(tier, items)
        assert await blocks.get(tier, items) == [True] * 8

    async def test_values_of_other_programs_are_counted_misses(self, tier, blocks):
        item, other = blocks.some(0, 1)
        data, label = blocks.data(item), blocks.label(item)
        version = VERSION.to_bytes(2, "little")
        wrong = [
            label.replace(version, b"\2\0", 1) + data,
            label.replace(b"kvlabel", b"kvother") + data,
            label[:-1] + data,
            label + data[:-1],
            label + data + b"x" * (1 << 20),
            blocks.labels.pack(item.key, data + b"x") + data + b"x",
        ]
        for value in wrong:
            self.run("SET", key_of(tier, item), value)
            assert await blocks.get(tier, [item]) == [False]
        assert blocks.refused == {Outcome.CORRUPT: len(wrong)}
        self.run("SET", key_of(tier, item), blocks.label(other) + blocks.data(other))
        assert await blocks.get(tier, [item]) == [False]
        assert blocks.refused[Outcome.STALE] == 1
        self.run("SET", key_of(tier, item), label + data)
        assert await blocks.get(tier, [item, other]) == [True, False]

    async def test_a_value_of_another_namespace_is_a_miss(self, tier, blocks, context, options):
        (item,) = await blocks.put(tier, 0)
        value = self.run("GET", key_of(tier, item))
        other = RedisTier(options)
        namespace = context.layout.namespace(salt="other")
        await other.open(replace(context, namespace=namespace))
        blocks.labels = Labels(namespace, context.layout.block_bytes, verify=True)
        assert await blocks.get(other, [item]) == [False]
        self.run("SET", key_of(other, item), value)
        assert await blocks.get(other, [item]) == [False]
        assert blocks.refused == {Outcome.STALE: 1}
        await other.aclose()

    def test_the_documentation_says_how_long_a_label_is(self):
        page = (Path(__file__).parents[2] / "docs" / "how-to" / "redis.md").read_text()
        assert f"begins with {LABEL_BYTES} bytes" in page
        assert f"its bytes and {LABEL_BYTES} more" in page

    async def test_a_block_is_read_with_its_label_by_one_command(self, tier, blocks):
        items = await blocks.put(tier, 0, 1, 2)
        self.run("CONFIG", "RESETSTAT")
        assert await blocks.get(tier, items) == [True] * 3
        stats = self.run("INFO", "commandstats")
        reading = {"cmdstat_getrange", "cmdstat_get", "cmdstat_mget", "cmdstat_strlen"}
        assert {name: stats[name]["calls"] for name in reading & stats.keys()} == {
            "cmdstat_getrange": 3
        }

    async def test_a_block_is_written_once(self, tier, blocks):
        (item,) = await blocks.put(tier, 0)
        first = self.run("GET", key_of(tier, item))
        await blocks.put(tier, 0)
        assert self.run("GET", key_of(tier, item)) == first

    async def test_the_server_forgets_by_priority_and_by_the_end_of_a_block(
        self, blocks, context, servers
    ):
        ttls = {"0": Duration(100), "50": Duration(1000)}
        tier = RedisTier(RedisOptions(url=servers[0].url, connect_timeout=PATIENT, ttls=ttls))
        await tier.open(context)
        soon = context.clock.wall() + 10
        low, high, ends = blocks.some(0, 1, 2)
        items = [
            low.of(priority=49),
            high.of(priority=50),
            ends.of(priority=100, expires_wall_s=soon),
        ]
        await blocks.store(tier, items)
        left = [self.run("PTTL", key_of(tier, item)) / 1000 for item in items]
        assert 99 < left[0] <= 100
        assert 999 < left[1] <= 1000
        assert 9 < left[2] <= 10
        gone = items[2].of(expires_wall_s=context.clock.wall() - 1)
        await blocks.remove(tier, [gone])
        await tier.put(blocks.writes([gone]))
        await asyncio.sleep(0.01)
        assert await blocks.contains(tier, [gone]) == [False]
        await tier.aclose()

    async def test_without_a_ttl_a_block_never_expires(self, tier, blocks):
        (item,) = await blocks.put(tier, 0)
        assert self.run("TTL", key_of(tier, item)) == -1

    @pytest.mark.parametrize("policy", ["noeviction", *VOLATILE])
    async def test_a_server_without_room_is_full(self, tier, blocks, servers, policy):
        used = self.run("INFO", "memory")["used_memory"]
        servers[0].configure(maxmemory_policy=policy, maxmemory=used + (1 << 19))
        with pytest.raises(TierFull, match="maxmemory"):
            await one_by_one(tier, blocks)
        assert await blocks.get(tier, blocks.some(0)) == [True], "what is stored stays"

    @pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", *VOLATILE])
    async def test_a_server_that_evicts_loses_blocks_and_no_more(
        self, blocks, context, servers, policy
    ):
        used = self.run("INFO", "memory")["used_memory"]
        servers[0].configure(maxmemory_policy=policy, maxmemory=used + (1 << 19))
        tier = RedisTier(
            RedisOptions(url=servers[0].url, connect_timeout=PATIENT, ttls={"0": Duration(1000)})
        )
        await tier.open(context)
        stored = 0
        for number in range(blocks.count):
            items = blocks.some(number)
            blocks.fill(items)
            try:
                stored += sum(await tier.put(blocks.writes(items)))
            except TierFull:
                continue  # a server makes room at its own pace
        found = await blocks.get(tier, blocks.some(*range(blocks.count)))
        assert 10 < sum(found) < stored
        assert not blocks.refused
        await tier.aclose()


class TestSurveys(Values):
    async def found(self, tier, salt):
        return sorted([key async for batch in tier.survey(salt) for key in batch])

    async def test_blocks_that_leave_during_a_survey_are_not_told(self, tier, blocks, monkeypatch):
        items = [one.of(salt=b"8 bytes!") for one in blocks.some(0, 1, 2)]
        await blocks.store(tier, items)
        self.run("SETRANGE", key_of(tier, items[1]), 7, b"damage")

        async def scanned(*which):
            async for names in scan(*which):
                self.run("DEL", key_of(tier, items[0]))
                yield names

        monkeypatch.setattr("kvladder.tiers.redis.tier.scan", scanned)
        assert await self.found(tier, b"8 bytes!") == sorted(one.key for one in items[1:])
        assert await self.found(tier, b"another!") == [items[1].key], "its salt cannot be read"

    async def test_a_survey_fails_if_a_label_is_not_answered(self, tier, blocks, context, servers):
        """A user without the right to read one block stands for a server that fails."""
        items = await blocks.put(tier, 0, 1)
        known = key_of(tier, items[0]).decode()
        self.run("ACL", "SETUSER", "some", "on", "nopass", "+@all", f"~{known}")
        other = RedisTier(RedisOptions(url=servers[0].url, username="some"))
        await other.open(context)
        with pytest.raises(TierError, match="permissions"):
            await self.found(other, b"8 bytes!")
        await other.aclose()
        self.run("ACL", "DELUSER", "some")


class TestParts(Values):
    """A server that takes only small values gets a block in parts."""

    @pytest.fixture
    def block_bytes(self):
        return 5 << 19

    @pytest.fixture
    def capacity(self):
        return 8

    @pytest.fixture
    def servers(self, standalone):
        standalone.configure(maxmemory=0, proto_max_bulk_len=1 << 20)
        yield [standalone]
        standalone.configure(proto_max_bulk_len=512 << 20)

    async def test_blocks_in_parts_come_back_whole_or_not_at_all(self, tier, blocks):
        items = await blocks.put(tier, 0, 1, 2)
        keys = [key_of(tier, item) for item in items]
        sizes = [self.run("STRLEN", keys[0] + tail) for tail in (b"", b":1", b":2")]
        assert sizes == [1 << 20, 1 << 20, (1 << 19) + LABEL_BYTES]
        assert await blocks.get(tier, items) == [True] * 3
        self.run("DEL", keys[1] + b":2")
        self.run("SETRANGE", keys[2] + b":1", 77, b"damage")
        assert await blocks.get(tier, items) == [True, False, False]
        await blocks.store(tier, [item._replace(replace=True) for item in items[1:]])
        assert await blocks.get(tier, items) == [True] * 3
        for key in keys:
            assert {self.run("TTL", key + tail) for tail in (b"", b":1", b":2")} == {-1}
        await blocks.remove(tier, items)
        assert self.run("DBSIZE") == 0

    async def test_the_part_that_makes_a_block_visible_is_stored_last(
        self, tier, blocks, monkeypatch
    ):
        sent, run = list[bytes](), tier._run

        async def watched(commands, *more, **named):
            made = [one.parts() for one in commands if callable(one.parts)]
            sent.extend(b"".join(map(bytes, parts))[:200] for parts in made)
            return await run(commands, *more, **named)

        monkeypatch.setattr(tier, "_run", watched)
        await blocks.put(tier, 0)
        assert [re.findall(rb"}(:\d)?\r\n", one)[0] for one in sent] == [b":2", b":1", b""]

    async def test_short_blocks_have_fewer_parts(self, tier, blocks):
        coding = Coding(1 << 20, packed_step(1, b"cut"))
        item = blocks.some(0)[0]._replace(coding=coding)
        await blocks.store(tier, [item])
        assert self.run("DBSIZE") == 2
        assert await blocks.get(tier, [item]) == [True]
        assert await tier.purge(None, lambda *_: None) == 1
        assert self.run("DBSIZE") == 0

    async def test_a_purge_of_a_salt_removes_all_parts_of_its_blocks_and_no_others(
        self, tier, blocks
    ):
        (red, short, torn), (blue,) = blocks.some(0, 1, 2), blocks.some(3)
        short = short._replace(coding=Coding(1 << 20, packed_step(1, b"cut")))
        reds = [one.of(salt=b"8 bytes!") for one in (red, short, torn)]
        await blocks.store(tier, [*reds, blue.of(salt=b"another!")])
        self.run("DEL", key_of(tier, torn))  # its parts tell no salt
        self.run("COPY", key_of(tier, red) + b":1", key_of(tier, red) + b":7")  # of a lower limit
        assert await tier.purge(b"8 bytes!", lambda *_: None) == 2
        assert await blocks.get(tier, [blue]) == [True]
        assert self.run("DBSIZE") == 3

    @pytest.mark.parametrize("ttl_s", [None, 50, 5000])
    async def test_parts_last_as_long_as_their_block(self, blocks, context, servers, ttl_s):
        self.run("FLUSHALL")
        ttls = {} if ttl_s is None else {"0": Duration(ttl_s)}
        tier = RedisTier(RedisOptions(url=servers[0].url, connect_timeout=PATIENT, ttls=ttls))
        await tier.open(context)
        (item,) = await blocks.put(tier, 0)
        for tail in (b"", b":1", b":2"):
            left_s = self.run("TTL", key_of(tier, item) + tail)
            assert left_s == -1 if ttl_s is None else 0.9 * ttl_s < left_s <= ttl_s
        await tier.aclose()

    async def test_parts_of_a_block_that_is_not_finished_expire(self, blocks, context, servers):
        """A user without the right to write the first part stands for an engine that died."""
        self.run("FLUSHALL")
        self.run(
            "ACL", "SETUSER", "half", "on", "nopass", "+@all", "~kvladder:*:1", "~kvladder:*:2"
        )
        tier = RedisTier(RedisOptions(url=servers[0].url, connect_timeout=PATIENT, username="half"))
        await tier.open(context)
        items = blocks.some(0)
        blocks.fill(items)
        assert list(await tier.put(blocks.writes(items))) == [False]
        assert self.run("DBSIZE") == 2
        for tail in (b":1", b":2"):
            assert 0 < self.run("PTTL", key_of(tier, items[0]) + tail) <= PART_MS
        await tier.aclose()
        self.run("ACL", "DELUSER", "half")

    async def test_the_servers_limit_of_a_value_is_known_before_the_first_block(
        self, tmp_path, blocks, context
    ):
        with RedisServer(tmp_path, [("proto-max-bulk-len", str(1 << 20))]) as server:
            server.kill()
            tier = RedisTier(RedisOptions(url=server.url, connect_timeout=PATIENT))
            with pytest.raises(Unavailable):
                await tier.open(context)
            server.start()
            await tier.open(context)
            items = await blocks.put(tier, 0, 1)
            assert await blocks.get(tier, items) == [True, True]
            await tier.aclose()


class TestRestarted(Values):
    @pytest.fixture
    def servers(self, tmp_path):
        with RedisServer(tmp_path) as server:
            yield [server]

    async def test_an_abandoned_connection_is_not_killed_in_another_run_of_the_server(
        self, tier, blocks, servers
    ):
        """A restarted server gives the numbers of its clients to others."""
        (item,) = await blocks.put(tier, 0)
        (server,) = servers
        clients = server.client().client_list()
        own = {int(c["id"]) for c in clients if c["name"] == "kvladder"}  # one asks how it is
        server.pause()
        getting = asyncio.create_task(tier.get(blocks.reads([item])))
        await asyncio.sleep(0.2)
        getting.cancel()
        await asyncio.wait({getting})
        server.kill()
        server.start()
        others: dict[int, Any] = {}
        while not others or max(others) < max(own):
            other = server.client(single_connection_client=True)
            others[other.client_id()] = other
        assert own <= others.keys()
        assert await blocks.get(tier, [item]) == [False], "nothing is left"
        alive = {int(client["id"]) for client in server.client().client_list()}
        assert others.keys() <= alive
        for other in others.values():
            other.close()


# ---- any bytes at all


def _value(draw_flips, value):
    data = bytearray(value)
    for position, flip in draw_flips:
        data[position % len(data)] ^= flip
    return bytes(data)


@settings(max_examples=150, deadline=None)
@given(
    value=st.one_of(
        st.binary(max_size=2000),
        st.tuples(
            st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 255)), min_size=1, max_size=4),
            st.integers(-700, 64),
        ),
    )
)
def test_any_value_under_a_blocks_key_is_a_miss_or_the_block(standalone, value):
    asyncio.run(_fuzzed(standalone, value))


async def _fuzzed(server, value):
    layout = Layout(block_tokens=16, block_bytes=BLOCK)
    arena = Arena.create(1, layout.slot_bytes)
    space = layout.namespace(salt="fuzz")
    context = TierContext(arena, layout, space, 8, SystemClock(), inline_blocking)
    tier = RedisTier(RedisOptions(url=server.url, connect_timeout=PATIENT))
    await tier.open(context)
    blocks = SampleBlocks(arena, layout, 1, space)
    (block,) = blocks.some(0)
    right = blocks.label(block) + blocks.data(block)
    if isinstance(value, tuple):
        changed = _value(value[0], right)
        value = changed[: value[1]] if value[1] < 0 else changed + b"\0" * value[1]
    server.run("SET", key_of(tier, block), value)
    (found,) = await blocks.get(tier, [block])  # which compares the bytes
    assert found or value != right
    assert blocks.refused.total() == (not found and value != b"")
    assert len(await tier.contains([block.ref])) == 1
    await tier.purge(b"12345678", lambda *_: None)
    await tier.remove([block.ref])
    await tier.aclose()
    blocks.close()
    arena.close()
