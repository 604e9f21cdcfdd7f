"""HTTP/1.1 over one connection: h11 parses, and limits bound what a client can cost."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from struct import Struct
from typing import Any, Final

import h11
import msgspec

REQUEST_BYTES_MAX: Final = 16 << 10
"""Largest size of a request's head, and of most bodies."""
REQUEST_S: Final = 10.0
"""Time limit for a client to send a request, and to read an answer or a part of one."""
_CREDENTIALS: Final = Struct("3i")
"""Process, user and group of a socket's other end."""
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A complete request."""

    method: str
    path: str
    """Path without the query."""
    headers: Mapping[str, str]
    """Values by name in lower case; a repeated name has its values joined by commas."""
    body: bytes = b""
    gone: Callable[[], bool] = lambda: False
    """Returns whether the client has hung up."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer: a body, or parts that are sent as they come."""

    body: bytes = b""
    status: int = 200
    kind: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()
    parts: AsyncIterator[bytes] | None = field(default=None)
    """Parts of an answer without an end; the connection ends with them."""


def as_json(value: Any, status: int = 200) -> HttpResponse:
    """Return an answer with ``value`` as JSON."""
    return HttpResponse(msgspec.json.encode(value) + b"\n", status, JSON)


def refusal(status: int, why: str, *headers: tuple[str, str]) -> HttpResponse:
    """Return the answer to a request that is refused."""
    body = msgspec.json.encode({"error": why}) + b"\n"
    return HttpResponse(body, status, JSON, headers)


Answer = Callable[[HttpRequest], Awaitable[HttpResponse]]
BodyMax = Callable[[HttpRequest], int]
"""Returns the largest size of a request's body; the request has only its head yet."""


def body_max(_: HttpRequest) -> int:
    """Return the size that suffices for most bodies."""
    return REQUEST_BYTES_MAX


class Refused(Exception):
    """A request cannot be read: the client gets the answer, and is disconnected."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def _peer(sock: socket.socket) -> str:
    """Return which client a connection comes from, as far as the kernel knows it."""
    try:
        if sock.family != socket.AF_UNIX:
            return str(sock.getpeername()[0])
        size = _CREDENTIALS.size
        _, user, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
    except OSError:  # it is gone
        return "gone"
    return f"user {user}"


class HttpReader(asyncio.StreamReader):
    """A stream that tells whether bytes have come that were not read yet."""

    is_unread = False

    def feed_data(self, data: Any) -> None:
        """Take bytes that have come."""
        self.is_unread = True
        super().feed_data(data)

    async def read(self, n: int = -1) -> bytes:
        """Return bytes as soon as there are some."""
        data = await super().read(n)
        self.is_unread = False
        return data


class HttpConnection:
    """Answers the requests of one client, one after the other."""

    def __init__(self, reader: HttpReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._link: Any = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        self._is_head = False
        """True if the request being answered wants no body."""
        self.peer = _peer(writer.get_extra_info("socket"))
        """Address of the client, or the number of its user if it came over a socket."""
        self.waits_since_s: float | None = asyncio.get_running_loop().time()
        """Time since which it waits for a request; None while it answers one."""

    async def converse(self, answer: Answer, bytes_max: BodyMax = body_max) -> None:
        """Answer until the client is done, breaks a rule, or takes more than its time.

        A body that is longer than ``bytes_max`` allows is not read.

        Raises
        ------
        OSError, TimeoutError
            The client is gone, or too slow.
        """
        try:
            while True:
                self.waits_since_s = asyncio.get_running_loop().time()
                async with asyncio.timeout(REQUEST_S):
                    request = await self._request(bytes_max)
                if request is None:
                    return
                self.waits_since_s = None
                await self._send(await answer(request))
                if self._link.our_state is not h11.DONE or self._link.their_state is not h11.DONE:
                    return
                self._link.start_next_cycle()
        except Refused as error:
            await self.refuse(error.status, str(error))

    async def refuse(self, status: int, why: str) -> None:
        """Send an error and end the connection; the rest of the request is not read."""
        if self._link.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            await self._send(refusal(status, why, ("Connection", "close")))
        self._writer.write_eof()
        async with asyncio.timeout(REQUEST_S):  # unread bytes would discard the answer
            while await self._reader.read(REQUEST_BYTES_MAX):
                pass

    async def _request(self, bytes_max: BodyMax) -> HttpRequest | None:
        """Return the next request; None if there is none."""
        head, body, most = None, bytearray(), None
        self._is_head = False  # a broken request has no method, whatever the one before had
        while True:
            try:
                event: Any = self._link.next_event()
            except h11.RemoteProtocolError as error:
                hint = error.error_status_hint
                why = f"not an HTTP request: {error}"
                if hint == 431:
                    why = f"the request is too long: expected at most {REQUEST_BYTES_MAX} bytes"
                raise Refused(hint, why) from error
            if event is h11.NEED_DATA:
                if self._link.they_are_waiting_for_100_continue:
                    await self._write(h11.InformationalResponse(status_code=100, headers=[]))
                self._link.receive_data(await self._reader.read(REQUEST_BYTES_MAX))
            elif isinstance(event, h11.Request):
                head, self._is_head = event, event.method == b"HEAD"
            elif isinstance(event, h11.Data) and head is not None:
                body += event.data
                if most is None:  # most requests have no body
                    most = bytes_max(self._made(head, b""))
                if len(body) > most:
                    why = f"the body is too long: expected at most {most} bytes"
                    raise Refused(413, why)
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return self._made(head, bytes(body))
            else:
                return None

    def _made(self, head: h11.Request, body: bytes) -> HttpRequest:
        headers: dict[str, str] = {}
        for name, value in head.headers:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        path = head.target.decode("latin-1").partition("?")[0]
        return HttpRequest(head.method.decode("ascii"), path, headers, body, self._is_gone)

    def has_sent(self) -> bool:
        """Return whether the client has sent bytes that were not read yet."""
        if self._writer.is_closing() or self._reader.is_unread:
            return self._reader.is_unread
        state = select.poll()
        state.register(self._writer.get_extra_info("socket").fileno(), select.POLLIN)
        return any(event == select.POLLIN for _, event in state.poll(0))

    def _is_gone(self) -> bool:
        """Return whether the client has hung up; closing only its sending side does not count."""
        if self._writer.is_closing():
            return True
        state = select.poll()
        state.register(self._writer.get_extra_info("socket").fileno(), 0)
        return bool(state.poll(0))

    async def _send(self, answer: HttpResponse) -> None:
        headers = [
            ("Content-Type", answer.kind),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *answer.headers,
        ]
        if answer.parts is None:
            headers.append(("Content-Length", str(len(answer.body))))
        is_head = self._is_head
        reason = HTTPStatus(answer.status).phrase.encode()
        events: list[Any] = [
            h11.Response(status_code=answer.status, headers=headers, reason=reason)
        ]
        if answer.parts is not None and not is_head:
            await self._write(*events)
            events.clear()
            async for part in answer.parts:
                await self._write(h11.Data(data=part))
        elif answer.body and not is_head:
            events.append(h11.Data(data=answer.body))
        await self._write(*events, h11.EndOfMessage())

    async def _write(self, *events: Any) -> None:
        """Send events at once, as each call of the kernel takes long."""
        data = b"".join(map(self._link.send, events))
        if data:
            self._writer.write(data)
            async with asyncio.timeout(REQUEST_S):
                await self._writer.drain()
