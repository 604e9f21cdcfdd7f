"""The interface to a tracer: what a cache tells of one request's fetches, saves and copies.

``kvladder/otel`` implements it. Without tracing no object has a span, and no clock is read for one.
All times are loop time, in seconds. Calls may come from any thread and never wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from kvladder.metrics import Missed

TraceHeaders: TypeAlias = Mapping[str, str]
"""The context of a request's trace, as the headers ``traceparent`` and ``tracestate`` carry it."""
Direction: TypeAlias = Literal["onboard", "offload"]
"""Whether a copy goes into the engine's KV cache or out of it."""


@dataclass(slots=True)
class ReadTiming:
    """Times of one read of a batch, filled in by the parts that it passes."""

    asked_s: float
    begun_s: float = 0.0
    """Time at which the tier was called; 0 if it was not."""
    delivered_s: float = 0.0
    """Time at which the tier answered; 0 if it failed."""
    checked: int = 0
    """Number of blocks that the level checked or decoded itself, after the tier's answer."""

    def begin(self, now_s: float) -> None:
        """Note that the tier is called now."""
        self.begun_s = now_s

    def deliver(self, now_s: float, checks: int) -> None:
        """Note that the tier answers now, and how many blocks the level has to check itself."""
        self.delivered_s, self.checked = now_s, checks


@dataclass(frozen=True, slots=True)
class TierRead:
    """One read of a batch of blocks from a level."""

    level: str
    timing: ReadTiming
    ended_s: float
    blocks: int
    found: int
    damaged: int
    """Number of blocks that came and were refused."""
    error: str
    """Class of the failure; empty if the tier answered."""
    is_retry: bool
    """True if a level above did not deliver these blocks."""


class CopySpan(Protocol):
    """A fetch or a save with blocks that are copied to or from an engine."""

    def copied(
        self, direction: Direction, blocks: int, size_bytes: int, begun_s: float, *, ok: bool
    ) -> None:
        """Record a copy that ends now."""
        ...


class FetchSpan(CopySpan, Protocol):
    """One fetch."""

    def probed(self, begun_s: float, blocks: int, found: int, failed: Sequence[str]) -> None:
        """Record a question to shared tiers that ends now; ``failed`` are levels without answer."""
        ...

    def answered(self, asked: int, sources: Sequence[str], missed: Sequence[Missed]) -> None:
        """End the fetch: levels of the blocks that are served, and why others are not."""
        ...


class SaveSpan(CopySpan, Protocol):
    """One save."""

    def ended(self, *, committed: bool) -> None:
        """End the save."""
        ...


class LookupSpan(Protocol):
    """The search of an engine for one request's blocks."""

    @property
    def headers(self) -> TraceHeaders:
        """Context for the fetches that belong to it."""
        ...

    def ended(self, prompt: int, own: int, found: int, missed: Sequence[Missed]) -> None:
        """End the search, in tokens: of the prompt, of the engine itself, and found after them."""
        ...


class HintsSpan(Protocol):
    """What one envelope of hints asks."""

    def ended(self, verbs: Sequence[str], outcomes: Sequence[str], blocks: int) -> None:
        """End it: verb and outcome of each action, and the blocks for which they were done."""
        ...


class Tracer(Protocol):
    """Begins spans; None stands for a trace that is not sampled.

    ``trace`` is the context that they continue. None takes the current one of the calling thread.
    """

    def lookup(self, trace: TraceHeaders | None) -> LookupSpan:
        """Begin the search of an engine for a request's blocks."""
        ...

    def fetch(self, trace: TraceHeaders | None, *, is_use: bool) -> FetchSpan | None:
        """Begin a fetch; without ``is_use`` it is a prefetch."""
        ...

    def save(self, trace: TraceHeaders | None, blocks: int) -> SaveSpan | None:
        """Begin a save of this number of blocks."""
        ...

    def hints(self, trace: TraceHeaders | None) -> HintsSpan | None:
        """Begin to act on an envelope of hints."""
        ...

    def read(self, spans: Sequence[FetchSpan], read: TierRead) -> None:
        """Record a read for the fetches that wait for its blocks, one at least."""
        ...

    @property
    def where(self) -> str:
        """Receiver of the spans, for people."""
        ...

    def close(self) -> None:
        """Send the last spans; later ones may be lost."""
        ...
