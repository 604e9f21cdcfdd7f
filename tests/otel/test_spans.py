"""The spans of fetches and saves, over real levels in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvladder.hints import HintExecutor
from kvladder.hints.requests import begin
from kvladder.hints.scopes import OwnRequest
from kvladder.manager import Fetch
from kvladder.otel.provider import SpanOutlet
from kvladder.otel.tracer import OtelTracer
from kvladder.testing.engines.hinted import hint_envelope
from kvladder.testing.fakes import Delay, Fail, FakeTier, Hang
from kvladder.testing.shared import SharedFakeTier
from kvladder.testing.sim import EPOCH_S
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.tiers.context import Clock
from kvladder.tiers.ladder.definition import LevelSettings
from tests.otel.headers import HEADERS, PARENT, TRACE, UNSAMPLED
from tests.stack.caches import COMMIT, QUICK, cache_of


class Recorded:
    """The spans of a cache that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def maker(self, **kinds: bool) -> Callable[[Clock], OtelTracer]:
        """Return the function that makes the tracer; ``kinds`` tell which levels are shared."""
        outlet = SpanOutlet(self._provider, None, "spans go to this test")
        told = {name: ("fake", shared) for name, shared in kinds.items()}
        return lambda clock: OtelTracer(
            outlet, clock, kinds=told, block_bytes=LAYOUT.block_bytes, version="1"
        )

    @property
    def all(self) -> list[ReadableSpan]:
        return [*self._exporter.get_finished_spans()]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == f"kvladder.{name}"]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def told(span: ReadableSpan) -> dict[str, Any]:
    """Return the attributes without the project's prefix."""
    return {name.removeprefix("kvladder."): one for name, one in (span.attributes or {}).items()}


def parent(span: ReadableSpan) -> int:
    assert span.parent is not None
    return int(span.parent.span_id)


