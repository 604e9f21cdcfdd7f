"""Messages between the halves of the connector: plain data, which TensorRT-LLM pickles."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvladder.arena import ArenaHandle
from kvladder.gpu.copy.copier import CopyJob, Finished

if TYPE_CHECKING:
    from kvladder.connectors.trtllm.cache import Cache


@dataclass(frozen=True)
class Meeting:
    """Data with which another rank maps the arena and reaches the process that owns it."""

    address: str
    """Address of a Unix socket."""
    arena: ArenaHandle
    rank_bytes: int
    """Bytes of a block on each rank; rank ``n``'s part begins at ``n * rank_bytes`` of a slot."""
    secret: bytes
    """Secret that a rank sends, since other processes can see the socket's name."""


@dataclass
class TrtllmStep:
    """Work for the workers in one step of the engine."""

    meeting: Meeting | None = None
    """Set until all ranks are connected; no step has jobs before that."""
    loads: list[CopyJob] = field(default_factory=list[CopyJob])
    """Copies that the step's forward pass depends on."""
    saves: list[tuple[int, CopyJob]] = field(default_factory=list[tuple[int, CopyJob]])
    """Copies to begin after the forward pass, with the id of their request."""


@dataclass(frozen=True)
class RankHello:
    """First message of a rank, once it has mapped the arena."""

    rank: int
    secret: bytes
    """Secret of the ``Meeting``."""
    fields: dict[str, str]
    """Description of the rank's tensors, which must agree among the ranks."""


class Halves:
    """State that the scheduler half and the worker half in one process share.

    TensorRT-LLM creates both at the same time, in two threads, and tells neither of the other.
    """

    def __init__(self, llm_args: Any) -> None:
        self.llm_args = llm_args
        self.ready = threading.Event()
        """Set once the worker has the KV cache's memory, and the cache is open."""
        self.cache: Cache | None = None
        self.ended: deque[Finished] = deque()
        """Copies that ended on this process's worker."""


_HALVES: dict[int, Halves] = {}


def halves_of(llm_args: Any) -> Halves:
    """Return the shared state of the halves with these arguments. Any thread may call it."""
    return _HALVES.setdefault(id(llm_args), Halves(llm_args))  # which keeps its arguments alive


def part(halves: Halves) -> None:
    """Forget closed halves: later arguments may have the same address."""
    if _HALVES.get(id(halves.llm_args)) is halves:
        del _HALVES[id(halves.llm_args)]


def taken(queue: deque[Finished]) -> Sequence[Finished]:
    """Remove and return all that is in a queue; other threads may append meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
