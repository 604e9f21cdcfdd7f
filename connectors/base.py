"""The engine-neutral interface: what any engine calls, all of it sync and none of it waiting.

It keeps the loads and saves under way: which slots they hold, and what their end means for the
cache. Who copies is a subclass's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from kvladder.gpu.copy.copier import CopyJob, Finished, JobId
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager, Fetch, Save
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.policy.fetch_cost import AvoidedCompute


@dataclass(slots=True)
class OpenJob:
    """A job that has not been reported by everybody who copies a part of it."""

    job: CopyJob
    holds: Fetch | Save
    reports_left: int
    ok: bool = True
    excused: bool = False
    """Whether its failure says nothing of the bytes in the cache."""
    bytes: int = 0
    seconds: float = 0.0
    """Of the part that took longest."""

    def end(self) -> None:
        """Every part is over: what was saved is published, what was loaded let go."""
        if isinstance(self.holds, Save):
            (self.holds.commit if self.ok else self.holds.abort)()
        else:
            (self.holds.release if self.ok or self.excused else self.holds.forget)()


class Connector(ABC):
    """What an engine calls, from one thread.

    Keys name blocks by content and prefix (see :class:`kvladder.keys.KeyScheme`), numbers name
    blocks in the engine's KV cache. Between ``load`` or ``save`` and the report of its end by
    ``poll``, the engine neither reuses nor writes the blocks concerned. Blocks of different layers
    or shapes are told apart by ``group``; a key names a block of one group.

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
        self._jobs: dict[JobId, OpenJob] = {}
        self._ids = count(1)

    @abstractmethod
    def _start(self, job: CopyJob) -> None:
        """Have ``job`` done; each of those who do a part of it reports its end."""

    @abstractmethod
    def poll(self) -> list[Finished]:
        """The loads and saves that ended since the last call, each reported once."""

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
        saves: AvoidedCompute | None = None,
        session: str | None = None,
    ) -> Fetch:
        """Pin the longest cached prefix of ``keys`` and begin to bring up what lies below host.

        Only ``levels`` are read, by name, None for all. ``salt`` is bound into the keys. ``saves``
        is what the engine need not compute if all of it comes, None for the tokens of the blocks.
        ``session`` is the request's, see :meth:`kvladder.manager.CacheManager.fetch`.

        Ask ``Fetch.done`` as often as you like; then give the match to ``load`` or release it.
        """
        return self.manager.fetch(keys, levels=levels, salt=salt, saves=saves, session=session)

    def load(self, match: Fetch, blocks: Sequence[int], *, first: int = 0, group: int = 0) -> JobId:
        """Begin to copy the matched blocks from ``first`` on into ``blocks``.

        ``first + len(blocks) <= match.blocks``. Takes the match over: it is released when the copy
        has ended; if it failed, its blocks are forgotten and ``blocks`` hold garbage.
        """
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
        only: Sequence[int] | None = None,
        priorities: Sequence[tuple[int, float | None]] | None = None,
        parent_floor: int = PRIORITY_MAX,
        levels: Collection[str] | None = None,
        ttl_s: float | None = None,
        salt: str = "",
        group: int = 0,
        session: str | None = None,
    ) -> JobId | None:
        """Begin to save those of ``blocks`` that are not cached yet and that a level would take.

        ``keys`` name consecutive blocks of one prefix, as many as there are ``blocks``, complete
        or complete once what the engine's device was told so far is done. ``priorities`` has a
        priority and its duration in seconds, None for good, for each of them, as
        :meth:`kvladder.Retention.of_blocks` returns it; None gives them the default. The other
        options are those of :meth:`kvladder.manager.CacheManager.save`. Returns None
        if there is nothing to copy. They are hits when the end of the job has been polled.
        """
        if len(keys) != len(blocks):
            raise ValueError(f"{len(keys)} keys for {len(blocks)} blocks")
        said = priorities is not None
        save = self.manager.save(
            keys,
            only=only,
            parent_floor=parent_floor,
            priorities=[priority for priority, _ in priorities or ()] if said else None,
            durations_s=[duration_s for _, duration_s in priorities or ()] if said else None,
            levels=levels,
            ttl_s=ttl_s,
            salt=salt,
            group=group,
            session=session,
        )
        whole = len(save.indices) == len(blocks)
        return self.fill(save, blocks if whole else [blocks[n] for n in save.indices], group=group)

    def fill(self, save: Save, blocks: Sequence[int], *, group: int = 0) -> JobId | None:
        """Begin to copy ``blocks`` into the slots of a save, as many; None if it has none.

        Takes the save over: it is committed when the copy has ended, or aborted if that failed.
        """
        if not save.slots:
            return None
        chosen = tuple(blocks)
        job = CopyJob(JobId(next(self._ids)), "offload", chosen, tuple(save.slots), group)
        return self._begin(job, save)

    def _begin(self, job: CopyJob, holds: Fetch | Save) -> JobId:
        self._jobs[job.id] = OpenJob(job, holds, self._reports)
        self._start(job)
        return job.id

    def _report(self, finished: Finished) -> OpenJob | None:
        """Somebody's part of a job is over; the job with all its parts, if it was the last one."""
        entry = self._jobs.get(finished.id)
        if entry is None:  # given up by close
            return None
        entry.ok = entry.ok and finished.ok
        entry.bytes += finished.bytes
        entry.seconds = max(entry.seconds, finished.seconds)
        entry.reports_left -= 1
        assert entry.reports_left >= 0
        if entry.reports_left:
            return None
        del self._jobs[finished.id]
        entry.end()
        return entry

    def close(self) -> None:
        """Give up what has not ended, once whoever copies has stopped; may be called again."""
        while self._jobs:
            _, entry = self._jobs.popitem()
            entry.ok, entry.excused = False, True
            entry.end()
