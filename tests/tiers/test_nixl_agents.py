"""Agents of NIXL end, whatever happens while they are made."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from kvladder.arena import Arena
from kvladder.testing.cancel import cancel_at
from kvladder.tiers.nixl import messages as m

pytest.importorskip("zmq")

from kvladder.tiers.nixl.line import Connection, Line
from tests.kit.fabric import Fabric, FakePlane

SIZE = 4096


@pytest.mark.parametrize("late", [False, True])
async def test_a_connection_that_is_given_up_leaves_no_agent(late: bool) -> None:
    """A thread ends its call even if its caller is cancelled: the agent is there."""
    with closing(Arena.create(4, SIZE)) as arena:
        suspension, reached = 0, True
        while reached:
            suspension += 1
            fabric = Fabric()
            connection = Connection(fabric.client(arena, block_bytes=SIZE), fabric.dial)
            reached = await cancel_at(connection.open(), suspension, late=late)
            connection.close()
            assert not any(plane.is_alive for plane in fabric.planes if plane.arena is arena)
            await fabric.aclose()
        assert suspension > 3, "before, during and after an agent is made"


async def test_a_client_that_leaves_while_its_session_begins_leaves_no_agent() -> None:
    fabric = Fabric()
    with closing(Arena.create(4, SIZE)) as arena:
        far = FakePlane(fabric, arena)
        hello = m.Hello(1, bytes(32), SIZE, far.metadata, far.area)
        for number in range(8):
            client = b"client %d" % number
            fabric.exporter.take(client, m.frame(hello))
            await asyncio.sleep(0.1 * number)
            fabric.exporter.take(client, m.frame(m.Bye(2)))
            await asyncio.sleep(1.0)
        assert len(fabric.own) > 4, "agents were made for clients that had left"
        assert not any(plane.is_alive for plane in fabric.own)
        assert not fabric.offers.spaces
        await fabric.aclose()


@pytest.mark.parametrize("fault", ["no agent", "refused"])
async def test_an_agent_that_cannot_be_used_is_ended(fault: str) -> None:
    """The connection is tried again and again: each attempt ends what it began."""
    fabric = Fabric()
    with closing(Arena.create(4, SIZE)) as arena:
        if fault == "no agent":
            fabric.to_near = lambda data: [_without_agent(data)]
        else:
            fabric.offers.block_bytes_max = SIZE // 2
        line = Line("far", fabric.client(arena, block_bytes=SIZE), fabric.dial, str)
        await asyncio.sleep(60.0)
        assert len(fabric.planes) > 8
        assert not line.is_up
        assert sum(plane.is_alive for plane in fabric.planes) <= 2, "those of the last attempt"
        await line.aclose()
        await asyncio.sleep(10.0)
        assert not any(plane.is_alive for plane in fabric.planes)
        await fabric.aclose()


def _without_agent(data: bytes) -> bytes:
    """Have a Welcome name an agent that does not exist."""
    answer = m.reply(data)
    if isinstance(answer, m.Welcome):
        return m.frame(m.Welcome(answer.op, b"gone", answer.area, answer.writable, answer.surveys))
    return data
