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
"""From the engine's blocks to slots (offload), or back (onboard)."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Blocks to copy: ``blocks[i]`` to or from ``slots[i]``. Plain data; may cross processes.

    The caller must keep all other code from writing what the job reads, and from touching what it
    writes, until the job is reported as finished.
    """

    id: JobId
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[Slot, ...]
    group: int = 0
    """Group of the blocks, one of the groups that the copier was made for."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that is over. If it failed, its target bytes are undefined."""

    id: JobId
    ok: bool
    bytes: int
    seconds: float
    """Time from the beginning of its copy to its end."""
    error: str = ""
    """Reason of the failure; "" if there was none."""


class Copier(ABC):
    """Copies blocks in the background. Only the engine's thread calls it.

    Jobs of one direction run in order; jobs of different directions may overtake each other.
    """

    @abstractmethod
    def submit(self, job: CopyJob, *, by_layer: bool = False) -> None:
        """Queue a copy after the work that the engine's device has so far; return at once.

        With ``by_layer``, all blocks of one layer are copied before the next layer, so that a
        fence may name a layer. Where that is much slower, whole blocks are copied instead.
        """

    @abstractmethod
    def poll(self) -> list[Finished]:
        """Return the jobs that ended since the last call, each once; never wait."""

    @abstractmethod
    def wait(self, ids: Sequence[JobId]) -> None:
        """Wait until these jobs are over; an id that is not in flight counts as over."""

    @abstractmethod
    def rest(self, timeout_s: float) -> None:
        """Wait until there is a job to poll, at most ``timeout_s``."""

    @abstractmethod
    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        """Make the device work that the engine queues from now on wait for these jobs.

        If ``layer`` is named, a job that goes by layer delays it only until the layer's bytes are
        there. The next ``poll`` reports the failures known by now, before the blocks may be read.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait until all jobs are over; until the next ``submit`` no copy touches the tensors."""

    def moved(self) -> None:
        """Take the new addresses of the pages, whose memory has moved; no job is in flight."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all jobs, then end all threads; may be called again.

        ``poll`` still reports the jobs that ended.
        """


@dataclass(slots=True)
class Task:
    """A job in flight."""

    job: CopyJob
    steps: Iterator[Sequence[str]]
    begun_s: float | None = None


class ThreadedCopier(Copier):
    """A copier with a thread that runs jobs in small steps, onboarding first.

    A step is the subclass's work up to its next yield, which names the layers that are complete.
    So a job that onboards waits for at most one step of a job that offloads.
    """

    def __init__(self, *, name: str, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._tasks: dict[Direction, deque[Task]] = {"onboard": deque(), "offload": deque()}
        self._active: dict[JobId, set[str]] = {}
        """The jobs in flight, each with the names of its layers that are complete."""
        self._finished: list[Finished] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def block_bytes(self, group: int) -> int:
        """Return the number of bytes copied per block of a group."""

    def _submit(self, job: CopyJob, steps: Iterator[Sequence[str]]) -> None:
        """Queue ``job`` for the thread; each item of ``steps`` does a part of it."""
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
        """Do one step of a task; return whether the task is over."""
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
        """Report a job that is over, with its time and error."""
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
