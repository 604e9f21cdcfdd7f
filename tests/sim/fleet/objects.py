"""An object store on a simulated machine, and a client library for it over the simulated network.

The tier is the real one. The library below it, obstore, has a runtime of its own, written in Rust,
which no simulated loop can drive: ``Store`` replaces it, with its names, answers, errors and
retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from random import Random
from typing import Any

from obstore.exceptions import AlreadyExistsError, GenericError

from kvladder.tiers.object.options import ObjectOptions
from kvladder.tiers.object.tier import ObjectTier
from tests.sim.fleet.loop import FleetLoop, Process
from tests.sim.fleet.net import GIVE_UP_S, End, Net

PORT = 443
MACHINE = "bucket"
RETRIES = 3
PAGE = 5


class Bucket:
    """The server: its objects outlive its process."""

    def __init__(self, loop: FleetLoop, net: Net, random: Random) -> None:
        self.loop = loop
        self.net = net
        self.random = random
        self.objects: dict[str, bytes] = {}
        self.process: Process | None = None
        self.fault = ""
        """``refused``, ``truncated``, ``full``, ``mute``: what each second request meets."""

    def start(self) -> None:
        """Start the server."""
        if self.process is None:
            self.process = Process(MACHINE, self.loop)
            self.net.listen(self.process, PORT, lambda end: _Peer(self, end))

    def kill(self) -> None:
        """End the process; the objects stay."""
        if self.process is not None:
            self.process.die()
            self.net.gone(self.process)
            self.process = None

    def answer(self, what: str, name: str, *more: Any) -> tuple[str, Any]:
        """Carry a request out; return what kind of answer it is, and the answer."""
        fault = self.fault if self.random.random() < 0.5 else ""
        if fault == "refused":
            return "error", "503 Slow Down"
        if fault == "full" and what == "put":
            return "error", "507 Insufficient Storage"
        found = self.objects.get(name)
        if what == "list":
            return "found", sorted((n, len(d)) for n, d in self.objects.items() if n >= name)[:PAGE]
        if what == "put":
            body, mode = more
            if mode == "create" and found is not None:
                return "exists", name
            self.objects[name] = body
            answer: tuple[str, Any] = "found", len(body)
        elif found is None:
            return "absent", name
        elif what == "delete":
            del self.objects[name]
            answer = "found", 0
        elif what == "get" and fault == "truncated":
            answer = "short", found[: len(found) // 2]
        else:
            answer = "found", found
        return ("mute", None) if fault == "mute" else answer


class _Peer(asyncio.Protocol):
    """The server's end of a connection."""

    def __init__(self, bucket: Bucket, end: End) -> None:
        self.bucket = bucket
        self.end = end

    def data_received(self, data: bytes) -> None:
        kind, answer = self.bucket.answer(*self.end.other.protocol.request)
        self.end.other.protocol.answer = kind, answer
        if kind != "mute":
            self.end.write(b"answer")


class _Request(asyncio.Protocol):
    """A request over a connection of its own."""

    def __init__(self, request: tuple[Any, ...]) -> None:
        self.request = request
        self.answer: tuple[str, Any]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(b"request")

    def data_received(self, data: bytes) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(GenericError(f"error sending request: {exc}"))


class Refused(Exception):
    """The server did not get the request, or has answered that it does not carry it out."""


class Found:
    """An object that is being got."""

    def __init__(self, data: bytes, size: int, *, short: bool) -> None:
        self.meta = {"size": size}
        self._data = data
        self._short = short

    async def bytes_async(self) -> bytes:
        """Return the content; an error if the connection broke meanwhile."""
        await asyncio.sleep(0)
        if self._short:
            raise GenericError("error decoding response body")
        return self._data


class Store:
    """A client, with the calls and errors of obstore that the tier uses."""

    def __init__(self, net: Net, limit_s: float) -> None:
        self._net = net
        self._limit_s = limit_s

    async def _ask(self, *request: Any) -> Any:
        """Send a request, again after errors that may pass.

        A put that creates is not repeated if it may have reached the server. Any other put may be
        carried out twice.
        """
        repeats = request[0] != "put" or request[-1] != "create"
        wait_s = self._limit_s / 50
        for attempt in range(RETRIES + 1):
            try:
                async with asyncio.timeout(self._limit_s):
                    return await self._once(request)
            except Refused as raised:
                error, again = GenericError(str(raised)), True
            except TimeoutError:
                error, again = GenericError("operation timed out"), repeats
            except (OSError, GenericError) as raised:
                if isinstance(raised, FileNotFoundError):
                    raise
                error, again = GenericError(str(raised)), repeats
            if attempt == RETRIES or not again:
                raise error
            await asyncio.sleep(wait_s)
            wait_s *= 2
        raise AssertionError

    async def _once(self, request: tuple[Any, ...]) -> Any:
        make = partial(_Request, request)
        try:
            end, sent = await self._net.connect(make, MACHINE, PORT, whole=True)
        except OSError as error:
            raise Refused(str(error)) from error
        try:
            await sent.done
        finally:
            if not sent.done.done():
                sent.done.cancel()
            end.abort()
            if not sent.done.cancelled():
                sent.done.exception()
        kind, answer = sent.answer
        if kind == "absent":
            raise FileNotFoundError(answer)
        if kind == "exists":
            raise AlreadyExistsError(answer)
        if kind == "error":
            raise Refused(answer)
        return kind, answer

    async def get_async(self, name: str, *, options: Any = None) -> Found:
        kind, data = await self._ask("get", name)
        size = len(data) * (2 if kind == "short" else 1)
        if options is not None:
            first, last = options["range"]
            data = data[first:last]
        return Found(data, size, short=kind == "short")

    async def head_async(self, name: str) -> dict[str, Any]:
        _, data = await self._ask("head", name)
        return {"size": len(data), "path": name}

    async def put_async(self, name: str, body: Any, *, mode: str, use_multipart: bool) -> None:
        await self._ask("put", name, bytes(body), mode)

    async def delete_async(self, name: str) -> None:
        await self._ask("delete", name)

    async def list(self, prefix: str) -> AsyncIterator[list[dict[str, Any]]]:
        after = prefix
        while True:
            _, rows = await self._ask("list", after)
            mine = [row for row in rows if row[0].startswith(prefix)]
            if mine:
                yield [{"path": name, "size": size} for name, size in mine]
            if len(mine) < PAGE:
                return
            after = mine[-1][0] + "\0"


class SimObjectTier(ObjectTier):
    """The object tier over the simulated network: only the library below it is replaced."""

    late_s = GIVE_UP_S + 10.0
    """The network delivers no packet later, but a server may be stopped then."""

    def __init__(self, net: Net) -> None:
        super().__init__(ObjectOptions(url="s3://simulated/kv"))
        self._net = net

    def _made(self, limit_s: float) -> Any:
        return Store(self._net, limit_s)
