"""The control socket of a running cache: statistics, configuration, and purges, from outside.

A request is a line of JSON such as ``{"command": "stats"}``. The answer is a line of JSON, too:
``{"result": ...}`` or ``{"error": "why"}``; see ``docs/how-to/control.md``.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvladder.control.sockets import BoundSocket
from kvladder.errors import ClosedError, ConfigError, Unavailable
from kvladder.manager import CacheManager
from kvladder.runtime import Runtime
from kvladder.tiers import forks

CLIENTS_MAX: Final = 8
REQUEST_BYTES_MAX: Final = 16 << 10
REQUEST_S: Final = 10.0
"""Time limit for a client to send a request, and to read an answer."""
CLOSE_S: Final = 5.0
RETRY_S: Final = 5.0
"""Seconds between two attempts to bind a socket that is unavailable."""
POLL_S: Final = 0.02
ACCEPTING_TURNS: Final = 5
"""Turns of the loop until an accepted client is served: asyncio needs three."""


class ControlRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="command"
):
    """Base of clients' requests."""


class StatsRequest(ControlRequest, frozen=True, kw_only=True, tag="stats"):
    """Asks for the result of ``CacheManager.stats``."""


class DescribeRequest(ControlRequest, frozen=True, kw_only=True, tag="describe"):
    """Asks for the result of ``CacheManager.describe``, which has no secrets."""


class PurgeRequest(ControlRequest, frozen=True, kw_only=True, tag="purge"):
    """Asks to remove blocks everywhere; answered when that is done, or after ``wait_s``."""

    salt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Cache salt of the requests that saved the blocks; either this or ``all``."""
    all: bool = False
    """True for every block of the namespace."""
    namespace: str | None = None
    """The expected namespace; the request is refused if the cache has another one."""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 600.0


_DECODER: Final = msgspec.json.Decoder(StatsRequest | DescribeRequest | PurgeRequest)


class ControlServer:
    """Answers at a Unix-domain socket, on the cache's own loop. Ended by ``close``.

    Clients that send anything invalid get an error or are disconnected. Each has a time limit, and
    their number is limited. While the socket is unavailable, the cache works without it, logs that,
    and retries in the background. This happens, for example, while a process of a killed engine
    still runs.

    Raises
    ------
    ConfigError
        No socket can have this name.
    """

    def __init__(
        self,
        path: Path,
        manager: CacheManager,
        runtime: Runtime,
        *,
        say: Callable[[str, str], object] = lambda _kind, _text: None,
    ) -> None:
        self._path = path
        self._manager = manager
        self._runtime = runtime
        self._say = say
        self._clients: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._socket: BoundSocket | None = None
        self._server: asyncio.Server | None = None
        self._waiting: asyncio.Task[None] | None = None
        why = ""
        try:
            self._bind()
        except Unavailable as error:
            why = str(error)
        try:
            runtime.call(self._begin(why))
        except BaseException:
            self._unbind()
            raise

    def _bind(self) -> None:
        self._socket = BoundSocket(self._path)

    def _unbind(self) -> None:
        if self._socket is not None:
            self._socket.close()

    async def _begin(self, why: str) -> None:
        """Listen, or wait for the socket if it is unavailable, for the reason ``why``."""
        if why:
            then = "the cache works without a control socket and tries again in the background"
            self._say("control", f"{why}: {then}")
            self._waiting = asyncio.create_task(self._wait(), name="kvladder-control")
        else:
            await self._listen()

    async def _wait(self) -> None:
        """Bind the socket once it is available, and listen."""
        run = self._runtime.threads("control")
        while self._socket is None:
            await asyncio.sleep(RETRY_S)
            with suppress(Unavailable, ConfigError):
                await run(self._bind)
        await self._listen()
        self._say("control taken", f"this cache now listens at the control socket {self._path}")

    async def _listen(self) -> None:
        assert self._socket is not None
        self._server = await asyncio.start_unix_server(
            self._serve, sock=self._socket.socket, limit=REQUEST_BYTES_MAX
        )

    def close(self) -> None:
        """Disconnect every client, and remove the socket; may be called again."""
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
        if self._server is None or self._socket is None:
            return
        # asyncio's server forgets a client accepted just before closing, and leaves it connected
        asyncio.get_running_loop().remove_reader(self._socket.socket)
        for _ in range(ACCEPTING_TURNS):
            await asyncio.sleep(0)
        with forks.ending(self._socket.socket.fileno()):
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
                await self._converse(reader, writer, others=len(self._clients) - 1)
        except (OSError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # it is gone, too slow, or cancelled by ``close``
        finally:
            self._clients.discard(task)
            writer.close()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, others: int
    ) -> None:
        """Answer line after line until the client is done or breaks a rule."""
        try:
            while others < 2 * CLIENTS_MAX:
                async with asyncio.timeout(REQUEST_S):
                    line = await reader.readline()
                if not line.endswith(b"\n"):
                    return
                if others >= CLIENTS_MAX:
                    why = f"{CLIENTS_MAX} clients are already connected: try again later"
                    await _send(writer, {"error": why})
                    return
                await _send(writer, await self._answer(line, partial(_is_gone, writer)))
        except ValueError:  # a line is too long, so the start of the next is unknown
            why = f"the request is too long: expected at most {REQUEST_BYTES_MAX} bytes"
            await _send(writer, {"error": why})
            writer.write_eof()
            async with asyncio.timeout(REQUEST_S):  # unread bytes would discard the answer
                while await reader.read(REQUEST_BYTES_MAX):
                    pass

    async def _answer(self, line: bytes, gone: Callable[[], bool]) -> dict[str, Any]:
        try:
            request = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return {"error": f"not a request: {error}"}
        if isinstance(request, StatsRequest):
            return {"result": self._manager.stats()}
        if isinstance(request, DescribeRequest):
            return {"result": self._manager.describe()}
        own = self._manager.namespace.hex()
        if request.namespace not in {None, own}:
            return {"error": f"expected namespace {own}, that of the running cache"}
        if request.all == (request.salt is not None):
            return {"error": "expected either a salt or all: true"}
        return {"result": await self._purge(request, gone)}

    async def _purge(self, request: PurgeRequest, gone: Callable[[], bool]) -> dict[str, Any]:
        """Remove in steps, then wait until all tiers are done, the client is gone or time is up."""
        manager = self._manager
        before = manager.stats()
        if request.salt is None:
            for _ in manager.ladder.clear(erase=True):
                await asyncio.sleep(0)
        else:
            for _ in manager.purge(request.salt):
                await asyncio.sleep(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(request.wait_s):
                while manager.removals and not gone():  # noqa: ASYNC110 - tiers send no event
                    await asyncio.sleep(POLL_S)
        now = manager.stats()
        names = [name for name, counts in now.items() if "removed" in counts]
        return {
            "namespace": manager.namespace.hex(),
            "processes": [os.getpid(), *filter(None, (now[name].get("process") for name in names))],
            **{
                what: {name: now[name][what] - before[name][what] for name in names}
                for what in ("removed", "purged")
            },
            "left": manager.removals,
        }


def _is_gone(writer: asyncio.StreamWriter) -> bool:
    """Return whether the client has hung up; closing only its sending side does not count."""
    if writer.is_closing():
        return True
    state = select.poll()
    state.register(writer.get_extra_info("socket").fileno(), 0)
    return bool(state.poll(0))


async def _send(writer: asyncio.StreamWriter, reply: dict[str, Any]) -> None:
    writer.write(msgspec.json.encode(reply) + b"\n")
    async with asyncio.timeout(REQUEST_S):
        await writer.drain()
