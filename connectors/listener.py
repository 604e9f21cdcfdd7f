"""How processes of one engine meet on a machine: at a socket of the one that owns the cache."""

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
"""What using a connection raises when its other end is no more."""
BACKLOG: Final = 128
"""Who comes before anybody is served waits; of so many at once."""
JOIN_S: Final = 10.0
"""How long the last words of those who are served are waited for."""
PAUSE_S: Final = 0.5
"""How long nobody is let in once that has failed."""
_CREDENTIALS: Final = struct.Struct("3i")

Serve = Callable[[Connection], None]


def abstract(name: str) -> str:
    """The address of a socket that is no file, so none is left behind."""
    return f"\0kvladder-{name}"


class LocalListener:
    """A socket where processes of this user come, each of which is served by a thread.

    From when it is made nobody else has the name, and whoever comes waits; ``begin`` serves them.

    Parameters
    ----------
    address:
        Of a Unix-domain socket.
    say:
        Takes what is told when nobody can come.

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
        """Have each connection served, in a thread; it ends with ``serve``, which may raise what
        ``GONE`` names.
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
                    self._say(f"no rank can come for now: {error!r}")
                wait([self._ending], PAUSE_S)  # what ails it may last
                continue
            self._start(self._attend, serve, connection)

    def _attend(self, serve: Serve, connection: Connection) -> None:
        with connection, suppress(*GONE):
            if not self._closed and _user_of(connection) == os.getuid():
                serve(connection)

    def heard(self, connection: Connection) -> bool:
        """Wait until there is something to receive; False if everything ends instead."""
        return self._ending not in wait([connection, self._ending])

    def end(self) -> None:
        """Serve nobody any more, and wait for those who are in the middle; the address is not free
        yet: whoever comes waits.
        """
        if self._closed:
            return
        self._closed = True
        self._until.close()  # whoever waits in ``heard`` sees it
        with suppress(OSError), socket.socket(socket.AF_UNIX) as waking:  # and whoever accepts
            waking.connect(self._address)
        for thread in self._threads:
            thread.join(JOIN_S)

    def close(self) -> None:
        """End, and let others have the address: whoever waits has come in vain. May be called
        again.
        """
        self.end()
        self._listener.close()
        self._ending.close()


def connect(address: str) -> Connection:
    """Come to a socket of ``LocalListener``.

    Raises
    ------
    OSError
        Nobody is there, or somebody of another user is.
    """
    connection = Client(address, "AF_UNIX")
    if _user_of(connection) != os.getuid():
        connection.close()
        raise PermissionError(f"the socket {address!r} belongs to another user")
    return connection


def _user_of(connection: Connection) -> int:
    """The user at the other end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return int(user)
