"""The steps of a fake tier's script: the faults that a call can meet."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from kvladder.errors import TierError, TierFull

Operation = Literal[
    "open", "get", "put", "remove", "contains", "recover", "purge", "resize", "spare", "gauges",
    "aclose",
]  # fmt: skip
SAID_AT_ONCE = ("spare", "gauges")
"""Synchronous operations; only a step that names one in ``on`` applies to it."""


@dataclass(eq=False, kw_only=True)
class Step:
    """One fault, for one or more calls."""

    on: Operation | None = None
    """Operation that the step applies to; None means the next awaited call, except ``aclose``."""
    times: int | None = 1
    """Number of calls that the step applies to; None means no limit."""
    after: bool = False
    """True if the step comes after the call's effect, so that only the answer is affected."""

    async def happen(self) -> CancelledError | None:
        """Carry out the step during a call.

        An error raised here ends the call at once. A returned CancelledError is raised at the end
        of the call, after its effect.
        """


@dataclass(eq=False)
class Delay(Step):
    """The call takes ``seconds`` longer."""

    seconds: float

    async def happen(self) -> None:
        await asyncio.sleep(self.seconds)


@dataclass(eq=False, kw_only=True)
class Fail(Step):
    """The call raises TierError."""

    temporary: bool = True

    async def happen(self) -> None:
        raise TierError("scripted", temporary=self.temporary)


@dataclass(eq=False, kw_only=True)
class Full(Step):
    """A put raises TierFull."""

    on: Operation | None = "put"

    async def happen(self) -> None:
        raise TierFull("scripted")


@dataclass(eq=False, kw_only=True)
class ShortRead(Step):
    """A get fills only the first half of each slot."""

    on: Operation | None = "get"


@dataclass(eq=False)
class Raise(Step):
    """The call raises an error that no tier may raise, e.g. a ValueError or a SystemExit."""

    error: type[BaseException]

    async def happen(self) -> None:
        raise self.error("scripted")


@dataclass(eq=False)
class Wrong(Step):
    """The call has its effect, but its answer is too long, too short or of a wrong type."""

    answer: Literal["long", "short", "nothing", "words"]

    def of(self, right: Sequence[bool | None]) -> Any:
        """Return the wrong answer in place of the right one."""
        if self.answer == "nothing":
            return None
        if self.answer == "words":
            return ["yes"] * len(right)
        return [*right, True] if self.answer == "long" else [*right][:-1]


@dataclass(eq=False, kw_only=True)
class Hold(Step):
    """The call stops until ``let_go``, so a test can act in the middle of the call.

    With ``stubborn``, cancellation does not end the call either, like a thread in a system call.
    After ``let_go``, the cancelled call still has its effect, and only then ends as cancelled.
    """

    stubborn: bool = False
    _reached: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _free: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def reached(self) -> None:
        """Wait until a call has reached this step."""
        await self._reached.wait()

    def let_go(self) -> None:
        """Let held calls continue, and let later ones pass without a stop."""
        self._free.set()

    async def happen(self) -> CancelledError | None:
        self._reached.set()
        cancelled = None
        while not self._free.is_set():
            try:
                await self._free.wait()
            except CancelledError as error:
                if not self.stubborn:
                    raise
                cancelled = error
        return cancelled


class Hang(Hold):
    """The call hangs until it is cancelled, or until the tier is healed or closed."""


class Block(Hang):
    """The call hangs in a thread of ``run_blocking``: only healing or closing ends it."""


def troubles(times: int | None, *, after: bool) -> list[Step]:
    """Return faults of each allowed kind, for ``times`` calls each.

    With ``after``, failures and the first hang come after the call's effect.
    """
    return [
        Fail(times=times, after=after, temporary=after),
        Hang(times=times, after=after),
        Hang(times=times, stubborn=True),
        Full(times=times),
        ShortRead(times=times),
    ]


def misbehaviours(random: Random, times: int | None, *, after: bool) -> list[Step]:
    """Return misbehaviour that no tier may show, and faults limited to one kind of call."""
    answer: Literal["long", "short", "nothing", "words"]
    answer = random.choice(("long", "short", "nothing", "words"))
    errors = (SystemExit, KeyboardInterrupt, GeneratorExit, ValueError, CancelledError)
    return [
        Wrong(answer, times=times),
        Raise(random.choice(errors), times=times, after=after),
        Raise(SystemExit, on="spare", times=times),
        Raise(ValueError, on="gauges", times=times),
        Block(on="put", times=times, after=after),
        Block(on="get", times=times, after=after),
        Fail(on="put", times=times),
        Hang(on="remove", times=times),
    ]
