"""Bounds connections to a feed of events by address, and how often each asks for a replay."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvladder.metrics import largest, shown

REPLAYS_MAX: Final = 4
"""Highest number of replays for one address in a second."""
WINDOW_S: Final = 1.0
CONNECTIONS_MAX: Final = 32
"""Largest number of connections from one address; a listener with replays has two."""
ALL_CONNECTIONS_MAX: Final = 512
"""Largest number of connections from all addresses."""
HANDSHAKE_MS: Final = 3000
"""Milliseconds in which a connection must speak ZeroMQ's protocol."""
_ZAP: Final = "inproc://zeromq.zap.01"
_OK, _LATER = (b"200", b"OK"), (b"300", b"too many connections")
"""ZeroMQ's answers to a new connection; after the second it tries again."""
LOCAL: Final = "local"
"""The name of clients that come over no network."""


class FeedClients:
    """The connections to a feed's sockets, by address. The sockets are of one context.

    Only the thread that owns the sockets may call its methods; any thread may call ``counts``,
    ``held`` and ``describe``.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._gate: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._gate.bind(_ZAP)
        self._monitors: list[zmq.Socket[bytes]] = []
        self._addresses: dict[tuple[int, int], str] = {}
        """Address of each connection, by the number of its monitor and its descriptor."""
        self._admitted: Counter[str] = Counter()
        """Number of connections that may stay, by address, at most as many as there are. ZeroMQ
        does not tell which one has ended, so a refused one may count for ``HANDSHAKE_MS``."""
        self._since_s = 0.0
        self._asked: Counter[str] = Counter()
        self._replays = self._refused = self._turned_away = 0

    def watch(self, watched: zmq.Socket[bytes]) -> None:
        """Decide who may connect to a socket that is not bound yet; its context ends this."""
        watched.zap_domain = b"kvladder"
        watched.handshake_ivl = HANDSHAKE_MS
        wanted = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._monitors.append(watched.get_monitor_socket(wanted))

    @property
    def sockets(self) -> Iterable[zmq.Socket[bytes]]:
        """Sockets to poll: call ``follow`` when one of them is readable."""
        return [self._gate, *self._monitors]

    def follow(self) -> None:
        """Take note of who has come and gone, and admit those who wait."""
        for number, monitor in enumerate(self._monitors):
            while monitor.poll(0):
                told = recv_monitor_message(monitor)
                at = number, int(told["value"])
                if told["event"] == zmq.EVENT_ACCEPTED:
                    self._addresses[at] = _peer(at[1])
                elif self._addresses.pop(at, None) is not None:
                    self._admitted &= Counter(self._addresses.values())
        while self._gate.poll(0):
            self._admit(self._gate.recv_multipart())

    def _admit(self, frames: list[bytes]) -> None:
        """Answer ZeroMQ's question whether a connection may stay."""
        *route, version, number, _domain, address, _identity, _mechanism = frames
        name = address.decode()
        name = name if name in self._addresses.values() else LOCAL
        self._admitted &= Counter(self._addresses.values())
        is_full = self._admitted[name] >= CONNECTIONS_MAX
        is_full |= self._admitted.total() >= ALL_CONNECTIONS_MAX
        self._admitted[name] += not is_full
        self._turned_away += is_full
        answer = _LATER if is_full else _OK
        self._gate.send_multipart([*route, version, number, *answer, b"", b""])

    def allows(self, client: str, now_s: float) -> bool:
        """Count a request for a replay; return whether its address may have one now."""
        if now_s - self._since_s >= WINDOW_S:
            self._since_s = now_s
            self._asked.clear()
        self._asked[client] += 1
        is_allowed = self._asked[client] <= REPLAYS_MAX
        self._replays += is_allowed
        self._refused += not is_allowed
        return is_allowed

    def held(self) -> dict[str, int]:
        """Return the number of connections, by address."""
        return dict(Counter([*self._addresses.values()]))

    def counts(self) -> dict[str, Any]:
        """Return the connections of the largest clients, and how many replays there were."""
        return {
            "clients": shown(self.held()),
            "replays": self._replays,
            "refused": self._refused,
            "turned_away": self._turned_away,
        }

    def describe(self) -> str:
        """Return how many clients are connected, and which has most connections."""
        held = self.held()
        most = f"at most {CONNECTIONS_MAX} from an address, {ALL_CONNECTIONS_MAX} from all"
        return f"{sum(held.values())}, most: {largest(held)}; {most}"


def _peer(descriptor: int) -> str:
    """Return the address at the other end of a connection; the descriptor stays as it is."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family in {socket.AF_INET, socket.AF_INET6}:
            return str(found.getpeername()[0])
        return LOCAL
    return "gone"
