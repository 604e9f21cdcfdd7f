"""The control channel: ZeroMQ sockets with CURVE, on the caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvladder.errors import TierError
from kvladder.tiers.nixl.curve import KeyFile, KeyRing
from kvladder.tiers.nixl.messages import FRAME_BYTES_MAX

QUEUE_MAX = 1024
DRAIN_MAX = 64
"""Messages that are taken before the loop runs other callbacks."""
LINGER_MS = 200
_BROKEN: dict[int, str] = {
    zmq.EVENT_CONNECT_RETRIED: "no process listens there",
    zmq.EVENT_DISCONNECTED: "the connection was closed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know this client's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it has another key, or is not a kvladder cache",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has another key, or is not a kvladder cache",
}


class Control(Protocol):
    """A client's end of the channel."""

    def send(self, data: bytes) -> None:
        """Send a frame; a frame that cannot be sent now is lost."""
        ...

    def close(self) -> None:
        """Send the frames already queued, then close."""
        ...


class Dial(Protocol):
    """Connects to a far end, i.e. another cache's end of the channel.

    ``take`` is called with each frame, and ``broke`` with the reason if the connection breaks. Both
    may be called several times.
    """

    def __call__(
        self, take: Callable[[bytes], None], broke: Callable[[TierError], None], /
    ) -> Control: ...


class Mailbox:
    """Passes each message of a socket to a function, on the loop.

    Parameters
    ----------
    take:
        Called with each message.
    whose:
        Called instead of ``take`` if given, with the sender's public key and the message. The key
        is the one that the socket's authentication named.
    """

    def __init__(
        self,
        socket: zmq.Socket[Any],
        take: Callable[[list[bytes]], None],
        whose: Callable[[str, list[bytes]], None] | None = None,
    ) -> None:
        self._socket = socket
        self._take = take
        self._whose = whose
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.Handle | None = None
        self._loop.add_reader(socket.fileno(), self._drain)
        self._later()

    def send(self, *frames: bytes) -> None:
        """Send a message; a message that cannot be sent now is lost."""
        if not self._socket.closed:
            with suppress(zmq.Again):
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._later()

    def _later(self) -> None:
        """Schedule a look for messages: the descriptor signals only once, and not every message."""
        if self._due is None:
            self._due = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for _ in range(DRAIN_MAX):
            if self._socket.closed:
                return
            try:
                self._next()
            except zmq.Again:
                return
        self._later()

    def _next(self) -> None:
        """Pass one message on; raise zmq.Again if there is none."""
        if self._whose is None:
            self._take(self._socket.recv_multipart(zmq.NOBLOCK))
            return
        frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self._whose(str(frames[-1].get("User-Id")), [frame.bytes for frame in frames])

    def close(self) -> None:
        """Send the messages already queued, and take no more; may be repeated."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(LINGER_MS)
        if self._due is not None:
            self._due.cancel()


def prepared(context: zmq.Context[Any], kind: int, keys: KeyFile) -> zmq.Socket[Any]:
    """Return a socket with all its options set, not connected yet."""
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = FRAME_BYTES_MAX
    socket.rcvhwm = socket.sndhwm = QUEUE_MAX
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret.encode()
    return socket


@cache
def _context() -> zmq.Context[Any]:
    """Return the ZeroMQ context that all connections of this process share."""
    return zmq.Context()


class Dialler:
    """Connects to a far end with the keys of the file as it is by then.

    If the file lists several public keys of far ends, the next one is tried after a connection
    over which nothing came. So a far end may change its key.
    """

    def __init__(self, address: str, ring: KeyRing) -> None:
        self._address = address
        self._ring = ring
        self._number = 0
        self._answered = True

    def __call__(
        self, take: Callable[[bytes], None], broke: Callable[[TierError], None]
    ) -> Control:
        """See ``Dial``."""
        keys = self._ring.keys
        if not self._answered:
            self._number += 1
        self._answered = False

        def came(data: bytes) -> None:
            self._answered = True
            take(data)

        peer = keys.peers[self._number % len(keys.peers)]
        return Dialled(self._address, keys, peer, came, broke)


class Dialled:
    """A connection to a far end; once closed, it is not made again. ``peer`` is its public key."""

    def __init__(
        self,
        address: str,
        keys: KeyFile,
        peer: str,
        take: Callable[[bytes], None],
        broke: Callable[[TierError], None],
    ) -> None:
        self._broke = broke
        self._frame = take
        socket = prepared(_context(), zmq.DEALER, keys)
        socket.curve_serverkey = peer.encode()
        watch = socket.get_monitor_socket(sum(_BROKEN))
        self._mailbox = Mailbox(socket, self._took)
        self._watch = Mailbox(watch, self._happened)
        self._socket = socket
        try:
            socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise TierError(f"invalid address: {error}", temporary=False) from error

    def _took(self, frames: list[bytes]) -> None:
        self._frame(frames[0])

    def _happened(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event in _BROKEN:
            may_mend = event in {zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_DISCONNECTED}
            self._broke(TierError(_BROKEN[event], temporary=may_mend))

    def send(self, data: bytes) -> None:
        """Send a frame; a frame that cannot be sent now is lost."""
        self._mailbox.send(data)

    def close(self) -> None:
        """Close the connection; may be repeated."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._watch.close()
        self._mailbox.close()
