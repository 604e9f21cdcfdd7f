"""What the two halves of the vLLM connector tell each other; plain data, pickled by vLLM."""

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
    """What one rank's worker says about its KV tensors when it has them."""

    rank: int
    """Its position among all: of its stage first, of its tensor-parallel group in it."""
    node: str
    """The machine that it runs on."""
    sizes: tuple[int, ...]
    """By group, bytes of one block on this rank; 0 where it has none of the group's layers."""
    fields: dict[str, str]
    """What must agree before bytes may be shared, and among the ranks of a stage."""
    weights: bytes
    """Digest of the weights that it computes with."""
    replicas: int = 1
    """How many neighbouring ranks, this one among them, hold the same bytes."""
    registers: bool = False
    """Whether a device copies from the arena: which slots it has registered is reported."""
    numa: int | None = None
    """The NUMA node that its device is at, if the machine tells."""
    taken: bool = False
    """Whether a scheduler half works with these tensors already."""
    worker: Any = None
    """The worker half itself where it is in the scheduler's process; never pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "worker": None}


CARRIED: Final = "kvladder"
"""The attribute of another connector's description that ours travels in."""


def carry(description: RankDescription, others: Iterable[Any]) -> KVConnectorHandshakeMetadata:
    """What vLLM hands on for all of these: another connector's description with ours, or ours.

    MultiConnector gives every connector's scheduler half the description that the first of them
    has. ``others`` are the worker halves beside ours.
    """
    for other in others:
        found: KVConnectorHandshakeMetadata | None = other.get_handshake_metadata()
        if found is not None:
            with suppress(AttributeError):  # it takes nothing: the scheduler half refuses it
                setattr(found, CARRIED, description)
                return found
    return description


def carried(metadata: Iterable[object]) -> dict[int, RankDescription]:
    """By rank, our descriptions among those that vLLM handed on, or in them."""
    found = (getattr(one, CARRIED, one) for one in metadata)
    return {one.rank: one for one in found if isinstance(one, RankDescription)}


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
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers have to do in one step of the engine."""

    attach: Attach | None = None
    """Given with every job, and until the arena is registered everywhere."""
    fence: list[JobId] = field(default_factory=list[JobId])
    """Saves whose source blocks this step writes: they end before it does."""
    late: bool = False
    """Whether the step has written to those blocks already, so saves in flight are not stored."""
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
    owners: dict[JobId, int] = field(default_factory=dict[JobId, int])
    """By copy of this step, the number of its request's LoRA adapter, if it has one."""
    adapters: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """By number of these, what ``weights`` is for the model's."""
    wanted: Wanted | None = None
    """Read before the step's forward pass."""


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What ended on one worker since its last report, or on all workers together."""

    ended: list[Finished] = field(default_factory=list[Finished])
    """Parts of jobs, one for each worker that has a part in one."""
    step: int = 0
    """The number of the step that has ended."""
    seen: dict[int, Seen] = field(default_factory=dict[int, Seen])
    """By rank, where there is news of its weights."""
    registered: dict[int, int] = field(default_factory=dict[int, int])
    """By rank, how many slots from the first its device has registered, where there are more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Report)
        self.ended += other.ended
        self.step = max(self.step, other.step)
        self.seen.update(other.seen)
        self.registered.update(other.registered)
        return self
