"""Spans of a cache's work for requests, with the attributes of ``docs/how-to/traces.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvladder.metrics import Missed
from kvladder.otel.provider import SpanOutlet, open_outlet
from kvladder.tiers.context import Clock
from kvladder.tiers.spans import Direction, FetchSpan, TierRead, TraceHeaders

ERROR_TYPE: Final = "error.type"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
QUEUE_MIN_S: Final = 0.001
"""Shortest wait that gets a span of its own."""
NS: Final = 1e9
_PROPAGATOR: Final = TraceContextTextMapPropagator()
Value = str | int | float | bool | Sequence[str] | Sequence[int]
Attributes = Mapping[str, Value]


class _TracedWork:
    """A span that has begun, and the children that are added to it."""

    def __init__(self, tracer: OtelTracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._inside = set_span_in_context(span, Context())
        clock = tracer.clock
        self.begun_s = clock.now()
        self._wall_s = clock.wall() - self.begun_s
        """Time since the epoch at which loop time was 0."""

    def child(
        self,
        name: str,
        begun_s: float,
        ended_s: float,
        attributes: Attributes,
        *,
        error: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
    ) -> Span:
        """Add a span that has ended, in loop time; ``error`` is the class of its failure."""
        span = self._tracer.sdk.start_span(
            name,
            context=self._inside,
            kind=kind,
            attributes=attributes,
            links=links,
            start_time=self._ns(begun_s),
        )
        self._fail(span, error)
        span.end(self._ns(max(begun_s, ended_s)))
        return span

    def copied(
        self, direction: Direction, blocks: int, size_bytes: int, begun_s: float, *, ok: bool
    ) -> None:
        told = {
            "kvladder.copy.direction": direction,
            "kvladder.block.count": blocks,
            "kvladder.bytes": size_bytes,
        }
        now_s = self._tracer.clock.now()
        self.child("kvladder.copy", begun_s, now_s, told, error="" if ok else "copy_failed")

    def _end(self, attributes: Attributes, error: str = "") -> None:
        self._span.set_attributes(attributes)
        self._fail(self._span, error)
        self._span.end(self._ns(self._tracer.clock.now()))

    def _ns(self, at_s: float) -> int:
        return int((self._wall_s + at_s) * NS)

    def _fail(self, span: Span, error: str) -> None:
        if error:
            span.set_attribute(ERROR_TYPE, error)
            span.set_status(Status(StatusCode.ERROR, error))


class TracedLookup(_TracedWork):
    """The span of an engine's search for one request."""

    @property
    def headers(self) -> TraceHeaders:
        """Context for the fetches that belong to it; also if it is not sampled."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._inside)
        return carrier

    def ended(self, prompt: int, own: int, found: int, missed: Sequence[Missed]) -> None:
        told: dict[str, Value] = {
            INPUT_TOKENS: prompt,
            CACHED_TOKENS: found,
            "kvladder.token.engine": own,
        }
        self._end(told | _why(missed))


class TracedFetch(_TracedWork):
    """The span of one fetch."""

    def __init__(self, tracer: OtelTracer, span: Span) -> None:
        super().__init__(tracer, span)
        self._asks_s = self.begun_s  # from when on blocks wait for slots and for the tier

    def probed(self, begun_s: float, blocks: int, found: int, failed: Sequence[str]) -> None:
        told: dict[str, Value] = {"kvladder.block.count": blocks, "kvladder.block.found": found}
        if failed:
            told["kvladder.level"] = failed[0]
        now_s = self._asks_s = self._tracer.clock.now()
        error = "no_answer" if failed else ""
        self.child("kvladder.probe", begun_s, now_s, told, error=error, kind=SpanKind.CLIENT)

    def read(self, read: TierRead, links: Sequence[Link]) -> Span | None:
        """Add the spans of a read; return that of the call, None if there was none."""
        timing, level = read.timing, {"kvladder.level": read.level}
        kind, is_shared = self._tracer.kinds[read.level]
        told: dict[str, Value] = {**level, "kvladder.tier.type": kind}
        told["kvladder.block.count"] = read.blocks
        asks_s = timing.asked_s if read.is_retry else self._asks_s
        queued_s = (timing.begun_s or read.ended_s) - asks_s
        if queued_s >= QUEUE_MIN_S or not timing.begun_s:
            error = "" if timing.begun_s else read.error
            self.child("kvladder.queue", asks_s, asks_s + queued_s, told, error=error)
        if not timing.begun_s:
            return None
        came_s = timing.delivered_s if timing.checked else read.ended_s
        size_bytes = read.found * self._tracer.block_bytes
        told |= {
            "kvladder.block.found": read.found,
            "kvladder.block.damaged": read.damaged,
            "kvladder.bytes": size_bytes,
            "kvladder.retry": read.is_retry,
        }
        damaged = "damaged" if read.damaged else ""
        error = read.error or damaged
        client = SpanKind.CLIENT if is_shared else SpanKind.INTERNAL
        span = self.child(
            "kvladder.read", timing.begun_s, came_s, told, error=error, kind=client, links=links
        )
        if timing.checked:
            counts: dict[str, Value] = {**level, "kvladder.block.count": timing.checked}
            self.child("kvladder.check", came_s, read.ended_s, counts, error=damaged)
        return span

    def answered(self, asked: int, sources: Sequence[str], missed: Sequence[Missed]) -> None:
        hits = Counter(sources)
        told: dict[str, Value] = {
            "kvladder.block.count": asked,
            "kvladder.block.found": len(sources),
            "kvladder.bytes": len(sources) * self._tracer.block_bytes,
            "kvladder.hit.levels": [*hits],
            "kvladder.hit.blocks": [*hits.values()],
        }
        self._end(told | _why(missed))


class TracedSave(_TracedWork):
    """The span of one save, from its slots to its end."""

    def ended(self, *, committed: bool) -> None:
        self._end({}, "" if committed else "aborted")


class TracedHints(_TracedWork):
    """The span of one envelope of hints."""

    def ended(self, verbs: Sequence[str], outcomes: Sequence[str], blocks: int) -> None:
        told: dict[str, Value] = {
            "kvladder.hint.verbs": [*verbs],
            "kvladder.hint.outcomes": [*outcomes],
            "kvladder.block.count": blocks,
        }
        self._end(told)


class OtelTracer:
    """Begins spans for one cache; any thread calls it.

    Parameters
    ----------
    outlet:
        Takes the spans; closed with the tracer.
    kinds:
        Type of the tier of each level below host, and whether engines share it.
    block_bytes:
        Size of a block.
    version:
        Version of kvladder, as the scope of its spans.
    """

    def __init__(
        self,
        outlet: SpanOutlet,
        clock: Clock,
        *,
        kinds: Mapping[str, tuple[str, bool]],
        block_bytes: int,
        version: str,
    ) -> None:
        self.sdk = outlet.provider.get_tracer("kvladder", version)
        self._outlet = outlet
        self.clock = clock
        self.kinds = kinds
        self.block_bytes = block_bytes

    def lookup(self, trace: TraceHeaders | None) -> TracedLookup:
        """Begin the search of an engine for a request's blocks."""
        return TracedLookup(self, self._begin("kvladder.lookup", trace, {}))

    def fetch(self, trace: TraceHeaders | None, *, is_use: bool) -> TracedFetch | None:
        """Begin a fetch; without ``is_use`` it is a prefetch. None if it is not sampled."""
        span = self._begin("kvladder.fetch", trace, {"kvladder.prefetch": not is_use})
        return TracedFetch(self, span) if span.is_recording() else None

    def save(self, trace: TraceHeaders | None, blocks: int) -> TracedSave | None:
        """Begin a save of this number of blocks. None if it is not sampled."""
        told = {"kvladder.block.count": blocks, "kvladder.bytes": blocks * self.block_bytes}
        span = self._begin("kvladder.save", trace, told)
        return TracedSave(self, span) if span.is_recording() else None

    def hints(self, trace: TraceHeaders | None) -> TracedHints | None:
        """Begin to act on an envelope of hints. None if it is not sampled."""
        span = self._begin("kvladder.hints", trace, {})
        return TracedHints(self, span) if span.is_recording() else None

    def read(self, spans: Sequence[FetchSpan], read: TierRead) -> None:
        """Add a read to the first of these fetches, and to the others with links to that span."""
        links: Sequence[Link] = ()
        for fetch in spans:
            assert isinstance(fetch, TracedFetch)
            span = fetch.read(read, links)
            if span is not None and not links:
                links = [Link(span.get_span_context())]

    @property
    def where(self) -> str:
        """Receiver of the spans, for people."""
        return self._outlet.where

    def close(self) -> None:
        """Send the last spans, for some seconds at most; later ones may be lost."""
        self._outlet.close()

    def _begin(self, name: str, trace: TraceHeaders | None, attributes: Attributes) -> Span:
        # an empty context, as the thread's own one belongs to another request, if to any
        context = None if trace is None else _PROPAGATOR.extract(trace, Context())
        return self.sdk.start_span(name, context=context, attributes=attributes)


def open_tracer(
    clock: Clock, *, kinds: Mapping[str, tuple[str, bool]], block_bytes: int, version: str
) -> OtelTracer:
    """Return a tracer for the provider of the process, or for the environment's collector.

    Raises
    ------
    ConfigError
        There is neither, or the exporter is not installed.
    """
    return OtelTracer(open_outlet(), clock, kinds=kinds, block_bytes=block_bytes, version=version)


def _why(missed: Sequence[Missed]) -> dict[str, Value]:
    """Return why a prefix ended, if it ended early."""
    if not missed:
        return {}
    level, reason, _ = missed[0]
    return {"kvladder.miss.reason": reason, **({"kvladder.miss.level": level} if level else {})}
