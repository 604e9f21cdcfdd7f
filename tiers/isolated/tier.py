"""A tier in a child process, for libraries that cannot cancel calls, hold the GIL, or crash."""

from __future__ import annotations

import asyncio
import pickle
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import cast

from kvladder.children.spawn import start_again
from kvladder.errors import ConfigError, TierError
from kvladder.keys import BlockKey
from kvladder.tiers.base import Medium, Tier
from kvladder.tiers.context import Progress, TierContext
from kvladder.tiers.isolated.calls import TierCalls
from kvladder.tiers.isolated.process import Process
from kvladder.tiers.label import Read, RecoveredBlock, Ref, Write, arrived, is_verified, to_write

CLOSE_S = 4.0
SALTS_MAX = 1024
"""Most salts with a remembered number of spare blocks."""
_TRAITS = tuple({**Medium.__annotations__, **Tier.__annotations__}.keys() - {"resizes"})
"""Names of the attributes that are copied from the tier."""


class IsolatedTier(Tier):
    """Runs another tier in a child process that maps the arena, so no block bytes are sent.

    An abandoned call is cancelled in the child. If it has not ended after ``abandon_s``, the child
    is killed, and the call ends once the child is dead: from then on the tier touches no slot. If
    the child dies, its calls fail with a TierError, and a new child starts in the background. Until
    the tier is open again, calls fail at once.

    Parameters
    ----------
    make:
        The class of the tier; another process must be able to import it.
    options:
        The tier's options; None if it has none.
    abandon_s:
        Seconds that a cancelled call may take to end.
    """

    def __init__(self, make: type[Tier], options: object, *, abandon_s: float = 1.0) -> None:
        known = cast("Callable[..., Tier]", make)
        tier = known() if options is None else known(options)
        for name in _TRAITS:
            setattr(self, name, getattr(tier, name))
        self._name = make.__name__
        self._abandon_s = abandon_s
        try:
            self._pickled = pickle.dumps((make, options))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _not_importable(make, str(error)) from error
        if make.__module__ == "__main__":  # in the child this is another program
            raise _not_importable(make, "it is defined in the main program")
        self._process: Process | None = None
        self._ready = False
        self._starting: asyncio.Task[None] | None = None
        self._spare: OrderedDict[bytes, float] = OrderedDict()
        self._unheard = inf
        self._full: set[bytes] = set()
        """Salts without spare blocks when the level asked, since the child was last asked."""
        self._asking: asyncio.Task[None] | None = None
        self._gauges: dict[str, int] = {}
        self._described: dict[str, str] = {}
        self._ends = 0
        self._closed = False

    # ---- the process

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        process = self._new(warn)
        try:
            await process.start(self._pickled)
            size = int(capacity_bytes)  # which may be a ``Size``
            return await process.started(process.tier.examine(size))
        finally:
            await process.aclose()

    async def open(self, context: TierContext) -> None:
        self.context = context
        await self._open()

    def _new(self, say: Callable[[str], object]) -> Process:
        return Process(self._name, abandon_s=self._abandon_s, say=say, ended=self._ended)

    def _say(self, text: str) -> None:
        """Log a message later, on the loop, so that an error of ``say`` ends no call."""
        asyncio.get_running_loop().call_soon(self.context.say, text)

    async def _open(self) -> None:
        """Start a child and open the tier in it; after a failure the child is dead."""
        context, handle = self.context, self.context.arena.handle
        process = self._process = self._new(context.say)
        sizes = context.layout, context.namespace, context.capacity_blocks
        told = *sizes, context.timeout_s, context.required, dict(context.fields)
        arena = handle.fd, handle.slots, handle.slot_bytes
        try:
            await process.start(self._pickled, [handle.fd])
            opened = await process.started(process.tier.open(arena, pickle.dumps(told)))
        except BaseException:
            await process.aclose()
            raise
        self.batch_max, self._described = opened.batch_max, opened.described
        self._unheard = opened.spare
        self._ready = True

    def _ended(self, process: Process) -> None:
        """Handle the end of a child: start another one in the background."""
        if process is self._process and self._ready and not self._closed:
            self._ready = False
            self._ends += 1
            self._say(f"{process.how}: kvladder starts it again")
            again = start_again(self._open, self._not_opened)
            self._starting = asyncio.create_task(again, name="kvladder-isolated-start")

    def _not_opened(self, error: Exception) -> None:
        self._say(f"{self._name} cannot be opened again, kvladder keeps trying: {error}")

    def _running(self) -> Process:
        """Return the child process.

        Raises
        ------
        TierError
            The tier is closed, or the child is being started.
        """
        if self._closed:
            raise TierError("the tier is closed", temporary=False)
        if self._process is None or not self._ready:
            raise TierError(f"the process of {self._name} is being started")
        return self._process

    @property
    def _tier(self) -> TierCalls:
        """The tier in the child; see ``_running``."""
        return self._running().tier

    # ---- the tier

    async def get(self, reads: Sequence[Read]) -> Sequence[bool | None]:
        if not reads:
            return []
        rows = [(Ref(read.key, read.place), int(read.slot)) for read in reads]
        answer = await self._tier.get(is_verified(reads[0]), rows)
        self._gauges = answer.gauges
        for read, found in zip(reads, answer.found, strict=True):
            if found is not None:
                arrived(read, found)
        return cast("Sequence[bool | None]", answer.results)

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        if not writes:
            return []
        told = [to_write(write) for write in writes]
        rows = [
            (Ref(w.key, w.place), int(w.slot), w.facts, coding, w.replace)
            for w, (_, coding) in zip(writes, told, strict=True)
        ]
        answer = await self._tier.put(told[0][0], rows)
        self._gauges = answer.gauges
        self._hear(answer.spare)
        return cast("Sequence[bool]", answer.results)

    async def remove(self, blocks: Sequence[Ref]) -> None:
        await self._tier.remove(list(blocks))

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        return cast("Sequence[bool]", await self._tier.contains(list(blocks)))

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        return await self._running().purge(salt, progress)

    async def sync(self) -> None:
        await self._tier.sync()

    async def erase(self, salt: bytes | None, start: int) -> tuple[int, int | None]:
        return await self._tier.erase(salt, start)

    async def survey(self, salt: bytes | None) -> AsyncIterator[Sequence[BlockKey]]:
        anew = True
        while (batch := await self._tier.survey(salt, anew)) is not None:
            yield batch
            anew = False

    def spare(self, salt: bytes) -> float:
        """Return the number last reported; the child checks the current number at each put."""
        found = self._spare.get(salt, self._unheard if salt else inf)
        if found < 1 and self._ready:
            self._full.add(salt)
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(), name="kvladder-isolated-spare")
        return found

    async def _ask(self) -> None:
        """Ask the child for the spare blocks of the salts that had none."""
        salts = list(self._full)
        self._full.clear()
        with suppress(TierError):
            self._hear(await self._tier.spare(salts))

    def _hear(self, spare: Mapping[bytes, float]) -> None:
        for salt, blocks in spare.items():
            self._spare[salt] = blocks
            self._spare.move_to_end(salt)
        while len(self._spare) > SALTS_MAX:
            self._spare.popitem(last=False)

    async def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        batch = await self._tier.recover(anew=True)
        while batch is not None:
            yield batch
            batch = await self._tier.recover(anew=False)

    def gauges(self) -> Mapping[str, int]:
        pid = self._process.pid if self._process is not None and self._ready else 0
        return {**self._gauges, "process": pid, "process_ends": self._ends}

    def describe(self) -> dict[str, str]:
        how = f"its own; killed if an abandoned call does not end within {self._abandon_s:g} s"
        return {**self._described, "process": how}

    async def aclose(self) -> None:
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        process = self._process
        if process is not None:
            closing: set[asyncio.Future[None]] = set()
            if self._ready:
                self._ready = False
                closing.add(asyncio.ensure_future(process.tier.aclose()))
            try:
                if closing:
                    await asyncio.wait(closing, timeout=CLOSE_S)
            finally:
                await process.aclose()  # this also ends the call
            await asyncio.gather(*closing, return_exceptions=True)
        if self._asking is not None:
            await asyncio.wait({self._asking})


def _not_importable(make: type[Tier], why: str) -> ConfigError:
    what = f"{make.__name__} cannot be constructed in another process: {why}"
    return ConfigError(what, hint="expected a class in a module that can be imported")
