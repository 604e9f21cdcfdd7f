"""The engine's side of an isolated tier's child process: calls to it, and its reliable end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TypeVar

from kvladder.children.pipe import Pipe
from kvladder.children.spawn import Spawned
from kvladder.errors import TierError
from kvladder.tiers.context import Progress
from kvladder.tiers.isolated.calls import LISTENER, TIER, TierCalls

R = TypeVar("R")

CHILD = "kvladder.tiers.isolated.child"
START_S = 60.0
"""Seconds for each step of a start, construct and open; long, since libraries are large."""


class Process:
    """A child process that serves one tier. If it dies, its calls end only after its death.

    A cancelled call is cancelled in the child. If it has not ended after ``abandon_s``, the child
    is killed, and the call ends when the child is dead.

    All coroutines run on one loop. The child does not outlive the thread of that loop.

    Parameters
    ----------
    name:
        Name of the tier, for messages.
    abandon_s:
        Seconds that a cancelled call may take to end before the child is killed.
    say:
        Called with the messages of ``TierContext.say``, and with the warnings of ``Tier.examine``.
    ended:
        Called when the child is dead.
    """

    tier: TierCalls
    """The tier in the child, after ``start``. Its calls raise TierError or ConfigError."""

    def __init__(
        self,
        name: str,
        *,
        abandon_s: float,
        say: Callable[[str], object],
        ended: Callable[[Process], None],
    ) -> None:
        self._name = name
        self._abandon_s = abandon_s
        self._say = say
        self._ended = ended
        self._purges = count(1)
        self._progress: dict[int, Progress] = {}
        """Callbacks of purges, by number."""
        self._spawned: Spawned
        self._pipe: Pipe | None = None

    async def start(self, pickled: bytes, descriptors: Sequence[int] = ()) -> None:
        """Start the child, which inherits these descriptors, and let it construct the tier.

        The caller must call ``aclose``, also after an error.

        Raises
        ------
        TierError, ConfigError
            The process cannot be started, takes too long, or cannot construct the tier.
        """
        try:
            self._spawned = spawned = await Spawned.start(CHILD, descriptors)
        except OSError as error:
            raise TierError(f"the process of {self._name} cannot be started: {error}") from error
        # nothing was awaited since the child began, so from here on this task always ends it
        late = f"an abandoned call did not end within {self._abandon_s:g} s"
        pipe = self._pipe = Pipe(
            spawned.reader,
            spawned.writer,
            f"the process of {self._name}",
            ended=self._gone,
            late=partial(spawned.kill, late),
            late_s=self._abandon_s,
        )
        pipe.answer(LISTENER, self)
        self.tier = pipe.stub(TIER)
        await self.started(self.tier.make(pickled))

    async def started(self, step: Awaitable[R]) -> R:
        """Return the result of a step of the start; raise TierError if it takes too long."""
        try:
            async with asyncio.timeout(START_S):
                return await step
        except TimeoutError as error:
            raise TierError(
                f"the process of {self._name} did not start within {START_S} s"
            ) from error

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._spawned.pid

    @property
    def how(self) -> str:
        """Sentence that says how the child ended."""
        return f"the process of {self._name} has ended: {self._spawned.how}"

    async def _gone(self, fault: str) -> str:
        """Wait for the child's death; kill it first if it broke the protocol."""
        if fault:
            self._spawned.kill(fault)
        await self._spawned.end()
        self._ended(self)
        return self.how

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        """Call ``Tier.purge`` in the child."""
        number = next(self._purges)
        self._progress[number] = progress
        try:
            return await self.tier.purge(salt, number)
        finally:
            del self._progress[number]

    def said(self, text: str) -> None:
        """See ``TierListener``."""
        self._say(text)

    def progressed(self, number: int, done: int, total: int) -> None:
        """See ``TierListener``."""
        if (progress := self._progress.get(number)) is not None:
            progress(done, total)

    async def aclose(self) -> None:
        """Kill the child and wait until it is dead; may be called again."""
        if self._pipe is None:
            return
        self._spawned.kill("the tier was closed")
        joining = asyncio.ensure_future(self._pipe.join())
        while not joining.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({joining})
