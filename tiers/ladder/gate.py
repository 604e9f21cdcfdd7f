"""The gate in front of a tier: deadlines, circuit breakers, and what a failure becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from math import isnan
from types import NoneType
from typing import Literal, NamedTuple, NoReturn, TypeVar, cast, get_args

import numpy as np

from kvladder.arena import Slot
from kvladder.errors import TierError, TierFull
from kvladder.metrics import LevelStats
from kvladder.tiers.base import Shared, Tier

State = Literal["closed", "trial", "open"]
BREAKER_STATES: tuple[State, ...] = get_args(State)
"""In the order of their numbers in statistics."""
Kind = Literal["get", "put", "remove", "contains"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds of calls; a breaker each, since a success of one says nothing of another."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a level's breakers open and when they try again."""

    failures: int = 3
    """Failures in a row of one kind of call after which that kind is left out."""
    retry_s: float = 5.0
    """Seconds until the first trial; doubled after each trial that fails."""
    retry_max_s: float = 60.0
    """The longest time between two trials."""


class Breaker:
    """Decides whether calls of one kind may begin.

    Closed: they may. Open: none may until the retry time. Trial: one is under way, and decides.
    The trial's success closes the breaker, its failure opens it for twice as long.
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._wait_s = settings.retry_s
        self._retry_at_s = 0.0
        self.state: State = "closed"
        self.opened = 0

    def allows(self, now_s: float) -> bool:
        """Whether a call may begin now; changes nothing."""
        if self.state == "closed":
            return True
        return self.state == "open" and now_s >= self._retry_at_s

    def retry_in_s(self, now_s: float) -> float:
        """Seconds until ``allows`` may become true; 0 if it is."""
        return 0.0 if self.state == "closed" else max(0.0, self._retry_at_s - now_s)

    def begin(self, now_s: float) -> bool:
        """Like ``allows``, for a call that does begin: from open it becomes the trial."""
        if not self.allows(now_s):
            return False
        if self.state == "open":
            self.state = "trial"
        return True

    def success(self) -> None:
        """The tier answered."""
        self._failures = 0
        self._wait_s = self._settings.retry_s
        self.state = "closed"

    def give_up(self) -> None:
        """A call that had begun was ended from here, and tells nothing of the tier."""
        if self.state == "trial":
            self.state = "open"  # its time has come already: the next call is the trial

    def failure(self, now_s: float) -> None:
        """The tier failed or did not answer in time."""
        self._failures += 1
        if self.state == "trial":
            self._wait_s = min(self._wait_s * 2, self._settings.retry_max_s)
        elif self.state == "open" or self._failures < self._settings.failures:
            return
        self.state = "open"
        self.opened += 1
        self._retry_at_s = now_s + self._wait_s


PAUSE_S = 1.0
"""From the end of a task that died to its next start."""


async def supervised(
    work: Callable[[], Awaitable[None]], died: Callable[[BaseException], object]
) -> None:
    """Do ``work``, and begin anew each time it dies of an error, which ``died`` is told.

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


T = TypeVar("T")
Results = Sequence[bool | None]
Operation = Callable[[], Awaitable[object]]

BEHIND_CALLS_MAX = 8
"""Calls left behind and not ended yet from which on a tier is not called at all."""
BEHIND_SLOTS_SHARE = 4
"""The same for the slots that they keep: from one in so many of the arena's on."""
BEHIND_AFTER_S = 0.1
"""Within this time a call that was cancelled may end before it counts for that."""
_BOOLEANS = (bool, np.bool_)
_MAYBES = (*_BOOLEANS, NoneType)
_VERBS: Mapping[Kind, str] = {
    "get": "read",
    "put": "write",
    "remove": "remove",
    "contains": "answer what it has",
}


class Answer(NamedTuple):
    """What came of a call."""

    results: Results | None
    """What the tier returned; None if it failed, hung or was not called."""
    quiet: bool = True
    """Whether the tier no longer touches the slots and places of the call."""
    full: bool = False
    """Whether it failed because the medium is full."""


class Said(NamedTuple):
    """What a tier says of itself, for statistics."""

    gauges: dict[str, int]
    corrupt_blocks: int


@dataclass(frozen=True, slots=True)
class GateSettings:
    """How long a tier may take and when it is left alone."""

    timeout_s: float = 5.0
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


