"""The process that serves clients over NIXL and ZeroMQ; the cache is in its parent process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Final, NamedTuple

from kvladder.arena import Arena, ArenaHandle
from kvladder.errors import ConfigError, TierError
from kvladder.export.link import FarOffers, Gauges, Serve, from_parent
from kvladder.tiers.blocking import BlockingPool
from kvladder.tiers.isolated.child import failure
from kvladder.tiers.isolated.spawn import run
from kvladder.tiers.isolated.wire import Close, Done, frame, take

GAUGES_S: Final = 1.0
"""Seconds between two reports of this process's gauges to the parent."""
THREADS: Final = 4


class ServingStarted(NamedTuple):
    """The address at which clients are served, and a reader of the exporter's gauges."""

    address: str
    gauges: Callable[[], Mapping[str, int]]


Serving = Callable[[FarOffers, Serve], AbstractAsyncContextManager[ServingStarted]]


async def attend(
    serving: Serving, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Read the settings from the parent and serve clients by ``serving`` until told to close."""
    told = from_parent.decode(await take(reader))
    assert isinstance(told, Serve), told
    fd, slots, slot_bytes = told.arena
    handle = ArenaHandle(os.getppid(), fd, slots, slot_bytes)
    arena = Arena.attach(handle, inherited=fd, writable=not told.guarded)
    offers, closing = FarOffers(arena, told, writer), asyncio.Event()
    reading = asyncio.create_task(_read(reader, offers, closing))
    try:
        async with serving(offers, told) as served:
            writer.write(frame(Done(value=served.address)))
            while not closing.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(GAUGES_S):
                        await closing.wait()
                writer.write(frame(Gauges(counts=dict(served.gauges()))))
    except (ConfigError, TierError) as error:
        writer.write(frame(failure(0, error)))
    await writer.drain()
    reading.cancel()


async def _read(reader: asyncio.StreamReader, offers: FarOffers, closing: asyncio.Event) -> None:
    """Pass the parent's answers to ``offers``; set ``closing`` on Close or at the end of input."""
    try:
        while True:
            message = from_parent.decode(await take(reader))
            if isinstance(message, Close):
                closing.set()
            else:
                offers.take(message)
    finally:
        closing.set()


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
    )
    async with clients as (address, exporter), announced(offers, told, address) as announcing:
        yield ServingStarted(address, lambda: {**exporter.gauges(), **announcing()})


if __name__ == "__main__":
    run(partial(attend, over_nixl))
