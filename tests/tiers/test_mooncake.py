"""The Mooncake tier against a real master and real nodes."""

from __future__ import annotations

import asyncio
import itertools
import signal
from contextlib import suppress

import pytest

import kvladder
from kvladder.config.stack import load_config
from kvladder.errors import ConfigError, TierError
from kvladder.testing import TierTests
from kvladder.testing.fixtures import POISON, TierFixtures
from kvladder.testing.redisserver import free_ports
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.label import LABEL_BYTES, Outcome
from kvladder.tiers.mooncake.tier import NOT_READY, MooncakeOptions, MooncakeTier
from tests.kit.mooncake import LEASE, PROGRAM, Mooncake
from tests.kit.starts import refused

pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="the extra mooncake is not installed"),
    pytest.mark.slow,
]
TESTS = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Mooncake(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster


def options(cluster, **more):
    return MooncakeOptions(master=cluster.master, admin=cluster.admin, **more)


class TestMooncake(TierTests):
    real = True

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster):
        cluster.clear()
        self.client = cluster.client

    @pytest.fixture
    def namespace(self, layout):
        """One per test: a put that was killed keeps its name for a while."""
        return layout.namespace(salt=f"test {next(TESTS)}")

    @pytest.fixture
    def make(self, cluster):
        return lambda: IsolatedTier(MooncakeTier, options(cluster, pin_priority=90))

    @staticmethod
    def name(tier, ref):
        return f"kvladder:1:{tier.context.namespace.hex()[:32]}:{ref.key.hex()}"

    async def raw_get(self, tier, ref):
        return self.client("get", self.name(tier, ref))[LABEL_BYTES:]

    async def raw_put(self, tier, ref, label, data):
        self.client("remove", self.name(tier, ref), True)
        assert self.client("put", self.name(tier, ref), label + data or b"\0") == 0

    async def raw_corrupt(self, tier, ref):
        data = bytearray(self.client("get", self.name(tier, ref)))
        data[LABEL_BYTES] ^= 1
        await self.raw_put(tier, ref, bytes(data[:LABEL_BYTES]), bytes(data[LABEL_BYTES:]))

    async def test_a_purge_of_a_salt_removes_objects_without_a_whole_label(self, tier, blocks):
        mine = await blocks.put(tier, 0, 1)
        assert self.client("put", self.name(tier, blocks.some(2)[0].ref), b"cut") == 0
        told = []
        assert await tier.purge(b"12345678", lambda *part: told.append(part)) == 1
        assert told[-1] == (3, 3)
        assert await blocks.get(tier, mine) == [True, True]

    async def test_without_the_list_of_names_a_salt_is_not_purged(self, cluster, context):
        tier = IsolatedTier(MooncakeTier, MooncakeOptions(master=cluster.master))
        await tier.open(context)
        with pytest.raises(TierError, match="purged: set admin to the master's HTTP server"):
            await tier.purge(b"12345678", lambda *_: None)
        await tier.aclose()

    @pytest.mark.parametrize("size", [1, LABEL_BYTES, LABEL_BYTES + 9000])
    async def test_an_object_of_any_length_is_one_miss(self, tier, blocks, size):
        one, two = await blocks.put(tier, 0, 1)
        await self.raw_put(tier, one.ref, bytes(size), b"")
        assert await blocks.get(tier, [one, two]) == [False, True]
        assert blocks.refused == {Outcome.CORRUPT: 1}

    async def test_pinned_and_replaced_blocks_are_read_back(self, tier, blocks):
        stored = [blocks.some(0)[0].of(priority=95), blocks.some(1)[0]]
        await blocks.store(tier, stored)
        await blocks.store(tier, [stored[0]._replace(replace=True)])
        assert await blocks.get(tier, stored) == [True, True]


