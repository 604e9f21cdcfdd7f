"""One stack for all ranks of a server on a machine: one rank owns it, the others are its clients.

The first rank to start owns the stack. The others map its arena and send batches over a socket,
with one connection for each of SGLang's threads. The owner answers with slots, piece by piece, and
the ranks copy bytes straight between SGLang's pools and the arena. The owner holds a slot until its
rank has asked for the next piece or is dead. So no rank touches a slot that was given to another
page. A rank that only reads loses its slots after ``HELD_S``: the page it reads counts as missing.

A rank that asks for much delays only itself. Its requests of one kind are answered one after the
other, and hold at most its share of the slots. Further processes have one share together.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import closing
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Final, Literal, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from kvladder.arena import Arena, ArenaHandle
from kvladder.connectors.listener import (
    GONE,
    UNREADABLE,
    InvalidMessage,
    LocalListener,
    Peer,
    PeerLine,
    connect,
)
from kvladder.connectors.sglang.options import CALL_S, DEADLINE_MAX
from kvladder.connectors.sglang.pieces import (
    PageBatch,
    PageRun,
    Pieces,
    fetch_pieces,
    save_pieces,
)
from kvladder.errors import ArenaError, ConfigError
from kvladder.export.bounds import HELD_S
from kvladder.manager import POLL_S, CacheManager
from kvladder.metrics import largest, shown
from kvladder.notices import Notices
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
MESSAGE_BYTES_MAX: Final = 1 << 20
"""Largest request of a rank: enough for ``PAGES_MAX`` pages and a long salt."""
HOLDS: Final[tuple[Verb, ...]] = ("fetch", "save")
"""Requests that hold slots."""
Turns = defaultdict[str, Lock]
"""Locks by kind of request: those of one kind are answered one after the other."""


class Joining(msgspec.Struct, frozen=True, array_like=True):
    """First message of a rank: the kind of its requests over this connection."""

    verb: Verb


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First answer of the owner."""

    arena: tuple[int, int, int, int]
    stack: bytes
    """Random id of this stack: the descriptor in ``arena`` may have been another arena's before."""


