"""The common parts of trials: cases, figures, and lanes that run one trial after the other."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

STRIKE_S = 0.03
"""Within this time from the beginning of a call it happens."""
BEFORE, FIRST, LAST, CLOSED = "before", "after the first round", "after the last", "after closing"
"""The moments at which held resources are counted."""


class Case(NamedTuple):
    """A fault of a process or server during transfers."""

    tier: str
    victim: str
    fault: str
    """The name of a signal, or of another event."""
    call: str


def cases(tier: str, victims: Sequence[str]) -> list[Case]:
    """Return all cases of a tier that kill or stop a process."""
    faults = "SIGKILL", "SIGSTOP"
    return [Case(tier, *one) for one in itertools.product(victims, faults, ("get", "put"))]


class Held(NamedTuple):
    """The resources of this process at a moment without transfers."""

    slots: int
    """Slots of the arena that hold no block of the host level."""
    descriptors: int
    threads: int
    """The number of threads, including those of libraries, which may keep and end theirs freely."""
    python_threads: int

    @classmethod
    def now(cls, slots: int = 0) -> Held:
        """Count descriptors and threads."""
        descriptors, threads = (len([*Path("/proc/self", of).iterdir()]) for of in ("fd", "task"))
        return cls(slots, descriptors, threads, threading.active_count())


@dataclass
class Service:
    """A kind of fault as the users of a cache notice it."""

    wrong_bytes: int = 0
    loads: int = 0
    longest_s: float = 0.0
    """Wait for a fetch."""
    again_s: list[float] = field(default_factory=list[float])
    """Seconds in each round from the end of the fault until the level served later saves."""


@dataclass
class Figures:
    """The worst of all trials."""

    took_s: float = 0.0
    trials: Counter[Case] = field(default_factory=Counter[Case])
    wait_s: float = 0.0
    """Seconds of a caller beyond its timeout."""
    held_s: float = 0.0
    """Seconds from a timeout until slots are free."""
    stall_s: float = 0.0
    """Seconds of delay of another thread of the caller's process."""
    gone_s: float = 0.0
    """Seconds from the death of a client until the far end has its slots back."""
    late_bytes: int = 0
    services: dict[Case, Service] = field(default_factory=dict[Case, Service])
    held: dict[str, dict[str, Held]] = field(default_factory=dict[str, dict[str, Held]])
    """Held resources by tier, at named moments."""

    def check(self) -> None:
        """Assert the invariants that hold on a busy machine too."""
        assert self.late_bytes == 0
        assert not sum(one.wrong_bytes for one in self.services.values())
        for moments in self.held.values():
            assert not any(held.slots for held in moments.values())
            assert moments[CLOSED].descriptors <= moments[BEFORE].descriptors
            assert moments[CLOSED].python_threads <= moments[BEFORE].python_threads

    def add(self, other: Figures) -> None:
        """Add the figures of trials that ran in another process at the same time."""
        for name in ("took_s", "wait_s", "held_s", "stall_s", "gone_s"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.trials += other.trials
        self.late_bytes += other.late_bytes
        self.services |= other.services
        self.held |= other.held


class Lane(ABC):
    """Far ends and a user of them, with one trial after the other.

    Parameters
    ----------
    folder:
        The lane's own folder; it is created here.
    figures:
        The figures to which the lane adds its results.
    turn:
        A lock held while a trial is measured, which no other lane may disturb.
    """

    def __init__(self, folder: Path, figures: Figures, turn: asyncio.Lock) -> None:
        folder.mkdir()
        self.folder, self.figures, self.turn = folder, figures, turn

    @classmethod
    @abstractmethod
    def cases(cls) -> list[Case]:
        """Return the possible cases."""

    @abstractmethod
    async def open(self) -> None:
        """Begin to use the far ends, and wait until they serve."""

    @abstractmethod
    async def trial(self, case: Case, delay_s: float) -> None:
        """Cause a fault this time after an operation began."""

    @abstractmethod
    async def recover(self, case: Case) -> None:
        """Repair the damage of the fault, and count the trial once the state is as before."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the use of the far ends."""

    def close(self) -> None:
        """End the far ends; also after an error."""


async def run(
    folder: Path,
    trials: int,
    lanes: Sequence[type[Lane]],
    *,
    seed: int = 11,
    within_s: float = math.inf,
) -> Figures:
    """Run this number of trials, all cases equally often, while other lanes recover.

    None begins after ``within_s``.
    """
    figures, turn, random = Figures(), asyncio.Lock(), Random(seed)
    threads = ThreadPoolExecutor(len(lanes))  # one each: how many there are does not change
    asyncio.get_running_loop().set_default_executor(threads)
    began_s = time.perf_counter()
    known = [(make, case) for make in dict.fromkeys(lanes) for case in make.cases()]
    due = [*itertools.islice(itertools.cycle(known), trials)]
    random.shuffle(due)

    async def work(number: int, make: type[Lane]) -> None:
        lane = await asyncio.to_thread(make, folder / f"lane{number}", figures, turn)
        try:
            await lane.open()
            while mine := [case for its, case in due if its is make]:
                if time.perf_counter() - began_s > within_s:
                    break
                due.remove((make, mine[0]))
                await lane.trial(mine[0], random.random() * STRIKE_S)
                await lane.recover(mine[0])
            await lane.aclose()
        finally:
            await asyncio.to_thread(lane.close)

    async with asyncio.TaskGroup() as group:
        for number, make in enumerate(lanes):
            group.create_task(work(number, make))
    figures.took_s = time.perf_counter() - began_s
    return figures
