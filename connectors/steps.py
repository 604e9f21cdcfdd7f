"""For engines that decide in one process and copy in others, step by step."""

from __future__ import annotations

from collections.abc import Iterable

from kvladder.connectors.base import Connector, OpenJob
from kvladder.gpu.copy.copier import CopyJob, Finished, JobId
from kvladder.manager import CacheManager, PrefetchSet


class StepConnector(Connector):
    """Puts jobs into the steps of an engine, and ends them when all ranks have reported."""

    def __init__(self, manager: CacheManager, *, ranks: int) -> None:
        super().__init__(manager, reports=ranks)
        self._begun: list[CopyJob] = []
        self._ended: list[Finished] = []
        self.rising = PrefetchSet()
        """Of requests that come later."""
        self.copied = {"offload_bytes": 0, "offload_s": 0.0, "onboard_bytes": 0, "onboard_s": 0.0}
        """What has been copied out of the engine's KV cache, and into it."""

    def _start(self, job: CopyJob) -> None:
        self._begun.append(job)

    def loading_s(self, blocks: int) -> float | None:
        """How long copying so many blocks into the engine's memory takes, as measured so far."""
        if not self.copied["onboard_bytes"]:
            return None
        byte_s = self.copied["onboard_s"] / self.copied["onboard_bytes"]
        return byte_s * blocks * self.manager.layout.block_bytes

    @property
    def begun(self) -> list[CopyJob]:
        """What ``take`` would return."""
        return [*self._begun]

    def take(self) -> list[CopyJob]:
        """The jobs that were begun since the last call; asked once a step."""
        self.rising.settle()
        begun, self._begun = self._begun, []
        return begun

    @property
    def saving(self) -> list[OpenJob]:
        """The saves under way."""
        return [one for one in self._jobs.values() if one.job.direction == "offload"]

    def reading(self, blocks: Iterable[int]) -> list[JobId]:
        """The saves under way that still read any of these blocks."""
        written = set(blocks)
        return [one.job.id for one in self.saving if not written.isdisjoint(one.job.blocks)]

    def distrust(self) -> None:
        """The blocks that the saves under way read may hold something else than they should."""
        for one in self.saving:
            one.ok = False

    def excuse(self) -> None:
        """What is being loaded may not arrive, through no fault of the cache: it stays there."""
        for one in self._jobs.values():
            one.excused = True

    def withdraw(self) -> list[CopyJob]:
        """No step could be made, and nothing is fenced: what is being saved may be overwritten.

        The saves that begin with it would come too late and are given up. Returns its loads.
        """
        self.distrust()
        jobs = self.take()
        for job in jobs:
            if job.direction == "offload":
                self._jobs[job.id].reports_left = 1
                self.report([Finished(job.id, False, 0, 0.0)])
        return [job for job in jobs if job.direction == "onboard"]

    def report(self, ended: Iterable[Finished]) -> None:
        """Take in what workers reported: a part of a job each."""
        self.rising.settle()
        for finished in ended:
            one = self._report(finished)
            if one is not None:
                self.copied[f"{one.job.direction}_bytes"] += one.bytes
                self.copied[f"{one.job.direction}_s"] += one.seconds
                self._ended.append(Finished(one.job.id, one.ok, one.bytes, one.seconds))

    def poll(self) -> list[Finished]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self.rising.close()
        super().close()
