"""Connects an engine's processes on one machine: the process that owns the cache has a socket."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener, wait
from threading import Lock
from typing import Any, Final

import msgspec

from kvladder.export.bounds import MESSAGES_MAX, WINDOW_S, MessageCounter
from kvladder.metrics import largest, shown, summed
from kvladder.runtime import SystemClock

GONE: Final = (EOFError, OSError)
"""Errors that a connection raises when its other end is closed, or too slow."""
BACKLOG: Final = 128
"""Maximum number of connections that queue until they are accepted."""
PLACES_MAX: Final = 512
"""Largest number of connections. A new one takes the place of the connection that has waited
longest to send its first message. If all have sent one, the new one is refused."""
PROCESS_PLACES_MAX: Final = 10
"""Largest number of connections of one process: twice those of a rank, which may give one up and
connect again before its owner notices."""
TIMEOUT_S: Final = 10.0
"""Seconds in which a process must send its first message, and the rest of one that it has begun,
and read what it is sent."""
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that decoding a message of a process may raise."""
JOIN_S: Final = 10.0
"""Seconds that ``end`` waits for the threads that still serve a connection."""
PAUSE_S: Final = 0.5
"""Seconds before the next attempt after accepting a connection has failed."""
_CREDENTIALS: Final = struct.Struct("3i")

Say = Callable[[str, str], object]


class InvalidMessage(Exception):
    """A process has sent a message that is none of its engine's, and is disconnected."""