async def contained(work: Awaitable[T]) -> T:
    """``work``, of a tier. What would end the loop that it runs on becomes a TierError."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise TierError(f"it raised {error!r}", temporary=False) from error


class Gate:
    """Calls a tier so that nothing it does reaches further than a None.

    A claim on each slot is held until the tier no longer touches it. A call that is not over at
    its deadline is cancelled and left behind, its slots quarantined until it has really ended. Each
    kind of call has a breaker; and when too many calls are left behind, none begins until they end.

    Parameters
    ----------
    wake:
        Called on the loop thread when a tier that had too many calls left behind has fewer.
    """

    def __init__(
        self,
        name: str,
        settings: GateSettings,
        shared: Shared,
        stats: LevelStats,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.breakers = {kind: Breaker(settings.breaker) for kind in KINDS}
        self._name = name
        self._settings = settings
        self._shared = shared
        self._stats = stats
        self._wake = wake
        self._calls: set[asyncio.Task[Results]] = set()
        self._behind: dict[asyncio.Task[Results], int] = {}
        """Calls left behind that have not ended, and how many slots each keeps."""
        self.crowded = False
        """Whether too many calls are left behind for another one to begin."""
        self.absent = False
        """Whether the tier is not open (yet): it is called for nothing."""
        self._closing = False

    # ---- what is known of the tier

    @property
    def behind(self) -> int:
        """Calls that were left behind and have not ended."""
        return len(self._behind)

    def open(self, kind: Kind) -> bool:
        """Whether the tier may be called in this way now."""
        if self.crowded or self.absent:
            return False
        breaker = self.breakers[kind]  # asked for each block: the clock takes the longest
        return breaker.state == "closed" or breaker.allows(self._shared.clock.now())

    def ill(self, *kinds: Kind) -> bool:
        """Whether the last that is known of one of these kinds is that it failed too often."""
        return (
            self.crowded
            or self.absent
            or any(self.breakers[kind].state != "closed" for kind in kinds)
        )

    def retry_in_s(self, *kinds: Kind) -> float | None:
        """Seconds until one of these kinds, which may not be called now, may be; None if all may.

        None, too, while calls that were left behind are in the way: ``wake`` tells when they end.
        """
        now = self._shared.clock.now()
        shut = [self.breakers[kind] for kind in kinds if not self.breakers[kind].allows(now)]
        if self.crowded or self.absent or not shut:
            return None
        limit_s = self._settings.timeout_s  # by then a trial is over
        return min(limit_s if b.state == "trial" else b.retry_in_s(now) for b in shut)

    @property
    def states(self) -> dict[Kind, State]:
        """The state of the breaker of each kind of call."""
        return {kind: self.breakers[kind].state for kind in KINDS}

    # ---- calls

    async def call(
        self,
        kind: Kind,
        operation: Operation,
        late: Callable[[], None],
        *,
        slots: Sequence[Slot] = (),
        expected: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Call the tier; a call that does not return ``expected`` booleans has failed.

        If it is left behind, ``late`` runs under the lock when it has ended. None for ``expected``
        takes any answer for none.
        """
        shared, breaker = self._shared, self.breakers[kind]
        timeout_s = self._settings.timeout_s if timeout_s is None else timeout_s
        if self.crowded or self.absent or not breaker.begin(shared.clock.now()):
            return Answer(None)
        shared.arena.share(slots)

        async def calling() -> Results:
            answer = await contained(operation())
            return () if expected is None else checked(kind, answer, expected)

        loop = asyncio.get_running_loop()
        task = loop.create_task(calling(), name=f"kvladder-call-{self._name}")
        over: asyncio.Future[None] = loop.create_future()
        has_ended = left_behind = False

        def settle() -> None:
            if not over.done():
                over.set_result(None)

        def quiet(task: asyncio.Task[Results]) -> None:
            nonlocal has_ended
            has_ended = True
            self._calls.discard(task)
            with shared.lock:
                shared.arena.release(slots)
                if left_behind:
                    late()
            if self._behind.pop(task, None) is not None:
                self._recount()
            if not task.cancelled():
                task.exception()  # seen: asyncio must not report it as lost
            settle()

        self._calls.add(task)
        task.add_done_callback(quiet)
        timer, decided = loop.call_later(timeout_s, settle), False
        try:
            await over  # in less time than ``asyncio.wait`` takes
            decided = True
        finally:
            timer.cancel()
            left_behind = not has_ended
            if left_behind:
                self._behind[task] = len(slots)
                loop.call_later(BEHIND_AFTER_S, self._recount)
                task.cancel()
            if not decided:  # cancelled: the cache closes, and the tier has failed at nothing
                breaker.give_up()
        if left_behind:
            self._failed(kind, f"no answer within {timeout_s:g} s")
            self._stats.timeouts += 1
            return Answer(None, quiet=False)
        return self._answer(kind, task)

    def _recount(self) -> None:
        """Calls were left behind or have ended: see whether others may begin."""
        was_crowded, kept = self.crowded, sum(self._behind.values())
        slots_max = max(1, self._shared.arena.slots // BEHIND_SLOTS_SHARE)
        self.crowded = len(self._behind) >= BEHIND_CALLS_MAX or kept >= slots_max
        if was_crowded and not self.crowded:
            self._wake()
        elif self.crowded and not (was_crowded or self._closing):
            what = f"{self.behind} calls to tier {self._name} have not ended, with {kept} slots"
            what += ": it is left alone until some do"
            self._shared.notices.say(f"{self._name} behind", what)

    def _answer(self, kind: Kind, task: asyncio.Task[Results]) -> Answer:
        if task.cancelled():
            self._failed(kind, "it cancelled the call")
            return Answer(None)
        error = task.exception()
        # a removal that finds no room has failed, or it would be tried again at once
        if error is None or (kind == "put" and isinstance(error, TierFull)):
            self.breakers[kind].success()
            return Answer(None, full=True) if error else Answer(task.result())
        self._failed(kind, str(error) if isinstance(error, TierError) else repr(error))
        return Answer(None)

    def _failed(self, kind: Kind, why: str) -> None:
        if self._closing:
            return
        self._stats.errors += 1
        breaker = self.breakers[kind]
        breaker.failure(self._shared.clock.now())
        then = " and is not asked to for a while" if breaker.state == "open" else ""
        what = f"tier {self._name} failed to {_VERBS[kind]}{then}: {why}"
        self._shared.notices.say(f"{self._name} {kind}", what)

    # ---- what a tier says of itself at once, without the lock

    def spare(self, tier: Tier, salt: bytes) -> float:
        """``Tier.spare``; 0 if it fails at that, since there may be a quota."""

        def ask() -> float:
            spare = float(tier.spare(salt))
            return _wrong("a number", spare) if isnan(spare) else spare

        return self._said("spare", ask, 0.0)

    def said(self, tier: Tier) -> Said:
        """``Tier.gauges`` and ``corrupt_blocks``; none and 0 if it fails at that."""
        none: dict[str, int] = {}
        return Said(
            self._said("gauges", lambda: {k: int(v) for k, v in tier.gauges().items()}, none),
            self._said("corrupt_blocks", lambda: int(tier.corrupt_blocks()), 0),
        )

    def describe(self, tier: Tier) -> dict[str, str]:
        """``Tier.describe``; nothing if it fails at that."""
        none: dict[str, str] = {}
        told = self._said("settings", lambda: dict(tier.describe()), none)
        return {str(name): str(value) for name, value in told.items()}

    def _said(self, what: str, ask: Callable[[], T], otherwise: T) -> T:
        if self.absent:
            return otherwise
        try:
            return ask()
        except BaseException as error:  # noqa: BLE001 - whatever a plug-in raises, the level lives
            with self._shared.lock:
                self._stats.errors += 1
            message = f"tier {self._name} failed to say its {what}: {error!r}"
            self._shared.notices.say(f"{self._name} {what}", message)
            return otherwise

    async def aclose(self, *, timeout_s: float) -> None:
        """Cancel what is under way and wait for it, but not longer than ``timeout_s``."""
        self._closing = True
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=timeout_s)


def checked(kind: Kind, answer: object, count: int) -> Results:
    """The answer to a call about ``count`` blocks; TierError if it is none."""
    said, right = _listed(answer), _MAYBES if kind == "get" else _BOOLEANS
    if said is None or len(said) != count:
        return _wrong(f"{count} booleans", answer)
    if {*map(type, said)} == {bool}:  # as nearly always
        return cast("list[bool]", said)
    if not all(isinstance(one, right) for one in said):
        return _wrong(f"{count} booleans", answer)
    return [None if one is None else bool(one) for one in said]


def _listed(answer: object) -> list[object] | None:
    return list(cast("Sequence[object]", answer)) if isinstance(answer, Sequence) else None


def _wrong(expected: str, answer: object) -> NoReturn:
    size = f" of {len(answer)}" if isinstance(answer, Sized) else ""
    said = f"{type(answer).__name__}{size}"
    raise TierError(f"it answered with {said}, expected {expected}", temporary=False)
