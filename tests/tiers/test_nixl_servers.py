"""The NIXL tier over several far ends, in simulated time: owners of blocks, missing ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import pytest_asyncio

from kvladder.errors import ConfigError, PermissionDenied, TierError, Unavailable
from kvladder.testing import TierTests
from kvladder.testing.fixtures import TierFixtures
from kvladder.tiers.label import LABEL_BYTES

pytest.importorskip("zmq")

from kvladder.tiers.nixl import messages as m
from kvladder.tiers.nixl import tier as tier_module
from kvladder.tiers.nixl.roster import FOLLOW_S, Entry, run_of
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier
from tests.kit.fabric import Fabric, FakePlane
from tests.tiers.test_nixl_line import until

SERVERS = ("a:1", "b:1", "c:1")
PEERS = ("p:1", "q:1")
URL = "redis://list"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "nixl.md"


class Fabrics(TierFixtures):
    """Five far ends, and stand-ins for ZeroMQ and NIXL."""

    @pytest_asyncio.fixture
    async def fabrics(self, monkeypatch):
        fabrics = {address: Fabric() for address in (*SERVERS, *PEERS)}
        planes = fabrics["a:1"].planes
        for fabric in fabrics.values():
            fabric.planes = planes

        def dialler(address, _ring):
            return fabrics[address].dial

        def ring(*_):
            return SimpleNamespace(keys=SimpleNamespace(peers=["server"]), renew=lambda: False)

        def plane(arena, _transports, _interfaces):
            return FakePlane(fabrics["a:1"], arena)

        for name, fake in (("Dialler", dialler), ("KeyRing", ring), ("NixlPlane", plane)):
            monkeypatch.setattr(tier_module, name, fake)
        for name in ("load", "greet"):
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


@pytest.mark.slow
class TestThreeServers(Fabrics, TierTests):
    @pytest.fixture
    def make(self, fabrics):
        self.network = fabrics
        return lambda: NixlTier(NixlOptions(servers=SERVERS, keys="k"))

    def holder(self, ref, namespace):
        """Return the server that has a block, otherwise the first one."""
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


class TestOwners(Fabrics):
    @pytest.fixture
    def capacity(self):
        return 32

    @pytest.fixture
    def make(self, fabrics):
        self.network = fabrics
        return lambda: NixlTier(NixlOptions(servers=SERVERS, peers=PEERS, keys="k"))

    def spread(self):
        """Return how many blocks each far end has."""
        return [len(fabric.offers.blocks) for fabric in self.network.values()]

    async def test_blocks_are_spread_and_each_is_in_one_server(self, tier, blocks):
        stored = await blocks.put(tier, *range(32))
        assert sum(self.spread()) == 32
        assert min(self.spread()[:3]) > 0
        assert self.spread()[3:] == [0, 0], "peers are read only"
        assert await blocks.contains(tier, stored) == [True] * 32
        assert await blocks.get(tier, stored) == [True] * 32

    async def test_a_missing_server_costs_only_its_own_blocks(self, tier, blocks):
        stored = await blocks.put(tier, *range(32))
        self.network["b:1"].is_cut = True
        await until(lambda: tier.gauges()["far_ends_connected"] == 4)
        found = await blocks.get(tier, stored)
        assert found.count(None) == self.spread()[1], "they may be there later"
        assert found.count(True) == 32 - self.spread()[1]
        with pytest.raises(TierError, match="b:1: it does not answer heartbeats"):
            await tier.remove(blocks.refs(stored[:1]))
        others = zip(stored[1:], found[1:], strict=True)  # the first one is removed elsewhere
        again = [stored[0], *(block for block, has in others if not has)]
        await blocks.store(tier, again)
        assert await blocks.get(tier, stored) == [True] * 32, "another one took its part"
        self.network["b:1"].is_cut = False
        await until(lambda: tier.gauges()["far_ends_connected"] == 5)
        assert await blocks.get(tier, stored) == [True] * 32
        assert tier.gauges()["connections_broken"] == 1

    async def test_a_server_that_hangs_in_a_batch_costs_only_its_own_blocks(
        self, make, context, blocks
    ):
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
        """Move a block to another far end."""
        for fabric in self.network.values():
            for name in [name for name in fabric.offers.blocks if name.endswith(block.key)]:
                slot, length, label = fabric.offers.blocks[name]
                (new,) = to.arena.lease(1)
                to.arena.view(new)[:length] = fabric.offers.arena.view(slot)[:length]
                fabric.offers.forget({name})
                to.blocks[name] = new, length, label

    async def test_an_engine_among_the_servers_is_refused(self, make, context):
        self.network["a:1"].offers.writable = False
        with pytest.raises(ConfigError, match="a:1 takes no blocks from this client"):
            await make().open(context)

    async def test_without_servers_nothing_is_put(self, fabrics, context, blocks):
        tier = NixlTier(NixlOptions(peers=PEERS, keys="k"))
        await tier.open(context)
        assert await tier.put(blocks.writes(blocks.some(0))) == [False]
        assert await blocks.get(tier, blocks.some(0)) == [False]
        await tier.aclose()

    async def test_a_tier_starts_without_servers_only_if_none_is_required(self, make, context):
        for address in SERVERS:
            self.network[address].is_cut = True
        with pytest.raises(Unavailable, match="no answer within 5 s"):
            await make().open(replace(context, required=True))
        tier = NixlTier(NixlOptions(servers=SERVERS, keys="k"))
        await tier.open(context)
        with pytest.raises(TierError, match="a:1: no answer"):
            await tier.contains([])
        self.network["b:1"].is_cut = False
        await until(lambda: tier.gauges()["far_ends_connected"] == 1)
        assert await tier.contains([]) == []
        await tier.aclose()

    async def test_a_survey_needs_every_server_and_one_that_can_list(self, tier, fabrics, blocks):
        async def found():
            return sorted([key async for batch in tier.survey(None) for key in batch])

        keys = await blocks.put(tier, *range(6))
        assert await found() == sorted(ref.key for ref in keys)
        [line, *_] = tier._servers
        line.here.surveys = False
        with pytest.raises(TierError, match="older version"):
            await found()
        line.here.fail(TierError("gone"))
        with pytest.raises(TierError):
            await found()

    async def test_a_purge_that_a_server_fails_is_an_error(self, tier, blocks):
        await blocks.put(tier, *range(8))
        progress = list[tuple[int, int]]()
        assert await tier.purge(None, lambda *told: progress.append(told)) == 8
        for line in tier._servers:
            line.here.writable = line.here.surveys = False
        denied = "a:1 does not let this client remove blocks"
        with pytest.raises(PermissionDenied, match=denied):
            await tier.purge(None, lambda *told: progress.append(told))
        assert progress == [(8, 8)]
        with pytest.raises(PermissionDenied, match=denied):
            await tier.remove(blocks.refs(blocks.some(1)))
        with pytest.raises(PermissionDenied, match=denied):
            [_ async for _ in tier.survey(None)]
        self.network["b:1"].is_cut = True
        await until(lambda: tier.gauges()["far_ends_connected"] == 4)
        with pytest.raises(TierError, match="b:1: it does not answer heartbeats"):
            await tier.remove(blocks.refs(blocks.some(1)))  # another call may reach that one


class FakeRoster:
    """A list that tests write."""

    def __init__(self, url, publics):
        assert (url, *publics()) == (URL, "server")
        self.entries = dict(FakeRoster.first)
        self.error = FakeRoster.wrong
        self.ignored = 0
        FakeRoster.made.append(self)

    first: ClassVar[dict[str, Entry]] = {}
    wrong: ClassVar[Exception | None] = None
    made: ClassVar[list[FakeRoster]] = []

    async def read(self):
        if self.error is not None:
            raise self.error
        return dict(self.entries)

    async def aclose(self):
        self.made.remove(self)


def entry(address, **more):
    return Entry(
        **{"address": address, "run": address, "writable": True, "block_bytes": 1 << 30, **more}
    )


class TestRoster(Fabrics):
    """Far ends are read from a list in Redis."""

    @pytest.fixture
    def capacity(self):
        return 32

    @pytest.fixture
    def make(self, fabrics, monkeypatch):
        self.network = fabrics
        found = {"one": entry("a:1"), "two": entry("b:1"), "engine": entry("p:1", writable=False)}
        monkeypatch.setattr(FakeRoster, "first", found)
        monkeypatch.setattr(FakeRoster, "made", [])
        monkeypatch.setattr(tier_module, "Roster", FakeRoster)
        return lambda: NixlTier(NixlOptions(roster=URL, keys="k"))

    @staticmethod
    def lines(tier):
        return {(line.name, line.address, line.is_up) for line in (*tier._servers, *tier._peers)}

    def names(self, tier):
        return sorted(name for name, *_ in self.lines(tier))

    async def test_a_new_server_is_used_and_one_that_left_is_not(self, tier, blocks):
        (roster,) = FakeRoster.made
        assert self.names(tier) == ["engine", "one", "two"]
        stored = await blocks.put(tier, *range(32))
        before = {key: tier._owner(key, tier._servers).name for key in (b.key for b in stored)}
        roster.entries["three"] = entry("c:1")
        await until(lambda: tier.gauges()["far_ends_connected"] == 4)
        after = {key: tier._owner(key, tier._servers).name for key in before}
        moved = {key for key in before if before[key] != after[key]}
        assert {after[key] for key in moved} == {"three"}, "those that it takes, and no others"
        assert 0 < len(moved) < 32
        self.network["c:1"].is_cut = True
        del roster.entries["three"]
        await until(lambda: self.names(tier) == ["engine", "one", "two"])
        assert {key: tier._owner(key, tier._servers).name for key in before} == before
        assert await blocks.get(tier, stored) == [True] * 32

    async def test_connected_servers_stay_when_the_list_is_lost(self, tier, blocks):
        (roster,) = FakeRoster.made
        stored = await blocks.put(tier, *range(32))
        roster.entries.clear()
        await asyncio.sleep(10 * FOLLOW_S)
        assert self.names(tier) == ["engine", "one", "two"]
        assert await blocks.get(tier, stored) == [True] * 32
        self.network["b:1"].is_cut = True
        await until(lambda: self.names(tier) == ["engine", "one"])

    async def test_an_unreadable_list_changes_nothing_and_is_reported_once(
        self, tier, blocks, context
    ):
        (roster,) = FakeRoster.made
        self.network["b:1"].is_cut = True
        for error in (TierError("redis: refused"), ConfigError("no", path="roster")):
            roster.error = error
            await asyncio.sleep(10 * FOLLOW_S)
        assert self.names(tier) == ["engine", "one", "two"], "also who is away"
        assert tier.gauges()["roster_failures"] >= 18
        self.network["b:1"].is_cut = False
        await until(lambda: tier.gauges()["far_ends_connected"] == 3)
        roster.error = None
        del roster.entries["engine"]
        self.network["p:1"].is_cut = True
        await until(lambda: self.names(tier) == ["one", "two"])

    async def test_a_server_that_moved_to_another_address_has_the_same_blocks(self, tier, blocks):
        (roster,) = FakeRoster.made
        stored = await blocks.put(tier, *range(32))
        before, after = self.network["b:1"].offers, self.network["c:1"].offers
        for name, (slot, length, label) in before.blocks.items():
            (new,) = after.arena.lease(1)
            after.arena.view(new)[:length] = before.arena.view(slot)[:length]
            after.blocks[name] = new, length, label
        roster.entries["two"] = entry("c:1")
        await until(lambda: ("two", "c:1", True) in self.lines(tier))
        assert await blocks.get(tier, stored) == [True] * 32
        assert self.names(tier) == ["engine", "one", "two"]

    async def test_unsuitable_servers_are_left_out(self, tier, context):
        (roster,) = FakeRoster.made
        own = context.namespace.hex()
        roster.entries |= {
            "small": entry("c:1", block_bytes=100),
            "later": entry("c:1", version=99),
            "other": entry("q:1", writable=False, namespace="ab" * 32),
            "self": entry("q:1", run=run_of(context.arena), writable=False, namespace=own),
        }
        await until(lambda: tier.gauges()["far_ends_unfit"] == 3)
        assert self.names(tier) == ["engine", "one", "two"]
        roster.entries["same"] = entry("q:1", writable=False, namespace=own)
        await until(lambda: tier.gauges()["far_ends_connected"] == 4)
        assert self.names(tier) == ["engine", "one", "same", "two"]

    async def test_a_tier_does_not_open_while_the_list_cannot_be_read(
        self, make, context, monkeypatch
    ):
        monkeypatch.setattr(FakeRoster, "wrong", TierError("redis: refused"))
        with pytest.raises(TierError, match="redis: refused"):
            await make().open(context)
        assert not FakeRoster.made
        monkeypatch.setattr(FakeRoster, "wrong", None)
        monkeypatch.setattr(FakeRoster, "first", {})
        with pytest.raises(Unavailable, match="the roster lists no usable server") as missing:
            await make().open(replace(context, required=True))
        assert missing.value.path == "roster"
        assert not FakeRoster.made

    async def test_a_tier_opens_before_any_server_is_announced(
        self, make, context, blocks, monkeypatch
    ):
        monkeypatch.setattr(FakeRoster, "first", {})
        tier = make()
        await tier.open(context)
        assert await tier.put(blocks.writes(blocks.some(0))) == [False]
        assert await tier.contains([]) == []
        (roster,) = FakeRoster.made
        roster.entries["one"] = entry("a:1")
        await until(lambda: tier.gauges()["far_ends_connected"] == 1)
        assert await blocks.put(tier, 0) != []
        await tier.aclose()


class TestParts(Fabrics):
    """A batch to one server, which travels in several parts."""

    @pytest.fixture
    def capacity(self):
        return 16

    @pytest.fixture
    def make(self, fabrics, monkeypatch):
        monkeypatch.setattr(tier_module, "PART_BYTES_MIN", 1)
        self.fabric = fabrics["a:1"]
        self.came: list[m.Message] = []

        def seen(data):
            self.came.append(m.request(data))
            return [data]

        self.fabric.to_far = seen
        return lambda: NixlTier(NixlOptions(servers=SERVERS[:1], keys="k"))

    def count(self, kind):
        return sum(isinstance(message, kind) for message in self.came)

    async def test_a_batch_is_sent_in_the_documented_number_of_parts(self, tier, blocks):
        stored = await blocks.put(tier, *range(16))
        assert self.count(m.Offer) == self.count(m.Commit) == tier_module.PARTS
        assert await blocks.get(tier, stored) == [True] * 16
        assert self.count(m.Get) == tier_module.PARTS
        assert await blocks.get(tier, stored[:1]) == [True]
        assert self.count(m.Get) == tier_module.PARTS + 1

    @pytest.mark.parametrize(
        ("count", "least", "sizes"),
        [(16, 4, [4, 4, 4, 4]), (15, 4, [5, 5, 5]), (9, 4, [4, 5]), (7, 4, [7]), (3, 4, [3])],
    )
    async def test_no_part_is_smaller_than_the_minimum(
        self, tier, blocks, monkeypatch, count, least, sizes
    ):
        few = (least - 1) * tier.context.layout.slot_bytes + 1
        monkeypatch.setattr(tier_module, "PART_BYTES_MIN", few)
        stored = await blocks.put(tier, *range(count))
        assert len(stored) == count
        offers = [message for message in self.came if isinstance(message, m.Offer)]
        assert [len(offer.lengths) for offer in offers] == sizes
        assert await blocks.get(tier, stored) == [True] * count

    async def test_labels_are_made_while_the_far_end_looks_for_room(self, tier, blocks):
        refs = blocks.some(*range(16))
        blocks.fill(refs)
        writes, made = blocks.writes(refs), list[int]()

        def seen(data):
            if isinstance(m.reply(data), m.Grant):
                made.append(sum(bool(write._label) for write in writes))
            return [data]

        self.fabric.to_near = seen
        assert await tier.put(writes) == [True] * 16
        assert made == [16] * tier_module.PARTS

    @pytest.mark.parametrize(("kind", "lost"), [(m.Get, None), (m.Offer, False)])
    async def test_a_failed_part_costs_only_its_own_blocks(self, tier, blocks, kind, lost):
        stored = await blocks.put(tier, *range(8))

        def fails(data):
            message = m.request(data)
            if isinstance(message, kind) and self.count(kind) == seen + 1:
                (ident,) = self.fabric.controls
                answer = m.frame(m.Failed(message.op, "no"))
                self.fabric.later(self.fabric._arrive, ident, answer)
                self.came.append(message)
                return []
            return record(data)

        seen, record = self.count(kind), self.fabric.to_far
        self.fabric.to_far = fails
        if kind is m.Get:
            found = await blocks.get(tier, stored)
        else:
            more = blocks.some(*range(8, 16))
            blocks.fill(more)
            found = await tier.put(blocks.writes(more))
        parts = [(found[n], found[n + 1]) for n in range(0, 8, 2)]
        assert parts.count((True, True)) == 3
        assert parts.count((lost, lost)) == 1


def test_the_page_states_the_number_and_size_of_the_parts_of_a_batch():
    page = " ".join(PAGE.read_text().split())
    assert tier_module.PARTS == 4
    assert f"up to four parts of {tier_module.PART_BYTES_MIN >> 20} MiB or more" in page
