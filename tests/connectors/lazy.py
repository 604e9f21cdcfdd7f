"""A copier with delays and failures chosen by the test."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvladder.arena import Arena
from kvladder.gpu.copy.copier import Copier, CopyJob, Finished, JobId
from kvladder.gpu.copy.cpu import CpuCopier
from kvladder.gpu.copy.pages import Parts


class LazyCopier(Copier):
    """Copies on a wait or at some later poll, in any order; or fails."""

    def __init__(self, parts: Parts, arena: Arena, *, random: Random) -> None:
        self._real = CpuCopier(parts, arena)
        self._random = random
        self._waiting: list[CopyJob] = []
        self._finished: list[Finished] = []
        self.failing = 0.0
        self.failing_way: str | None = None
        """Only jobs of this direction fail; None: any."""
        self.layered: set[JobId] = set()
        """The jobs that went by layer so far."""
        self.held = False
        """Whether jobs end only when a caller waits for them."""

    def submit(self, job: CopyJob, *, by_layer: bool = False, urgent: bool = False) -> None:
        del urgent
        self._waiting.append(job)
        if by_layer:
            self.layered.add(job.id)

    def _begin(self, job: CopyJob, *, by_layer: bool = False) -> None:
        self._waiting.remove(job)
        may_fail = self.failing_way in (None, job.direction)
        if may_fail and self._random.random() < self.failing:
            self._finished.append(Finished(job.id, False, 0, 0.0, "by the script"))
        else:
            self._real.submit(job, by_layer=by_layer)

    def _run(self, job: CopyJob) -> None:
        self._begin(job)
        self._real.wait([job.id])
        self._finished += self._real.poll()

    def poll(self) -> list[Finished]:
        for job in self._random.sample(self._waiting, len(self._waiting)):
            if not self.held and self._random.random() < 0.4:
                self._run(job)
        self._finished += self._real.poll()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, ids: Sequence[JobId]) -> None:
        for job in [job for job in self._waiting if job.id in ids]:
            self._run(job)
        self._real.wait(ids)

    def rest(self, timeout_s: float) -> None:
        """Do nothing: no work runs elsewhere."""

    def fence(self, ids: Sequence[JobId], layer: str | None = None) -> None:
        if layer is None:
            self.wait(ids)
            return
        for job in [job for job in self._waiting if job.id in ids]:
            self._begin(job, by_layer=job.id in self.layered)
        self._real.fence(ids, layer)

    def drain(self) -> None:
        self.wait([job.id for job in self._waiting])

    def close(self) -> None:
        self.drain()
        self._real.close()
