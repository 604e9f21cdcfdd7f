"""The limits of media: the same bytes moved by plain means, without a tier."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvladder.errors import needed
from kvladder.measuring.blocks import KIB, MIB, Blocks, copied, timed_raw
from kvladder.measuring.files import RawFile, Threads, whole
from kvladder.tiers.context import Blocking
from kvladder.tiers.redis.resp import STEP_BYTES, encode, encode_around
from kvladder.tiers.redis.url import RedisOptions

PIECE_BYTES = 4 * MIB
"""Longest call to a disk."""


class RawRedis:
    """A minimal client of one Redis server: one blocking socket.

    Parameters
    ----------
    address:
        Host and port, or the path of a Unix socket and 0.
    first:
        Commands that log in, each answered with OK.
    prefix:
        Beginning of the names of all its keys.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        tls: ssl.SSLContext | None = None,
        first: Sequence[Sequence[bytes | int]] = (),
        prefix: bytes = b"raw:",
        timeout_s: float = 30.0,
    ) -> None:
        self._prefix = prefix
        host, port = address
        if port:
            self._socket = socket.create_connection(address, timeout=timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(timeout_s)
            self._socket.connect(host)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        self._file = self._socket.makefile("rb", buffering=64 * KIB)
        for command in first:
            self._socket.sendall(encode(*command))
            self._require(b"+OK\r\n")

    def name(self, number: int) -> bytes:
        """Return the key of a value."""
        return self._prefix + b"%d" % number

    def _require(self, wanted: bytes) -> None:
        if (reply := self._file.readline()) != wanted:
            raise OSError(f"the server answered {reply[:80]!r}")

    def set(self, values: Sequence[memoryview]) -> None:
        """Store values, pipelined."""
        parts: list[bytes | memoryview] = []
        for number, value in enumerate(values):
            before, after = encode_around(b"SET", self.name(number), length=len(value))
            parts += [before, value, after]
        while parts:
            sent = self._sent(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = memoryview(parts[0])[sent:]
        for _ in values:
            self._require(b"+OK\r\n")

    def _sent(self, parts: Sequence[bytes | memoryview]) -> int:
        if isinstance(self._socket, ssl.SSLSocket):  # which has no sendmsg
            return self._socket.send(parts[0])
        return self._socket.sendmsg(parts[:512])

    def delete(self, names: Sequence[bytes]) -> None:
        """Let the server free the memory of the values, as ours does."""
        self._socket.sendall(encode(b"UNLINK", *names))
        self._file.readline()

    def get(self, values: Sequence[memoryview]) -> None:
        """Fetch the values, each into its memory, with few requests ahead, as in ours."""
        reader: Any = self._file
        ahead = max(1, 2 * STEP_BYTES // len(values[0]))
        asked = 0
        for number, value in enumerate(values):
            if asked == number or asked - number <= ahead // 2:
                end = min(len(values), number + ahead)
                names = (self.name(n) for n in range(asked, end))
                self._socket.sendall(b"".join(encode(b"GET", name) for name in names))
                asked = end
            self._require(b"$%d\r\n" % len(value))
            filled = 0
            while filled < len(value):
                got: int = reader.readinto1(value[filled:])
                if not got:
                    raise OSError("the server ended the connection")
                filled += got
            self._file.read(2)

    def exist(self, names: Sequence[bytes]) -> None:
        """Ask about keys, pipelined."""
        self._socket.sendall(b"".join(encode(b"EXISTS", name) for name in names))
        for _ in names:
            self._require(b":1\r\n")

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


class Limit(ABC):
    """Moves blocks by plain means. ``write`` and ``read`` return the seconds that it takes."""

    name = ""
    """The means, in a few words."""

    @abstractmethod
    async def write(self, count: int) -> float:
        """Write the first ``count`` blocks."""

    @abstractmethod
    async def read(self, count: int) -> float:
        """Read them again."""

    async def remove(self) -> None:
        """Remove all that it wrote."""

    async def aclose(self) -> None:
        """Release every resource."""


class CopyLimit(Limit):
    """Copies blocks in memory, if nothing closer to the medium can be asked."""

    name = "memcpy"

    def __init__(self, blocks: Blocks, run: Blocking) -> None:
        self._blocks, self._run = blocks, run

    async def write(self, count: int) -> float:
        took: float = await self._run(timed_raw, copied(self._blocks, count))
        return took

    async def read(self, count: int) -> float:
        return await self.write(count)


class FileLimit(Limit):
    """Writes and reads one preallocated file, with as many threads as the tier has."""

    def __init__(
        self, path: Path, blocks: Blocks, run: Blocking, *, direct: bool, threads: int
    ) -> None:
        self.name = "raw O_DIRECT" if direct else "raw, page cache"
        size = blocks.arena.slot_bytes * len(blocks.slots)
        made = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(made, 0, size)
        finally:
            os.close(made)
        self._slot_bytes = blocks.arena.slot_bytes
        self._memory = whole(blocks.arena)
        self._file, self._run = RawFile(path, self._memory, direct=direct), run
        self._threads = Threads(threads)

    async def _move(self, way: str, count: int) -> float:
        length, end = min(self._slot_bytes, PIECE_BYTES), count * self._slot_bytes
        took: float = await self._run(self._file.seconds, way, self._threads, length, 0, end)
        return took

    async def write(self, count: int) -> float:
        return await self._move("write", count)

    async def read(self, count: int) -> float:
        return await self._move("read", count)

    async def aclose(self) -> None:
        self._threads.close()
        self._file.close()


class RedisLimit(Limit):
    """Sends the same values by the bare protocol, over one blocking socket."""

    name = "raw RESP"

    def __init__(self, options: RedisOptions, prefix: str, blocks: Blocks, run: Blocking) -> None:
        self._options, self._prefix, self._run = options, prefix.encode(), run
        self._views = [view[: blocks.size] for view in blocks.views]
        self._raw: RawRedis | None = None

    def _connected(self) -> RawRedis:
        if self._raw is None:
            options, url = self._options, self._options.parsed
            user = options.username or url.username
            password = options.password or url.password
            first: list[Sequence[bytes | int]] = []
            if user or password:
                first.append((b"AUTH", (user or "default").encode(), password.encode()))
            if url.db:
                first.append((b"SELECT", url.db))
            tls = None
            if url.tls:
                tls = ssl.create_default_context(cafile=options.ca or None)
                if options.certificate:
                    tls.load_cert_chain(options.certificate, options.certificate_key)
            self._raw = RawRedis(url.addresses[0], tls=tls, first=first, prefix=self._prefix)
        return self._raw

    async def _timed(self, call: Callable[[RawRedis], object]) -> float:
        raw = await self._run(self._connected)
        took: float = await self._run(timed_raw, lambda: call(raw))
        return took

    async def write(self, count: int) -> float:
        await self.remove()
        return await self._timed(lambda raw: raw.set(self._views[:count]))

    async def read(self, count: int) -> float:
        return await self._timed(lambda raw: raw.get(self._views[:count]))

    async def remove(self) -> None:
        await self._timed(lambda raw: raw.delete([*map(raw.name, range(len(self._views)))]))

    async def aclose(self) -> None:
        if self._raw is not None:
            self._raw.close()


class StoreLimit(Limit):
    """Puts and gets the same bytes by obstore alone, with as many requests at once."""

    name = "obstore alone"

    def __init__(
        self,
        url: str,
        options: tuple[Mapping[str, Any], Mapping[str, Any]],
        prefix: str,
        blocks: Blocks,
        timeout_s: float,
    ) -> None:
        with needed("object"):
            from obstore import store
        config, client = options
        limit = timedelta(seconds=timeout_s)
        given: dict[str, Any] = {"config": config, "client_options": {"timeout": limit, **client}}
        make: Any = store.from_url
        self._store = make(url, **({} if url.startswith("file:") else given))
        self._prefix = prefix
        self._views = [view[: blocks.size] for view in blocks.views]
        self._written = 0

    def _name(self, number: int) -> str:
        return f"{self._prefix}/{number}"

    async def write(self, count: int) -> float:
        self._written = max(self._written, count)
        began = time.perf_counter()
        await asyncio.gather(
            *(
                self._store.put_async(self._name(n), view, use_multipart=False)
                for n, view in enumerate(self._views[:count])
            )
        )
        return time.perf_counter() - began

    async def read(self, count: int) -> float:
        async def one(number: int, view: memoryview) -> None:
            found = await self._store.get_async(self._name(number))
            view[:] = memoryview(await found.bytes_async()).cast("B")

        began = time.perf_counter()
        await asyncio.gather(*(one(n, view) for n, view in enumerate(self._views[:count])))
        return time.perf_counter() - began

    async def remove(self) -> None:
        names = [self._name(number) for number in range(self._written)]
        await asyncio.gather(
            *(self._store.delete_async(name) for name in names), return_exceptions=True
        )