class Peer:
    """A process that has connections to a listener."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.name = f"process {process}"
        self.lines: set[PeerLine] = set()


class PeerLine:
    """A connection that a listener has accepted; only the thread that serves it may use it."""

    kind = ""
    """The kind of its requests, if the function that serves it tells them apart."""
    slots = 0
    """Number of slots that it holds, as far as the function that serves it has set it."""
    is_known = False
    """True once its first message has come."""
    is_pending = False
    """True while a request of it is answered."""

    def __init__(self, listener: LocalListener, connection: Connection, peer: Peer) -> None:
        self._listener = listener
        self._connection = connection
        self.peer = peer

    def request(self, bytes_max: int) -> bytes:
        """Wait for a request and return it; the first one has to come within ``TIMEOUT_S``.

        Raises
        ------
        EOFError, OSError
            There will be none: the process is gone or too slow, or the listener ends.
        """
        self.is_pending = False
        within_s = None if self.is_known else TIMEOUT_S
        if not self._listener.wait(self._connection, within_s):
            raise EOFError
        return self._received(bytes_max)

    def reply(self, within_s: float | None) -> None:
        """Wait until the process continues with its request, also if the listener ends meanwhile.

        Raises
        ------
        EOFError, OSError
            The process is gone, or silent for ``within_s``.
        """
        if not self._connection.poll(within_s):
            self._listener.lost += 1
            raise TimeoutError
        self._received(0)

    def _received(self, bytes_max: int) -> bytes:
        message = self._connection.recv_bytes(bytes_max)
        self.is_known = self.is_pending = True
        self._listener.pace(self.peer)
        return message

    def send(self, message: bytes) -> None:
        """Send a message; raise OSError if the process is gone, or does not read."""
        self._connection.send_bytes(message)

    @property
    def is_over(self) -> bool:
        """True if the listener ends, so that no request is to begin."""
        return self._listener.is_over

    @property
    def is_silent(self) -> bool:
        """True if it has never sent anything."""
        return not self.is_known and not self._connection.poll()

    def hang_up(self) -> None:
        """Wake the thread that serves it, which then closes it. The connection must be open."""
        with suppress(OSError), _socket_of(self._connection) as end:
            end.shutdown(socket.SHUT_RDWR)


Serve = Callable[[PeerLine], None]


class LocalListener:
    """A socket that accepts connections from this user's processes, with one thread for each.

    The address is bound at construction; connections queue until ``begin``. Each process has at
    most ``PROCESS_PLACES_MAX`` connections, and waits if it sends more than ``MESSAGES_MAX``
    messages in a second; a connection counts as one. So a process delays only itself.

    Parameters
    ----------
    address:
        The address of a Unix-domain socket.
    say:
        Called with a kind and a message when a connection cannot be accepted, or is closed because
        of what it sent.

    Raises
    ------
    OSError
        With EADDRINUSE if the address is taken.
    """

    def __init__(self, address: str, say: Say) -> None:
        self._listener = Listener(address, "AF_UNIX", backlog=BACKLOG)
        self._address = address
        self._say = say
        self._ending, self._until = Pipe(duplex=False)
        self._threads: list[threading.Thread] = []
        self._lock = Lock()
        self._peers: dict[int, Peer] = {}
        self._lines: dict[PeerLine, None] = {}
        """All connections, in the order in which they came."""
        self._messages = MessageCounter()
        self._now = SystemClock().now
        self.is_over = False
        """True once it ends."""
        self._refused = self._displaced = self._invalid = 0
        self.lost = 0
        """Number of connections that were closed because their process held slots too long."""

    def begin(self, serve: Serve) -> None:
        """Serve each connection in its own thread, and close it when ``serve`` returns.

        ``serve`` may raise InvalidMessage and the errors in ``GONE``.
        """
        self._start(self._accept, serve)

    def _start(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, name="kvladder-line", daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            thread.start()

    # ---- the bounds

    def _accept(self, serve: Serve) -> None:
        while not self.is_over:
            try:
                connection = self._listener.accept()
            except OSError as error:
                if not self.is_over:
                    self._say("ranks", f"ranks cannot connect for now: {error!r}")
                wait([self._ending], PAUSE_S)  # the cause may last: do not spin
                continue
            line = self._admitted(connection)
            if line is None:
                connection.close()
            else:
                self._start(self._attend, serve, line, connection)

    def _admitted(self, connection: Connection) -> PeerLine | None:
        """Return a place for a connection; None if it gets none."""
        with _socket_of(connection) as end:
            process, user = _peer_of(end)
            if user != os.getuid() or _has_ended(end):
                return None
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, _timeval(TIMEOUT_S))
        with self._lock:
            peer = self._peers.get(process) or Peer(process)
            is_few = self._messages.allows(peer.name.encode(), peer.name, self._now())
            if not is_few or len(peer.lines) >= PROCESS_PLACES_MAX or not self._has_room():
                self._refused += 1
                return None
            line = PeerLine(self, connection, peer)
            self._peers[process] = peer
            peer.lines.add(line)
            self._lines[line] = None
        return line

    def _has_room(self) -> bool:
        """Return whether there is a place, if need be that of a connection that says nothing."""
        if len(self._lines) < PLACES_MAX:
            return True
        silent = next((line for line in self._lines if line.is_silent), None)
        if silent is not None:
            silent.hang_up()
            self._forget(silent)
            self._displaced += 1
        return silent is not None

    def _forget(self, line: PeerLine) -> None:
        self._lines.pop(line, None)
        line.peer.lines.discard(line)
        if not line.peer.lines:
            self._peers.pop(line.peer.process, None)

    def _attend(self, serve: Serve, line: PeerLine, connection: Connection) -> None:
        with connection:
            try:
                serve(line)
            except InvalidMessage as error:
                self._invalid += 1
                self._say("invalid messages of ranks", f"{line.peer.name}: {error}")
            except GONE:
                pass
            finally:
                with self._lock:
                    self._forget(line)

    def wait(self, connection: Connection, within_s: float | None) -> bool:
        """Wait until there is something to receive; return False if there will be nothing."""
        return wait([connection, self._ending], within_s) == [connection]

    def pace(self, peer: Peer) -> None:
        """Count a message of a process; let it wait if it has sent too many."""
        with self._lock:
            is_few = self._messages.allows(peer.name.encode(), peer.name, self._now())
        if not is_few:
            wait([self._ending], WINDOW_S)

    # ---- what is told of them

    def held(self, kind: str) -> dict[str, int]:
        """Return the number of slots that connections of a kind hold, by process."""
        lines = [line for line in self._held() if line.kind == kind]
        return summed((line.peer.name, line.slots) for line in lines)

    def _held(self) -> list[PeerLine]:
        with self._lock:
            return [*self._lines]

    def _places(self) -> dict[str, int]:
        return summed((line.peer.name, 1) for line in self._held())

    def _pending(self) -> dict[str, int]:
        return summed((line.peer.name, int(line.is_pending)) for line in self._held())

    def _last(self) -> dict[str, int]:
        with self._lock:
            return dict(self._messages.last(self._now()))

    def counts(self) -> dict[str, Any]:
        """Return what the largest processes hold, and the counters, as plain data."""
        return {
            "clients": shown(self._places()),
            "client_requests": shown(self._pending()),
            "client_messages": shown(self._last()),
            "refused": self._refused,
            "displaced": self._displaced,
            "clients_lost": self.lost,
            "messages_refused": self._invalid,
        }

    def describe(self) -> list[str]:
        """Return the bounds of each process and of all, and how much of them is in use."""
        places, most = self._places(), f"{MESSAGES_MAX} a process, which then waits"
        return [
            f"ranks' connections: {sum(places.values())} of {PLACES_MAX}",
            f"  most connections: {largest(places)}; at most {PROCESS_PLACES_MAX} a process",
            f"  most requests: {largest(self._pending())}; at most 1 a connection",
            f"  most messages in a second: {largest(self._last())}; at most {most}",
            f"  a connection sends its first message within {TIMEOUT_S:g} s",
        ]

    # ---- the end

    def end(self) -> None:
        """Stop serving new connections, and wait for the threads that serve one.

        The address stays bound, so new connections queue until ``close``. May be called again.
        """
        if self.is_over:
            return
        self.is_over = True
        self._until.close()  # wakes the threads that wait for a request
        with suppress(OSError), socket.socket(socket.AF_UNIX) as waking:  # wakes ``_accept``
            waking.connect(self._address)
        end_s = self._now() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._now()))

    def close(self) -> None:
        """End, and release the address; queued connections are refused. May be called again."""
        self.end()
        self._listener.close()
        self._ending.close()


def abstract(name: str) -> str:
    """Return the address of a socket in the abstract namespace, which leaves no file behind."""
    return f"\0kvladder-{name}"


def connect(address: str) -> Connection:
    """Connect to the socket of a ``LocalListener``.

    Raises
    ------
    OSError
        No process listens there, or the process belongs to another user.
    """
    connection = Client(address, "AF_UNIX")
    with _socket_of(connection) as end:
        _, user = _peer_of(end)
    if user != os.getuid():
        connection.close()
        raise PermissionError(f"the socket {address!r} belongs to another user")
    return connection


@contextmanager
def _socket_of(connection: Connection) -> Generator[socket.socket]:
    """Yield a connection as a socket, without another descriptor: there may be none left."""
    found = socket.socket(fileno=connection.fileno())
    try:
        yield found
    finally:
        found.detach()


def _peer_of(end: socket.socket) -> tuple[int, int]:
    """Return the ids of the process at the other end, and of its user."""
    told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(told)
    return int(process), int(user)


def _has_ended(end: socket.socket) -> bool:
    """Return whether the other end is closed and has sent nothing."""
    try:
        return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _timeval(seconds: float) -> bytes:
    """Return a time as options of sockets have it."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
