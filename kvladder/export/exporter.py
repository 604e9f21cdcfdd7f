"""Serves the clients of a cache: one control socket, and a session for each client."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import zmq
from zmq.utils import z85

from kvladder.errors import ConfigError, TierError
from kvladder.export.bounds import (
    HANDSHAKE_MS,
    HELD_S,
    MESSAGES_MAX,
    SESSIONS_MAX,
    MessageCounter,
)
from kvladder.export.offers import Offers
from kvladder.export.session import Session
from kvladder.metrics import shown, summed
from kvladder.tiers.context import Blocking
from kvladder.tiers.nixl.control import Mailbox, prepared
from kvladder.tiers.nixl.curve import ALL, KeyFile, KeyRing, Rights
from kvladder.tiers.nixl.line import HEARTBEAT_S, SILENT_MAX
from kvladder.tiers.nixl.messages import (
    WHY_MAX,
    Bye,
    Failed,
    Gone,
    Hello,
    Ping,
    Pong,
    Reply,
    Welcome,
    WireError,
    area_in,
    frame,
    request,
)
from kvladder.tiers.nixl.plane import NixlPlane, Plane, load, made
from kvladder.tiers.nixl.pump import doze

PATIENCE = 2
"""A client is given up after this multiple of ``SILENT_MAX``, the client's own limit."""
HELD_MAX = round(HELD_S / HEARTBEAT_S)
_ZAP = "inproc://zeromq.zap.01"  # ZeroMQ sends its questions of access here: RFC 27
_ZAP_VERSION = b"1.0"
KEYS_S = 1.0
"""Seconds between two looks at the file of keys."""
BIND_S = 0.01
BIND_MAX = 500
"""Time between attempts to bind the address again for another secret key, and their number."""


