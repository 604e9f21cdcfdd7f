"""Connects an engine's processes on one machine: the process that owns the cache has a socket."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Final

GONE: Final = (EOFError, OSError)
"""Errors that a connection raises when its other end is closed."""
BACKLOG: Final = 128
"""Maximum number of connections that queue until they are accepted."""
JOIN_S: Final = 10.0
"""Seconds that ``end`` waits for each thread that still serves a connection."""
PAUSE_S: Final = 0.5
"""Seconds before the next attempt after accepting a connection has failed."""
_CREDENTIALS: Final = struct.Struct("3i")

Serve = Callable[[Connection], None]


def abstract(name: str) -> str:
    """Return the address of a socket in the abstract namespace, which leaves no file behind."""
    return f"\0kvladder-{name}"


class LocalListener:
    """A socket that accepts connections from this user's processes, with one thread for each.

    The address is bound at construction; connections queue until ``begin``.

    Parameters
    ----------
    address:
        The address of a Unix-domain socket.
    say:
        Called with a message when a connection cannot be accepted.

    Raises
    ------
    OSError
        With EADDRINUSE if the address is taken.
    """

    def __init__(self, address: str, say: Callable[[str], object]) -> None:
        self._listener = Listener(address, "AF_UNIX", backlog=BACKLOG)
        self._address = address
        self._say = say
        self._ending, self._until = Pipe(duplex=False)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def begin(self, serve: Serve) -> None:
        """Serve each connection in its own thread, and close it when ``serve`` returns.

        ``serve`` may raise the errors in ``GONE``.
        """
        self._start(self._accept, serve)

    def _start(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, name="kvladder-line", daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _accept(self, serve: Serve) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    self._say(f"ranks cannot connect for now: {error!r}")
                wait([self._ending], PAUSE_S)  # the cause may last: do not spin
                continue
            self._start(self._attend, serve, connection)

    def _attend(self, serve: Serve, connection: Connection) -> None:
        with connection, suppress(*GONE):
            if not self._closed and _user_of(connection) == os.getuid():
                serve(connection)

    def heard(self, connection: Connection) -> bool:
        """Wait until there is something to receive; return False if the listener ends first."""
        return self._ending not in wait([connection, self._ending])

    def end(self) -> None:
        """Stop serving new connections, and wait for the threads that serve one.

        The address stays bound, so new connections queue until ``close``. May be called again.
        """
        if self._closed:
            return
        self._closed = True
        self._until.close()  # wakes the threads that wait in ``heard``
        with suppress(OSError), socket.socket(socket.AF_UNIX) as waking:  # wakes ``_accept``
            waking.connect(self._address)
        for thread in self._threads:
            thread.join(JOIN_S)

    def close(self) -> None:
        """End, and release the address; queued connections are refused. May be called again."""
        self.end()
        self._listener.close()
        self._ending.close()


def connect(address: str) -> Connection:
    """Connect to the socket of a ``LocalListener``.

    Raises
    ------
    OSError
        No process listens there, or the process belongs to another user.
    """
    connection = Client(address, "AF_UNIX")
    if _user_of(connection) != os.getuid():
        connection.close()
        raise PermissionError(f"the socket {address!r} belongs to another user")
    return connection


def _user_of(connection: Connection) -> int:
    """Return the user id of the process at the other end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return int(user)
