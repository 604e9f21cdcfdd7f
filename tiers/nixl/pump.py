"""Keeps a data plane going while something is under way on it, and knows when that ends."""

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
"""Between two polls of which the first moved nothing. An event loop's timers take 1 ms at least."""
NAPS = 200
"""After so many of them nothing is expected soon: what follows are timers."""
REST_S = 1e-3


def doze() -> None:
    """Let others have the processor for a moment; in a process where nobody else needs the loop."""
    select.select([], [], [], NAP_S)


class Pump:
    """Polls a plane, which moves bytes at no other time.

    Parameters
    ----------
    failed:
        Called once, when the plane says that the connection has failed.
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
        """What is to be posted, which takes until most of the bytes are on their way."""
        self._users = 0
        self._still = 0
        """Polls since something moved."""
        self._due: asyncio.Handle | None = None
        self._error: TierError | None = None

    def begin(self) -> None:
        """From now on the other end may write to slots here, until as many calls of ``end``."""
        self._users += 1
        self._wake()

    def end(self) -> None:
        """One of those that began has ended."""
        self._users -= 1

    @contextmanager
    def busy(self) -> Generator[None]:
        """While it lasts, the other end may write to slots here."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def write(
        self, own: Sequence[int], far: Sequence[int], lengths: Sequence[int]
    ) -> asyncio.Future[None]:
        """As ``Plane.write``; done when it is over, a TierError if it failed. Do not cancel it.

        One is posted after the other, and in between it is seen which have ended.
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
        """The plane is destroyed: what is under way has failed."""
        self._error = error
        if self._due is not None:
            self._due.cancel()
        for future in (*self._writes, *(future for future, _ in self._waiting)):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody waits any more
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
        """Whether there was a write to be posted."""
        if not self._waiting or self._error is not None:
            return False
        future, post = self._waiting.popleft()
        try:
            self._writes[future] = post()
        except TierError as error:
            self._failed(error)  # some of it may be under way
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody waits any more
        return True

    def _poll(self) -> bool:
        """Whether anything may have moved."""
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
