"""The engine-neutral interface that every engine calls; all calls are synchronous, none waits.

It keeps the loads and saves in flight: which slots each holds, and what its end means for the
cache. A subclass decides how blocks are copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

from kvladder.gpu.copy.copier import CopyJob, Finished, JobId
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager, Fetch, Save, TraceHeaders
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.policy.fetch_cost import AvoidedCompute
from kvladder.units import counted


@dataclass(slots=True)
class OpenJob:
    """A job in flight: at least one rank that copies a part of it has not reported its end."""

    job: CopyJob
    holds: Fetch | Save
    reports_left: int
    ok: bool = True
    excused: bool = False
    """True if a failure would say nothing about the bytes in the cache."""
    bytes: int = 0
    seconds: float = 0.0
    """Duration of the slowest part."""
    begun_s: float = 0.0
    """Loop time at which it began, if it is traced."""

    def end(self) -> None:
        """Settle the job once every part has ended.

        A save is committed, or aborted if it failed. A load is released. If it failed and is not
        excused, the cache also forgets its blocks.
        """
        if isinstance(self.holds, Save):
            (self.holds.commit if self.ok else self.holds.abort)()
        else:
            (self.holds.release if self.ok or self.excused else self.holds.forget)()

    def trace(self) -> None:
        """Tell the span of the fetch or save, if there is one, that the copy ends now."""
        if self.holds.span is not None:
            job = self.job
            self.holds.span.copied(
                job.direction, len(job.blocks), self.bytes, self.begun_s, ok=self.ok
            )


@dataclass(frozen=True, slots=True)
class StartedSave:
    """The result of ``Connector.save``; false if there is nothing to copy."""

    job: JobId | None
    """The copy in flight; None if there is nothing to copy."""
    floor: int
    """Lowest priority so far: ``parent_floor`` of the prefix's next blocks, copied or not."""

    def __bool__(self) -> bool:
        """Return whether there is something to copy."""
        return self.job is not None


class Connector(ABC):
    """The interface that an engine calls, from one thread.

    Keys name blocks by content and prefix (see :class:`kvladder.keys.KeyScheme`). Numbers name
    blocks in the engine's KV cache. Between ``load`` or ``save`` and the report of its end by
    ``poll``, the engine must not reuse or write the blocks concerned. ``group`` distinguishes
    blocks of different layers or shapes; a key names a block of one group.

    Parameters
    ----------
    manager:
        Owned by the caller, which closes it after the connector.
    reports:
        Number of reports that end a job: one per rank that copies a part of it.
    """

    def __init__(self, manager: CacheManager, *, reports: int = 1) -> None:
        assert reports >= 1
        self.manager = manager
        self._reports = reports
        self._jobs: dict[JobId, OpenJob] = {}
        self._ids = count(1)

    def __repr__(self) -> str:
        jobs = counted(len(self._jobs), "job")
        return f"<{type(self).__name__}: {jobs} in flight, {self.manager!r}>"

    @abstractmethod
    def _start(self, job: CopyJob) -> None:
        """Begin ``job``; each rank that copies a part of it reports the end of its part."""

    @abstractmethod
    def poll(self) -> list[Finished]:
        """Return the loads and saves that ended since the last call, each once."""

    @property
    def busy(self) -> bool:
        """True while a load or save is in flight."""
        return bool(self._jobs)

    def match(
        self,
        keys: Sequence[BlockKey],
        *,
        levels: Collection[str] | None = None,
        salt: str = "",
        saves: AvoidedCompute | None = None,
        session: str | None = None,
        trace: TraceHeaders | None = None,
    ) -> Fetch:
        """Pin the longest cached prefix of ``keys`` and begin to fetch the blocks below host.

        Only the named ``levels`` are read; None reads all. ``salt`` is the one bound into the
        keys. ``saves`` is the computing that the engine avoids if all blocks come; None stands for
        the tokens of the blocks. ``session`` is the request's session, and ``trace`` has the
        headers of its trace, see :meth:`kvladder.manager.CacheManager.fetch`.

        Poll ``Fetch.done`` as often as you like. Then give the match to ``load`` or release it.
        """
        return self.manager.fetch(
            keys, levels=levels, salt=salt, saves=saves, session=session, trace=trace
        )

    def load(self, match: Fetch, blocks: Sequence[int], *, first: int = 0, group: int = 0) -> JobId:
        """Begin to copy the matched blocks, starting at ``first``, into ``blocks``.

        ``first + len(blocks) <= match.blocks``. The connector takes the match over and releases it
        when the copy has ended. If the copy failed, the cache forgets the matched blocks, and
        ``blocks`` hold garbage.
        """
        assert match.done
        slots = match.slots[first : first + len(blocks)]
        if len(slots) < len(blocks):
            match.release()
            raise ValueError(
                f"{len(blocks)} blocks to load from number {first} on, but {match.blocks} matched"
            )
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
        trace: TraceHeaders | None = None,
        parent: BlockKey | None = None,
    ) -> StartedSave:
        """Begin to save those of ``blocks`` that are not cached yet and that a level would take.

        ``keys`` name consecutive blocks of one prefix, one key for each of ``blocks``. The blocks
        are complete, or will be once the work already queued on the engine's device is done.
        ``priorities`` has, for each block, a priority and its duration in seconds (None: for
        good), as :meth:`kvladder.Retention.of_blocks` returns it. None gives all the default. The
        other options are those of :meth:`kvladder.manager.CacheManager.save`. The blocks are hits
        once ``poll`` has reported the end of the result's ``job``. The next blocks of the prefix
        get the result's ``floor`` as ``parent_floor``.
        """
        if len(keys) != len(blocks):
            raise ValueError(f"{len(keys)} keys for {len(blocks)} blocks: expected one each")
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
            trace=trace,
            parent=parent,
        )
        whole = len(save.indices) == len(blocks)
        chosen = blocks if whole else [blocks[n] for n in save.indices]
        return StartedSave(self.fill(save, chosen, group=group), save.floor)

    def fill(self, save: Save, blocks: Sequence[int], *, group: int = 0) -> JobId | None:
        """Begin to copy ``blocks`` into the slots of a save; return None if it has no slots.

        There is one block for each slot. The connector takes the save over. It commits the save
        when the copy has ended, or aborts it if the copy failed.
        """
        if not save.slots:
            return None
        chosen = tuple(blocks)
        job = CopyJob(JobId(next(self._ids)), "offload", chosen, tuple(save.slots), group)
        return self._begin(job, save)

    def _begin(self, job: CopyJob, holds: Fetch | Save) -> JobId:
        self._jobs[job.id] = entry = OpenJob(job, holds, self._reports)
        if holds.span is not None:
            entry.begun_s = self.manager.ladder.clock.now()
        self._start(job)
        return job.id

    def _report(self, finished: Finished) -> OpenJob | None:
        """Record the end of one part of a job; return the job if that was its last part."""
        entry = self._jobs.get(finished.id)
        if entry is None:  # ``close`` abandoned it
            return None
        entry.ok = entry.ok and finished.ok
        entry.bytes += finished.bytes
        entry.seconds = max(entry.seconds, finished.seconds)
        entry.reports_left -= 1
        assert entry.reports_left >= 0
        if entry.reports_left:
            return None
        del self._jobs[finished.id]
        entry.trace()
        entry.end()
        return entry

    def close(self) -> None:
        """Abandon the jobs that have not ended. May be called again.

        Call it only after all copying has stopped.
        """
        while self._jobs:
            _, entry = self._jobs.popitem()
            entry.ok, entry.excused = False, True
            entry.trace()
            entry.end()
