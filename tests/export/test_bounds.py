"""Bounds of one client of an exporter, and what is told of who uses how much."""

from __future__ import annotations

import asyncio

import pytest

from kvladder.export import bounds
from kvladder.export.bounds import MessageCounter
from kvladder.metrics import CLIENTS_SHOWN, OTHERS, largest, shown
from kvladder.tiers.nixl import messages as m
from tests.export.clients import Client, keys_of, server

pytest.importorskip("zmq")

from kvladder.tiers.nixl.curve import ALL, KeyFile, Tenant
from tests.kit.fabric import Fabric, FakePlane

SPACE = bytes(range(32))


def hello(fabric: Fabric, client: bytes, name: str) -> None:
    """Begin the session of a client."""

    plane = FakePlane(fabric, fabric.offers.arena)
    message = m.Hello(1, SPACE, 4096, plane.metadata, (plane.area.address, *plane.area[1:]))
    fabric.exporter.take(client, m.frame(message), ALL._replace(name=name))


def test_the_largest_clients_have_names_and_the_others_are_summed_up() -> None:
    held = {f"client {n}": n for n in range(20)}
    found = shown(held)
    assert len(found) == CLIENTS_SHOWN + 1
    assert sum(found.values()) == sum(held.values())
    assert found[OTHERS] == sum(range(12))
    assert shown({"one": 3, "idle": 0}) == {"one": 3}
    assert (largest(held), largest({}), largest({"idle": 0})) == ("19, of client 19", "0", "0")


def test_messages_are_counted_by_the_second_and_by_the_clients_name() -> None:
    counter, most = MessageCounter(), bounds.MESSAGES_MAX
    assert all(counter.allows(b"1", "red", 10.0) for _ in range(most))
    assert not counter.allows(b"1", "red", 10.9)
    assert counter.allows(b"2", "red", 10.9), "another connection has its own share"
    assert counter.allows(b"3", "blue", 10.9)
    assert counter.last(10.9) == {}
    assert counter.last(11.1) == {"red": most + 2, "blue": 1}
    assert counter.allows(b"1", "red", 11.2), "a second later it may send again"
    assert counter.last(30.0) == {}


async def test_a_client_that_sends_too_much_loses_its_session_and_others_do_not() -> None:
    fabric = Fabric()
    try:
        sent: dict[bytes, list[m.Reply]] = {b"loud": [], b"quiet": []}
        fabric.exporter._send_to = lambda to, data: sent[to].append(m.reply(data))
        for name in sent:
            hello(fabric, name, name.decode())
        await asyncio.sleep(2)
        assert fabric.exporter.gauges()["clients"] == 2

        def ping(client: bytes, count: int) -> None:
            for _ in range(count):
                fabric.exporter.take(client, m.frame(m.Ping(2)), ALL._replace(name=client.decode()))

        ping(b"quiet", 5)
        ping(b"loud", bounds.MESSAGES_MAX)
        assert fabric.exporter.gauges()["clients"] == 2
        ping(b"loud", 50)
        gauges = fabric.exporter.gauges()
        assert (gauges["clients"], gauges["clients_lost"]) == (1, 1)
        (gone,) = [one for one in sent[b"loud"] if isinstance(one, m.Gone)]
        assert gone.why == f"more than {bounds.MESSAGES_MAX} messages a second"
        assert len(sent[b"loud"]) <= bounds.MESSAGES_MAX + 2, "the rest is not answered"
        assert not any(isinstance(one, m.Gone) for one in sent[b"quiet"])
        await asyncio.sleep(1)
        told = fabric.exporter.gauges()["client_messages"]
        assert told == {"loud": bounds.MESSAGES_MAX + 50, "quiet": 5}
    finally:
        await fabric.aclose()


async def test_a_session_whose_key_loses_its_rights_ends() -> None:
    fabric = Fabric()
    try:
        sent: list[m.Reply] = []
        fabric.exporter._send_to = lambda _, data: sent.append(m.reply(data))
        for rights in (None, ALL._replace(read=frozenset()), ALL._replace(name="another")):
            hello(fabric, b"mine", "mine")
            await asyncio.sleep(2)
            assert fabric.exporter.gauges()["clients"] == 1
            fabric.exporter.take(b"mine", m.frame(m.Ping(2)), rights)
            assert fabric.exporter.gauges()["clients"] == 0
            assert isinstance(sent[-1], m.Gone)
            before = len(sent)
            fabric.exporter.take(b"mine", m.frame(m.Ping(3)), None)
            assert len(sent) == before, "an unlisted key gets no answer"
            await asyncio.sleep(2)
    finally:
        await fabric.aclose()


async def test_the_counts_say_which_client_holds_slots() -> None:
    async with server(slots=16) as (_, offers):
        clients = [Client(offers, session=n, name=name) for n, name in enumerate(("a", "a", "b"))]
        for client in clients:
            await client.hello()
        await clients[0].granted(keys_of(1))
        await clients[1].granted(keys_of(2))
        await clients[2].granted(keys_of(3, 4, 5))
        assert offers.counts()["client_slots"] == {"granted": {"b": 3, "a": 2}}
        for client in clients:
            await offers.gone(client.session)
        assert offers.counts()["client_slots"] == {}


def test_clients_are_named_by_their_tenant_or_by_their_key() -> None:
    one, two, three = ("A" * 40, "B" * 40, "C" * 40)
    keys = KeyFile(secret="S" * 40, peers=[one, two], tenants=(Tenant(name="red", peers=[three]),))
    names = {key: rights.name for key, rights in keys.rights.items()}
    assert names[three] == "red"
    assert len({*names.values()}) == 3
    assert not any(key in name or name in key for key, name in names.items())
