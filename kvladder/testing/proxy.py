"""TCP proxies that simulate a bad network in tests of clients: slow, broken, silent or wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TypeVar

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
        self.flip_every = 0
        """One bit of each so many bytes is inverted, in both directions; 0 inverts none."""
        self.flipped = 0
        """The number of inverted bits so far."""
        self._passed = 0
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

    def damaged(self, piece: bytes) -> bytes:
        """Return bytes as they arrive: some of them damaged, if ``flip_every`` is set."""
        if not self.flip_every:
            return piece
        first = -(self._passed + 1) % self.flip_every
        self._passed += len(piece)
        wrong = bytearray(piece)
        for at in range(first, len(piece), self.flip_every):
            wrong[at] ^= 0x40
            self.flipped += 1
        return bytes(wrong)

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
            writer.write(self.damaged(piece))
            await writer.drain()
        with suppress(OSError):
            writer.transport.abort()
        raise ConnectionResetError("the other side has closed")


N = TypeVar("N", bound=SlowNetwork)
R = TypeVar("R")


class Networks:
    """A thread that runs proxies, for tests without an event loop; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._networks: list[SlowNetwork] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for network in self._networks:
            asyncio.run_coroutine_threadsafe(network.__aexit__(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, network: N) -> N:
        """Let a proxy listen, until the end of this context; return it."""
        asyncio.run_coroutine_threadsafe(network.__aenter__(), self._loop).result()
        self._networks.append(network)
        return network

    def call(self, function: Callable[[], R]) -> R:
        """Call a method of a proxy, e.g. ``cut``, in the thread of the proxies; return its result.

        Attributes may be set in any thread.
        """

        async def called() -> R:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()
