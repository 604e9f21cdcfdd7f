"""A proxy for an HTTP server that delays, cuts, truncates, damages and refuses requests."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvladder.testing.proxy import SlowNetwork

FAULTS: Sequence[str] = ("delay", "cut", "truncate", "flip", "500")
_LENGTH = re.compile(rb"(?i)(\r\ncontent-length: *)(\d+)")
_NO_BODY = re.compile(rb"HTTP/1\.\d (1\d\d|204|304)")
_REFUSED = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"


class Message(NamedTuple):
    """A request or a response."""

    head: bytes
    body: bytes
    is_last: bool = False
    """Whether the end of the connection ends the body."""

    def half(self) -> Message:
        """Return the same message with half of its body and a matching length in its head."""
        body = self.body[: len(self.body) // 2]
        head = _LENGTH.sub(rb"\g<1>%d" % len(body), self.head, count=1)
        return self._replace(head=head, body=body)

    def flipped(self) -> Message:
        """Return the same message with another bit in the middle of its body."""
        body = bytearray(self.body)
        body[len(body) // 2] ^= 0x40
        return self._replace(body=bytes(body))


class FaultyProxy(SlowNetwork):
    """A proxy between clients and an HTTP server on loopback; an async context manager."""

    def __init__(self, port: int, *, delay_s: float) -> None:
        super().__init__(port)
        self.fault = ""
        """The fault of each request from now on, one of ``FAULTS``, or none.

        ``delay``: the response is late. ``cut``: the connection breaks within the first body, the
        request's or the response's. ``truncate``: half of that body is passed on as the whole.
        ``flip``: a bit in the middle of that body is inverted.
        ``500``: the proxy gives this answer, and the server gets no request.
        """
        self.met = Counter[str]()
        """The number of requests with each fault."""
        self._delay_s = delay_s

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.server_port)
        self._writers.add(back)
        try:
            while await self._exchange(reader, writer, there, back):
                pass
        except (asyncio.IncompleteReadError, OSError):  # one side has closed
            pass
        finally:
            back.transport.abort()
            self._writers.discard(back)

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        back: asyncio.StreamWriter,
    ) -> bool:
        """Pass on one request and its response; return whether another may follow."""
        request = await _message(reader)
        fault = self.fault
        self.met[fault] += 1
        if fault == "500":
            writer.write(_REFUSED)
            await writer.drain()
            return True
        if request.body and fault in {"cut", "truncate"}:
            whole, request = request, request.half()
            if fault == "cut":
                back.write(whole.head + request.body)
                await back.drain()
                return False
            fault = ""
        elif request.body and fault == "flip":
            request, fault = request.flipped(), ""
        back.write(request.head + request.body)
        await back.drain()
        response = await _message(there, to_head=request.head.startswith(b"HEAD "))
        if fault == "delay":
            await asyncio.sleep(self._delay_s)
        elif fault == "truncate":
            response = response.half()
        elif fault == "flip" and response.body:
            response = response.flipped()
        is_cut = fault == "cut"
        body = response.half().body if is_cut else response.body
        writer.write(response.head + body)
        await writer.drain()
        return not (is_cut or response.is_last)


async def _message(reader: asyncio.StreamReader, *, to_head: bool = False) -> Message:
    """Read a message; ``to_head`` marks the answer to a request for the head alone."""
    head = await reader.readuntil(b"\r\n\r\n")
    if to_head or _NO_BODY.match(head):
        return Message(head, b"")
    if found := _LENGTH.search(head):
        return Message(head, await reader.readexactly(int(found[2])))
    if head.startswith(b"HTTP/"):
        return Message(head, await reader.read(), is_last=True)
    return Message(head, b"")
