"""Where spans go: to the process's provider, or to the collector that the environment names."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
import kvladder
from kvladder import ConfigError, Layout
from kvladder.compose import open_manager
from kvladder.config.stack import load_config
from kvladder.manager import CacheManager
from kvladder.otel import provider
from kvladder.otel.provider import ENDPOINTS, PROTOCOLS, open_outlet
from kvladder.testing.redisserver import free_ports
from tests.kit.collector import Collector, descendants
from tests.kit.source import ROOT
from tests.kit.traffic import forgotten, keys, save, stored
from tests.otel.headers import HEADERS, PARENT, TRACE
from tests.patience import PATIENCE_S, until

LAYOUT = Layout(block_tokens=16, block_bytes=16 << 10, fields={"model": "traced"})
EACH = ("kvladder.save", "kvladder.fetch", "kvladder.read")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINTS, *PROTOCOLS, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        monkeypatch.setenv(ENDPOINTS[1], collector.endpoint)
        yield collector


def source(folder: Path, **more: Any) -> dict[str, Any]:
    files = {"type": "files", "path": str(folder / "kv"), "capacity": "64 MiB", "when": "commit"}
    arena = {"size": 64 * LAYOUT.slot_bytes}
    return {"arena": arena, "otel": True, "tiers": [{"type": "host"}, files], **more}


def used(cache: CacheManager, *path: object) -> int:
    """Save a prefix, and load it from below; return the number of blocks that came."""
    wanted = keys(*path)
    stored(cache, wanted)
    forgotten(cache, wanted)
    fetch = cache.fetch(wanted, trace=HEADERS)
    assert fetch.wait(60)
    fetch.release()
    return fetch.blocks


@pytest.mark.slow
def test_spans_arrive_at_the_collector_that_the_environment_names(
    tmp_path: Path, collector: Collector
) -> None:
    with kvladder.open_cache(source(tmp_path), layout=LAYOUT) as cache:
        assert f"otel: spans go to {collector.endpoint}, by http/protobuf" in cache.describe()
        assert used(cache, "a", "b") == 2
        collector.wait(*EACH)
    (fetch,), (read,) = collector.named("kvladder.fetch"), collector.named("kvladder.read")
    below = descendants(collector.spans, f"{PARENT:016x}")
    waits = collector.named("kvladder.queue")  # of a busy machine
    assert [span for span in below if span not in waits] == [fetch, read]
    assert fetch.trace == read.trace == f"{TRACE:032x}"
    assert fetch.start_ns <= read.start_ns <= read.end_ns <= fetch.end_ns
    assert abs(fetch.start_ns / 1e9 - time.time()) < 3600
    assert fetch.attributes["kvladder.hit.levels"] == ["files"]
    assert read.attributes["kvladder.bytes"] == 2 * LAYOUT.block_bytes
    assert read.resource["service.name"] == "kvladder"
    (saved,) = collector.named("kvladder.save")
    assert saved.parent == "", "no trace was named, and none is current"


@pytest.mark.slow
def test_the_last_spans_are_sent_when_the_cache_closes(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "FLUSH_S", PATIENCE_S)  # a busy machine sends late
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with kvladder.open_cache(source(tmp_path), layout=LAYOUT) as cache:
        used(cache, "a")
    assert {span.name for span in collector.spans} - {"kvladder.queue"} == {*EACH}
    assert {span.resource["service.name"] for span in collector.spans} == {"mine"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["absent", "hangs", "refuses"])
def test_a_collector_that_is_away_costs_spans_and_nothing_else(
    fault: str, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    if fault == "absent":
        monkeypatch.setenv(ENDPOINTS[1], f"http://127.0.0.1:{free_ports(1)[0]}")
    elif fault == "hangs":
        collector.hangs.set()
    collector.answer = 503
    cache = kvladder.open_cache(source(tmp_path), layout=LAYOUT)
    try:
        for number in range(20):
            save(cache, keys("a", number))
            fetch = cache.fetch(keys("a", number))
            assert fetch.done, "it needs no tier, so it has no reason to wait"
            assert fetch.blocks == 2
            fetch.release()
        if fault != "absent":
            until(lambda: collector.requests)
        processor: Any = cache.tracer.sdk.span_processor  # type: ignore[union-attr]
        (batches,) = processor._span_processors
        inner = getattr(batches, "_batch_processor", None)  # from 1.34 on
        assert len(batches.queue if inner is None else inner._queue) <= 8
    finally:
        began_s = time.monotonic()
        cache.close()
    assert time.monotonic() - began_s < 28, "the SDK alone would wait for 30 s"
    assert not collector.spans


GLOBAL = """
import sys
from pathlib import Path
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import kvladder
from tests.kit.traffic import keys, save
from tests.otel.test_outlet import LAYOUT, source

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with kvladder.open_cache(source(Path(sys.argv[1])), layout=LAYOUT) as cache:
    assert "spans go to the process's tracer provider" in cache.describe()
    with trace.get_tracer("app").start_as_current_span("request") as request:
        save(cache, keys("a"))
        fetch = cache.fetch(keys("a"))
        assert fetch.done
        fetch.release()
parents = {span.name: span.parent for span in exporter.get_finished_spans()}
inside = request.get_span_context().span_id
assert {n: p and p.span_id for n, p in parents.items()} == {
    "request": None, "kvladder.save": inside, "kvladder.fetch": inside,
}, parents
with trace.get_tracer("app").start_as_current_span("later"):
    pass
assert exporter.get_finished_spans()[-1].name == "later", "the provider is still its owner's"
"""


@pytest.mark.slow
def test_the_provider_and_the_current_context_of_the_process_are_used(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GLOBAL, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def refused(what: Any) -> str:
    with pytest.raises(ConfigError) as found:
        what()
    return str(found.value)


def test_spans_without_a_receiver_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refused(lambda: kvladder.open_cache(source(tmp_path), layout=LAYOUT))
    assert text.startswith("otel: no receiver of spans")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in text
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:1")
    monkeypatch.setenv(PROTOCOLS[1], "http/json")
    text = refused(open_outlet)
    assert "'http/json'" in text
    assert "expected http/protobuf or grpc" in text
    monkeypatch.setenv(PROTOCOLS[1], "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    assert "needs opentelemetry-exporter-otlp-proto-grpc" in refused(open_outlet)


def test_spans_without_the_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvladder.otel.tracer", None)
    text = refused(lambda: kvladder.open_cache(source(tmp_path), layout=LAYOUT))
    assert text.startswith("otel: needs OpenTelemetry")
    assert "install kvladder[otel]" in text


def test_otel_has_no_effect_in_a_server_or_without_tiers_and_is_refused(tmp_path: Path) -> None:
    serving = source(tmp_path, block={"size": "16 KiB"})
    text = refused(lambda: open_manager(load_config(serving), LAYOUT, serves=True))
    assert text.startswith("otel: has no effect here")
    text = refused(lambda: load_config({"gpu": {"memory": "1 GiB"}, "otel": True}))
    assert text.startswith("otel: has no effect here")
    text = refused(lambda: load_config(source(tmp_path) | {"otel": {"enable": True}}))
    assert "did you mean 'enabled'?" in text
