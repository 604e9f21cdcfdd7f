"""What the halves of the connector tell each other; plain data, which TensorRT-LLM pickles."""

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
    """How another rank maps the arena, and reaches the process that owns it."""

    address: str
    """Of a Unix socket."""
    arena: ArenaHandle
    rank_bytes: int
    """Of a block on each rank; rank ``n``'s begin ``n`` times as far into a slot."""
    secret: bytes
    """What a rank shows, since the name of the socket is no secret on its machine."""


@dataclass
class TrtllmStep:
    """What the workers have to do in one step of the engine."""

    meeting: Meeting | None = None
    """Given until all ranks have come, and before any job."""
    loads: list[CopyJob] = field(default_factory=list[CopyJob])
    """What the step's forward pass reads."""
    saves: list[tuple[int, CopyJob]] = field(default_factory=list[tuple[int, CopyJob]])
    """Requests and what to begin for them after the forward pass."""


@dataclass(frozen=True)
class RankHello:
    """A rank has mapped the arena."""

    rank: int
    secret: bytes
    """That of the meeting."""
    fields: dict[str, str]
    """What must agree among the ranks."""


class Halves:
    """What the scheduler's and the worker's half in one process have in common.

    TensorRT-LLM makes them at the same time, in two threads, and neither hears of the other.
    """

    def __init__(self, llm_args: Any) -> None:
        self.llm_args = llm_args
        self.ready = threading.Event()
        """Set once the worker has the KV cache's memory, and the cache is open."""
        self.cache: Cache | None = None
        self.ended: deque[Finished] = deque()
        """What ended on this process's worker."""


_HALVES: dict[int, Halves] = {}


def halves_of(llm_args: Any) -> Halves:
    """Those that were given the same arguments; any thread may ask."""
    return _HALVES.setdefault(id(llm_args), Halves(llm_args))  # which keeps its arguments alive


def part(halves: Halves) -> None:
    """They are closed: whoever is given arguments at the same address is not one of them."""
    if _HALVES.get(id(halves.llm_args)) is halves:
        del _HALVES[id(halves.llm_args)]


def taken(queue: deque[Finished]) -> Sequence[Finished]:
    """What is in it, taken out."""
    return [queue.popleft() for _ in range(len(queue))]
