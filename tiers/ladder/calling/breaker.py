"""Guards for calls of a tier: breakers, errors that are contained, tasks that start again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from kvladder.errors import TierError

T = TypeVar("T")
State = Literal["closed", "trial", "open"]
BREAKER_STATES: tuple[State, ...] = get_args(State)
"""The states in the order of their numbers in statistics."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a level's breakers open and when they try again."""

    failures: int = 3
    """Number of failures in a row of one kind of call that opens its breaker."""
    retry_s: float = 5.0
    """Seconds until the first trial; doubled after each trial that fails."""
    retry_max_s: float = 60.0
    """Longest time between two trials."""


class Breaker:
    """Decides whether calls of one kind may begin.

    Closed: they may. Open: none may until the retry time. Trial: one is in flight, and decides. The
    trial's success closes the breaker, its failure opens it for twice as long.
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._wait_s = settings.retry_s
        self._retry_at_s = 0.0
        self.state: State = "closed"
        self.opened = 0

    def retune(self, settings: BreakerSettings) -> None:
        """Decide by other settings; an open breaker keeps the time of its next trial."""
        self._settings = settings
        self._wait_s = min(settings.retry_max_s, max(settings.retry_s, self._wait_s))
        if self.state == "closed":
            self._wait_s = settings.retry_s

    def allows(self, now_s: float) -> bool:
        """Return whether a call may begin now; changes nothing."""
        if self.state == "closed":
            return True
        return self.state == "open" and now_s >= self._retry_at_s

    def retry_in_s(self, now_s: float) -> float:
        """Return the seconds until ``allows`` may become true; 0 if it is."""
        return 0.0 if self.state == "closed" else max(0.0, self._retry_at_s - now_s)

    def begin(self, now_s: float) -> bool:
        """Return ``allows`` for a call that begins if it may; an open breaker goes to trial."""
        if not self.allows(now_s):
            return False
        if self.state == "open":
            self.state = "trial"
        return True

    def success(self) -> None:
        """Close the breaker: the tier answered."""
        self._failures = 0
        self._wait_s = self._settings.retry_s
        self.state = "closed"

    def give_up(self) -> None:
        """End a call that its caller cancelled, which says nothing of the tier."""
        if self.state == "trial":
            self.state = "open"  # the retry time is over, so the next call is the trial

    def failure(self, now_s: float) -> None:
        """Count a failure or timeout of the tier."""
        self._failures += 1
        if self.state == "trial":
            self._wait_s = min(self._wait_s * 2, self._settings.retry_max_s)
        elif self.state == "open" or self._failures < self._settings.failures:
            return
        self.state = "open"
        self.opened += 1
        self._retry_at_s = now_s + self._wait_s


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Timeout and breaker for the calls of a tier."""

    timeout_s: float = 5.0
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


PAUSE_S = 1.0
"""Seconds from the end of a task that died to its next start."""


async def supervised(
    work: Callable[[], Awaitable[None]], died: Callable[[BaseException], object]
) -> None:
    """Do ``work``, and start it again each time it dies of an error; ``died`` gets the error.

    Ends when it is cancelled or ``work`` returns.
    """
    while True:
        try:
            await work()
        except GeneratorExit:  # the loop is gone
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            died(error)
        else:
            return
        await asyncio.sleep(PAUSE_S)


async def contained(work: Awaitable[T]) -> T:
    """Await ``work`` of a tier; an exception that would end the loop becomes a TierError."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise TierError(f"the tier raised {error!r}", temporary=False) from error
