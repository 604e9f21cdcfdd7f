"""The engine's side of an isolated tier's child process: calls to it, and its reliable end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TypeVar

import msgspec

from kvladder.errors import ConfigError, TierError, TierFull, Unavailable
from kvladder.tiers.context import Progress
from kvladder.tiers.isolated.spawn import Spawned
from kvladder.tiers.isolated.wire import (
    Cancel,
    Done,
    Failed,
    Message,
    Progressed,
    Reply,
    Request,
    Said,
    Start,
    frame,
    replies,
    take,
)

R = TypeVar("R", bound=Message)

CHILD = "kvladder.tiers.isolated.child"
START_S = 60.0
"""Seconds for each step of a start, construct and open; long, since libraries are large."""


class Process:
    """A child process that serves one tier. If it dies, its calls end only after its death.

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
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._progress: dict[int, Progress] = {}
        self._spawned: Spawned
        self._serving: asyncio.Task[None] | None = None

    async def start(self, pickled: bytes, descriptors: Sequence[int] = ()) -> None:
        """Start the child, which inherits these descriptors, and let it construct the tier.

        The caller must call ``aclose``, also after an error.

        Raises
        ------
        TierError, ConfigError
            The process cannot be started, takes too long, or cannot construct the tier.
        """
        try:
            self._spawned = await Spawned.start(CHILD, descriptors)
        except OSError as error:
            raise TierError(f"a process for {self._name} cannot be started: {error}") from error
        # nothing was awaited since the child began, so from here on this task always ends it
        self._serving = asyncio.create_task(self._serve(), name=f"kvladder-{self._name}")
        await self.call(Start(pickled=pickled), Done, limit_s=START_S)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._spawned.pid

    @property
    def how(self) -> str:
        """Sentence that says how the child ended."""
        return f"the process of {self._name} has ended: {self._spawned.how}"

    async def _serve(self) -> None:
        """Deliver answers until the child is gone; then wait for its death and fail its calls."""
        try:
            while True:
                self._take(replies.decode(await take(self._spawned.reader)))
        except (ConnectionError, OSError):
            pass
        except (msgspec.MsgspecError, ValueError) as error:
            self._spawned.kill(f"it does not keep to the protocol: {error}")
        finally:
            await self._spawned.end()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(TierError(self.how))
                    future.exception()  # marks it as seen: its caller may have abandoned it
            self._calls.clear()
            self._ended(self)

    def _take(self, message: Reply) -> None:
        # the loop reports errors of these callbacks, so they end neither the child nor a call
        soon = asyncio.get_running_loop().call_soon
        if isinstance(message, Said):
            soon(self._say, message.text)
            return
        if isinstance(message, Progressed):
            if (progress := self._progress.get(message.number)) is not None:
                soon(progress, message.done, message.total)
            return
        future = self._calls.pop(message.number, None)
        if future is not None and not future.done():
            future.set_result(message)

    async def call(
        self,
        message: Request,
        wanted: type[R],
        *,
        limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> R:
        """Send a request and return its answer, which is a ``wanted``.

        A call that is cancelled, or has no answer after ``limit_s``, is cancelled in the child. If
        it has not ended after ``abandon_s``, the child is killed, and the call ends when the child
        is dead.

        Raises
        ------
        TierError, ConfigError
            The tier raised it. Also TierError if the child ends or takes too long.
        """
        if self._serving is None or self._serving.done() or self._spawned.writer.is_closing():
            raise TierError(f"the process of {self._name} has ended")
        number = message.number = next(self._numbers)
        body = frame(message)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        if progress is not None:
            self._progress[number] = progress
        self._spawned.writer.write(body)
        try:
            async with asyncio.timeout(limit_s):
                answer = await asyncio.shield(future)
        except TimeoutError as error:
            await self._give_up(number, future)
            raise TierError(f"the process of {self._name} needs more than {limit_s} s") from error
        except asyncio.CancelledError:
            await self._give_up(number, future)
            raise
        finally:
            self._progress.pop(number, None)
        if isinstance(answer, Failed):
            raise error_of(answer)
        assert isinstance(answer, wanted), answer
        return answer

    async def _give_up(self, number: int, future: asyncio.Future[Reply]) -> None:
        """End a call in the child: cancel it, and kill the child if that takes too long."""
        if not future.done() and not self._spawned.writer.is_closing():
            self._spawned.writer.write(frame(Cancel(number)))
        why = f"a call that was given up did not end within {self._abandon_s:g} s"
        killing = asyncio.get_running_loop().call_later(self._abandon_s, self._spawned.kill, why)
        try:
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
        finally:
            killing.cancel()

    async def aclose(self) -> None:
        """Kill the child and wait until it is dead; may be called again."""
        if self._serving is None:
            return
        self._spawned.kill("the tier was closed")
        while not self._serving.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({self._serving})


def error_of(failed: Failed) -> TierError | ConfigError:
    """Return the error that a call raised, to raise it again."""
    if failed.kind == "config":
        return ConfigError(failed.message, path=failed.path, hint=failed.hint)
    if failed.kind == "unavailable":
        return Unavailable(failed.message, path=failed.path, hint=failed.hint)
    if failed.kind == "cancelled":
        return TierError("it cancelled the call")
    kind = TierFull if failed.kind == "full" else TierError
    return kind(failed.message, temporary=failed.temporary)
