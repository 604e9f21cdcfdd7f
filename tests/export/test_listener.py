"""The port of an exporter: connections without a key."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvladder.errors import TierError
from kvladder.tiers.nixl import messages as m

pytest.importorskip("zmq")

import zmq

from kvladder.export import exporter as module
from kvladder.export.exporter import Listener
from kvladder.tiers.nixl.control import Dial, Dialled
from kvladder.tiers.nixl.curve import ALL, Rights, make_keys, read_keys
from kvladder.tiers.nixl.line import greet

pytestmark = pytest.mark.real
GREETING = b"\xff" + bytes(7) + b"\1\x7f\3\1CURVE" + bytes(15) + b"\0" + bytes(31)
HALVES = b"", GREETING[:12], GREETING


@asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[tuple[Listener, Dial]]:
    """Open a listener that answers pings, and a client with a key."""
    server, client = (read_keys(str(path)) for path in make_keys(folder))

    def answer(peer: bytes, data: bytes, rights: Rights | None) -> None:
        assert rights is not None
        assert rights._replace(name="") == ALL
        listener.send(peer, m.frame(m.Pong(m.request(data).op, known=False)))

    listener = Listener("127.0.0.1:0", server, answer)
    context: Any = zmq.Context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvladder.tiers.nixl.control._context", lambda: context)
        try:
            yield listener, partial(Dialled, f"127.0.0.1:{listener.port}", client, client.peers[0])
        finally:
            listener.close()
            context.term()


def strangers(port: int, count: int) -> list[socket.socket]:
    """Return connections that are silent, send half a greeting, or have no key."""
    made: list[socket.socket] = []
    for number in range(count):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        made.append(one)
        with_some = HALVES[number % 3]
        if with_some:
            one.setblocking(True)
            one.send(with_some)
    return made


async def test_a_client_without_a_key_is_disconnected_and_one_with_a_key_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_MS", 500)
    loop = asyncio.get_running_loop()
    async with listening(tmp_path / "keys") as (listener, dial):
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        broken: list[TierError] = []
        client = dial(answers.put_nowait, broken.append)
        assert listener._boxes[1]._socket.handshake_ivl == 500, "and not ZeroMQ's own 30 s"
        client.send(m.frame(m.Ping(1)))
        await answers.get()
        made = strangers(listener.port, 60)
        try:
            for one in made:
                one.setblocking(False)
                with suppress(ConnectionError):
                    while await loop.sock_recv(one, 1000):
                        pass  # its own greeting, and then the end
            client.send(m.frame(m.Ping(2)))
            await answers.get()
            await greet(dial)
            assert not broken
        finally:
            client.close()
            for one in made:
                one.close()


def test_the_export_process_raises_its_descriptor_limit_to_the_maximum() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        module.raise_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