def own(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def done(fetch: Fetch) -> Fetch:
    while not fetch.done:  # noqa: ASYNC110 - an engine asks at every step
        await asyncio.sleep(0.01)
    fetch.release()
    return fetch


async def below(cache: SimCache, *path: int) -> None:
    """Save a prefix whose blocks only the level below host has afterwards."""
    cache.save(cache.keys(*path))
    await cache.settle()
    with cache.stack.lock:
        cache.stack.host.remove(cache.keys(*path))


async def test_a_fetch_and_a_save_continue_the_request_that_the_headers_name() -> None:
    spans = Recorded()
    level = LevelSpec(FakeTier(), COMMIT)
    async with cache_of(level, make_tracer=spans.maker(level1=False)) as cache:
        cache.save(cache.keys(1, 2, 3), trace=HEADERS)
        await cache.settle()
        with cache.stack.lock:
            cache.stack.host.remove(cache.keys(1, 2, 3)[1:])
        await done(cache.manager.fetch(cache.keys(1, 2, 3, 4), trace=HEADERS))
    save, fetch, read = (spans.one(name) for name in ("save", "fetch", "read"))
    for span in spans.all:
        assert span.context is not None
        assert span.context.trace_id == TRACE
    assert parent(save) == parent(fetch) == PARENT
    assert parent(read) == own(fetch)
    assert told(save) == {"block.count": 3, "bytes": 3 * LAYOUT.block_bytes}
    assert told(fetch) == {
        "prefetch": False,
        "block.count": 4,
        "block.found": 3,
        "bytes": 3 * LAYOUT.block_bytes,
        "hit.levels": ("host", "level1"),
        "hit.blocks": (1, 2),
        "miss.reason": "never_seen",
    }
    assert told(read) == {
        "level": "level1",
        "tier.type": "fake",
        "block.count": 2,
        "block.found": 2,
        "block.damaged": 0,
        "bytes": 2 * LAYOUT.block_bytes,
        "retry": False,
    }
    assert not spans.named("queue"), "no block waited"
    assert {span.status.status_code for span in spans.all} == {StatusCode.UNSET}
    assert read.start_time is not None
    assert EPOCH_S <= read.start_time / 1e9 < EPOCH_S + 60, "in the time of the day"


async def test_unsampled_traces_have_no_span_and_a_request_without_headers_begins_one() -> None:
    spans = Recorded()
    async with cache_of(make_tracer=spans.maker()) as cache:
        cache.save(cache.keys(1, 2), trace=UNSAMPLED)
        await done(cache.manager.fetch(cache.keys(1, 2), trace=UNSAMPLED))
        assert not spans.all
        await done(cache.manager.fetch(cache.keys(1, 2)))
        await done(cache.manager.fetch(cache.keys(1, 2), trace={"traceparent": "nonsense"}))
    assert [span.parent for span in spans.all] == [None, None]


async def test_a_set_of_blocks_has_no_span_as_no_request_asks_for_it() -> None:
    spans = Recorded()
    async with cache_of(make_tracer=spans.maker()) as cache:
        cache.save(cache.keys(1, 2), trace=UNSAMPLED)
        await done(cache.manager.fetch_set(cache.keys(1, 2)))
    assert not spans.all


async def test_a_read_that_fails_or_hangs_or_is_not_begun_is_an_error() -> None:
    spans = Recorded()
    tier = FakeTier([Fail(on="get"), Hang(on="get")])
    level = LevelSpec(tier, COMMIT, settings=QUICK)
    async with cache_of(level, make_tracer=spans.maker(level1=False)) as cache:
        await below(cache, 1, 2)
        for _ in range(2):
            await done(cache.manager.fetch(cache.keys(1, 2), trace=HEADERS))
    failed, hung = spans.named("read")
    assert told(failed)["error.type"] == "TierError"
    assert told(hung)["error.type"] == "timeout"
    for span in (failed, hung):
        assert span.status.status_code is StatusCode.ERROR
        assert told(span)["block.found"] == 0
    reasons = [told(span)["miss.reason"] for span in spans.named("fetch")]
    assert reasons == ["failed", "failed"]
    assert {span.status.status_code for span in spans.named("fetch")} == {StatusCode.UNSET}


async def test_damage_is_an_error_of_the_read_and_of_the_check_that_found_it() -> None:
    spans = Recorded()
    tier = FakeTier(checks=False)
    async with cache_of(LevelSpec(tier, COMMIT), make_tracer=spans.maker(level1=False)) as cache:
        await below(cache, 1, 2)
        tier.corrupt(cache.keys(1, 2)[1])
        await done(cache.manager.fetch(cache.keys(1, 2), trace=HEADERS))
    read, check = spans.one("read"), spans.one("check")
    assert (told(read)["block.found"], told(read)["block.damaged"]) == (1, 1)
    assert told(read)["error.type"] == told(check)["error.type"] == "damaged"
    assert told(check)["block.count"] == 2
    assert parent(check) == own(spans.one("fetch"))
    assert told(spans.one("fetch"))["miss.reason"] == "damaged"


async def test_blocks_that_wait_for_other_reads_of_their_level_have_a_span_of_their_wait() -> None:
    spans = Recorded()
    tier = FakeTier([Delay(0.5, on="get"), Delay(0.2, on="get")])
    level = LevelSpec(tier, COMMIT, settings=LevelSettings(QUICK.calls, reads_max=1))
    async with cache_of(level, make_tracer=spans.maker(level1=False)) as cache:
        await below(cache, 1, 2)
        await below(cache, 5, 6)
        first = cache.manager.fetch(cache.keys(5, 6))
        waits = cache.manager.fetch(cache.keys(1, 2), trace=HEADERS)
        await asyncio.gather(done(first), done(waits))
        assert waits.blocks == 2
    queue, read = spans.one("queue"), spans.named("read")[-1]
    assert parent(queue) == parent(read) == own(spans.named("fetch")[-1])
    assert seconds(queue) == pytest.approx(0.5, abs=0.05)
    assert seconds(read) == pytest.approx(0.2, abs=0.01)
    assert queue.end_time == read.start_time


async def test_a_read_that_two_requests_wait_for_is_in_both_traces_with_a_link() -> None:
    spans = Recorded()
    level = LevelSpec(FakeTier([Delay(0.1, on="get")]), COMMIT)
    async with cache_of(level, make_tracer=spans.maker(level1=False)) as cache:
        await below(cache, 1, 2)
        both = [cache.manager.fetch(cache.keys(1, 2), trace=HEADERS) for _ in range(2)]
        await asyncio.gather(*map(done, both))
        assert [fetch.blocks for fetch in both] == [2, 2]
    first, second = spans.named("read")
    assert {parent(first), parent(second)} == {own(span) for span in spans.named("fetch")}
    assert not first.links
    assert [link.context.span_id for link in second.links] == [own(first)]


async def test_blocks_that_one_level_does_not_deliver_are_read_from_the_next_one() -> None:
    spans = Recorded()
    levels = LevelSpec(FakeTier([Fail(on="get")]), COMMIT), LevelSpec(FakeTier(), COMMIT)
    async with cache_of(*levels, make_tracer=spans.maker(level1=False, level2=False)) as cache:
        await below(cache, 1, 2)
        assert (await done(cache.manager.fetch(cache.keys(1, 2), trace=HEADERS))).blocks == 2
    seen = [(told(span)["level"], told(span)["retry"]) for span in spans.named("read")]
    assert seen == [("level1", False), ("level2", True)]
    assert told(spans.one("fetch"))["hit.levels"] == ("level2",)


async def test_a_question_to_a_shared_tier_has_a_span_and_no_answer_is_an_error() -> None:
    spans = Recorded()
    tier = SharedFakeTier([Delay(0.05, on="contains"), Fail(on="contains")])
    level = LevelSpec(tier, COMMIT, settings=QUICK)
    async with cache_of(level, make_tracer=spans.maker(level1=True)) as cache:
        keys = cache.keys(1, 2, 3)
        tier.others_put({key: cache.payload(key) for key in keys[:2]})
        assert (await done(cache.manager.fetch(keys, trace=HEADERS))).blocks == 2
        await asyncio.sleep(1)
        assert (await done(cache.manager.fetch(cache.keys(7, 8), trace=HEADERS))).blocks == 0
    probe, failed = spans.named("probe")[0], spans.named("probe")[-1]
    assert (told(probe)["block.count"], told(probe)["block.found"]) == (3, 2)
    assert seconds(probe) == pytest.approx(0.05, abs=0.01)
    assert probe.kind.name == spans.named("read")[0].kind.name == "CLIENT"
    assert (told(failed)["error.type"], told(failed)["level"]) == ("no_answer", "level1")
    assert failed.status.status_code is StatusCode.ERROR


async def test_the_check_of_blocks_that_their_tier_did_not_check_follows_the_read() -> None:
    spans = Recorded()
    spec = LevelSpec(FakeTier(checks=False), COMMIT)
    async with cache_of(spec, make_tracer=spans.maker(level1=False)) as cache:
        await below(cache, 1, 2)
        assert (await done(cache.manager.fetch(cache.keys(1, 2), trace=HEADERS))).blocks == 2
    read, check = spans.one("read"), spans.one("check")
    assert read.end_time == check.start_time
    assert told(check) == {"level": "level1", "block.count": 2}


async def test_an_abandoned_save_is_an_error() -> None:
    spans = Recorded()
    async with cache_of(make_tracer=spans.maker()) as cache:
        cache.manager.save(cache.keys(1, 2), trace=HEADERS).abort()
        again = cache.manager.save(cache.keys(1, 2), trace=HEADERS)
        again.commit()
        again.abort()  # without effect
        assert not cache.manager.save(cache.keys(1, 2), trace=HEADERS).slots
    assert [span.status.status_code for span in spans.named("save")] == [
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]


async def test_an_envelope_of_hints_has_a_span_with_its_outcomes() -> None:
    recorded = Recorded()
    async with cache_of(
        LevelSpec(FakeTier(), COMMIT), make_tracer=recorded.maker(level1=False)
    ) as cache:
        keys, hints = cache.keys(1, 2), HintExecutor.of(cache.manager)
        cache.save(keys)
        retain = {"do": "retain", "priority": 50}
        sent = hint_envelope(retain, {"do": "pin"}, {"do": "fly"}, message="1")
        hints.apply(sent, request=OwnRequest(keys), trace=HEADERS)
        span = recorded.one("hints")
        assert (parent(span), span.context and span.context.trace_id) == (PARENT, TRACE)
        assert told(span) == {
            "hint.verbs": ("retain", "pin", "unknown"),
            "hint.outcomes": ("accepted", "rejected", "rejected"),
            "block.count": 2,
        }
        hints.apply(sent, request=OwnRequest(keys), trace=UNSAMPLED)
        assert len(recorded.named("hints")) == 1
        hints.apply("no envelope", trace=HEADERS)
        (_, wrong) = recorded.named("hints")
        assert told(wrong)["hint.outcomes"] == ("rejected",)

        own = hint_envelope(retain, {"do": "prefetch", "session": "none"}, message="2")
        begin(hints, own, salt="", trace=HEADERS)
        assert told(recorded.named("hints")[-1])["hint.outcomes"] == ("accepted", "missing")
        assert len(recorded.named("hints")) == 3, "one for both actions"
