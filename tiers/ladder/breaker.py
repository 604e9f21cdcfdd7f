"""Guards for calls of a tier: breakers, answers that are checked, errors that are contained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Sized
from dataclasses import dataclass, field
from types import NoneType
from typing import Literal, NoReturn, TypeVar, cast, get_args

import numpy as np

from kvladder.errors import TierError

T = TypeVar("T")
Results = Sequence[bool | None]
State = Literal["closed", "trial", "open"]
BREAKER_STATES: tuple[State, ...] = get_args(State)
"""The states in the order of their numbers in statistics."""
Kind = Literal["get", "put", "remove", "contains"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds of calls. Each has a breaker, as success of one kind says nothing about another."""


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


_BOOLEANS = (bool, np.bool_)
_MAYBES = (*_BOOLEANS, NoneType)


async def contained(work: Awaitable[T]) -> T:
    """Await ``work`` of a tier; an exception that would end the loop becomes a TierError."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise TierError(f"the tier raised {error!r}", temporary=False) from error


def checked(kind: Kind, answer: object, count: int) -> Results:
    """Return the answer to a call about ``count`` blocks; raise TierError if it is malformed."""
    said, right = _listed(answer), _MAYBES if kind == "get" else _BOOLEANS
    if said is None or len(said) != count:
        return wrong(f"{count} booleans", answer)
    if {*map(type, said)} == {bool}:  # as nearly always
        return cast("list[bool]", said)
    if not all(isinstance(one, right) for one in said):
        return wrong(f"{count} booleans", answer)
    return [None if one is None else bool(one) for one in said]


def _listed(answer: object) -> list[object] | None:
    return list(cast("Sequence[object]", answer)) if isinstance(answer, Sequence) else None


def wrong(expected: str, answer: object) -> NoReturn:
    """Raise a TierError: the tier did not answer with what was ``expected``."""
    size = f" of {len(answer)}" if isinstance(answer, Sized) else ""
    said = f"{type(answer).__name__}{size}"
    raise TierError(f"the tier answered with {said}, expected {expected}", temporary=False)
