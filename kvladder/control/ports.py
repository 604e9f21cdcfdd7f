"""A TCP port of a running cache, bound for HTTP."""

from __future__ import annotations

import socket

from kvladder.errors import Unavailable
from kvladder.tiers import forks

WHERE = "http.listen"
_OTHER_HINT = "end the process that has the port, or choose another port"


class BoundPort:
    """A bound TCP port that belongs to this process alone, until ``close``.

    Raises
    ------
    Unavailable
        Another process has the port, or the address is not there now.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            found = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, where = found[0]
            self.socket = socket.socket(family, kind, protocol)
            try:
                forks.own(self.socket.fileno())
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(where)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            why = error.strerror or str(error)
            raise Unavailable(f"{address}: {why}", path=WHERE, hint=_OTHER_HINT) from error
        self.name = f"http://{host}:{self.socket.getsockname()[1]}/"
        """URL of the page."""

    def close(self) -> None:
        """Release the port."""
        with forks.ending(self.socket.fileno()):
            self.socket.close()
