"""One stack for all ranks of a server on a machine: one rank owns it, the others are its clients.

The first rank to start owns the stack. The others map its arena and send batches over a socket,
with one connection for each of SGLang's threads. The owner answers with slots, piece by piece, and
the ranks copy bytes straight between SGLang's pools and the arena. The owner holds a slot until its
rank has asked for the next piece or is dead. So no rank touches a slot that was given to another
page.
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
"""Seconds that the owner may take to open the stack: the arena or the index may be large."""
GRACE_S: Final = 1.0
"""Seconds that an answer may be late."""
FLUSH_S: Final = 5.0
"""Seconds that closing waits for levels that outlive the engine."""
LEAVING_S: Final = 20.0
"""Seconds to retry while the previous owner closes its stack and another one opens."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First message of the owner to a rank."""

    arena: tuple[int, int, int, int]
    stack: bytes
    """Random id of this stack: the descriptor in ``arena`` may have been another arena's before."""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Request of a rank. Any message that follows it means that a piece was copied."""

    verb: Verb
    batch: PageBatch


class Over(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End of an answer, with the result."""

    value: int | list[bool]


_encode: Final = msgspec.msgpack.Encoder().encode
_hello: Final = msgspec.msgpack.Decoder(Hello)
_asked: Final = msgspec.msgpack.Decoder(Ask)
_answer: Final = msgspec.msgpack.Decoder(PageRun | Over)


class CacheServer:
    """The rank that owns the stack and may serve other ranks. Any thread may call it."""

    def __init__(self, manager: CacheManager, lines: LocalListener | None) -> None:
        self.manager = manager
        self.arena = manager.arena
        self._lines = lines
        self._stack = os.urandom(16)
        if lines is not None:
            lines.begin(self._serve)

    def reach(self, batch: PageBatch) -> int:
        """Return how many leading pages are worth fetching; count a miss if there are none."""
        found = self.manager.reach(batch.names)
        if not found:
            self.manager.missed(batch.names)
        return found

    def holding(self, batch: PageBatch) -> list[bool]:
        """Return whether each page is held, as far as is known without asking shared tiers."""
        return self.manager.holding(batch.names)

    def fetch(self, batch: PageBatch) -> Pieces:
        """See ``fetch_pieces``."""
        return fetch_pieces(self.manager, batch)

    def save(self, batch: PageBatch) -> Pieces:
        """See ``save_pieces``."""
        return save_pieces(self.manager, batch)

    def clear(self) -> None:
        """Remove every page of this model from every level."""
        self.manager.clear()

    def close(self) -> None:
        """Stop serving, close the stack and release the address. May be called again."""
        if self._lines is not None:
            self._lines.end()
        try:
            self.manager.close(timeout_s=FLUSH_S)
        finally:  # only now: the next owner of the address opens what this one has closed
            if self._lines is not None:
                self._lines.close()

    # ---- for the other ranks: one thread for each of their connections

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
        """Send a piece and wait until its rank has copied it.

        When this returns or raises, the rank no longer touches the piece's slots.
        """
        connection.send_bytes(_encode(piece))
        connection.recv_bytes()


class CacheClient:
    """A rank that uses another rank's stack. Whatever the owner does not answer is a miss.

    Raises
    ------
    OSError, EOFError, ArenaError
        No stack can be used: its owner is not ready yet, or has ended.
    """

    manager = None
    arena: Arena

    def __init__(self, address: str) -> None:
        self._address = address
        self._locks: dict[Verb, Lock] = {
            verb: Lock() for verb in ("reach", "holding", "fetch", "save", "clear")
        }
        """Locks of the connections, one for each of SGLang's threads."""
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
        """See ``CacheServer``; 0 if the owner does not answer."""
        return int(self._told("reach", batch, 0))

    def holding(self, batch: PageBatch) -> list[bool]:
        """See ``CacheServer``."""
        return list(self._told("holding", batch, [False] * len(batch.keys)))

    def fetch(self, batch: PageBatch) -> Pieces:
        """See ``CacheServer``. A copied piece counts once the owner's next message has come."""
        return self._asked("fetch", batch, 0)

    def save(self, batch: PageBatch) -> Pieces:
        """See ``CacheServer``."""
        return self._asked("save", batch, 0)

    def clear(self) -> None:
        """See ``CacheServer``."""
        self._told("clear", PageBatch([], within_s=CALL_S), 0)

    def close(self) -> None:
        """Close the connections and unmap the arena. May be called again."""
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
        """Return a new connection to the owner and its greeting.

        Raises ConnectionError if the owner is another one than before, or is silent for too long.
        """
        connection = connect(self._address)
        told = connection.recv_bytes() if connection.poll(within_s) else b""
        hello = _hello.decode(told) if told else None
        if hello is None or self._hello not in {None, hello}:
            connection.close()
            why = "another process owns the stack" if told else f"no greeting in {within_s:g} s"
            raise ConnectionError(why)
        self._hello = hello
        return connection, hello

    def _told(self, verb: Verb, batch: PageBatch, nothing: Any) -> Any:
        """Ask for something that has no pieces; return the answer."""
        return drained(self._asked(verb, batch, nothing), lambda _: None)

    def _asked(self, verb: Verb, batch: PageBatch, nothing: Any) -> Generator[PageRun, None, Any]:
        """Yield the pieces that the owner sends, and return its result.

        If the owner stops answering, return ``nothing``, or the count of pages done in its last
        piece. The caller touches the slots of a piece only until it asks for the next one or ends
        this generator.
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
                        raise TimeoutError("no answer in time")
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
                    self._drop(verb)  # then the owner releases the slots that it holds for us

    def _lost(self, error: Exception) -> None:
        if not self._is_lost:
            self._is_lost = True
            logger.warning(
                "the rank that owns kvladder's stack does not answer (%r): this rank caches nothing"
                " until it does",
                error,
            )


Node = CacheServer | CacheClient


def drained(pieces: Generator[PageRun, None, R], copy: Callable[[PageRun], object]) -> R:
    """Call ``copy`` with each piece; return the generator's result."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            found: R = end.value
            return found
        copy(piece)


def join(address: str | None, open_stack: Callable[[], CacheManager]) -> Node:
    """Open a stack and own it, or use that of the rank that has the address already.

    Without an address the rank owns its stack alone.

    Raises
    ------
    ConfigError
        The stack cannot be opened, by this rank or by the owner.
    """
    if address is None:
        return CacheServer(open_stack(), None)
    end_s = SystemClock().now() + LEAVING_S
    while (lines := _lines_at(address)) is None:
        try:
            return CacheClient(address)
        except (*GONE, ArenaError) as error:  # the owner is just closing, or failed
            if SystemClock().now() >= end_s:
                what = f"the rank that owns kvladder's stack could not open it: {error!r}"
                raise ConfigError(what, hint="see the error of that rank in the log") from error
            threading.Event().wait(POLL_S)
    try:
        return CacheServer(open_stack(), lines)
    except BaseException:
        lines.close()
        raise


def _lines_at(address: str) -> LocalListener | None:
    """Bind the address and return its listener; None if another rank has the address."""
    try:
        return LocalListener(address, logger.warning)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None
