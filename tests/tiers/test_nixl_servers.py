"""The NIXL tier over several far ends, in simulated time: who has which block, and who is away."""

from __future__ import annotations

from dataclasses import replace

import pytest
import pytest_asyncio

from kvladder.errors import ConfigError, TierError
from kvladder.testing import TierTests
from kvladder.testing.fixtures import TierFixtures
from kvladder.tiers.label import LABEL_BYTES

pytest.importorskip("zmq")

from kvladder.tiers.nixl import tier as tier_module
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier
from tests.kit.fabric import Fabric, FakePlane
from tests.tiers.test_nixl_line import until

SERVERS = ("a:1", "b:1", "c:1")
PEERS = ("p:1", "q:1")


class Fabrics(TierFixtures):
    """Five far ends, and what the tier has instead of ZeroMQ and NIXL."""

    @pytest_asyncio.fixture
    async def fabrics(self, monkeypatch):
        fabrics = {address: Fabric() for address in (*SERVERS, *PEERS)}
        planes = fabrics["a:1"].planes
        for fabric in fabrics.values():
            fabric.planes = planes

        def dialled(address, _keys, take, broke):
            return fabrics[address].dial(take, broke)

        def plane(arena, _transports, _interfaces):
            return FakePlane(fabrics["a:1"], arena)

        for name, fake in (("Dialled", dialled), ("NixlPlane", plane)):
            monkeypatch.setattr(tier_module, name, fake)
        for name in ("load", "read_keys", "greet"):
            monkeypatch.setattr(tier_module, name, self.nothing)
        yield fabrics
        for fabric in fabrics.values():
            await fabric.aclose()

    @staticmethod
    def nothing(*_):
        class Done:
            def __await__(self):
                return iter(())

        return Done()


class TestThreeServers(Fabrics, TierTests):
    @pytest.fixture
    def make(self, fabrics):
        self.network = fabrics
        return lambda: NixlTier(NixlOptions(servers=SERVERS, keys="k"))

    def holder(self, ref, namespace):
        """The server that has a block, else the first one."""
        offers = [fabric.offers for fabric in self.network.values()]
        found = [one for one in offers if namespace + ref.key in one.blocks]
        assert len(found) <= 1, "a block is in one of them"
        return (found or offers)[0]

    async def raw_get(self, tier, ref):
        space = tier.context.namespace
        offers = self.holder(ref, space)
        slot, length, _ = offers.blocks[space + ref.key]
        return bytes(offers.arena.view(slot)[:length])

    async def raw_put(self, tier, ref, label, data):
        space = tier.context.namespace
        line = tier._owner(ref.key, tier._servers)
        offers = self.network[line.address].offers
        offers.forget({space + ref.key})
        (slot,) = offers.arena.lease(1)
        data = data[: offers.arena.slot_bytes]
        offers.arena.view(slot)[: len(data)] = data
        offers.blocks[space + ref.key] = slot, len(data), label.ljust(LABEL_BYTES, b"\0")

    async def raw_corrupt(self, tier, ref):
        space = tier.context.namespace
        offers = self.holder(ref, space)
        offers.arena.view(offers.blocks[space + ref.key][0])[0] ^= 1


class TestWhoHasIt(Fabrics):
    @pytest.fixture
    def capacity(self):
        return 32

    @pytest.fixture
    def make(self, fabrics):
        self.network = fabrics
        return lambda: NixlTier(NixlOptions(servers=SERVERS, peers=PEERS, keys="k"))

    def spread(self):
        """How many blocks each far end has."""
        return [len(fabric.offers.blocks) for fabric in self.network.values()]

    async def test_blocks_are_spread_and_each_is_in_one_server(self, tier, blocks):
        stored = await blocks.put(tier, *range(32))
        assert sum(self.spread()) == 32
        assert min(self.spread()[:3]) > 0
        assert self.spread()[3:] == [0, 0], "peers are read only"
        assert await blocks.contains(tier, stored) == [True] * 32
        assert await blocks.get(tier, stored) == [True] * 32

    async def test_one_that_is_away_costs_its_own_blocks(self, tier, blocks):
        stored = await blocks.put(tier, *range(32))
        self.network["b:1"].is_cut = True
        await until(lambda: tier.gauges()["far_ends_connected"] == 4)
        found = await blocks.get(tier, stored)
        assert found.count(None) == self.spread()[1], "they may be there later"
        assert found.count(True) == 32 - self.spread()[1]
        with pytest.raises(TierError, match="b:1: it is silent"):
            await tier.remove(blocks.refs(stored[:1]))
        others = zip(stored[1:], found[1:], strict=True)  # the first one is removed elsewhere
        again = [stored[0], *(block for block, has in others if not has)]
        await blocks.store(tier, again)
        assert await blocks.get(tier, stored) == [True] * 32, "another one took its part"
        self.network["b:1"].is_cut = False
        await until(lambda: tier.gauges()["far_ends_connected"] == 5)
        assert await blocks.get(tier, stored) == [True] * 32
        assert tier.gauges()["connections_broken"] == 1

    async def test_one_that_hangs_in_a_batch_costs_its_own_blocks(self, make, context, blocks):
        tier = make()
        await tier.open(replace(context, timeout_s=2.0))
        stored = await blocks.put(tier, *range(32))
        self.network["c:1"].hangs = True
        found = await blocks.get(tier, stored)
        assert (found.count(None), found.count(False)) == (self.spread()[2], 0)
        await tier.aclose()

    async def test_blocks_of_peers_are_found_by_asking_all_at_once(self, tier, blocks):
        stored = await blocks.put(tier, 0, 1, 2)
        for fabric in (self.network["q:1"].offers, self.network["p:1"].offers):
            self.move(stored[0], fabric)
            assert await blocks.contains(tier, stored) == [True] * 3
            assert await blocks.get(tier, stored) == [True] * 3, "it is remembered who has it"
        assert await blocks.get(tier, stored) == [True] * 3, "they are asked in turn"

    def move(self, block, to):
        """Have another far end have a block, and nobody else."""
        for fabric in self.network.values():
            for name in [name for name in fabric.offers.blocks if name.endswith(block.key)]:
                slot, length, label = fabric.offers.blocks[name]
                (new,) = to.arena.lease(1)
                to.arena.view(new)[:length] = fabric.offers.arena.view(slot)[:length]
                fabric.offers.forget({name})
                to.blocks[name] = new, length, label

    async def test_an_engine_among_the_servers_is_refused(self, make, context):
        self.network["a:1"].offers.writable = False
        with pytest.raises(ConfigError, match="a:1 is an engine"):
            await make().open(context)

    async def test_without_servers_nothing_is_put(self, fabrics, context, blocks):
        tier = NixlTier(NixlOptions(peers=PEERS, keys="k"))
        await tier.open(context)
        assert await tier.put(blocks.writes(blocks.some(0))) == [False]
        assert await blocks.get(tier, blocks.some(0)) == [False]
        await tier.aclose()

    async def test_it_starts_without_servers_only_if_none_is_required(self, make, context):
        for address in SERVERS:
            self.network[address].is_cut = True
        with pytest.raises(ConfigError, match="no answer within 5 s"):
            await make().open(context)
        options = NixlOptions(servers=SERVERS, keys="k", required=False)
        tier = NixlTier(options)
        await tier.open(context)
        with pytest.raises(TierError, match="a:1: no answer"):
            await tier.contains([])
        self.network["b:1"].is_cut = False
        await until(lambda: tier.gauges()["far_ends_connected"] == 1)
        assert await tier.contains([]) == []
        await tier.aclose()
