"""Polls a data plane while transfers are in flight, and tells when they end."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from kvladder.errors import TierError
from kvladder.tiers.nixl.plane import Plane, Posted

NAP_S = 50e-6
"""Seconds to block after a poll that moved nothing; timers of an event loop take at least 1 ms."""
NAPS = 200
"""Number of idle polls in a row after which timers replace the naps."""
REST_S = 1e-3


def doze() -> None:
    """Free the processor for a moment by blocking the loop; only for processes of one tier."""
    select.select([], [], [], NAP_S)


class Pump:
    """Polls a plane, which moves bytes only while it is polled.

    Parameters
    ----------
    failed:
        Called with the error when the plane reports that the connection has failed; it may be
        called again.
    nap:
        Blocks the loop for a moment.
    """

    def __init__(
        self, plane: Plane, failed: Callable[[TierError], None], nap: Callable[[], None] = doze
    ) -> None:
        self._plane = plane
        self._failed = failed
        self._nap = nap
        self._loop = asyncio.get_running_loop()
        self._writes: dict[asyncio.Future[None], Posted] = {}
        self._waiting: deque[tuple[asyncio.Future[None], Callable[[], Posted]]] = deque()
        """Writes to be posted; posting one takes until most of its bytes are on their way."""
        self._users = 0
        self._still = 0
        """Number of polls since something moved."""
        self._due: asyncio.Handle | None = None
        self._error: TierError | None = None

    def begin(self) -> None:
        """Poll from now on, since the other end may write to slots here; pair it with ``end``."""
        self._users += 1
        self._wake()

    def end(self) -> None:
        """End one ``begin``."""
        self._users -= 1

    @contextmanager
    def busy(self) -> Generator[None]:
        """Poll while the body runs, since the other end may write to slots here."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def write(
        self, own: Sequence[int], far: Sequence[int], lengths: Sequence[int]
    ) -> asyncio.Future[None]:
        """Queue a ``Plane.write``, and return a future that is done when the write is over.

        If the write fails, the future raises TierError. Do not cancel the future. Writes are
        posted one after the other; between two posts, the pump polls for writes that have ended.
        """
        if self._error is not None:
            raise self._error
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((future, partial(self._plane.write, own, far, lengths)))
        self._wake()
        return future

    def touch(self) -> None:
        """Poll once."""
        if self._error is None:
            self._poll()

    def close(self, error: TierError) -> None:
        """Stop polling and fail all writes with ``error``; called when the plane is destroyed."""
        self._error = error
        if self._due is not None:
            self._due.cancel()
        for future in (*self._writes, *(future for future, _ in self._waiting)):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark it as retrieved: the write may have no waiter any more
        self._writes.clear()
        self._waiting.clear()

    def _wake(self) -> None:
        self._still = 0
        if isinstance(self._due, asyncio.TimerHandle):
            self._due.cancel()
            self._due = None
        if self._error is None and self._due is None:
            self._due = self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._due = None
        posted = self._post()
        self._still = 0 if self._poll() or posted else self._still + 1
        if self._error is not None or not (self._users or self._writes or self._waiting):
            return
        if self._still > NAPS:
            self._due = self._loop.call_later(REST_S, self._step)
            return
        if self._still:
            self._nap()
        self._due = self._loop.call_soon(self._step)

    def _post(self) -> bool:
        """Post the next queued write; return whether there was one."""
        if not self._waiting or self._error is not None:
            return False
        future, post = self._waiting.popleft()
        try:
            self._writes[future] = post()
        except TierError as error:
            self._failed(error)  # a part of the write may be in flight
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark it as retrieved: the write may have no waiter any more
        return True

    def _poll(self) -> bool:
        """Poll once and complete ended writes; return whether anything may have moved."""
        try:
            moved = self._plane.progress()
            for future, posted in list(self._writes.items()):
                if self._plane.ended(posted):
                    moved = True
                    del self._writes[future]
                    future.set_result(None)
        except TierError as error:
            self._failed(error)
            return False
        return moved