class TestFaults(TierFixtures):
    """Nodes that stop and die, each test on a store of its own."""

    real = True

    @pytest.fixture
    def block_bytes(self):
        return 4 << 20

    @pytest.fixture
    def lease(self):
        return LEASE

    @pytest.fixture
    def store(self, tmp_path, lease):
        with Mooncake(tmp_path, lease=lease) as store:
            yield store

    @pytest.fixture
    def make(self, store):
        return lambda: IsolatedTier(MooncakeTier, options(store), abandon_s=0.3)

    @pytest.fixture
    def capacity(self):
        return 8

    @pytest.mark.parametrize("call", ["get", "put"])
    async def test_nothing_of_a_node_that_was_stopped_lands_later(self, tier, blocks, store, call):
        stored = await blocks.put(tier, 0, 1, 2)
        process = tier.gauges()["process"]
        store.nodes[0].kill(signal.SIGSTOP)
        if call == "get":
            task = asyncio.create_task(tier.get(blocks.reads(stored)))
        else:
            task = asyncio.create_task(tier.put(blocks.writes(blocks.some(4, 5))))
        await asyncio.sleep(0.3)  # it does not end without help
        task.cancel()
        with pytest.raises((asyncio.CancelledError, TierError)):
            await task
        blocks.poison(stored)
        store.nodes[0].kill(signal.SIGCONT)
        await asyncio.sleep(0.2)
        assert all({*blocks.bytes_in(block.slot)} == {POISON} for block in stored)
        assert tier.gauges()["process"] != process
        while True:
            with suppress(TierError):
                if await blocks.get(tier, stored) == [True] * 3:
                    break
            await asyncio.sleep(0.05)
        cut = blocks.some(4, 5)
        blocks.fill(cut)
        while await blocks.contains(tier, cut) != [True, True]:  # a killed put has ended
            await tier.put(blocks.writes(cut))
            await asyncio.sleep(0.05)

    async def test_an_interrupted_put_is_a_miss_and_can_be_repeated(self, tier, blocks, store):
        """The master keeps its name, and answers all calls but a put with "not ready"."""
        stored, cut = await blocks.put(tier, 0), blocks.some(4)
        blocks.fill(cut)
        store.nodes[0].kill(signal.SIGSTOP)
        task = asyncio.create_task(tier.put(blocks.writes(cut)))
        name = TestMooncake.name(tier, cut[0].ref)
        while store.client("get_size", name) != NOT_READY:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, TierError)):
            await task
        store.nodes[0].kill(signal.SIGCONT)
        while True:
            with suppress(TierError):  # the process of the tier is being started
                if await blocks.contains(tier, [*stored, *cut]) == [True, False]:
                    break
            await asyncio.sleep(0.05)
        assert await blocks.get(tier, [*stored, *cut]) == [True, False]
        assert await blocks.get(tier, cut) == [False]
        assert await tier.purge(b"another!", lambda *_: None) == 0
        await blocks.remove(tier, [*stored, *cut])
        assert await blocks.contains(tier, [*stored, *cut]) == [False, False]
        assert store.client("get_size", name) == NOT_READY, "it was put or removed meanwhile"

    async def test_a_node_that_dies_takes_its_blocks_and_no_others(self, tier, blocks, store):
        stored = await blocks.put(tier, 0, 1, 2)
        store.nodes[0].kill()
        found = []
        with suppress(TierError):
            found = await blocks.get(tier, stored)
        assert True not in found
        store.add()
        (other,) = blocks.some(5)
        blocks.fill([other])
        while True:
            with suppress(TierError):
                if list(await tier.put(blocks.writes([other]))) == [True]:
                    break
            await asyncio.sleep(0.05)
        assert await blocks.get(tier, [other]) == [True]

    @pytest.mark.parametrize("lease", ["0ms"])
    async def test_a_read_that_outlasts_the_lease_is_reported_as_such(self, tier, blocks):
        stored = await blocks.put(tier, 0, 1, 2)
        with pytest.raises(TierError, match="longer than the master's --default_kv_lease_ttl"):
            await blocks.get(tier, stored)

    async def test_without_a_master_calls_fail(self, tier, blocks, store):
        await blocks.put(tier, 0)
        store.kill()
        with pytest.raises(TierError):
            async with asyncio.timeout(30):
                await tier.contains(blocks.refs(blocks.some(0)))


def test_a_missing_master_is_named():
    (port,) = free_ports(1)
    layout = kvladder.Layout(block_tokens=4, block_bytes=8192)
    level = {"type": "mooncake", "master": f"127.0.0.1:{port}", "capacity": "8 MiB"}
    stack = {"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, level]}
    error = refused(stack, layout)
    assert error.path == "tiers[1].master"
    assert "check that mooncake_master runs there" in error.hint


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"isolate": False}, "tiers[1].isolate"),
        ({"master": "nowhere"}, "tiers[1].master"),
        ({"admin": "http://x:1"}, "tiers[1].admin"),
        ({"replicas": 0}, "tiers[1].replicas"),
        ({"pin_priority": 102}, "tiers[1].pin_priority"),
    ],
)
def test_invalid_settings_are_refused(changed, path):
    level = {"type": "mooncake", "master": "127.0.0.1:1", "capacity": "8 MiB", **changed}
    with pytest.raises(ConfigError) as refused:
        load_config({"arena": {"size": "1 MiB"}, "tiers": [{"type": "host"}, level]})
    assert refused.value.path == path
