"""Publishes what each level holds over ZeroMQ, for engines that do not publish KV events."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from math import ceil, inf
from time import monotonic
from typing import Any, Final

import msgspec
import zmq

from kvladder.config.settings import EventsConfig
from kvladder.errors import ConfigError
from kvladder.publishing.clients import REPLAYS_MAX, FeedClients
from kvladder.publishing.device import OnDevice
from kvladder.publishing.messages import Messages
from kvladder.publishing.wire import (
    END,
    TOO_OFTEN,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
)
from kvladder.tiers.ladder import Ladder
from kvladder.units import Size

CLOSE_S: Final = 1.0
"""Timeout for sending the last messages at close."""
EVENTS_MAX: Final = 16
"""Highest number of events in a message. Each has up to a thousand blocks."""
KEPT_BYTES_MAX: Final = 64 << 20
"""Most bytes of the batches that are kept for replays; the newest stays in any case."""
WAITING_MAX: Final = 1000
"""Most batches that wait for one connection to the feed; of large ones, ``KEPT_BYTES_MAX``."""
ENDS_MAX: Final = 64
"""Most replies without a batch that wait for one connection beside a replay."""
REPEAT_S: Final = 10.0
"""Shortest time between two announcements of everything: each goes to all listeners."""
_EXAMPLE: Final = "expected an address to bind, such as tcp://127.0.0.1:5557"


class Publisher:
    """A thread that sends events as they happen, and replays them on request.

    Wire format and replay are vLLM's: see :mod:`kvladder.publishing.wire`. A DEALER socket that
    sends an empty frame and a sequence number gets every batch from that one on, then one numbered
    -1. If the first of them is no longer kept, the publisher sends AllBlocksCleared to all
    listeners and announces everything again, at most once in ``REPEAT_S``. An address that asks
    more often than ``REPLAYS_MAX`` times a second gets only the end, with the reason as its topic.

    Raises
    ------
    ConfigError
        An address cannot be bound.
    """

    def __init__(
        self,
        settings: EventsConfig,
        ladder: Ladder,
        *,
        block_tokens: int,
        device: OnDevice | None = None,
    ) -> None:
        assert settings.publish is not None
        self._ladder = ladder
        self._tokens = block_tokens
        self._device = device
        self._topic = settings.topic.encode()
        self._sent: deque[tuple[int, zmq.Frame]] = deque()
        """Batches by number; all clients share the bytes of one."""
        self._kept_max, self._kept_bytes = settings.buffer, 0
        self._repeated_s, self._is_behind = -inf, False
        self._sequence = count()
        self._encode = msgspec.msgpack.Encoder().encode
        self._closing = False
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        self._clients = FeedClients(self._context)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK)
        try:
            self._publish = self._bound(zmq.PUB, settings.publish, "events.publish")
            self._replay: zmq.Socket[bytes] | None = None
            if settings.replay is not None:
                self._replay = self._bound(zmq.ROUTER, settings.replay, "events.replay")
        except ConfigError:
            self._release()
            raise

    def _bound(self, kind: int, address: str, path: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = int(CLOSE_S * 1000)
        self._clients.watch(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{address}: {error}", path=path, hint=_EXAMPLE) from error
        return socket

    def counts(self) -> dict[str, Any]:
        """Return who is connected, and how many replays there were."""
        return self._clients.counts()

    def describe(self) -> list[str]:
        """Return the bounds of the feed, and how much of them is in use."""
        kept = f"{self._kept_max} batches or {Size(KEPT_BYTES_MAX)}"
        limits = (
            f"{REPLAYS_MAX} replays a second for an address, {self._waiting(WAITING_MAX)} messages"
            f" waiting for a connection, {kept} kept for replays"
        )
        return [f"clients of the feed: {self._clients.describe()}; {limits}"]

    def start(self) -> None:
        """Begin to publish, starting with what the levels hold now. They must be open."""
        ladder = self._ladder
        if self._device is not None:
            self._device.begin(ladder)
        self._messages = Messages(ladder, self._tokens, self._device)
        with ladder.lock:
            ladder.events.listen(self._wake)
        self._thread = threading.Thread(target=self._serve, name="kvladder-events", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _serve(self) -> None:
        self._ladder.lock.be_patient()
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        for socket in self._clients.sockets:
            poller.register(socket, zmq.POLLIN)
        while True:
            closing = self._closing
            ready = dict(poller.poll(0 if closing else self._wait_ms()))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            self._clients.follow()
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
            self._repeat()
            events = self._messages.take()
            for start in range(0, len(events), EVENTS_MAX):
                self._send(events[start : start + EVENTS_MAX])
            if events:
                continue
            if closing:
                return

    def _send(self, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        sequence = next(self._sequence)
        encoded = self._encode(Batch(self._ladder.clock.wall(), [*events], 0))
        payload = zmq.Frame(encoded, copy=True)
        self._sent.append((sequence, payload))
        self._kept_bytes += len(encoded)
        while len(self._sent) > self._kept_max or (
            self._kept_bytes > KEPT_BYTES_MAX and len(self._sent) > 1
        ):
            self._kept_bytes -= len(self._sent.popleft()[1].buffer)
        _bound(self._publish, self._waiting(WAITING_MAX))
        self._publish.send_multipart([self._topic, sequence.to_bytes(8), payload], copy=False)

    def _waiting(self, most: int) -> int:
        """Return how many batches may wait for a connection: ``KEPT_BYTES_MAX`` of their mean."""
        fitting = KEPT_BYTES_MAX * len(self._sent) // self._kept_bytes if self._sent else most
        return max(1, min(most, fitting))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Replay the batches that a listener asks for."""
        frames = replay.recv_multipart(copy=False)
        client, *rest = (frame.bytes for frame in frames)
        if len(rest) != 2 or len(rest[1]) != 8:
            return
        first = int.from_bytes(rest[1])
        _bound(replay, self._waiting(self._kept_max) + ENDS_MAX)
        is_allowed = self._clients.allows(str(frames[1].get("Peer-Address")), monotonic())
        if is_allowed:
            for sequence, payload in self._sent:
                if sequence >= first:
                    number = sequence.to_bytes(8)
                    replay.send_multipart([client, b"", self._topic, number, payload], copy=False)
            self._is_behind |= bool(self._sent) and first < self._sent[0][0]
        replay.send_multipart([client, b"", b"" if is_allowed else TOO_OFTEN, END, b""])

    def _wait_ms(self) -> int | None:
        """Return how long to wait for events and clients; None if only they give work."""
        if self._messages.pending:
            return 0
        if not self._is_behind:
            return None
        return max(0, ceil(1e3 * (self._repeated_s + REPEAT_S - monotonic())))

    def _repeat(self) -> None:
        """Announce everything again, in its time, if a listener is behind what is kept."""
        if self._messages.pending or not self._is_behind:
            return
        if monotonic() >= self._repeated_s + REPEAT_S:
            self._is_behind, self._repeated_s = False, monotonic()
            self._send([AllBlocksCleared()])
            self._messages.repeat()

    def close(self) -> None:
        """Publish pending events and end the thread; may be called again."""
        if self._thread is not None:
            with self._ladder.lock:
                self._ladder.events.ignore(self._wake)
            self._closing = True
            self._wake()
            self._thread.join(CLOSE_S)
            self._thread = None
        self._release()

    def _release(self) -> None:
        if not self._context.closed:
            self._context.destroy()
            os.close(self._wakeup)


def _bound(socket: zmq.Socket[bytes], messages: int) -> None:
    """Let no more messages wait for each connection of a socket; it drops the others."""
    if socket.sndhwm != messages:
        socket.sndhwm = messages
