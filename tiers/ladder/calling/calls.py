"""Calls of a tier, with deadlines: a failure is a miss, and a call that hangs is abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from kvladder.arena import Slot
from kvladder.errors import PermissionDenied, TierError, TierFull
from kvladder.metrics import Histogram, LevelStats
from kvladder.tiers.answers import KINDS, Kind, Results, checked
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.calling.breaker import Breaker, CallSettings, State, contained

Operation = Callable[[], Awaitable[object]]

CALLS_TIMEOUT_S = 1.0
"""Timeout for the end of cancelled calls, before and after the tier is closed."""
TIMEOUT_PARTS = 4
"""Parts of a timeout; see ``Timeout``."""
BEHIND_CALLS_MAX = 8
"""Number of abandoned calls that have not ended at which a tier is no longer called."""
BEHIND_SLOTS_SHARE = 4
"""The same limit for slots: a tier is not called if such calls keep one in this many slots."""
BEHIND_AFTER_S = 0.1
"""Time after which a cancelled call that has not ended counts for these limits."""
_VERBS: Mapping[Kind, str] = {
    "get": "read",
    "put": "write",
    "remove": "remove",
    "contains": "report which blocks it has",
}


class CallOutcome(NamedTuple):
    """Result of a call."""

    results: Results | None
    """Results from the tier; None if it failed, hung or was not called."""
    quiet: bool = True
    """True if the tier no longer touches the slots and places of the call."""
    full: bool = False
    """True if it failed because the medium is full."""
    denied: bool = False
    """True if the medium does not let this client remove blocks."""
    took_s: float = 0.0
    error: str = ""
    """Class of the failure, for traces; empty if the tier answered."""

    def add_to(self, durations: Histogram) -> None:
        """Count the duration, unless a breaker or abandoned calls kept the call from beginning."""
        if self.results is not None or self.took_s > 0:
            durations.observe(self.took_s)


class Timeout:
    """Calls ``end`` on a loop after a time, unless cancelled before.

    It waits for one of ``TIMEOUT_PARTS`` after the other. Each begins when the end of the last one
    was noticed, so a time in which the loop stands still takes at most one part from it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._part_s = seconds / TIMEOUT_PARTS
        self._end = end
        self._left = TIMEOUT_PARTS
        self._timer = loop.call_later(self._part_s, self._tick)

    def _tick(self) -> None:
        self._left -= 1
        if self._left:
            self._timer = self._loop.call_later(self._part_s, self._tick)
        else:
            self._end()

    def cancel(self) -> None:
        """Do not call ``end`` any more."""
        self._timer.cancel()


