"""Messages between the two halves of the vLLM connector; plain data that vLLM pickles."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvladder.arena import ArenaHandle
from kvladder.connectors.vllm.identity.seen import Seen as Seen
from kvladder.connectors.vllm.identity.seen import Wanted as Wanted
from kvladder.gpu.copy.copier import CopyJob, Finished, JobId


@dataclass
class RankDescription(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """One rank's description of its KV tensors, made once they are registered."""

    rank: int
    """Position among all ranks: by pipeline stage, then within its tensor-parallel group."""
    node: str
    """The machine that it runs on, see ``this_node``."""
    sizes: tuple[int, ...]
    """Bytes of one block on this rank, by group; 0 if it has none of the group's layers."""
    fields: dict[str, str]
    """Properties that must be equal in all ranks of a stage, and in all caches that share bytes."""
    weights: bytes
    """Digest of the weights that it computes with."""
    replicas: int = 1
    """Number of neighbouring ranks, including this one, that hold the same bytes."""
    registers: bool = False
    """True if a device copies from the arena; the rank then reports its registered slots."""
    numa: int | None = None
    """NUMA node of its device, if the machine tells."""
    taken: bool = False
    """True if a scheduler half already works with these tensors."""
    worker: Any = None
    """The worker half itself if it is in the scheduler's process; never pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "worker": None}


CARRIED: Final = "kvladder"
"""The attribute of another connector's description that carries ours."""


def carry(description: RankDescription, others: Iterable[Any]) -> KVConnectorHandshakeMetadata:
    """Return the description that vLLM passes on: another connector's with ours in it, or ours.

    MultiConnector passes only the first connector's description to all scheduler halves. ``others``
    are the worker halves beside ours.
    """
    for other in others:
        found: KVConnectorHandshakeMetadata | None = other.get_handshake_metadata()
        if found is not None:
            with suppress(AttributeError):  # no room for ours: the scheduler half raises for it
                setattr(found, CARRIED, description)
                return found
    return description


def carried(metadata: Iterable[object]) -> dict[int, RankDescription]:
    """Return our descriptions by rank: those that vLLM passed on, or that others carry."""
    found = (getattr(one, CARRIED, one) for one in metadata)
    return {one.rank: one for one in found if isinstance(one, RankDescription)}


@dataclass(frozen=True)
class Attach:
    """The arena's handle for workers to map it, and where each rank's bytes begin in a slot."""

    arena: ArenaHandle
    offsets: tuple[tuple[int, ...], ...]
    """Offset in a slot, by rank and group."""


@dataclass(frozen=True)
class Load:
    """A job that fills blocks of one request."""

    job: CopyJob
    request_id: str
    sync: bool
    """True if this step's forward pass reads the blocks."""


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The work of all workers in one step of the engine."""

    attach: Attach | None = None
    """Set if the step has jobs, and in each step until all devices have registered the arena."""
    fence: list[JobId] = field(default_factory=list[JobId])
    """Saves that read blocks which this step writes: they must end before it writes them."""
    late: bool = False
    """True if the step may write to these blocks before the fence; then these saves fail."""
    loads: list[Load] = field(default_factory=list[Load])
    saves: list[CopyJob] = field(default_factory=list[CopyJob])
    """Saves that begin after the forward pass."""
    idle: bool = False
    """True if there is no forward pass, and requests wait for copies or fetches in flight."""
    number: int = 0
    """The number that workers report when the step has ended; 0 if the step is not timed."""
    turn: int = 0
    """Position of the step among all steps, from 1, whether or not they are timed."""
    weights: tuple[int, ...] = ()
    """``Seen.changes`` of each rank as known to the scheduler half; keys name these weights."""
    doubt: int = 0
    """Number of the latest doubt; ranks that have not looked since it look at their weights now."""
    owners: dict[JobId, int] = field(default_factory=dict[JobId, int])
    """Number of the request's LoRA adapter, if it has one, by copy of this step."""
    adapters: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """The same as ``weights`` for each adapter in ``owners``, by number."""
    wanted: Wanted | None = None
    """The adapter that ranks read into memory before the step's forward pass."""


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The news of one worker since its last report, or of all workers together."""

    ended: list[Finished] = field(default_factory=list[Finished])
    """Ended parts of jobs, one for each worker that has a part in the job."""
    step: int = 0
    """The number of the step that has ended; 0 for none."""
    seen: dict[int, Seen] = field(default_factory=dict[int, Seen])
    """State of the weights, by rank, if there is news of them."""
    registered: dict[int, int] = field(default_factory=dict[int, int])
    """Number of leading slots that a device has registered, by rank, if it has grown."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Report)
        self.ended += other.ended
        self.step = max(self.step, other.step)
        self.seen.update(other.seen)
        self.registered.update(other.registered)
        return self
