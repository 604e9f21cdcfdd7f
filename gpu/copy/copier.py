"""Copies between an engine's KV tensors and arena slots: batched, in the background."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NewType

from kvladder.arena import Slot
from kvladder.gpu.copy.ranges import ranged

JobId = NewType("JobId", int)

Direction = Literal["offload", "onboard"]
"""From the engine's blocks to slots, and back."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Blocks to copy: ``blocks[i]`` to or from ``slots[i]``. Plain data; may cross processes.

    Whoever makes it sees to it that nobody else writes what it reads, or touches what it writes,
    until it is reported as finished.
    """

    id: JobId
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[Slot, ...]
    group: int = 0
    """Which of the copier's kinds of blocks these are."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that is over: its bytes are there, or they are not (and may be garbage)."""

    id: JobId
    ok: bool
    bytes: int
    seconds: float
    """From the beginning of its copy to its end."""
    error: str = ""
    """Why it failed."""


class Copier(ABC):
    """Copies blocks in the background. Called by one thread, the engine's.

    Jobs of one direction run in order; those of the two directions may overtake each other.
    """

    @abstractmethod
    def submit(self, job: CopyJob, *, by_layer: bool = False) -> None:
        """Begin a copy after what the engine's device was told to do so far; returns at once.

        ``by_layer`` has it go layer by layer, all blocks of one before the next, so that a fence
        may name a layer; where that is slower than whole blocks by far, these are copied.
        """

    @abstractmethod
    def poll(self) -> list[Finished]:
        """The jobs that ended since the last call, each reported once; never waits."""

    @abstractmethod
    def wait(self, ids: Sequence[JobId]) -> None:
        """Return when these jobs are over; ids that are not under way are over."""

    @abstractmethod
    def rest(self, timeout_s: float) -> None:
        """Return when there is something to poll, or after ``timeout_s``."""

    @abstractmethod
    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        """Whatever the engine tells its device from now on happens after these jobs.

        Of a job that goes by layer, after the bytes of one ``layer`` if that is named.
        What is known to have failed is reported by the next ``poll``, before they may be read.
        """

    @abstractmethod
    def drain(self) -> None:
        """End what was submitted: nothing touches the engine's tensors until more is."""

    def moved(self) -> None:
        """The memory behind the pages lies elsewhere now; no job is under way."""

    @abstractmethod
    def close(self) -> None:
        """End what was submitted, then all threads; ``poll`` still reports. May be called again."""


@dataclass(slots=True)
class Task:
    """A job under way."""

    job: CopyJob
    steps: Iterator[Sequence[str]]
    begun_s: float | None = None


class ThreadedCopier(Copier):
    """A copier with a thread that works through jobs in small steps, onboarding first.

    A step is what its subclass does between two yields, of the names of layers that have come
    whole; a job that is being offloaded gives way to one that an engine waits for after at most
    one step.
    """

    def __init__(self, *, name: str, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._tasks: dict[Direction, deque[Task]] = {"onboard": deque(), "offload": deque()}
        self._active: dict[JobId, set[str]] = {}
        """The jobs under way, and what has come of those that go by layer."""
        self._finished: list[Finished] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def block_bytes(self, group: int) -> int:
        """Bytes that are copied per block of a group."""

    def _submit(self, job: CopyJob, steps: Iterator[Sequence[str]]) -> None:
        """Have the thread run ``steps``, an iterator that does a part of ``job`` at each turn."""
        with self._changed:
            if self._closed:
                self._finished.append(Finished(job.id, False, 0, 0.0, "the copier is closed"))
                return
            self._active[job.id] = set()
            self._tasks[job.direction].append(Task(job, steps))
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(self._tasks.values()))
                queue = self._tasks["onboard"] or self._tasks["offload"]
                if not queue:
                    return
                task = queue[0]
            if self._step(task):
                with self._changed:
                    queue.popleft()
            del task

    def _step(self, task: Task) -> bool:
        """Do one part of a task; whether it was the last one."""
        if task.begun_s is None:
            task.begun_s = self._now()
        try:
            with ranged(task.job.direction, len(task.job.blocks)):
                came = next(task.steps)
        except StopIteration:
            self._report(task.job, task.begun_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, the bytes did not arrive
            self._report(task.job, task.begun_s, error=repr(error))
        else:
            if came:
                with self._changed:
                    self._active[task.job.id].update(came)
                    self._changed.notify_all()
            return False
        return True

    def _report(self, job: CopyJob, begun_s: float, *, error: str = "") -> None:
        """The job is over, its copy included."""
        size = 0 if error else len(job.blocks) * self.block_bytes(job.group)
        finished = Finished(job.id, not error, size, self._now() - begun_s, error)
        with self._changed:
            del self._active[job.id]
            self._finished.append(finished)
            self._changed.notify_all()

    def poll(self) -> list[Finished]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, ids: Sequence[JobId]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._active.keys().isdisjoint(ids))

    def rest(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._finished), timeout_s)

    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        with self._changed:
            under_way = self._active
            self._changed.wait_for(
                lambda: all(layer in under_way.get(number, (layer,)) for number in ids)
            )

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._active)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()


def require_places(job: CopyJob, *, blocks: int, slots: int) -> None:
    """Raise ValueError unless every block and slot of ``job`` exists and they pair up."""
    if len(job.blocks) != len(job.slots):
        raise ValueError(f"{len(job.blocks)} blocks for {len(job.slots)} slots")
    for block, slot in zip(job.blocks, job.slots, strict=True):
        if not (0 <= block < blocks and 0 <= slot < slots):
            raise ValueError(f"block {block} of {blocks}, slot {slot} of {slots}")
