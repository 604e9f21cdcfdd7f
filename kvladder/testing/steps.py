"""The steps of a fake tier's script: what can happen to a call."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from kvladder.errors import TierError, TierFull

Operation = Literal[
    "open", "get", "put", "remove", "contains", "recover", "purge", "spare", "gauges", "aclose"
]
SAID_AT_ONCE = ("spare", "gauges")
"""What a tier says without being awaited: only steps that name it are for it."""


@dataclass(eq=False, kw_only=True)
class Step:
    """One thing that happens to calls."""

    on: Operation | None = None
    """To which calls; None means whichever is awaited next."""
    times: int | None = 1
    """How often before the script goes on; None means for ever."""
    after: bool = False
    """Whether the call has already had its effect, and only the answer is still to come."""

    async def happen(self) -> CancelledError | None:
        """Do it. What is raised is what the caller of the tier gets; what is returned, later."""


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
    """The call raises what no tier may raise: an error of Python, or what ends a thread."""

    error: type[BaseException]

    async def happen(self) -> None:
        raise self.error("scripted")


@dataclass(eq=False)
class Wrong(Step):
    """The call has its effect and answers nonsense: too much, too little, or something else."""

    answer: Literal["long", "short", "nothing", "words"]

    def of(self, right: Sequence[bool | None]) -> Any:
        """What is said instead of the right answer."""
        if self.answer == "nothing":
            return None
        if self.answer == "words":
            return ["yes"] * len(right)
        return [*right, True] if self.answer == "long" else [*right][:-1]


@dataclass(eq=False, kw_only=True)
class Hold(Step):
    """The call stops until ``let_go``: what happens meanwhile happens between two of its lines.

    A ``stubborn`` one is not ended by cancellation either, as a thread in a system call is not:
    once it is let go it does what it was asked to do, and only then ends as cancelled.
    """

    stubborn: bool = False
    _reached: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _free: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def reached(self) -> None:
        """Wait until a call has got here."""
        await self._reached.wait()

    def let_go(self) -> None:
        """Let calls go on, those that are to come too."""
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
    """The call does not end until it is cancelled, or the tier healed or closed."""


class Block(Hang):
    """The call hangs in a thread of ``run_blocking``: only healing or closing ends it."""


def troubles(times: int | None, *, after: bool) -> list[Step]:
    """One of each kind, for so many calls, before or after the effect of each."""
    return [
        Fail(times=times, after=after, temporary=after),
        Hang(times=times, after=after),
        Hang(times=times, stubborn=True),
        Full(times=times),
        ShortRead(times=times),
    ]


def misbehaviours(random: Random, times: int | None, *, after: bool) -> list[Step]:
    """What no tier should do, and some that goes on at one kind of call only."""
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
