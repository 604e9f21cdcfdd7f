"""One stack for all ranks of a server on a machine: one owns it, the others map its arena and ask.

Whoever comes first owns it. The others send batches over a socket, each of SGLang's threads over a
connection of its own, and are told slots, piece by piece; bytes of pages go straight between
SGLang's pools and the arena. A slot is held until its rank has asked for the next piece or is dead:
so nobody reads from, or writes to, a slot that has become another page's.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Final, Literal, TypeVar

import msgspec

from kvladder.arena import Arena, ArenaHandle
from kvladder.connectors.listener import GONE, LocalListener, connect
from kvladder.connectors.sglang.options import CALL_S
from kvladder.connectors.sglang.pieces import (
    PageBatch,
    PageRun,
    Pieces,
    fetch_pieces,
    save_pieces,
)
from kvladder.errors import ArenaError, ConfigError
from kvladder.manager import POLL_S, CacheManager
from kvladder.runtime import SystemClock

logger = logging.getLogger("kvladder.sglang")

R = TypeVar("R")
Verb = Literal["reach", "holding", "fetch", "save", "clear"]

START_S: Final = 600.0
"""How long the owner may take to open the stack: a large arena, many blocks on disk."""
GRACE_S: Final = 1.0
"""How much later than it should an answer may come."""
FLUSH_S: Final = 5.0
"""How long detaching waits for levels that outlive the engine."""
LEAVING_S: Final = 20.0
"""How long a stack may take to close, and another one to have its place."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is told first."""

    arena: tuple[int, int, int, int]
    stack: bytes
    """Like that of no other: a descriptor may have been another arena's."""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants. Whatever else it says means that a piece was copied."""

    verb: Verb
    batch: PageBatch


class Over(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The end of an answer."""

    value: int | list[bool]


_encode: Final = msgspec.msgpack.Encoder().encode
_hello: Final = msgspec.msgpack.Decoder(Hello)
_asked: Final = msgspec.msgpack.Decoder(Ask)
_answer: Final = msgspec.msgpack.Decoder(PageRun | Over)


class CacheServer:
    """The rank that has the stack, which may serve others. Calls may come from any thread."""

    def __init__(self, manager: CacheManager, lines: LocalListener | None) -> None:
        self.manager = manager
        self.arena = manager.arena
        self._lines = lines
        self._stack = os.urandom(16)
        if lines is not None:
            lines.begin(self._serve)

    def reach(self, batch: PageBatch) -> int:
        """How many leading pages it is worth to fetch."""
        found = self.manager.reach(batch.names)
        if not found:
            self.manager.missed(len(batch.keys))
        return found

    def holding(self, batch: PageBatch) -> list[bool]:
        """Whether each page is here, as far as is known without asking shared tiers."""
        return self.manager.holding(batch.names)

    def fetch(self, batch: PageBatch) -> Pieces:
        """See ``fetch_pieces``."""
        return fetch_pieces(self.manager, batch)

    def save(self, batch: PageBatch) -> Pieces:
        """See ``save_pieces``."""
        return save_pieces(self.manager, batch)

    def clear(self) -> None:
        """Forget every page of this model, in every level."""
        self.manager.clear()

    def close(self) -> None:
        """End everything; may be called again."""
        if self._lines is not None:
            self._lines.end()
        try:
            self.manager.close(timeout_s=FLUSH_S)
        finally:  # who has the address next may open what this one has closed
            if self._lines is not None:
                self._lines.close()

    # ---- for the others, each of whose connections has a thread

    def _serve(self, connection: Connection) -> None:
        assert self._lines is not None
        handle = self.arena.handle
        arena = handle.pid, handle.fd, handle.slots, handle.slot_bytes
        hello = Hello(arena, self._stack)
        connection.send_bytes(_encode(hello))
        while self._lines.heard(connection):
            ask = _asked.decode(connection.recv_bytes())
            connection.send_bytes(_encode(Over(self._answered(connection, ask))))

    def _answered(self, connection: Connection, ask: Ask) -> int | list[bool]:
        if ask.verb == "reach":
            return self.reach(ask.batch)
        if ask.verb == "holding":
            return self.holding(ask.batch)
        if ask.verb == "clear":
            self.clear()
            return 0
        pieces = self.fetch(ask.batch) if ask.verb == "fetch" else self.save(ask.batch)
        with closing(pieces):
            return drained(pieces, lambda piece: self._copied(connection, piece))

    def _copied(self, connection: Connection, piece: PageRun) -> None:
        """Have a rank copy a piece; returns, or raises, when it touches no slot of it any more."""
        connection.send_bytes(_encode(piece))
        connection.recv_bytes()


