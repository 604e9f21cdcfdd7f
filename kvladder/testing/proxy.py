"""A network that is slow, breaks, or swallows everything: a TCP proxy for tests of clients."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

PIECE_BYTES = 64 << 10


class SlowNetwork:
    """Stands between clients and a server on loopback; an async context manager.

    Every attribute may be changed at any time, also while bytes are under way.

    Parameters
    ----------
    port:
        Where the server listens on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self.server_port = port
        self.bytes_per_s = 0.0
        """How fast each direction of a connection is; 0 means as fast as it goes."""
        self.latency_s = 0.0
        """How much later every piece arrives."""
        self.refusing = False
        """Whether new connections are closed at once."""
        self.stray = b""
        """Sent once, before the next piece that comes from the server."""
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None
        self.port = 0
        """Where clients connect to, on 127.0.0.1."""

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
        """From now on nothing arrives any more, in either direction, and nothing is closed."""
        self._open.clear()

    def deliver(self) -> None:
        """What was swallowed arrives after all."""
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
