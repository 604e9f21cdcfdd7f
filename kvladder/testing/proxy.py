"""A TCP proxy that simulates a bad network in tests of clients: slow, broken or silent."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

PIECE_BYTES = 64 << 10


class SlowNetwork:
    """A proxy between clients and a server on loopback; an async context manager.

    Every attribute may be changed at any time, also while bytes are in flight.

    Parameters
    ----------
    port:
        The port of 127.0.0.1 at which the server listens.
    """

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.bytes_per_s = 0.0
        """Speed of each direction of a connection; 0 means no limit."""
        self.latency_s = 0.0
        """Seconds by which every piece is delayed."""
        self.refusing = False
        """True to close new connections at once."""
        self.stray = b""
        """Bytes to send once, before the next piece from the server."""
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None
        self.port = 0
        """The port of 127.0.0.1 to which clients connect."""

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def swallow(self) -> None:
        """Hold back all bytes from now on, in both directions, without closing a connection."""
        self._open.clear()

    def deliver(self) -> None:
        """Deliver the bytes that ``swallow`` held back, and carry on as before."""
        self._open.set()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if not self.refusing:
                await self._join(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.server_port)
        self._writers.add(back)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, back))
                group.create_task(self._carry(there, writer, replies=True))
        except* OSError:
            pass
        finally:
            back.transport.abort()
            self._writers.discard(back)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool = False
    ) -> None:
        while piece := await reader.read(PIECE_BYTES):
            wait_s = self.latency_s
            if self.bytes_per_s:
                wait_s += len(piece) / self.bytes_per_s
            if wait_s:
                await asyncio.sleep(wait_s)
            await self._open.wait()
            if replies:
                piece, self.stray = self.stray + piece, b""
            writer.write(piece)
            await writer.drain()
        with suppress(OSError):
            writer.transport.abort()
        raise ConnectionResetError("the other side has closed")
