"""Loads and saves under way: which slots they hold, and what their end means for the cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from kvladder.connectors.base import Connector, Match
from kvladder.gpu.copy.copier import CopyJob, JobId
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager, Save
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.policy.worth import Saves


@dataclass(slots=True)
class Open:
    """A job that has not been reported by everybody who copies a part of it."""

    job: CopyJob
    holds: Match | Save
    reports_left: int
    ok: bool = True
    excused: bool = False
    """Whether its failure says nothing of the bytes in the cache."""


class JobConnector(Connector):
    """A connector that hands copy jobs to somebody who reports back.

    Parameters
    ----------
    manager:
        Owned by the caller, who closes it after the connector.
    reports:
        How many reports end a job: one per rank that copies its part.
    """

    def __init__(self, manager: CacheManager, *, reports: int = 1) -> None:
        assert reports >= 1
        self.manager = manager
        self._reports = reports
        self._jobs: dict[JobId, Open] = {}
        self._ids = count(1)

    @abstractmethod
    def _start(self, job: CopyJob) -> None:
        """Have ``job`` done; each of those who do a part of it reports its end."""

    @property
    def busy(self) -> bool:
        """Whether a load or save has not ended."""
        return bool(self._jobs)

    def match(
        self,
        keys: Sequence[BlockKey],
        *,
        levels: Collection[str] | None = None,
        salt: str = "",
        saves: Saves | None = None,
    ) -> Match:
        return self.manager.fetch(keys, levels=levels, salt=salt, saves=saves)

    def release(self, match: Match) -> None:
        match.release()

    def load(self, match: Match, blocks: Sequence[int], *, first: int = 0, group: int = 0) -> JobId:
        assert match.done
        slots = match.slots[first : first + len(blocks)]
        if len(slots) < len(blocks):
            match.release()
            raise ValueError(f"{len(blocks)} blocks from {first} on, but {match.blocks} matched")
        job = CopyJob(JobId(next(self._ids)), "onboard", tuple(blocks), tuple(slots), group)
        return self._begin(job, match)

    def save(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[int],
        *,
        priorities: Sequence[tuple[int, float | None]] | None = None,
        parent_floor: int = PRIORITY_MAX,
        levels: Collection[str] | None = None,
        ttl_s: float | None = None,
        salt: str = "",
        group: int = 0,
    ) -> JobId | None:
        if len(keys) != len(blocks):
            raise ValueError(f"{len(keys)} keys for {len(blocks)} blocks")
        said = priorities is not None
        save = self.manager.save(
            keys,
            parent_floor=parent_floor,
            priorities=[priority for priority, _ in priorities or ()] if said else None,
            durations_s=[duration_s for _, duration_s in priorities or ()] if said else None,
            levels=levels,
            ttl_s=ttl_s,
            salt=salt,
        )
        if not save.slots:
            return None
        whole = len(save.indices) == len(blocks)
        chosen = tuple(blocks) if whole else tuple(blocks[index] for index in save.indices)
        job = CopyJob(JobId(next(self._ids)), "offload", chosen, tuple(save.slots), group)
        return self._begin(job, save)

    def _begin(self, job: CopyJob, holds: Match | Save) -> JobId:
        self._jobs[job.id] = Open(job, holds, self._reports)
        self._start(job)
        return job.id

    def _report(self, job_id: JobId, *, ok: bool, reports: int = 1) -> CopyJob | None:
        """Somebody's part of a job is over; the job, if it was the last part."""
        entry = self._jobs.get(job_id)
        if entry is None:  # given up by close
            return None
        entry.ok = entry.ok and ok
        entry.reports_left -= reports
        assert entry.reports_left >= 0
        if entry.reports_left:
            return None
        del self._jobs[job_id]
        holds = entry.holds
        if isinstance(holds, Save):
            (holds.commit if entry.ok else holds.abort)()
        else:
            (holds.release if entry.ok or entry.excused else holds.forget)()
        return entry.job

    def close(self) -> None:
        """Give up what was not reported; whoever copies has stopped before."""
        while self._jobs:
            _, entry = self._jobs.popitem()
            (entry.holds.abort if isinstance(entry.holds, Save) else entry.holds.release)()