class Exporter:
    """Keeps the sessions of all clients; begins and ends them.

    Parameters
    ----------
    offers:
        The cache.
    plane:
        Makes a data plane over the cache's arena. The first call takes half a second.
    send:
        Sends a frame to a client.
    """

    def __init__(
        self,
        offers: Offers,
        plane: Callable[[], Awaitable[Plane]],
        send: Callable[[bytes, bytes], object],
        *,
        nap: Callable[[], None] = doze,
    ) -> None:
        self._offers = offers
        self._plane = plane
        self._send_to = send
        self._nap = nap
        self._numbers = count(1)
        self._sessions: dict[bytes, Session] = {}
        self._rights: dict[bytes, Rights] = {}
        """Rights with which each session began."""
        self._messages = MessageCounter()
        self._joining: dict[bytes, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._fence = asyncio.Lock()
        self._closing = False
        self._refused = 0
        self._lost = 0

    def gauges(self) -> dict[str, int | dict[str, int]]:
        """Return the number of clients, what each does, and the counters since the start."""
        pending = summed(
            (self._rights[client].name, one.pending) for client, one in self._sessions.items()
        )
        now_s = asyncio.get_running_loop().time()
        return {
            "client_requests": shown(pending),
            "client_messages": shown(self._messages.last(now_s)),
            "clients": len(self._sessions),
            "clients_lost": self._lost,
            "messages_refused": self._refused + sum(s.refused for s in self._sessions.values()),
        }

    async def run(self) -> None:
        """Check at every heartbeat whether the clients live, until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for session in [*self._sessions.values()]:
                session.beat(PATIENCE * SILENT_MAX, HELD_MAX)

    def take(self, client: bytes, data: bytes, rights: Rights | None = ALL) -> None:
        """Answer a frame of a client; ``client`` is the socket's name for it.

        ``rights`` are those of its key now; None if the key is not listed any more.
        """
        if client in self._sessions and rights != self._rights[client]:
            self._drop(client, "the rights of this client's key have changed")
            return
        if rights is None:
            return
        if not self._messages.allows(client, rights.name, asyncio.get_running_loop().time()):
            self._refused += 1
            if client in self._sessions:
                self._drop(client, f"more than {MESSAGES_MAX} messages a second")
            return
        try:
            message = request(data)
        except WireError as error:
            self._refuse(client, 0, error)
            return
        session = self._sessions.get(client)
        if isinstance(message, Bye):
            self._drop(client, "")
        elif session is not None:
            try:
                session.take(message)
            except WireError as error:
                self._refuse(client, message.op, error)
        elif isinstance(message, Ping):
            self._send(client, Pong(message.op, known=False))
        elif not isinstance(message, Hello):
            self._send(client, Gone(message.op, "there is no session"))
        elif client not in self._joining:
            task = self._joining[client] = asyncio.create_task(self._join(client, message, rights))
            task.add_done_callback(lambda _: self._joining.pop(client))

    def _send(self, client: bytes, message: Reply) -> None:
        self._send_to(client, frame(message))

    def _refuse(self, client: bytes, op: int, error: Exception) -> None:
        self._refused += 1
        self._send(client, Failed(op, str(error)[:WHY_MAX], final=True))

    # ---- the beginning and the end of a session

    async def _join(self, client: bytes, hello: Hello, rights: Rights) -> None:
        try:
            await self._begin(client, hello, rights)
        except WireError as error:
            self._refuse(client, hello.op, error)
        except TierError as error:
            self._send(client, Failed(hello.op, str(error)[:WHY_MAX]))

    async def _begin(self, client: bytes, hello: Hello, rights: Rights) -> None:
        """Begin a session; raise WireError if the client is refused for good."""
        offers, size, number = self._offers, hello.block_bytes, next(self._numbers)
        far = area_in(hello.area, size)
        if size > offers.block_bytes_max:
            most = offers.block_bytes_max
            raise WireError(f"blocks of {size} bytes: a slot of the cache holds at most {most}")
        if not rights.may_read(hello.namespace):
            space = hello.namespace.hex()
            raise WireError(f"this client's keys do not allow namespace {space}")
        writable = offers.writable and rights.may_write(hello.namespace)
        if len(self._sessions) + len(self._joining) > SESSIONS_MAX:
            raise TierError(f"the cache already has {SESSIONS_MAX} clients")
        if why := await offers.hello(number, hello.namespace, size, rights.name):
            raise WireError(why)
        plane: Plane | None = None
        try:
            plane = await self._plane()
            plane.join(hello.metadata, far, size)
        except BaseException:
            if plane is not None:
                plane.destroy()
            await offers.gone(number)
            raise
        self._rights[client] = rights
        self._sessions[client] = Session(
            number,
            offers,
            plane,
            far=far,
            block_bytes=size,
            writable=writable,
            send=partial(self._send, client),
            failed=lambda error: self._drop(client, str(error)),
            nap=self._nap,
        )
        answer = Welcome(hello.op, plane.metadata, plane.area, writable, writable)
        self._send(client, answer)

    def _drop(self, client: bytes, why: str) -> None:
        """End the session of a client that has left, or, if ``why`` is given, is lost."""
        if (joining := self._joining.get(client)) is not None:
            joining.cancel()
        session = self._sessions.pop(client, None)
        self._rights.pop(client, None)
        if session is not None:
            self._refused += session.refused
            self._lost += bool(why)
            if why:
                self._send(client, Gone(0, why[:WHY_MAX]))
            session.mute()
            task = asyncio.create_task(self._leave(session))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _leave(self, session: Session) -> None:
        """End a session. Ending its agent blocks the loop for up to a second.

        Agents end one at a time. After each there is a pause of the same length for other clients.
        """
        async with self._fence:
            loop = asyncio.get_running_loop()
            begun_s = loop.time()
            session.fence()
            if not self._closing:
                await asyncio.sleep(loop.time() - begun_s)
        await session.close()

    async def aclose(self) -> None:
        """End all sessions."""
        self._closing = True
        joining = [*self._joining.values()]
        for client in (*self._sessions, *self._joining):
            self._drop(client, "the cache is closed")
        if ending := [*joining, *self._leaving]:
            await asyncio.wait(ending)


class Listener:
    """The socket of an exporter. It admits clients by their keys.

    A connection that has shown no key after ``HANDSHAKE_MS`` is closed.

    Parameters
    ----------
    take:
        Called with the socket's name for a client, its frame, and the rights of its key now; None
        for a client that connected with a key that is not listed any more.

    Raises
    ------
    ConfigError
        The address cannot be bound.
    """

    def __init__(
        self, address: str, keys: KeyFile, take: Callable[[bytes, bytes, Rights | None], object]
    ) -> None:
        self._take = take
        self._keys, self._rights = keys, keys.rights
        self._context: zmq.Context[Any] = zmq.Context()  # ZAP works within one context
        gate = self._context.socket(zmq.ROUTER)
        gate.bind(_ZAP)
        socket = prepared(self._context, zmq.ROUTER, keys)
        socket.curve_server = True
        socket.zap_domain = b"kvladder"
        socket.handshake_ivl = HANDSHAKE_MS
        self._boxes = [Mailbox(gate, self._asked), Mailbox(socket, _ignored, self._came)]
        try:
            socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            hint = "expected an unused host:port of this machine"
            raise ConfigError(f"{address}: {error}", path="listen", hint=hint) from error
        self._socket, self._address = socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self._address.rpartition(":")[2])

    def _came(self, key: str, frames: list[bytes]) -> None:
        if len(frames) == 2:
            self._take(frames[0], frames[1], self._rights.get(key))

    async def renew(self, keys: KeyFile) -> None:
        """Use other keys from now on. Another secret key disconnects all clients.

        If the address cannot be bound again, this process exits, and another one takes its place.
        """
        own, self._keys, self._rights = self._keys, keys, keys.rights
        if keys.secret == own.secret:
            return
        socket = self._socket
        socket.unbind(self._address)
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret.encode()
        for _ in range(BIND_MAX):
            try:
                socket.bind(self._address)  # ZeroMQ releases the address in a thread of its own
            except zmq.ZMQError:
                await asyncio.sleep(BIND_S)
            else:
                return
        raise SystemExit(f"{self._address} cannot be bound again")

    def _asked(self, frames: list[bytes]) -> None:
        """Answer ZeroMQ's question whether a client may connect."""
        *route, version, number, _domain, _address, _identity, mechanism, key = frames
        user = z85.encode(key) if mechanism == b"CURVE" else b""
        known = version == _ZAP_VERSION and user.decode() in self._rights
        code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._boxes[0].send(*route, _ZAP_VERSION, number, code, text, user, b"")

    def send(self, client: bytes, data: bytes) -> None:
        """Send a frame to a client; it is dropped if the client has gone."""
        self._boxes[1].send(client, data)

    def close(self) -> None:
        """Send pending frames and close the sockets."""
        for box in self._boxes:
            box.close()
        self._context.term()


def _ignored(frames: list[bytes]) -> None:
    """Drop a message that has no sender."""


async def follow(ring: KeyRing, listener: Listener, run_blocking: Blocking) -> None:
    """Use the keys of the file as it is from time to time, until cancelled."""
    while True:
        await asyncio.sleep(KEYS_S)
        if await run_blocking(ring.renew):
            await listener.renew(ring.keys)


def raise_descriptors() -> None:
    """Raise this process's limit of descriptors: unknown connections use some until refused."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@asynccontextmanager
async def exporting(
    offers: Offers,
    *,
    listen: str,
    keys: str,
    transports: str,
    interfaces: str,
    run_blocking: Blocking,
    say: Callable[[str], object],
) -> AsyncGenerator[tuple[str, Exporter, KeyRing]]:
    """Serve clients of a cache while the context lasts.

    Yields the address, the exporter, and the keys, which follow their file.

    Parameters
    ----------
    listen:
        Host and port; port 0 takes any free port.
    keys:
        The file with the keys of this end; it is read again when it has changed.
    transports, interfaces:
        See ``NixlPlane``.
    say:
        Called with a text when the keys have changed, or their file is wrong.

    Raises
    ------
    ConfigError
        NIXL is missing, or a key or the address is wrong.
    TierError
        NIXL does not work here.
    """
    await run_blocking(load)
    ring = KeyRing(keys, say)
    make = partial(NixlPlane, offers.arena, transports, interfaces)
    plane = partial(made, run_blocking, make)
    (await plane()).destroy()  # fails now rather than at the first client
    with ExitStack() as undo:
        exporter = Exporter(offers, plane, lambda to, data: listener.send(to, data))
        listener = Listener(listen, ring.keys, exporter.take)
        undo.callback(listener.close)
        running = asyncio.create_task(exporter.run(), name="kvladder-exporter")
        undo.callback(running.cancel)
        following = asyncio.create_task(follow(ring, listener, run_blocking), name="kvladder-keys")
        undo.callback(following.cancel)
        try:
            yield f"{listen.rpartition(':')[0]}:{listener.port}", exporter, ring
        finally:
            await exporter.aclose()
