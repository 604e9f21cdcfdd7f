"""The proxies of tests: what they damage, hold back and break."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvladder.testing.proxy import Networks, SlowNetwork
from tests.patience import PATIENCE_S

SENT = bytes(range(250)) * 4


@pytest.fixture
def network() -> Iterator[SlowNetwork]:
    """Return a proxy before a server that returns what it receives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    while said := client.recv(1 << 16):
                        client.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        with Networks() as networks:
            yield networks.add(SlowNetwork(listener.getsockname()[1]))
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def echoed(network: SlowNetwork) -> bytes:
    """Return what comes back of ``SENT``."""
    with closing(socket.create_connection(("127.0.0.1", network.port), PATIENCE_S)) as client:
        client.sendall(SENT)
        found = b""
        while len(found) < len(SENT):
            if not (piece := client.recv(1 << 16)):
                raise ConnectionError("the other side has closed")
            found += piece
        return found


def test_a_network_that_damages_inverts_a_bit_of_each_so_many_bytes(network: SlowNetwork) -> None:
    assert echoed(network) == SENT
    network.flip_every = 300
    wrong = echoed(network)
    assert len(wrong) == len(SENT)
    # 2,000 bytes pass in both directions, and a bit that is inverted twice is right again
    places = [at for at, (one, other) in enumerate(zip(wrong, SENT, strict=True)) if one != other]
    assert network.flipped == 6
    assert len(places) == 6
    assert all(wrong[at] ^ SENT[at] == 0x40 for at in places)
    network.flip_every = 0
    assert echoed(network) == SENT


def test_a_thread_of_networks_breaks_connections_when_told(network: SlowNetwork) -> None:
    network.refusing = True
    with pytest.raises(ConnectionError):
        echoed(network)
    network.refusing = False
    assert echoed(network) == SENT
