"""The client of a tier: all calls that await it, with deadlines; a failure is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import isnan
from typing import NamedTuple, TypeVar

from kvladder.arena import Slot
from kvladder.errors import ConfigError, TierError, TierFull
from kvladder.keys import BlockKey, Namespace
from kvladder.layout import Layout
from kvladder.metrics import Histogram, LevelStats
from kvladder.tiers.answers import KINDS, Kind, Results, checked, wrong
from kvladder.tiers.base import NO_PLACE
from kvladder.tiers.codecs.pipeline import CodecPipeline
from kvladder.tiers.context import Blocking, TierContext
from kvladder.tiers.label import LevelRead, LevelWrite, Ref
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.breaker import Breaker, CallSettings, State, contained
from kvladder.tiers.ladder.definition import LevelDefinition
from kvladder.tiers.spans import ReadTiming

T = TypeVar("T")
Threads = Callable[[str], Blocking]
"""Makes a few threads of this name for blocking calls."""
Operation = Callable[[], Awaitable[object]]

CLOSE_TIMEOUT_S = 5.0
"""Timeout for closing a tier; then the call is abandoned."""
CALLS_TIMEOUT_S = 1.0
"""Timeout for the end of cancelled calls, before and after the tier is closed."""
PURGE_TIMEOUT_S = 600.0
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
    took_s: float = 0.0
    error: str = ""
    """Class of the failure, for traces; empty if the tier answered."""

    def add_to(self, durations: Histogram) -> None:
        """Count the duration, unless a breaker or abandoned calls kept the call from beginning."""
        if self.results is not None or self.took_s > 0:
            durations.observe(self.took_s)


class TierClient:
    """Calls a tier, through its codecs. Whatever the tier does, a caller sees only a None.

    A claim on each slot is held until the tier no longer touches it. A call that passes its
    deadline is cancelled and abandoned; its slots stay claimed until it has really ended. Each kind
    of call has a breaker. With too many abandoned calls no call begins until some end. The client
    knows no index, and does not decide what becomes of a place. Coroutines run on the loop thread.

    Parameters
    ----------
    on_calm:
        Called with the stack's lock held when few enough abandoned calls are left again.
    """

    def __init__(
        self, spec: LevelDefinition, shared: Shared, stats: LevelStats, on_calm: Callable[[], None]
    ) -> None:
        self.tier = spec.tier
        self.pipeline = CodecPipeline(
            spec.tier, spec.settings.pipeline, spec.scratch, verify=spec.verify
        )
        self.breakers = {kind: Breaker(spec.settings.calls.breaker) for kind in KINDS}
        self._reads = asyncio.Semaphore(spec.settings.reads_max)
        """Limits the reads in flight; each read holds it."""
        self.settings = spec.settings.calls
        self.required = spec.required
        """True if the cache does not start without the tier."""
        self.why = ""
        """Reason why the tier is left out now; empty if it is not."""
        self._spec = spec
        self._name = spec.name
        self._shared = shared
        self._stats = stats
        self._on_calm = on_calm
        self._calls: set[asyncio.Task[Results]] = set()
        self._behind: dict[asyncio.Task[Results], int] = {}
        """Abandoned calls that have not ended, and how many slots each keeps."""
        self.crowded = False
        """True if too many abandoned calls keep another one from beginning."""
        self.absent = True
        """True if the tier is not open (yet): it is not called at all."""
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

    # ---- the start of a tier, and its end

    def prepare(self, layout: Layout, namespace: Namespace, threads: Threads) -> TierContext:
        """Open the codecs, and return the context for opening the tier.

        The tier and its codecs get ``threads`` of their own, so that a thread that hangs blocks no
        other user.

        Raises
        ------
        ConfigError
            A codec cannot work as configured, or the tier can take no batch.
        """
        if self.tier.batch_max < 1:
            raise ConfigError(f"batch_max is {self.tier.batch_max}", hint="expected 1 or more")
        context = TierContext(
            arena=self._shared.arena,
            layout=layout,
            namespace=namespace,
            capacity_blocks=self._spec.capacity_blocks,
            clock=self._shared.clock,
            run_blocking=threads(self._name),
            timeout_s=self.settings.timeout_s,
            required=self.required,
            say=lambda text: self._shared.notices.say(text, f"tier {self._name}: {text}"),
            fields=self._shared.fields,
        )
        self.pipeline.open(context, threads(f"{self._name}-codecs"))
        return context

    def leave_out(self, why: str) -> None:
        """Note why the tier is not called until it is ``opened``, and report the first reason."""
        if not self.why:
            then = "The cache works without it and tries again in the background"
            what = f"tier {self._name} is left out: {why}. {then}"
            self._shared.notices.say(f"{self._name} open", what)
        self.why = why

    def opened(self) -> None:
        """Allow calls: the tier is open and has recovered its blocks."""
        self.why, self.absent = "", False

    async def aclose(self) -> None:
        """Close the tier; abandon what does not end within ``CLOSE_TIMEOUT_S``."""
        closing = asyncio.ensure_future(contained(self.tier.aclose()))
        await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
        what = ""
        if not closing.done():
            closing.cancel()
            closing.add_done_callback(lambda task: task.cancelled() or task.exception())
            what = f"did not close within {CLOSE_TIMEOUT_S:g} s and was abandoned"
        elif not closing.cancelled() and closing.exception() is not None:
            what = f"failed to close: {closing.exception()!r}"
        if what:
            self._shared.notices.say(f"{self._name} close", f"tier {self._name} {what}")

    async def resize(self, capacity_blocks: int) -> None:
        """Have the tier prepare for another capacity, within the timeout of a call.

        Raises
        ------
        TierError
            It failed, or took too long.
        """
        task = asyncio.ensure_future(contained(self.tier.resize(capacity_blocks)))
        task.add_done_callback(lambda call: call.cancelled() or call.exception())
        try:
            await asyncio.wait({task}, timeout=self.settings.timeout_s)
        finally:
            task.cancel()  # one that ignores it is left behind: it has no slots
        if not task.done():
            raise TierError(f"it was not resized within {self.settings.timeout_s:g} s")
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            raise error if isinstance(error, TierError) else TierError(f"it failed: {error!r}")

    async def end_calls(self) -> None:
        """Cancel calls in flight and wait for them, at most ``CALLS_TIMEOUT_S``."""
        self._closing = True
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=CALLS_TIMEOUT_S)

    # ---- calls

    async def get(
        self,
        blocks: Sequence[LevelRead],
        ended: Callable[[], None],
        timing: ReadTiming | None = None,
    ) -> CallOutcome:
        """Fill the blocks' slots, when a read may begin; see ``call``.

        ``ended`` runs under the lock once no call reads them any more, in every case, even late.
        ``timing`` is filled in if it is given.
        """
        slots = [block.slot for block in blocks]
        get, answer = self.pipeline.get, CallOutcome(None)
        try:
            async with self._reads:
                answer = CallOutcome(None, quiet=False)  # what holds if ``call`` is cancelled
                if timing is not None:
                    timing.begin(self._shared.clock.now())
                answer = await self.call(
                    "get", lambda: get(blocks, timing), ended, slots=slots, expected=len(blocks)
                )
        finally:
            if answer.quiet:
                with self._shared.lock:
                    ended()
        return answer

    async def put(self, blocks: Sequence[LevelWrite], late: Callable[[], None]) -> CallOutcome:
        """Store what is in the blocks' slots; see ``call``."""
        slots = [block.slot for block in blocks]
        put = self.pipeline.put
        return await self.call("put", lambda: put(blocks), late, slots=slots, expected=len(blocks))

    async def remove(self, blocks: Sequence[Ref], late: Callable[[], None]) -> CallOutcome:
        """Have the tier forget these blocks; see ``call``."""
        return await self.call("remove", lambda: self.tier.remove(blocks), late)

    async def contains(self, keys: Sequence[BlockKey]) -> CallOutcome:
        """Ask a shared tier whether it has these blocks; see ``call``."""
        blocks = [Ref(key, NO_PLACE) for key in keys]
        return await self.call(
            "contains",
            lambda: self.tier.contains(blocks),
            lambda: None,
            expected=len(blocks),
            timeout_s=self.tier.probe_timeout_s,
        )

    async def purge(self, salt: bytes | None, start: int) -> tuple[int, int | None] | None:
        """Purge a shared tier of a salt, None for all, or run a step of erasing in another one.

        Erasing begins at place ``start``. Returns how many blocks are gone and where to continue,
        None at the end; returns None alone if it failed. Neither ``put`` nor ``remove`` is called
        meanwhile.
        """
        done, following = 0, None

        async def purging() -> Sequence[bool]:
            nonlocal done, following
            if self.tier.shared:
                done = int(await self.tier.purge(salt, lambda _done, _total: None))
            else:
                done, following = await self.tier.erase(salt, start)
                if following is not None and following <= start:
                    raise TierError(
                        f"erase returned next place {following}, expected more than {start}"
                    )
            return ()

        timeout_s = PURGE_TIMEOUT_S if self.tier.shared else None
        answer = await self.call("remove", purging, lambda: None, timeout_s=timeout_s)
        return None if answer.results is None else (done, following)

    async def survey(self, salt: bytes | None, take: Callable[[Sequence[BlockKey]], object]) -> str:
        """Give ``take`` the blocks of a salt, None for all, that lie on the medium now.

        Returns why that is not known; empty if it is.
        """

        async def surveying() -> Sequence[bool]:
            async for batch in self.tier.survey(salt):
                take(batch)
            return ()

        if self.absent:
            return f"left out: {self.why or 'it is not open'}"
        answer = await self.call("contains", surveying, lambda: None, timeout_s=PURGE_TIMEOUT_S)
        return "the tier does not answer" if answer.results is None else ""

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

        With None for ``expected`` any answer counts as success. If the call is abandoned, or its
        caller is cancelled, ``late`` runs under the lock when it has ended.
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
        timer, decided = loop.call_later(timeout_s, settle), False
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
        if error is None or (kind == "put" and isinstance(error, TierFull)):
            self.breakers[kind].success()
            return CallOutcome(None if error else task.result(), full=bool(error), took_s=took_s)
        self._failed(kind, str(error) if isinstance(error, TierError) else repr(error))
        return CallOutcome(None, took_s=took_s, error=type(error).__name__)

    def _failed(self, kind: Kind, why: str) -> None:
        if self._closing:
            return
        self._stats.errors += 1
        breaker = self.breakers[kind]
        breaker.failure(self._shared.clock.now())
        then = ", and kvladder will not try again for a while" if breaker.state == "open" else ""
        what = f"tier {self._name} failed to {_VERBS[kind]}{then}: {why}"
        self._shared.notices.say(f"{self._name} {kind}", what)

    # ---- what a tier says of itself at once, without the lock

    def spare(self, salt: bytes) -> float:
        """Return ``Tier.spare``; 0 if that fails, since there may be a quota."""

        def ask() -> float:
            spare = float(self.tier.spare(salt))
            return wrong("a number", spare) if isnan(spare) else spare

        return self._said("spare", ask, 0.0)

    def gauges(self) -> dict[str, int]:
        """Return ``Tier.gauges``; none if that fails."""

        def ask() -> dict[str, int]:
            return {name: int(value) for name, value in self.tier.gauges().items()}

        return self._said("gauges", ask, {})

    def describe(self) -> dict[str, str]:
        """Return ``Tier.describe``; nothing if that fails."""
        none: dict[str, str] = {}
        told = self._said("settings", lambda: dict(self.tier.describe()), none)
        return {str(name): str(value) for name, value in told.items()}

    def _said(self, what: str, ask: Callable[[], T], otherwise: T) -> T:
        if self.absent:
            return otherwise
        try:
            return ask()
        except BaseException as error:  # noqa: BLE001 - whatever a plug-in raises, the level lives
            with self._shared.lock:
                self._stats.errors += 1
            message = f"tier {self._name} failed to report its {what}: {error!r}"
            self._shared.notices.say(f"{self._name} {what}", message)
            return otherwise
