"""Batched background copies between an engine's KV tensors and arena slots."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Literal, NewType, get_args

from kvladder.arena import Slot
from kvladder.gpu.copy.ranges import ranged

JobId = NewType("JobId", int)

SHORT_BYTES = 128 << 20
"""Largest load that overtakes longer ones; a bus moves so many bytes in 2 to 5 ms."""

Direction = Literal["offload", "onboard"]
"""``offload`` copies from the engine's blocks to slots, ``onboard`` back."""


Lane = Literal["urgent", "onboard", "offload"]
"""Queue of jobs that run in order; those of the first run first."""
LANES: Final[tuple[Lane, ...]] = get_args(Lane)


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Blocks to copy: ``blocks[i]`` to or from ``slots[i]``. Plain data; may cross processes.

    Its creator ensures that, until it is reported as finished, nothing else writes the bytes that
    it reads, or touches the bytes that it writes.
    """

    id: JobId
    direction: Direction
    blocks: tuple[int, ...]
    slots: tuple[Slot, ...]
    group: int = 0
    """Index of the blocks' group in the copier."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended. If it is not ``ok``, the target's bytes may be garbage."""

    id: JobId
    ok: bool
    bytes: int
    seconds: float
    """Duration of its copy."""
    error: str = ""
    """Reason why it failed."""


class Copier(ABC):
    """Copies blocks in the background. Only the engine's thread calls it.

    Jobs may overtake each other: short loads overtake long ones.
    """

    @property
    def settled(self) -> bool:
        """True once the slots that this copier reaches are known; see ``Arena.admitted``."""
        return True

    @abstractmethod
    def submit(self, job: CopyJob, *, by_layer: bool = False, urgent: bool = False) -> None:
        """Begin a copy, ordered after the work queued on the engine's device; return at once.

        With ``by_layer``, it copies all blocks of one layer before the next layer, so that a fence
        may name a layer. If that is far slower than whole blocks, it copies whole blocks anyway.
        An ``urgent`` load, or one by layer, overtakes long loads: a forward pass waits for it.
        """

    @abstractmethod
    def poll(self) -> list[Finished]:
        """Return the jobs that ended since the last call, each once; never waits."""

    @abstractmethod
    def wait(self, ids: Sequence[JobId]) -> None:
        """Wait until these jobs have ended. Ids of unknown jobs count as ended."""

    @abstractmethod
    def rest(self, timeout_s: float) -> None:
        """Wait until there is something to poll, at most ``timeout_s``."""

    @abstractmethod
    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        """Order all later work of the engine's device after these jobs.

        If ``layer`` is given and a job goes by layer, later work is ordered only after the bytes of
        that layer. A failure known by now is reported by the next ``poll``, before the bytes may be
        read.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait until all jobs have ended; no copy touches the engine's tensors then."""

    def moved(self) -> None:
        """Note that the pages' memory has moved. No job may be in flight."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all jobs, then end all threads; ``poll`` still works. May be called again."""


@dataclass(slots=True)
class Task:
    """A job in flight."""

    job: CopyJob
    steps: Iterator[Sequence[str]]
    begun_s: float | None = None


class ThreadedCopier(Copier):
    """A copier with a thread that runs jobs in small steps: short loads, then others, then saves.

    A step is the subclass's work between two yields; it yields the names of layers that are
    complete. So a load, which an engine waits for, is delayed by at most one step of a save, and a
    short one by at most one step of a longer one.
    """

    def __init__(self, *, name: str, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._tasks: dict[Lane, deque[Task]] = {lane: deque() for lane in LANES}
        self._active: dict[JobId, set[str]] = {}
        """Jobs in flight, with the layers that are complete of jobs that go by layer."""
        self._finished: list[Finished] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def block_bytes(self, group: int) -> int:
        """Return the bytes copied per block of a group."""

    def _submit(
        self, job: CopyJob, steps: Iterator[Sequence[str]], *, urgent: bool = False
    ) -> None:
        """Queue ``job`` for the thread; ``steps`` does a part of it at each iteration."""
        with self._changed:
            if self._closed:
                self._finished.append(Finished(job.id, False, 0, 0.0, "the copier is closed"))
                return
            self._active[job.id] = set()
            self._tasks[self._lane(job, urgent=urgent)].append(Task(job, steps))
            self._changed.notify_all()

    def _lane(self, job: CopyJob, *, urgent: bool) -> Lane:
        try:
            size = self.block_bytes(job.group)
        except KeyError:  # its first step fails
            size = 0
        return lane_of(job, size, urgent=urgent)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(self._tasks.values()))
                queue = next(filter(None, self._tasks.values()), None)
                if queue is None:
                    return
                task = queue[0]
            if self._step(task):
                with self._changed:
                    queue.popleft()
            del task

    def _step(self, task: Task) -> bool:
        """Do one part of a task; return whether it has ended."""
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
        """Report a job that has ended."""
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


def lane_of(
    job: CopyJob, block_bytes: int, *, urgent: bool, short_bytes: int = SHORT_BYTES
) -> Lane:
    """Return the queue of a job: loads that are short, or that a forward pass waits for, overtake.

    ``block_bytes`` is the size of one of its blocks.
    """
    if job.direction == "offload":
        return "offload"
    return "urgent" if urgent or len(job.blocks) * block_bytes <= short_bytes else "onboard"


def require_places(job: CopyJob, *, blocks: int, slots: int) -> None:
    """Raise ValueError unless all blocks and slots of ``job`` exist and their counts are equal."""
    if len(job.blocks) != len(job.slots):
        raise ValueError(f"{len(job.blocks)} blocks for {len(job.slots)} slots")
    for block, slot in zip(job.blocks, job.slots, strict=True):
        if not (0 <= block < blocks and 0 <= slot < slots):
            raise ValueError(f"block {block} of {blocks} or slot {slot} of {slots} does not exist")
