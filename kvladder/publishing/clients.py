"""Counts who is connected to a feed of events, and bounds how often each may ask for a replay."""

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
LOCAL: Final = "local"
"""The name of clients that come over no network."""


class FeedClients:
    """The connections to a feed's sockets, by address.

    Only the thread that owns the sockets may call its methods; any thread may call ``counts``,
    ``held`` and ``describe``.
    """

    def __init__(self) -> None:
        self._monitors: list[zmq.Socket[bytes]] = []
        self._addresses: dict[tuple[int, int], str] = {}
        """Address of each connection, by the number of its monitor and its descriptor."""
        self._since_s = 0.0
        self._asked: Counter[str] = Counter()
        self._replays = self._refused = 0

    def watch(self, watched: zmq.Socket[bytes]) -> None:
        """Follow who connects to a socket; its context ends the monitor."""
        wanted = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._monitors.append(watched.get_monitor_socket(wanted))

    @property
    def monitors(self) -> Iterable[zmq.Socket[bytes]]:
        """Sockets to poll: call ``follow`` when one of them is readable."""
        return self._monitors

    def follow(self) -> None:
        """Take note of who has come and gone."""
        for number, monitor in enumerate(self._monitors):
            while monitor.poll(0):
                told = recv_monitor_message(monitor)
                at = number, int(told["value"])
                if told["event"] == zmq.EVENT_ACCEPTED:
                    self._addresses[at] = _peer(at[1])
                else:
                    self._addresses.pop(at, None)

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
        }

    def describe(self) -> str:
        """Return how many clients are connected, and which has most connections."""
        held = self.held()
        return f"{sum(held.values())}, most: {largest(held)}"


def _peer(descriptor: int) -> str:
    """Return the address at the other end of a connection; the descriptor stays as it is."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        if found.family in {socket.AF_INET, socket.AF_INET6}:
            return str(found.getpeername()[0])
        return LOCAL
    return "gone"
