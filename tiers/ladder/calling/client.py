"""The client of a tier: opens and closes it, and makes each kind of call; see ``calls``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import isnan
from typing import TypeVar

from kvladder.errors import ConfigError, PermissionDenied, TierError
from kvladder.keys import BlockKey, Namespace
from kvladder.layout import Layout
from kvladder.metrics import LevelStats
from kvladder.tiers.answers import wrong
from kvladder.tiers.base import NO_PLACE
from kvladder.tiers.codecs.pipeline import CodecPipeline
from kvladder.tiers.context import Blocking, TierContext
from kvladder.tiers.label import LevelRead, Ref, Write
from kvladder.tiers.ladder.base_level import Shared
from kvladder.tiers.ladder.calling.breaker import contained
from kvladder.tiers.ladder.calling.calls import CallOutcome, GuardedCalls
from kvladder.tiers.ladder.definition import LevelDefinition
from kvladder.tiers.spans import ReadTiming

T = TypeVar("T")
Threads = Callable[[str], Blocking]
"""Makes a few threads of this name for blocking calls."""

CLOSE_TIMEOUT_S = 5.0
"""Timeout for closing a tier; then the call is abandoned."""
PURGE_TIMEOUT_S = 600.0


class TierClient(GuardedCalls):
    """Calls a tier, through its codecs, and opens and closes it.

    Parameters
    ----------
    on_calm:
        See ``GuardedCalls``, which has the rules for all calls.
    """

    def __init__(
        self, spec: LevelDefinition, shared: Shared, stats: LevelStats, on_calm: Callable[[], None]
    ) -> None:
        calls, may_deny = spec.settings.calls, spec.tier.shared
        super().__init__(spec.name, calls, shared, stats, on_calm, may_deny=may_deny)
        self.tier = spec.tier
        self.pipeline = CodecPipeline(
            spec.tier, spec.settings.pipeline, spec.scratch, verify=spec.verify
        )
        self._reads = asyncio.Semaphore(spec.settings.reads_max)
        """Limits the reads in flight; each read holds it."""
        self.required = spec.required
        """True if the cache does not start without the tier."""
        self.why = ""
        """Reason why the tier is left out now; empty if it is not."""
        self._spec = spec

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

    async def put(self, blocks: Sequence[Write], late: Callable[[], None]) -> CallOutcome:
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
        None at the end; returns None alone if it failed. A purge that the medium does not permit is
        at its end, and counted. Neither ``put`` nor ``remove`` is called meanwhile.
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
        if answer.denied:
            self._stats.denied += 1
            return 0, None
        return None if answer.results is None else (done, following)

    async def sync(self) -> bool:
        """Have a durable tier make removals survive a power cut; return whether it did."""

        async def syncing() -> Sequence[bool]:
            await self.tier.sync()
            return ()

        answer = await self.call("remove", syncing, lambda: None)
        return answer.results is not None

    async def survey(self, salt: bytes | None, take: Callable[[Sequence[BlockKey]], object]) -> str:
        """Give ``take`` the blocks of a salt, None for all, that lie on the medium now.

        Returns why that is not known; empty if it is.

        Raises
        ------
        PermissionDenied
            The medium does not let this client list blocks.
        """
        denied: PermissionDenied | None = None

        async def surveying() -> Sequence[bool]:
            nonlocal denied
            try:
                async for batch in self.tier.survey(salt):
                    take(batch)
            except PermissionDenied as error:
                denied = error
            return ()

        if self.absent:
            return f"left out: {self.why or 'it is not open'}"
        answer = await self.call("contains", surveying, lambda: None, timeout_s=PURGE_TIMEOUT_S)
        if denied is not None:
            raise denied
        return "the tier does not answer" if answer.results is None else ""

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