class CacheClient:
    """A rank that uses the stack of another one; what that does not answer is a miss.

    Raises
    ------
    OSError, EOFError, ArenaError
        There is none: it has not come into being, or is no more.
    """

    manager = None
    arena: Arena

    def __init__(self, address: str) -> None:
        self._address = address
        self._locks: dict[Verb, Lock] = {
            verb: Lock() for verb in ("reach", "holding", "fetch", "save", "clear")
        }
        """Of connections, one for each of SGLang's threads."""
        self._connections: dict[Verb, Connection] = {}
        self._hello: Hello | None = None
        self._is_lost = False
        try:
            self._connections["reach"], hello = self._connected(START_S)
            self.arena = Arena.attach(ArenaHandle(*hello.arena))
        except (*GONE, ArenaError):
            self._hang_up()
            raise

    def reach(self, batch: PageBatch) -> int:
        """See ``CacheServer``; 0 if it does not answer."""
        return int(self._told("reach", batch, 0))

    def holding(self, batch: PageBatch) -> list[bool]:
        """See ``CacheServer``."""
        return list(self._told("holding", batch, [False] * len(batch.keys)))

    def fetch(self, batch: PageBatch) -> Pieces:
        """See ``CacheServer``. What was copied counts as soon as the owner has said more."""
        return self._asked("fetch", batch, 0)

    def save(self, batch: PageBatch) -> Pieces:
        """See ``CacheServer``."""
        return self._asked("save", batch, 0)

    def clear(self) -> None:
        """See ``CacheServer``."""
        self._told("clear", PageBatch([], within_s=CALL_S), 0)

    def close(self) -> None:
        """Let go of the arena; may be called again."""
        self._hang_up()
        self.arena.close()

    def _hang_up(self) -> None:
        for verb, lock in self._locks.items():
            with lock:
                self._drop(verb)

    def _drop(self, verb: Verb) -> None:
        connection = self._connections.pop(verb, None)
        if connection is not None:
            connection.close()

    def _connected(self, within_s: float) -> tuple[Connection, Hello]:
        """A further connection to the owner, as long as it is the one that it was."""
        connection = connect(self._address)
        told = connection.recv_bytes() if connection.poll(within_s) else b""
        hello = _hello.decode(told) if told else None
        if hello is None or self._hello not in {None, hello}:
            connection.close()
            why = "it is another one" if told else f"it needs more than {within_s:g} s"
            raise ConnectionError(why)
        self._hello = hello
        return connection, hello

    def _told(self, verb: Verb, batch: PageBatch, nothing: Any) -> Any:
        """Ask for what needs no pieces."""
        return drained(self._asked(verb, batch, nothing), lambda _: None)

    def _asked(self, verb: Verb, batch: PageBatch, nothing: Any) -> Generator[PageRun, None, Any]:
        """Hand on what the owner says; if it says no more, what was settled by then.

        A slot is not touched after the next piece was asked for, nor once this has ended.
        """
        now = SystemClock().now
        end_s = now() + batch.within_s + batch.deadline_s + GRACE_S
        is_over = False
        with self._locks[verb]:
            try:
                if verb not in self._connections:
                    self._connections[verb], _ = self._connected(end_s - now())
                connection = self._connections[verb]
                connection.send_bytes(_encode(Ask(verb, batch)))
                while True:
                    if not connection.poll(max(0.0, end_s - now())):
                        raise TimeoutError("it takes too long")
                    told = _answer.decode(connection.recv_bytes())
                    if isinstance(told, Over):
                        is_over = True
                        self._is_lost = False
                        return told.value
                    nothing = told.done
                    yield told
                    connection.send_bytes(b"")
            except (*GONE, msgspec.DecodeError) as error:
                self._lost(error)
                return nothing
            finally:
                if not is_over:
                    self._drop(verb)  # the owner lets go of what is held

    def _lost(self, error: Exception) -> None:
        if not self._is_lost:
            self._is_lost = True
            logger.warning(
                "the rank that owns kvladder's stack does not answer (%r): nothing is cached for"
                " this one until it does",
                error,
            )


Node = CacheServer | CacheClient


def drained(pieces: Generator[PageRun, None, R], copy: Callable[[PageRun], object]) -> R:
    """Have each piece copied; returns what they return."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            found: R = end.value
            return found
        copy(piece)


def join(address: str | None, open_stack: Callable[[], CacheManager]) -> Node:
    """Own a stack, or use that of the rank that has the address already; without one own it alone.

    Raises
    ------
    ConfigError
        The stack cannot be opened, here or there.
    """
    if address is None:
        return CacheServer(open_stack(), None)
    end_s = SystemClock().now() + LEAVING_S
    while (lines := _lines_at(address)) is None:
        try:
            return CacheClient(address)
        except (*GONE, ArenaError) as error:  # one that is just leaving, or failed
            if SystemClock().now() >= end_s:
                what = f"the rank that owns kvladder's stack could not open it: {error!r}"
                raise ConfigError(what, hint="see its message above") from error
            threading.Event().wait(POLL_S)
    try:
        return CacheServer(open_stack(), lines)
    except BaseException:
        lines.close()
        raise


def _lines_at(address: str) -> LocalListener | None:
    """Take the address; None if another rank has it."""
    try:
        return LocalListener(address, logger.warning)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None
