"""Starts and watches the process that serves the clients of a cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from kvladder.children.pipe import Pipe
from kvladder.children.spawn import Spawned, start_again
from kvladder.config.settings import ExportConfig
from kvladder.errors import ClosedError, ConfigError, TierError
from kvladder.export.bounds import (
    HANDSHAKE_MS,
    HELD_S,
    MESSAGES_MAX,
    OPERATIONS_MAX,
    SESSIONS_MAX,
)
from kvladder.export.cache import CacheOffers
from kvladder.export.link import EXPORTER, LISTENER, OFFERS, Serve
from kvladder.metrics import largest
from kvladder.schema import within
from kvladder.tiers.isolated.process import START_S
from kvladder.tiers.ladder.stack import Portal
from kvladder.tiers.nixl.messages import FRAME_BYTES_MAX

CHILD: Final = "kvladder.export.child"
CLOSE_S: Final = 2.0
"""Seconds in which the child must disconnect its clients."""


class Export:
    """Serves the clients of a cache in a child that maps the arena, so NIXL may crash there.

    When a child has died and been waited for, all that it held is free. Another one then starts
    in the background, at the same port. Ended by ``close``.

    Parameters
    ----------
    say:
        Called with messages to the operator of the cache: a kind, and a sentence.
    module:
        The module that the child runs.

    Raises
    ------
    ConfigError
        Clients cannot be served: the address is in use, the file of keys is wrong, or a library
        is missing.
    """

    def __init__(
        self,
        offers: CacheOffers,
        portal: Portal,
        config: ExportConfig,
        say: Callable[[str, str], object],
        *,
        module: str = CHILD,
    ) -> None:
        self._offers = offers
        self._portal = portal
        self._config = config
        self._say = say
        self._module = module
        self._spawned: Spawned
        self._pipe: Pipe | None = None
        self._starting: asyncio.Task[None] | None = None
        self._process = 0
        """Process id of the child; 0 while no child serves."""
        self._ends = 0
        self._gauges: dict[str, int | dict[str, int]] = {}
        self._closed = False
        self.address = config.listen or ""
        """Host and port at which clients are served."""
        if not self._guarded:
            why = "because of export.transports or of huge pages"
            say("export", f"clients can write to all slots, {why}")
        try:
            portal.call(self._start())
        except TierError as error:
            raise ConfigError(str(error), path="export") from error

    def counts(self) -> dict[str, Any]:
        """Return the counters, the child's process id and the port, as plain data."""
        own = {"process": self._process, "process_ends": self._ends}
        own["port"] = int(self.address.rpartition(":")[2])
        return {**self._offers.counts(), **self._gauges, **own}

    def describe(self) -> list[str]:
        """Return the bounds of each client and of all, and how much of them is in use."""
        offers, gauges = self._offers, self._gauges
        pinned, granted = offers.held_by()
        pending, messages = gauges.get("client_requests"), gauges.get("client_messages")
        return [
            f"clients at {self.address}: {offers.counts()['sessions']} of {SESSIONS_MAX}",
            f"  most slots granted: {largest(granted)}; at most {offers.granted_max} a session",
            f"  most slots pinned: {largest(pinned)}; at most {offers.pinned_max} by all",
            f"  a session holds slots for at most {HELD_S:g} s",
            f"  most requests: {_largest(pending)}; at most {OPERATIONS_MAX} a session",
            f"  most messages in a second: {_largest(messages)}; at most {MESSAGES_MAX} a session",
            f"  a message has at most {FRAME_BYTES_MAX >> 10} KiB",
            f"  a connection shows its key within {HANDSHAKE_MS / 1000:g} s",
        ]

    # ---- the child

    @property
    def _guarded(self) -> bool:
        """True if the child can confine clients to the slots that they are granted.

        It cannot protect reserved huge pages, nor memory that a network card writes to.
        """
        offers = self._offers
        return not offers.writable or (self._config.transports == "tcp" and not offers.arena.huge)

    @contextmanager
    def _descriptor(self) -> Generator[int]:
        """Yield the arena's descriptor for the child: a read-only one if clients only read."""
        fd = self._offers.arena.handle.fd
        if self._offers.writable:
            yield fd
            return
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield own
        finally:
            os.close(own)

    async def _start(self) -> None:
        """Start a child and wait until it serves; kill it if that fails."""
        handle = self._offers.arena.handle
        try:
            with self._descriptor() as fd:
                spawned = await Spawned.start(self._module, [fd])
        except OSError as error:
            raise TierError(f"cannot start the process for clients: {error}") from error
        pipe = Pipe(
            spawned.reader,
            spawned.writer,
            "the process for clients",
            ended=partial(self._gone, spawned),
            late=spawned.kill,  # at once: only ``serve`` is called
        )
        pipe.answer(OFFERS, self._offers)
        pipe.answer(LISTENER, self)
        self._spawned, self._pipe = spawned, pipe
        told = Serve(
            arena=(fd, handle.slots, handle.slot_bytes),
            block_bytes_max=self._offers.block_bytes_max,
            writable=self._offers.writable,
            guarded=self._guarded,
            listen=self.address,
            keys=self._config.keys,
            transports=self._config.transports,
            interfaces=self._config.interfaces,
            roster=self._config.roster,
            host=self._config.at,
            name=self._config.name,
            namespace=self._offers.namespace,
        )
        try:
            async with asyncio.timeout(START_S):
                self.address = await pipe.stub(EXPORTER).serve(told)
        except BaseException as error:
            spawned.kill()
            await pipe.join()
            if isinstance(error, TimeoutError):
                raise TierError(f"the process for clients did not start in {START_S} s") from error
            if isinstance(error, ConfigError):
                raise within("export", error) from error
            raise
        self._process = spawned.pid

    def said(self, text: str) -> None:
        """See ``ExportListener``."""
        self._say("export", text)

    def counted(self, counts: dict[str, int | dict[str, int]]) -> None:
        """See ``ExportListener``."""
        self._gauges = counts

    async def _gone(self, spawned: Spawned, fault: str) -> str:
        """Wait for the child's death, then free all that it held; kill it first for a fault."""
        if fault:
            spawned.kill(fault)
        await spawned.end()
        await self._offers.all_gone()
        self._ended(spawned)
        return f"the process for clients has ended: {spawned.how}"

    def _ended(self, spawned: Spawned) -> None:
        """Start another child if the dead one had served."""
        if self._process == spawned.pid and not self._closed:
            self._process = 0
            self._ends += 1
            self._say("export", f"the process for clients has ended: {spawned.how}: restarting")
            again = start_again(self._start, self._not_started)
            self._starting = asyncio.create_task(again, name="kvladder-export-start")

    def _not_started(self, error: Exception) -> None:
        self._say("export", f"cannot restart the process for clients: {error}")

    # ---- the end

    def close(self) -> None:
        """Disconnect the clients and end the child; may be called again."""
        with suppress(TimeoutError, ClosedError):
            self._portal.call(self.aclose(), timeout_s=CLOSE_S + 1.0)

    async def aclose(self) -> None:
        """Do the same as ``close``, on the loop."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self._pipe is not None:
            self._pipe.stub(EXPORTER).close()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._pipe.join()
            self._spawned.kill()
            await self._pipe.join()
        self._process = 0


def _largest(held: int | dict[str, int] | None) -> str:
    """Return the client that holds most, of a gauge by client; 0 before the first report."""
    return largest(held) if isinstance(held, dict) else "0"
