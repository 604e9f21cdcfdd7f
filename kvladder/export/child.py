"""The process that serves clients over NIXL and ZeroMQ; the cache is in its parent process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Final, NamedTuple

from kvladder.arena import Arena, ArenaHandle
from kvladder.children.pipe import Pipe
from kvladder.children.spawn import run
from kvladder.errors import ConfigError, TierError
from kvladder.export.link import EXPORTER, LISTENER, FarOffers, Serve
from kvladder.tiers.blocking import BlockingPool

GAUGES_S: Final = 1.0
"""Seconds between two reports of this process's gauges to the parent."""
THREADS: Final = 4


class ServingStarted(NamedTuple):
    """The address at which clients are served, and a reader of the exporter's gauges."""

    address: str
    gauges: Callable[[], Mapping[str, int | dict[str, int]]]


Serving = Callable[[FarOffers, Serve], AbstractAsyncContextManager[ServingStarted]]


class ExporterOrders:
    """What the cache's process tells the exporter's to do, see ``ExporterCalls``."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.told: asyncio.Future[Serve] = loop.create_future()
        """The settings, once they have come; an OSError if the cache's process is gone before."""
        self.address: asyncio.Future[str] = loop.create_future()
        """The answer to them."""
        self.closing = asyncio.Event()
        """Set when the process must exit, because it was told to or the cache's process is gone."""

    async def serve(self, told: Serve) -> str:
        """See ``ExporterCalls``."""
        self.told.set_result(told)
        return await self.address

    def close(self) -> None:
        """See ``ExporterCalls``."""
        self.closing.set()

    async def gone(self, fault: str) -> str:
        """End what waits for the cache's process."""
        self.closing.set()
        if not self.told.done():
            self.told.set_exception(ConnectionResetError("the cache's process is gone"))
        return fault


async def attend(
    serving: Serving, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Take the settings from the parent and serve clients by ``serving`` until told to close."""
    orders = ExporterOrders()
    pipe = Pipe(reader, writer, "the cache's process", ended=orders.gone)
    pipe.answer(EXPORTER, orders)
    told = await orders.told
    fd, slots, slot_bytes = told.arena
    handle = ArenaHandle(os.getppid(), fd, slots, slot_bytes)
    arena = Arena.attach(handle, inherited=fd, writable=not told.guarded)
    offers, counted = FarOffers(arena, told, pipe), pipe.stub(LISTENER).counted
    try:
        async with serving(offers, told) as served:
            orders.address.set_result(served.address)
            while not orders.closing.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(GAUGES_S):
                        await orders.closing.wait()
                counted(dict(served.gauges()))
    except (ConfigError, TierError) as error:
        if not orders.address.done():
            orders.address.set_exception(error)
            await pipe.join()  # the parent has the answer and ends this process
    await writer.drain()
    await pipe.aclose()


@asynccontextmanager
async def over_nixl(offers: FarOffers, told: Serve) -> AsyncGenerator[ServingStarted]:
    """Serve clients over NIXL with the settings ``told`` while the context lasts."""
    try:
        from kvladder.export.announcing import announced
        from kvladder.export.exporter import exporting, raise_descriptors
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}", hint="install kvladder[nixl]") from error
    raise_descriptors()
    pool = BlockingPool(THREADS, "kvladder-export")
    clients = exporting(
        offers,
        listen=told.listen,
        keys=told.keys,
        transports=told.transports,
        interfaces=told.interfaces,
        run_blocking=pool.run,
        say=offers.say,
    )
    async with (
        clients as (address, exporter, ring),
        announced(offers, told, address, ring) as announcing,
    ):
        yield ServingStarted(address, lambda: {**exporter.gauges(), **announcing()})


if __name__ == "__main__":
    run(partial(attend, over_nixl))
