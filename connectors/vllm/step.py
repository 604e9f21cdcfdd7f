"""What the two halves of the vLLM connector tell each other; plain data, pickled by vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvladder.arena import ArenaHandle
from kvladder.connectors.base import Connector, Open
from kvladder.gpu.copy.copier import CopyJob, Finished, JobId
from kvladder.manager import CacheManager


@dataclass
class RankDescription(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one rank's worker says about its KV tensors when it has them."""

    rank: int
    """Its position among all: of its stage first, of its tensor-parallel group in it."""
    node: str
    """The machine that it runs on."""
    sizes: tuple[int, ...]
    """By group, bytes of one block on this rank; 0 where it has none of the group's layers."""
    fields: dict[str, str]
    """What must agree before bytes may be shared, and among the ranks of a stage."""
    replicas: int = 1
    """How many neighbouring ranks, this one among them, hold the same bytes."""
    weights: bytes = b""
    """Digest of the weights that it computes with."""
    taken: bool = False
    """Whether a scheduler half works with these tensors already."""
    worker: Any = None
    """The worker half itself where it is in the scheduler's process; never pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "worker": None}


@dataclass(frozen=True)
class Attach:
    """How a worker maps the arena, and where each rank's bytes begin in a slot."""

    arena: ArenaHandle
    offsets: tuple[tuple[int, ...], ...]
    """By rank and group."""


@dataclass(frozen=True)
class Load:
    """A job that fills blocks of one request."""

    job: CopyJob
    request_id: str
    sync: bool
    """Whether this step's forward pass reads the blocks."""


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers have to do in one step of the engine."""

    attach: Attach | None = None
    """Given with every job."""
    fence: list[JobId] = field(default_factory=list[JobId])
    """Saves whose source blocks this step writes: they end before it does."""
    loads: list[Load] = field(default_factory=list[Load])
    saves: list[CopyJob] = field(default_factory=list[CopyJob])
    """To begin after the forward pass."""
    idle: bool = False
    """There is no forward pass, and requests wait for blocks that are on their way."""
    number: int = 0
    """To be reported when it has ended; 0 for a step of which nobody wants to know."""
    turn: int = 0
    """How many steps were made before it, whether or not they are reported."""
    weights: tuple[int, ...] = ()
    """By rank, ``Seen.changes`` as the scheduler half knows it: names are of those weights."""
    doubt: int = 0
    """Ranks that have not looked at their weights since this doubt look at them now."""


@dataclass(frozen=True)
class Seen:
    """What a rank found when it looked at its weights, before a step's forward pass."""

    changes: int
    """How often they have changed."""
    digest: bytes
    doubt: int
    """The last one that it looked for."""
    step: int


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended on one worker since its last report, or on all workers together."""

    ended: list[Finished] = field(default_factory=list[Finished])
    """Parts of jobs, one for each worker that has a part in one."""
    step: int = 0
    """The number of the step that has ended."""
    seen: dict[int, Seen] = field(default_factory=dict[int, Seen])
    """By rank, where there is news of its weights."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Report)
        self.ended += other.ended
        self.step = max(self.step, other.step)
        self.seen.update(other.seen)
        return self


class StepConnector(Connector):
    """Puts jobs into the step's metadata and ends them when all ranks have reported."""

    def __init__(self, manager: CacheManager, *, ranks: int) -> None:
        super().__init__(manager, reports=ranks)
        self._begun: list[CopyJob] = []
        self._ended: list[Finished] = []
        self.copied = {"offload_bytes": 0, "offload_s": 0.0, "onboard_bytes": 0, "onboard_s": 0.0}
        """What has been copied out of vLLM's KV cache, and into it."""

    def _start(self, job: CopyJob) -> None:
        self._begun.append(job)

    def take(self) -> list[CopyJob]:
        """The jobs that were begun since the last call."""
        begun, self._begun = self._begun, []
        return begun

    @property
    def saving(self) -> list[Open]:
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
                self.report(Report([Finished(job.id, False, 0, 0.0)]))
        return [job for job in jobs if job.direction == "onboard"]

    def report(self, report: Report) -> None:
        """Take in what workers reported."""
        for finished in report.ended:
            one = self._report(finished)
            if one is not None:
                self.copied[f"{one.job.direction}_bytes"] += one.bytes
                self.copied[f"{one.job.direction}_s"] += one.seconds
                self._ended.append(Finished(one.job.id, one.ok, one.bytes, one.seconds))

    def poll(self) -> list[Finished]:
        ended, self._ended = self._ended, []
        return ended
