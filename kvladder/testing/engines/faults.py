"""The scripted parts around a connector under test: copies to hold or fail, and a cold tier."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from kvladder.arena import Arena
from kvladder.gpu.copy.copier import CopyJob, Direction, ThreadedCopier
from kvladder.keys import BlockKey
from kvladder.testing.fakes import FakeStore, FakeTier, Hang
from kvladder.testing.shared import SharedFakeTier
from kvladder.tiers.context import TierContext

HELD_S = 0.001
"""Time between two looks at a copy that is held."""


class Copies:
    """Holds and fails the copies of all copiers for tensors in main memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[CopyJob] = []
        """All jobs so far."""
        self.failing: set[Direction] = set()
        """Directions in which each new job fails before it copies anything."""
        self.unsafe: list[CopyJob] = []
        """Jobs in flight when their arena was closed."""
        self._open = threading.Event()
        self._open.set()
        self._in_flight: list[tuple[Any, CopyJob]] = []
        submit = ThreadedCopier._submit  # pyright: ignore[reportPrivateUsage]
        stop, close = ThreadedCopier.close, Arena.close

        def submitted(
            copier: ThreadedCopier,
            job: CopyJob,
            steps: Iterator[Sequence[str]],
            *,
            urgent: bool = False,
        ) -> None:
            self.begun.append(job)
            submit(copier, job, self._steps(copier, job, steps), urgent=urgent)

        def stopped(copier: ThreadedCopier) -> None:
            self.let_go()
            stop(copier)

        def closed(arena: Arena) -> bool:
            jobs = [job for owner, job in self._in_flight if owner is arena]
            self.unsafe += jobs
            self.let_go()
            return close(arena)

        monkeypatch.setattr(ThreadedCopier, "_submit", submitted)
        monkeypatch.setattr(ThreadedCopier, "close", stopped)
        monkeypatch.setattr(Arena, "close", closed)

    def hold_saves(self) -> None:
        """Hold each save before it copies anything, until ``let_go`` or the copier's end."""
        self._open.clear()

    def let_go(self) -> None:
        """Let held copies continue, and hold no other."""
        self._open.set()

    def count(self, direction: Direction) -> int:
        """Return how many blocks the jobs of this direction name."""
        return sum(len(job.blocks) for job in self.begun if job.direction == direction)

    def _steps(
        self, copier: Any, job: CopyJob, steps: Iterator[Sequence[str]]
    ) -> Iterator[Sequence[str]]:
        """Yield the steps of a copy, after it was held or failed."""
        entry = getattr(copier, "_arena", None), job
        fails = job.direction in self.failing
        self._in_flight.append(entry)
        try:
            while job.direction == "offload" and not self._open.wait(HELD_S):
                yield ()  # loads may overtake it
            if fails:
                raise OSError("scripted")
            yield from steps
        finally:
            self._in_flight.remove(entry)


class NoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The cold tier has no settings."""


class ColdTier(FakeTier):
    """A tier of one test, durable unless engines share it.

    ``Cold.tier_class`` is the subclass that a stack opens.
    """

    Options: ClassVar = NoOptions
    cold: ClassVar[Cold]
    """The control of this test."""

    def __init__(self, options: NoOptions) -> None:
        del options
        super().__init__(store=self.cold.store, durable=not self.shared)

    async def open(self, context: TierContext) -> None:
        self.cold.opened.append((self, asyncio.get_running_loop()))
        await super().open(context)


class SharedColdTier(ColdTier, SharedFakeTier):
    """The same tier, shared by engines; each may remove any block."""

    def __init__(self, options: NoOptions) -> None:
        super().__init__(options)
        self.removable = lambda _: True


class Cold:
    """The cold tier of a test: its medium, its faults, and the class to register as a type."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self.store = FakeStore()
        self.opened: list[tuple[ColdTier, asyncio.AbstractEventLoop]] = []
        """The tiers that were opened, each with its loop."""
        bases = (SharedColdTier,) if is_shared else (ColdTier,)
        self.tier_class: type[ColdTier] = type("OneColdTier", bases, {"cold": self})

    @property
    def keys(self) -> set[BlockKey]:
        """Keys of the blocks on the medium."""
        return {record.key for space in self.store.spaces.values() for record in space.values()}

    @property
    def reads(self) -> int:
        """Number of blocks that reads have asked for."""
        return sum(sum(tier.batches("get")) for tier, _ in self.opened)

    def damage(self, keys: set[BlockKey]) -> None:
        """Damage the bytes that reads of these blocks return."""
        for tier, _ in self.opened:
            tier.corrupt(*keys)

    def hang(self) -> None:
        """Let each call to the tier hang from now on."""
        for tier, _ in self.opened:
            tier.script.append(Hang(times=None))

    @property
    def hangs(self) -> bool:
        """True while a call hangs."""
        return any(tier.held for tier, _ in self.opened)

    def heal(self) -> None:
        """End all hanging calls, from any thread."""
        for tier, loop in self.opened:
            if not loop.is_closed():
                loop.call_soon_threadsafe(tier.heal)
