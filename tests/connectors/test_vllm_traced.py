"""The spans of vLLM's requests: each continues the trace whose headers came with the request."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from kvladder.otel.provider import ENDPOINTS
from tests.connectors.scripted import TOKENS, Engine
from tests.kit.collector import Collector, Received, descendants
from tests.otel.headers import HEADERS, PARENT, TRACE

pytestmark = [pytest.mark.slow, pytest.mark.versions]
STACK = {
    "arena": {"size": "32 KiB"},
    "fetch": {"budget": "100 %"},
    "otel": True,
    "tiers": [{"type": "host"}, {"type": "memory", "capacity": "2 MiB", "when": "commit"}],
}
PROMPT = [7 * number % 50 for number in range(30)]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        monkeypatch.setenv(ENDPOINTS[1], collector.endpoint)
        yield collector


@pytest.fixture
def engine(collector: Collector) -> Engine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing vLLM
        return Engine(STACK)


def below(collector: Collector, root: str) -> list[Received]:
    return descendants(collector.spans, root)


def test_vllm_hands_the_headers_of_a_trace_over_with_the_request() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    request = Request("r", [1, 2], SamplingParams(), None, trace_headers=HEADERS)
    assert request.trace_headers == HEADERS


def test_a_request_has_its_lookup_its_loads_and_its_saves_in_its_trace(
    engine: Engine, collector: Collector
) -> None:
    engine.add(PROMPT, trace_headers=HEADERS)
    engine.run()
    engine.half.settle()
    again = {"traceparent": f"00-{TRACE + 1:032x}-{PARENT + 1:016x}-01"}
    engine.add([*PROMPT, 3], trace_headers=again)
    engine.run()
    engine.close()
    first = below(collector, f"{PARENT:016x}")
    assert {span.trace for span in first} == {f"{TRACE:032x}"}
    lookup = next(span for span in first if span.name == "kvladder.lookup")
    assert lookup.attributes["kvladder.miss.reason"] == "never_seen"
    assert lookup.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert lookup.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    saves = [span for span in first if span.name == "kvladder.save"]
    assert sum(span.attributes["kvladder.block.count"] for span in saves) == 31 // TOKENS
    for save in saves:
        (copy,) = below(collector, save.id)
        assert copy.attributes["kvladder.copy.direction"] == "offload"

    second = below(collector, f"{PARENT + 1:016x}")
    assert {span.trace for span in second} == {f"{TRACE + 1:032x}"}
    (lookup,) = (span for span in second if span.name == "kvladder.lookup")
    whole = 30 // TOKENS * TOKENS
    assert lookup.attributes["gen_ai.usage.cache_read.input_tokens"] == whole
    (fetch,) = (span for span in second if span.name == "kvladder.fetch")
    assert fetch.parent == lookup.id
    (copy,) = (span for span in below(collector, fetch.id) if span.name == "kvladder.copy")
    assert copy.attributes["kvladder.copy.direction"] == "onboard"
    assert copy.attributes["kvladder.block.count"] * TOKENS == whole
    assert copy.attributes["kvladder.bytes"] > 0


def test_a_request_without_a_trace_begins_one_that_its_saves_belong_to(
    engine: Engine, collector: Collector
) -> None:
    engine.add(PROMPT)
    engine.run()
    engine.close()
    (lookup,) = collector.named("kvladder.lookup")
    assert lookup.parent == ""
    saves = collector.named("kvladder.save")
    assert saves
    assert {save.parent for save in saves} == {lookup.id}


def test_an_aborted_request_ends_its_lookup(engine: Engine, collector: Collector) -> None:
    engine.add(PROMPT)
    engine.run()
    request = engine.add([*PROMPT, 3], trace_headers=HEADERS)
    engine.abort(request.request_id)
    engine.run()
    engine.close()
    names = {span.name for span in below(collector, f"{PARENT:016x}")}
    assert names >= {"kvladder.lookup", "kvladder.fetch"}


def test_a_copy_that_fails_is_an_error(engine: Engine, collector: Collector) -> None:
    engine.add(PROMPT)
    engine.run()
    engine.half.settle()
    request = engine.add([*PROMPT, 3], trace_headers=HEADERS)
    while not engine.half.connector.busy:
        engine.step()
    for copier in engine.copiers:
        copier.failing = True
    del request
    engine.run()
    engine.close()
    (copy,) = (s for s in below(collector, f"{PARENT:016x}") if "onboard" in s.attributes.values())
    assert (copy.status, copy.attributes["error.type"]) == (2, "copy_failed")


def test_a_warning_says_that_vllm_drops_the_headers(caplog: Any, collector: Collector) -> None:
    from types import SimpleNamespace

    from kvladder.config.stack import load_config
    from kvladder.connectors.vllm.reports.log import logger, warn

    def told(endpoint: str | None) -> str:
        caplog.clear()
        observes = SimpleNamespace(otlp_traces_endpoint=endpoint)
        config = SimpleNamespace(observability_config=observes)
        with caplog.at_level("WARNING", logger=logger.name):
            warn(load_config(STACK), version="0.32.0", vllm_config=config)
        return str(caplog.text)

    assert "--otlp-traces-endpoint" in told(None)
    assert "--otlp-traces-endpoint" not in told(collector.endpoint)