class Over(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End of an answer, with the result."""

    value: int | list[bool]


_encode: Final = msgspec.msgpack.Encoder().encode
_joining: Final = msgspec.msgpack.Decoder(Joining)
_hello: Final = msgspec.msgpack.Decoder(Hello)
_asked: Final = msgspec.msgpack.Decoder(PageBatch)
_answer: Final = msgspec.msgpack.Decoder(PageRun | Over)


class CacheServer:
    """The rank that owns the stack and may serve other ranks. Any thread may call it."""

    def __init__(
        self, manager: CacheManager, lines: LocalListener | None = None, others: int = 0
    ) -> None:
        self.manager = manager
        self.arena = manager.arena
        self._lines = lines
        self._others = others
        self._share = max(1, manager.arena.slots // (len(HOLDS) * max(2, others + 2)))
        """Number of slots that a rank's fetch, or its save, may hold."""
        self._lock = Lock()
        self._turns: WeakKeyDictionary[Peer, Turns] = WeakKeyDictionary()
        """Turns of the ranks, which are the first processes to join."""
        self._spare: Turns = defaultdict(Lock)
        """Turns of all further processes."""
        self._stack = os.urandom(16)
        if lines is not None:
            manager.report("ranks", self._counts, self._described)
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
        return fetch_pieces(self.manager, batch, self._share)

    def save(self, batch: PageBatch) -> Pieces:
        """See ``save_pieces``."""
        return save_pieces(self.manager, batch, self._share)

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

    def _serve(self, line: PeerLine) -> None:
        try:
            line.kind = _joining.decode(line.request(MESSAGE_BYTES_MAX)).verb
            turn = self._turns_of(line.peer)[line.kind]
            handle = self.arena.handle
            arena = handle.pid, handle.fd, handle.slots, handle.slot_bytes
            line.send(_encode(Hello(arena, self._stack)))
            while True:
                batch = self._bounded(_asked.decode(line.request(MESSAGE_BYTES_MAX)))
                line.send(_encode(Over(self._answered(line, turn, batch))))
        except UNREADABLE as error:
            raise InvalidMessage(f"sent an invalid message: {error}") from error

    def _bounded(self, batch: PageBatch) -> PageBatch:
        """Return a batch that takes no longer than SGLang's own batches may."""
        if self.manager.kinds and batch.group >= len(self.manager.kinds):
            raise InvalidMessage(f"sent a page of an unknown group: {batch.group}")
        within_s = min(CALL_S, max(0.0, batch.within_s))
        deadline_s = min(float(DEADLINE_MAX), max(0.0, batch.deadline_s))
        return msgspec.structs.replace(batch, within_s=within_s, deadline_s=deadline_s)

    def _answered(self, line: PeerLine, turn: Lock, batch: PageBatch) -> int | list[bool]:
        """Answer a request; as if there were no pages while an earlier one of its kind lasts."""
        if not turn.acquire(timeout=batch.within_s):
            return [False] * len(batch.keys) if line.kind == "holding" else 0
        try:
            if line.is_over:
                raise EOFError
            return self._answer(line, batch)
        finally:
            turn.release()

    def _turns_of(self, peer: Peer) -> Turns:
        with self._lock:
            if peer not in self._turns and len(self._turns) < self._others:
                self._turns[peer] = defaultdict(Lock)
            return self._turns.get(peer, self._spare)

    def _answer(self, line: PeerLine, batch: PageBatch) -> int | list[bool]:
        if line.kind == "reach":
            return self.reach(batch)
        if line.kind == "holding":
            return self.holding(batch)
        if line.kind == "clear":
            self.clear()
            return 0
        pieces = self.fetch(batch) if line.kind == "fetch" else self.save(batch)
        with closing(pieces):
            return drained(pieces, lambda piece: self._copied(line, piece))

    def _copied(self, line: PeerLine, piece: PageRun) -> None:
        """Send a piece and wait until its rank has copied it.

        When this returns or raises, the rank no longer writes to the piece's slots. If it still
        reads them, it learns from the closed connection that these pages do not count.
        """
        line.slots = piece.held
        try:
            line.send(_encode(piece))
            line.reply(None if line.kind == "save" else HELD_S)
        finally:
            line.slots = 0

    def _counts(self) -> dict[str, Any]:
        assert self._lines is not None
        held = {kind: shown(self._lines.held(kind)) for kind in HOLDS}
        slots = {kind: found for kind, found in held.items() if found}
        return {**self._lines.counts(), "client_slots": slots}

    def _described(self) -> list[str]:
        assert self._lines is not None
        fetching, saving = (largest(self._lines.held(kind)) for kind in HOLDS)
        share = f"at most {self._share} a rank, and together by other processes"
        return [
            *self._lines.describe(),
            f"  most slots of fetches: {fetching}; {share}; each for {HELD_S:g} s",
            f"  most slots of saves: {saving}; {share}",
            f"  a message has at most {MESSAGE_BYTES_MAX >> 10} KiB",
        ]


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
            self._connections["reach"], hello = self._connected("reach", START_S)
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

    def _connected(self, verb: Verb, within_s: float) -> tuple[Connection, Hello]:
        """Return a new connection to the owner and its greeting.

        Raises ConnectionError if the owner is another one than before, or is silent for too long.
        """
        connection = connect(self._address)
        connection.send_bytes(_encode(Joining(verb)))
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
                    self._connections[verb], _ = self._connected(verb, end_s - now())
                connection = self._connections[verb]
                connection.send_bytes(_encode(batch))
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


def join(address: str | None, open_stack: Callable[[], CacheManager], others: int = 1) -> Node:
    """Open a stack and own it, or use that of the rank that has the address already.

    Without an address the rank owns its stack alone. ``others`` is the number of other ranks.

    Raises
    ------
    ConfigError
        The stack cannot be opened, by this rank or by the owner.
    """
    if address is None:
        return CacheServer(open_stack())
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
        return CacheServer(open_stack(), lines, others)
    except BaseException:
        lines.close()
        raise


def _lines_at(address: str) -> LocalListener | None:
    """Bind the address and return its listener; None if another rank has the address."""
    try:
        return LocalListener(address, Notices(SystemClock().now).say)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None
