"""Serves HTTP at the control socket and at the port of a running cache, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from kvladder.control.guard import Guard
from kvladder.control.http import (
    REQUEST_BYTES_MAX,
    REQUEST_S,
    Answer,
    BodyMax,
    HttpConnection,
    HttpReader,
    HttpRequest,
    body_max,
)
from kvladder.errors import ClosedError, ConfigError, Unavailable
from kvladder.metrics import largest, shown
from kvladder.runtime import Runtime
from kvladder.tiers import forks

CLIENTS_MAX: Final = 16
"""Largest number of clients of a socket or port. A new one takes the place of the client that has
waited longest to send a request. If all wait for answers, as many more are told so."""
CLOSE_S: Final = 5.0
RETRY_S: Final = 5.0
"""Seconds between two attempts to bind a socket that is unavailable."""
ACCEPTING_TURNS: Final = 5
"""Turns of the loop until an accepted client is served: asyncio needs three."""
logger = logging.getLogger("kvladder")
Say = Callable[[str, str], object]


class Bound(Protocol):
    """A bound socket."""

    @property
    def socket(self) -> socket.socket:
        """Socket that does not listen yet."""
        ...

    @property
    def name(self) -> str:
        """Name for users."""
        ...

    def close(self) -> None:
        """Release it."""
        ...


class HttpListener:
    """Answers clients at one bound socket. Ended by ``close``.

    Clients that send anything invalid get an error or are disconnected. Each has a time limit, and
    their number is limited. While the socket is unavailable, the cache works without it, logs that,
    and retries in the background. This happens, for example, while a process of a killed engine
    still runs.

    Parameters
    ----------
    bind:
        Binds the socket, and blocks for a moment. It raises Unavailable if that may work later.
    what:
        What the socket is to users.
    answer:
        Answers a request on the loop of ``runtime``.
    bytes_max:
        Returns the largest size of a request's body.

    Raises
    ------
    ConfigError
        There can be no such socket.
    """

    def __init__(
        self,
        bind: Callable[[], Bound],
        what: str,
        answer: Answer,
        runtime: Runtime,
        say: Say = lambda _kind, _text: None,
        bytes_max: BodyMax = body_max,
    ) -> None:
        self._bytes_max = bytes_max
        self._bind = bind
        self._what = what
        self._answer = answer
        self._runtime = runtime
        self._say = say
        self._clients: set[asyncio.Task[Any]] = set()
        self._places: dict[HttpConnection, asyncio.Task[Any]] = {}
        self._peers: dict[HttpConnection, str] = {}
        """Address of each client that has a place; at a socket, the number of its user."""
        self.displaced = 0
        """Number of clients that gave their places to new ones."""
        self.refused = 0
        """Number of clients that found no place."""
        self._closed = False
        self._bound: Bound | None = None
        self._server: asyncio.Server | None = None
        self._waiting: asyncio.Task[None] | None = None
        why = ""
        try:
            self._bound = bind()
        except Unavailable as error:
            why = str(error)
        try:
            runtime.call(self._begin(why))
        except BaseException:
            self._unbind()
            raise

    @property
    def name(self) -> str:
        """Name of the bound socket; empty while it is unavailable."""
        return "" if self._bound is None else self._bound.name

    @property
    def what(self) -> str:
        """Name of the kind of socket for users."""
        return self._what

    def held(self) -> dict[str, int]:
        """Return the number of places that each client has; any thread calls this."""
        return dict(Counter([*self._peers.values()]))

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.close()

    async def _begin(self, why: str) -> None:
        """Listen, or wait for the socket if it is unavailable, for the reason ``why``."""
        if why:
            then = f"the cache works without its {self._what} and tries again in the background"
            self._say(self._what, f"{why}: {then}")
            self._waiting = asyncio.create_task(self._wait(), name="kvladder-control")
        else:
            await self._listen()

    async def _wait(self) -> None:
        """Bind the socket once it is available, and listen."""
        run = self._runtime.threads("control")
        while self._bound is None:
            await asyncio.sleep(RETRY_S)
            with suppress(Unavailable, ConfigError):
                self._bound = await run(self._bind)
        await self._listen()
        self._say(f"{self._what} taken", f"this cache now listens at the {self._what} {self.name}")

    async def _listen(self) -> None:
        assert self._bound is not None
        sock = self._bound.socket
        unix = sock.family == socket.AF_UNIX
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.StreamReaderProtocol:
            reader = HttpReader(limit=REQUEST_BYTES_MAX, loop=loop)
            return asyncio.StreamReaderProtocol(reader, self._serve, loop=loop)

        start: Any = loop.create_unix_server if unix else loop.create_server
        self._server = await start(protocol, sock=sock)
        logger.info("kvladder listens at %s %s", self._what, self.name)

    def close(self) -> None:
        """Disconnect every client, and release the socket; may be called again."""
        if self._closed:
            return
        self._closed = True
        with suppress(TimeoutError, ClosedError):
            self._runtime.call(self._stop(), timeout_s=CLOSE_S)
        self._unbind()

    async def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
        if self._server is None or self._bound is None:
            return
        # asyncio's server forgets a client accepted just before closing, and leaves it connected
        asyncio.get_running_loop().remove_reader(self._bound.socket)
        for _ in range(ACCEPTING_TURNS):
            await asyncio.sleep(0)
        with forks.ending(self._bound.socket.fileno()):
            self._server.close()
        for task in self._clients:
            task.cancel()
        if self._clients:
            await asyncio.wait(set(self._clients))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio's server makes one for each client"
        self._clients.add(task)
        try:
            if not self._closed:
                assert isinstance(reader, HttpReader), "see _listen"
                await self._converse(HttpConnection(reader, writer), task)
        except (OSError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # it is gone, too slow, or cancelled by ``close``
        finally:
            self._clients.discard(task)
            writer.close()

    async def _converse(self, client: HttpConnection, task: asyncio.Task[Any]) -> None:
        if len(self._places) >= CLIENTS_MAX:
            self._make_room()
        if len(self._places) < CLIENTS_MAX:
            self._places[client], self._peers[client] = task, client.peer
            try:
                await client.converse(self._answer, self._bytes_max)
            finally:
                self._places.pop(client, None)
                self._peers.pop(client, None)
            return
        self.refused += 1
        if len(self._clients) <= 2 * CLIENTS_MAX:
            await client.refuse(
                503, f"{CLIENTS_MAX} clients are already connected: try again later"
            )

    def _make_room(self) -> None:
        """Disconnect the client that has waited longest to send a request, if there is one.

        So clients that only hold connections cannot keep others out. HTTP lets a server close a
        connection without a request; a client then connects again. Clients whose bytes are there
        and not read yet keep their places, unless all wait that have one.
        """
        waiting = {c: c.waits_since_s for c in self._places if c.waits_since_s is not None}
        silent = {c: since_s for c, since_s in waiting.items() if not c.has_sent()}
        waiting = silent or waiting
        if waiting:
            self._places.pop(min(waiting, key=waiting.__getitem__)).cancel()
            self.displaced += 1


class ControlServer:
    """The sockets of one cache, served by one thread, which yields to all others. See ``close``."""

    def __init__(self, answer: Answer, say: Say, bytes_max: BodyMax = body_max) -> None:
        self._runtime = Runtime("kvladder-http")
        self._answer = answer
        self._bytes_max = bytes_max
        self._say = say
        self._listeners: list[HttpListener] = []

    @property
    def names(self) -> list[str]:
        """Names of the sockets that are bound."""
        return [one.name for one in self._listeners if one.name]

    def stats(self) -> dict[str, Any]:
        """Return by listener which client has how many places, and the counters."""
        return {
            "places": {one.what: shown(one.held()) for one in self._listeners},
            "displaced": {one.what: one.displaced for one in self._listeners},
            "refused": {one.what: one.refused for one in self._listeners},
        }

    def describe(self) -> list[str]:
        """Return the bounds of each listener, and how much of them is in use."""
        bounds = (
            f"at most {CLIENTS_MAX}; {REQUEST_BYTES_MAX >> 10} KiB of a request's head;"
            f" {REQUEST_S:g} s to send it and to read the answer"
        )
        return [
            f"clients at the {one.what}: {sum(held.values())}, most: {largest(held)}; {bounds}"
            for one, held in ((one, one.held()) for one in self._listeners)
        ]

    def prepare(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the serving thread."""
        self._runtime.post(function)

    def listen(self, bind: Callable[[], Bound], what: str, guard: Guard | None = None) -> None:
        """Serve at what ``bind`` returns; a socket without a guard is open to each client.

        Raises
        ------
        ConfigError
            There can be no such socket.
        """
        answer, most = self._answer, self._bytes_max
        if guard is not None:
            answer = partial(self._guarded, guard)
            most = partial(self._guarded_max, guard)
        self._listeners.append(HttpListener(bind, what, answer, self._runtime, self._say, most))

    async def _guarded(self, guard: Guard, request: HttpRequest) -> Any:
        return guard.refusal(request) or await self._answer(request)

    def _guarded_max(self, guard: Guard, head: HttpRequest) -> int:
        """Return the largest size of a body; a client that will be refused may not send much."""
        return REQUEST_BYTES_MAX if guard.refusal(head) else self._bytes_max(head)

    def close(self) -> None:
        """Disconnect every client, release the sockets, and end the thread."""
        for listener in self._listeners:
            listener.close()
        self._runtime.close()
