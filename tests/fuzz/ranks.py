"""A fuzz target of what the owner of a stack is sent by other ranks of SGLang."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import count
from multiprocessing.connection import Pipe

import msgspec

import kvladder
from kvladder.connectors.listener import (
    GONE,
    InvalidMessage,
    LocalListener,
    Peer,
    PeerLine,
    abstract,
)
from kvladder.connectors.sglang.node import CacheServer, Joining, Verb
from kvladder.connectors.sglang.pieces import PageBatch
from tests.fuzz.target import Input, Target, framed

VERBS: tuple[Verb, ...] = ("reach", "holding", "fetch", "save", "clear")
KEYS = [b"%032d" % number for number in range(8)]
_processes = count()


class Owner:
    """A real stack, with the socket where ranks meet; no process connects to it."""

    def __init__(self) -> None:
        stack = {"arena": {"size": "64 KiB"}, "tiers": [{"type": "host"}]}
        manager = kvladder.open_cache(stack, layout=kvladder.Layout(16, 4096))
        self.lines = LocalListener(abstract(f"fuzz-{os.getpid()}"), lambda *_: None)
        self.server = CacheServer(manager, self.lines)
        self._serve = self.server._serve  # pyright: ignore[reportPrivateUsage]

    def hear(self, messages: Iterable[bytes]) -> None:
        """Serve a connection that sends these messages, and then nothing more."""
        ours, theirs = Pipe()
        with ours, theirs:
            for message in messages:
                theirs.send_bytes(message)
            end = socket.socket(fileno=theirs.fileno())
            end.shutdown(socket.SHUT_WR)
            end.detach()
            with suppress(InvalidMessage, *GONE):
                self._serve(PeerLine(self.lines, ours, Peer(next(_processes))))


@cache
def _owner() -> Owner:
    return Owner()


def close() -> None:
    """Close the stack that all inputs share."""
    if _owner.cache_info().currsize:
        _owner().server.close()
        _owner.cache_clear()


def hear(data: bytes) -> None:
    """Serve a rank: it loses its connection at most, holds no slot then, and harms no page."""
    owner = _owner()
    owner.hear(Input(data).frames())
    manager = owner.server.manager
    manager.check()
    host = manager.stats()["host"]
    assert not host["pinned"], "slots of a fetch are still held"
    assert manager.arena.free + host["blocks"] == manager.arena.slots, "so are slots of a save"


def _seeds() -> Iterable[bytes]:
    encode = msgspec.msgpack.encode
    batch = encode(PageBatch(KEYS, "salt", 0.01, 0.01, 50))
    for verb in VERBS:
        yield framed(encode(Joining(verb)), batch, b"", b"", b"", batch, b"")
    yield framed(encode(Joining("save")), encode([KEYS[:1], "", 1e9, -1.0, None, 3]))


TARGETS = {
    "ranks": Target(
        "requests of SGLang's ranks to the owner of their stack",
        hear,
        _seeds,
        [*KEYS[:2], b"\x91\xa5reach", b"\x91\xa4save", b"\xc0", b"\x96", b"\xdc"],
    )
}
