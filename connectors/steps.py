"""A connector for engines that decide in one process and copy in others, step by step."""

from __future__ import annotations

from collections.abc import Iterable

from kvladder.connectors.base import Connector, OpenJob
from kvladder.gpu.copy.copier import CopyJob, Finished, JobId
from kvladder.hints.executor import HintExecutor
from kvladder.manager import CacheManager, PrefetchSet


class StepConnector(Connector):
    """Puts jobs into the steps of an engine, and ends them when all ranks have reported."""

    def __init__(self, manager: CacheManager, *, ranks: int) -> None:
        super().__init__(manager, reports=ranks)
        self._begun: list[CopyJob] = []
        self._ended: list[Finished] = []
        self.rising = PrefetchSet()
        """Prefetches for requests that have not arrived yet."""
        self.copied = {"offload_bytes": 0, "offload_s": 0.0, "onboard_bytes": 0, "onboard_s": 0.0}
        """Bytes and seconds copied out of the engine's KV cache (offload) and into it (onboard)."""

    @property
    def hints(self) -> HintExecutor:
        """The executor of hints; made when first asked for, as most engines get none."""
        return HintExecutor.of(self.manager)

    def _start(self, job: CopyJob) -> None:
        self._begun.append(job)

    def loading_s(self, blocks: int) -> float | None:
        """Estimate the seconds to copy this number of blocks into the engine's memory.

        The estimate is the average so far; None before the first load has ended.
        """
        if not self.copied["onboard_bytes"]:
            return None
        byte_s = self.copied["onboard_s"] / self.copied["onboard_bytes"]
        return byte_s * blocks * self.manager.layout.block_bytes

    @property
    def begun(self) -> list[CopyJob]:
        """The jobs that ``take`` would return."""
        return [*self._begun]

    def take(self) -> list[CopyJob]:
        """Return the jobs begun since the last call; called once a step."""
        self._settle()
        begun, self._begun = self._begun, []
        return begun

    @property
    def saving(self) -> list[OpenJob]:
        """The saves in flight."""
        return [one for one in self._jobs.values() if one.job.direction == "offload"]

    def reading(self, blocks: Iterable[int]) -> list[JobId]:
        """Return the saves in flight that still read any of these blocks."""
        written = set(blocks)
        return [one.job.id for one in self.saving if not written.isdisjoint(one.job.blocks)]

    def distrust(self) -> None:
        """Let all saves in flight fail: the blocks that they read may hold wrong content."""
        for one in self.saving:
            one.ok = False

    def excuse(self) -> None:
        """Let the cache keep the blocks of loads in flight even if these loads fail.

        They may now fail for reasons that say nothing about the bytes in the cache.
        """
        for one in self._jobs.values():
            one.excused = True

    def withdraw(self) -> list[CopyJob]:
        """Withdraw the jobs of a step that could not be built; return its loads.

        Without the step there is no fence, so blocks may be overwritten while saves read them.
        All saves in flight therefore count as failed. The step's own saves would begin too late
        and are abandoned.
        """
        self.distrust()
        jobs = self.take()
        for job in jobs:
            if job.direction == "offload":
                self._jobs[job.id].reports_left = 1
                self.report([Finished(job.id, False, 0, 0.0)])
        return [job for job in jobs if job.direction == "onboard"]

    def report(self, ended: Iterable[Finished]) -> None:
        """Record the ended parts of jobs that workers reported."""
        self._settle()
        for finished in ended:
            one = self._report(finished)
            if one is not None:
                self.copied[f"{one.job.direction}_bytes"] += one.bytes
                self.copied[f"{one.job.direction}_s"] += one.seconds
                self._ended.append(Finished(one.job.id, one.ok, one.bytes, one.seconds))

    def poll(self) -> list[Finished]:
        ended, self._ended = self._ended, []
        return ended

    def _settle(self) -> None:
        """Release the fetches for later requests that are done."""
        self.rising.settle()

    def close(self) -> None:
        self.rising.close()
        super().close()
