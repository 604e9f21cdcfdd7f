"""The gate in front of a tier: deadlines, the circuit breaker, and what a failure becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvladder.arena import Slot
from kvladder.errors import TierError, TierFull
from kvladder.metrics import LevelStats
from kvladder.tiers.base import Shared
from kvladder.tiers.breaker import Breaker, BreakerSettings

Results = Sequence[bool | None]
Operation = Callable[[], Awaitable[Results]]


class Answer(NamedTuple):
    """What came of a call."""

    results: Results | None
    """What the tier returned; None if it failed, hung or was not called."""
    quiet: bool = True
    """Whether the tier no longer touches the slots and places of the call."""
    full: bool = False
    """Whether it failed because the medium is full."""


@dataclass(frozen=True, slots=True)
class GateSettings:
    """How long a tier may take and when it is left alone."""

    timeout_s: float = 5.0
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


class Gate:
    """Calls a tier so that nothing it does reaches further than a None.

    A claim on each slot is held until the tier no longer touches it. A call that is not over at
    its deadline is cancelled and left behind, its slots quarantined until it has really ended.
    """

    def __init__(
        self, name: str, settings: GateSettings, shared: Shared, stats: LevelStats
    ) -> None:
        self.breaker = Breaker(settings.breaker)
        self._name = name
        self._settings = settings
        self._shared = shared
        self._stats = stats
        self._calls: set[asyncio.Task[Results]] = set()
        self._closing = False

    def open(self) -> bool:
        """Whether the tier may be called now."""
        return self.breaker.allows(self._shared.clock.now())

    @property
    def ill(self) -> bool:
        """Whether the last that is known of the tier is that it failed too often."""
        return self.breaker.state != "closed"

    @property
    def retry_in_s(self) -> float:
        """Seconds until the tier may be called again; 0 if it may be called now."""
        if self.breaker.state == "trial":  # which is over by then
            return self._settings.timeout_s
        return self.breaker.retry_in_s(self._shared.clock.now())

    async def call(
        self,
        operation: Operation,
        slots: Sequence[Slot],
        late: Callable[[], None],
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Call the tier. If it is left behind, ``late`` runs under the lock when it has ended."""
        shared = self._shared
        timeout_s = self._settings.timeout_s if timeout_s is None else timeout_s
        if not self.breaker.begin(shared.clock.now()):
            return Answer(None)
        shared.arena.share(slots)

        async def calling() -> Results:
            return await operation()

        task = asyncio.create_task(calling(), name=f"kvladder-call-{self._name}")
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left_behind = False

        def quiet(task: asyncio.Task[Results]) -> None:
            self._calls.discard(task)
            with shared.lock:
                shared.arena.release(slots)
                if left_behind:
                    late()
            if not task.cancelled():
                task.exception()  # seen: asyncio must not report it as lost
            if not ended.done():
                ended.set_result(None)

        self._calls.add(task)
        task.add_done_callback(quiet)
        try:
            await asyncio.wait({ended}, timeout=timeout_s)
        finally:  # cancelled: the cache closes, and the tier has failed at nothing
            left_behind = not ended.done()
            if left_behind:
                task.cancel()
        if left_behind:
            self._failed(f"no answer within {timeout_s:g} s")
            self._stats.timeouts += 1
            return Answer(None, quiet=False)
        return self._answer(task, moves_bytes=bool(slots))

    def _answer(self, task: asyncio.Task[Results], *, moves_bytes: bool) -> Answer:
        if task.cancelled():
            self._failed("it cancelled the call")
            return Answer(None)
        error = task.exception()
        # a removal that finds no room has failed, or it would be tried again at once
        if error is None or (moves_bytes and isinstance(error, TierFull)):
            self.breaker.success()
            return Answer(None, full=True) if error else Answer(task.result())
        self._failed(str(error) if isinstance(error, TierError) else repr(error))
        return Answer(None)

    def _failed(self, why: str) -> None:
        if self._closing:
            return
        self._stats.errors += 1
        self.breaker.failure(self._shared.clock.now())
        then = " and is left alone for a while" if self.breaker.state == "open" else ""
        self._shared.notices.say(self._name, f"tier {self._name} failed{then}: {why}")

    async def aclose(self) -> None:
        """Cancel what is under way and wait for it, but not longer than for any call."""
        self._closing = True
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=self._settings.timeout_s)