class GuardedCalls:
    """Awaits calls of one tier. Whatever the tier does, a caller sees only a None.

    A claim on each slot is held until the tier no longer touches it. A call that passes its
    deadline is cancelled and abandoned; its slots stay claimed until it has really ended. Each kind
    of call has a breaker. With too many abandoned calls no call begins until some end. It knows no
    index, and does not decide what becomes of a place. Coroutines run on the loop thread.

    Parameters
    ----------
    on_calm:
        Called with the stack's lock held when few enough abandoned calls are left again.
    may_deny:
        True for a shared medium, which may give this client no right to remove blocks.
    """

    def __init__(
        self,
        name: str,
        settings: CallSettings,
        shared: Shared,
        stats: LevelStats,
        on_calm: Callable[[], None],
        *,
        may_deny: bool,
    ) -> None:
        self.breakers = {kind: Breaker(settings.breaker) for kind in KINDS}
        self.settings = settings
        self._name = name
        self._shared = shared
        self._stats = stats
        self._on_calm = on_calm
        self._may_deny = may_deny
        self._calls: set[asyncio.Task[Results]] = set()
        self._behind: dict[asyncio.Task[Results], int] = {}
        """Abandoned calls that have not ended, and how many slots each keeps."""
        self.crowded = False
        """True if too many abandoned calls keep another one from beginning."""
        self.absent = True
        """True if the tier is not open (yet): it is not called at all."""
        self.denied = ""
        """Reason why the tier may not remove blocks, when it last said so."""
        self._closing = False

    def retune(self, settings: CallSettings) -> None:
        """Have another timeout, and other settings of the breakers, for later calls."""
        if settings.breaker != self.settings.breaker:
            for breaker in self.breakers.values():
                breaker.retune(settings.breaker)
        self.settings = settings

    # ---- what is known of the tier

    @property
    def behind(self) -> int:
        """Number of abandoned calls that have not ended."""
        return len(self._behind)

    def open(self, kind: Kind) -> bool:
        """Return whether the tier may be called in this way now."""
        if self.crowded or self.absent:
            return False
        breaker = self.breakers[kind]  # called for each block; reading the clock takes longest
        return breaker.state == "closed" or breaker.allows(self._shared.clock.now())

    def ill(self, *kinds: Kind) -> bool:
        """Return whether calls of one of these kinds are known to fail, or none may begin."""
        return (
            self.crowded
            or self.absent
            or any(self.breakers[kind].state != "closed" for kind in kinds)
        )

    def retry_in_s(self, *kinds: Kind) -> float | None:
        """Return the seconds until one of these kinds may be called again; None if all may now.

        Also None while abandoned calls are in the way, or the tier is not open: ``wake`` tells when
        that ends.
        """
        now = self._shared.clock.now()
        shut = [self.breakers[kind] for kind in kinds if not self.breakers[kind].allows(now)]
        if self.crowded or self.absent or not shut:
            return None
        limit_s = self.settings.timeout_s  # a trial is over by then
        return min(limit_s if b.state == "trial" else b.retry_in_s(now) for b in shut)

    @property
    def states(self) -> dict[Kind, State]:
        """State of the breaker of each kind of call."""
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
    ) -> CallOutcome:
        """Call the tier; a call that does not return ``expected`` booleans has failed.

        With None for ``expected`` any answer counts as success. If the call is abandoned at its
        ``Timeout``, or its caller is cancelled, ``late`` runs under the lock when it has ended.
        """
        shared, breaker = self._shared, self.breakers[kind]
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        begun_s = shared.clock.now()
        if self.crowded or self.absent or not breaker.begin(begun_s):
            return CallOutcome(None, error="unavailable")
        shared.arena.share(slots)

        async def calling() -> Results:
            answer = await contained(operation())
            return () if expected is None else checked(kind, answer, expected)

        loop = asyncio.get_running_loop()
        task = loop.create_task(calling(), name=f"kvladder-call-{self._name}")
        over: asyncio.Future[bool] = loop.create_future()
        has_ended = left_behind = False

        def settle() -> None:
            if not over.done():
                over.set_result(True)

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
        timer, decided = Timeout(loop, timeout_s, settle), False
        try:
            decided = await over  # in less time than ``asyncio.wait`` takes
        finally:
            timer.cancel()
            left_behind = not has_ended
            if left_behind:
                self._behind[task] = len(slots)
                loop.call_later(BEHIND_AFTER_S, self._recount)
                task.cancel()
            if not decided:  # cancelled: the cache closes, so no failure of the tier
                breaker.give_up()
                if has_ended:  # it ended at the same moment
                    self._tell(late)
        if left_behind:
            self._failed(kind, f"no answer within {timeout_s:g} s")
            self._stats.timeouts += 1
            return CallOutcome(None, quiet=False, took_s=timeout_s, error="timeout")
        return self._answer(kind, task, shared.clock.now() - begun_s)

    def _tell(self, late: Callable[[], None]) -> None:
        """Report the end of a call whose result is no longer awaited."""
        with self._shared.lock:
            late()

    def _recount(self) -> None:
        """Decide anew whether calls may begin, after abandoned ones came or ended."""
        was_crowded, kept = self.crowded, sum(self._behind.values())
        slots_max = max(1, self._shared.arena.slots // BEHIND_SLOTS_SHARE)
        self.crowded = len(self._behind) >= BEHIND_CALLS_MAX or kept >= slots_max
        if was_crowded and not self.crowded:
            with self._shared.lock:
                self._on_calm()
        elif self.crowded and not (was_crowded or self._closing):
            what = f"{self.behind} abandoned calls to tier {self._name} have not ended and keep"
            what += f" {kept} slots: no call begins until some end"
            self._shared.notices.say(f"{self._name} behind", what)

    def _answer(self, kind: Kind, task: asyncio.Task[Results], took_s: float) -> CallOutcome:
        if task.cancelled():
            self._failed(kind, "the tier cancelled the call")
            return CallOutcome(None, took_s=took_s, error="cancelled")
        error = task.exception()
        # a removal that finds no room has failed, or it would be tried again at once
        is_full = kind == "put" and isinstance(error, TierFull)
        if self._may_deny and kind == "remove" and isinstance(error, PermissionDenied):
            self.deny(error)
            self.breakers[kind].success()
            return CallOutcome(None, denied=True, took_s=took_s, error=type(error).__name__)
        if error is None or is_full:
            self.breakers[kind].success()
            return CallOutcome(None if error else task.result(), full=is_full, took_s=took_s)
        self._failed(kind, str(error) if isinstance(error, TierError) else repr(error))
        return CallOutcome(None, took_s=took_s, error=type(error).__name__)

    def deny(self, error: PermissionDenied) -> None:
        """Note that the medium gives this client no right to remove blocks."""
        self.denied = str(error)
        what = f"tier {self._name} may not remove blocks, so they stay there: {error}"
        self._shared.notices.say(f"{self._name} denied", what)

    def _failed(self, kind: Kind, why: str) -> None:
        if self._closing:
            return
        self._stats.errors += 1
        breaker = self.breakers[kind]
        breaker.failure(self._shared.clock.now())
        then = ", and kvladder will not try again for a while" if breaker.state == "open" else ""
        what = f"tier {self._name} failed to {_VERBS[kind]}{then}: {why}"
        self._shared.notices.say(f"{self._name} {kind}", what)

    async def end_calls(self) -> None:
        """Cancel calls in flight and wait for them, at most ``CALLS_TIMEOUT_S``."""
        self._closing = True
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=CALLS_TIMEOUT_S)
