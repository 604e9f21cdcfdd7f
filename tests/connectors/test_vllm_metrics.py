"""Statistics reach vLLM's Prometheus whole: as changes, added up, under MultiConnector too."""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvladder.metrics import AGES_S, Histogram, LevelStats, Stats
from kvladder.publishing.exposition import METRICS
from tests.connectors.scripted import Engine

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

BELOW_HOST = {"queued", "queue_age_s", "removals", "corrupt", "unreadable", "encoded_bytes"}
BELOW_HOST |= {"foreign", "calls_behind", "disk_free_bytes", "disk_size_bytes"}
BELOW_HOST |= {"written_bytes", "written_bytes_day", "endurance_bytes"}
SHARED = {"namespace_bytes"}

pytestmark = pytest.mark.slow  # importing vLLM alone takes seconds


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    """Import it once, with whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("kvladder.connectors.vllm")


class Source:
    """Statistics of one level that a test changes."""

    def __init__(self) -> None:
        self.level = LevelStats()
        self.ages = Histogram(AGES_S)
        self.blocks = 0

    def __call__(self) -> Stats:
        more = {"blocks": self.blocks, "eviction_age_s": self.ages.as_dict()}
        return {"host": {**self.level.as_dict(4096), **more}}


def types(kind: Any = None) -> dict[Any, Any]:
    """The classes that vLLM has metrics made of: Prometheus's own, or all of one ``kind``."""
    import prometheus_client as own

    return {one: kind or one for one in (own.Counter, own.Gauge, own.Histogram)}


def metrics_of(engines: int = 1) -> Any:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from kvladder.connectors.vllm.connector import KVLadderConnector

    unregister_vllm_metrics()
    config = SimpleNamespace(kv_transfer_config=None)
    values: dict[int, list[object]] = {i: ["tiny", str(i)] for i in range(engines)}
    return KVLadderConnector.build_prom_metrics(config, types(), ["model_name", "engine"], values)


def value(name: str, engine: str = "0", **labels: str) -> float | None:
    from prometheus_client import REGISTRY

    labels = {"model_name": "tiny", "engine": engine, **labels}
    return REGISTRY.get_sample_value(f"vllm:kvladder_{name}", labels)


def test_metrics_are_sent_as_changes_that_add_up() -> None:
    from kvladder.connectors.vllm.reports.metrics import EVERY_S, Changes

    times = [0.0, 0.0, EVERY_S / 2, EVERY_S / 2, EVERY_S, 5 * EVERY_S, 9 * EVERY_S]
    changes, source, prom = Changes(lambda: times.pop(0)), Source(), metrics_of()
    source.level.hits, source.blocks = 3, 5
    sent = [changes.take(source, last=False)]
    assert changes.take(source, last=False) is None, "too soon"
    assert changes.take(source, last=True) is None, "nothing has changed"
    source.level.hits, source.blocks = 10, 4
    source.ages.observe(2.0)
    source.level.drop("queue", 47)
    assert changes.take(source, last=False) is None, "too soon again"
    sent.append(changes.take(source, last=False))
    source.ages.observe(1e9)
    source.ages.observe(2.0)
    sent.append(changes.take(source, last=False))
    for one in sent:
        assert one is not None
        assert not one.is_empty()
        crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(one.to_dict()))
        assert crossed == json.loads(json.dumps(one.to_dict())) == one.to_dict()
        prom.observe(crossed)
    assert value("tier_hit_blocks_total", tier="host") == 10
    assert value("tier_late_blocks_total", tier="host") == 0
    assert value("tier_blocks", tier="host") == 4
    dropped = {"tier": "host", "reason": "queue", "priority": "40"}
    assert value("tier_dropped_blocks_total", **dropped) == 1
    assert value("tier_eviction_age_seconds_count", tier="host") == 3
    assert value("tier_eviction_age_seconds_sum", tier="host") == 1e9 + 4
    assert value("tier_eviction_age_seconds_bucket", tier="host", le="1.0") == 0
    assert value("tier_eviction_age_seconds_bucket", tier="host", le="5.0") == 2


def test_metrics_separate_engines_and_work_with_another_kind_of_registry() -> None:
    from kvladder.connectors.vllm.reports.metrics import Changes, PromMetrics

    source, prom = Source(), metrics_of(engines=2)
    source.level.hits = 1
    source.ages.observe(2.0)
    sent = Changes(lambda: 0.0).take(source, last=True)
    assert sent is not None
    prom.observe(sent.to_dict(), 1)
    assert value("tier_hit_blocks_total", engine="1", tier="host") == 1
    assert value("tier_hit_blocks_total", engine="0", tier="host") is None

    observed: list[float] = []

    class Plain:
        """A histogram that only takes observations, as Ray's."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def labels(self, *_: str) -> Plain:
            return self

        def observe(self, value: float) -> None:
            observed.append(value)

        inc = set = lambda *_: None

    other = PromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        types(Plain),
        ["engine"],
        {0: ["0"]},
    )
    other.observe(sent.to_dict())
    assert observed == [5]


def test_a_counter_that_begins_anew_is_added_and_never_ends_the_engine() -> None:
    """A server that was replaced, a tier's process or a level that was exchanged counts from 0.

    vLLM ends with an error if a metric of a connector raises one.
    """
    from kvladder.connectors.vllm.reports.metrics import Changes

    changes, source, prom = Changes(lambda: 0.0), Source(), metrics_of()
    for hits, ages in ((10, [2.0, 2.0]), (3, [2.0]), (0, []), (4, [1e9])):
        source.level, source.ages = LevelStats(), Histogram(AGES_S)
        source.level.hits = hits
        for age in ages:
            source.ages.observe(age)
        sent = changes.take(source, last=True)
        if sent is not None:
            prom.observe(sent.to_dict())
    assert value("tier_hit_blocks_total", tier="host") == 17
    assert value("tier_eviction_age_seconds_count", tier="host") == 4
    assert value("tier_eviction_age_seconds_bucket", tier="host", le="5.0") == 3


def test_intervals_are_added_up_for_the_log() -> None:
    from kvladder.connectors.vllm.connector import KVLadderConnector
    from kvladder.connectors.vllm.reports.metrics import Changes

    changes, source = Changes(lambda: 0.0), Source()
    total = KVLadderConnector.build_kv_connector_stats()
    assert total.is_empty()
    for round_ in (1, 2):
        source.level.hits += 5
        source.level.queries += 10
        source.level.drop("room", 35)
        source.level.drop("queue", 60)
        source.ages.observe(0.1)
        source.blocks = round_
        sent = changes.take(source, last=True)
        assert sent is not None
        total = total.aggregate(KVLadderConnector.build_kv_connector_stats(sent.to_dict()))
    assert total.data["kvladder_tier_blocks"] == {"host": 2}
    assert total.data["kvladder_tier_eviction_age_seconds"]["host"][:2] == [0.2, 2]
    expected = {"host queried": 20, "host hit": 10, "host dropped": 4, "host late": 0}
    assert total.reduce() == expected
    total.reset()
    assert total.is_empty()


def test_a_multi_connector_carries_the_metrics() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
        MultiKVConnectorPromMetrics,
        MultiKVConnectorStats,
    )

    from kvladder.connectors.vllm.connector import KVLadderConnector
    from kvladder.connectors.vllm.reports.metrics import Changes, KVLadderStats

    source = Source()
    source.level.hits = 2
    sent = Changes(lambda: 0.0).take(source, last=True)
    assert sent is not None
    name = KVLadderConnector.__name__
    both = MultiKVConnectorStats(data={name: sent})
    rebuilt = MultiConnector.build_kv_connector_stats(both.to_dict())
    assert isinstance(rebuilt.data[name], KVLadderStats)
    assert rebuilt.aggregate(rebuilt).reduce()[name]["host hit"] == 4
    prom = MultiKVConnectorPromMetrics(
        SimpleNamespace(kv_transfer_config=None), types(), [], {}, {name: metrics_of()}
    )
    prom.observe(both.to_dict())
    assert value("tier_hit_blocks_total", tier="host") == 2


def test_nothing_is_counted_up_in_steps_that_only_wait_for_copies() -> None:
    from kvladder.connectors.vllm.reports.metrics import Changes

    engine, asked = Engine({"host": "1 MiB"}), 0

    def stats() -> Stats:
        nonlocal asked
        asked += 1
        return engine.half.stats()

    changes = Changes(lambda: 0.0)
    try:
        engine.add([11, 12, 13, 14, 15])
        engine.run()
        engine.copiers[0].held = True
        engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
        for _ in range(8):
            engine.step(64)
            changes.take(stats, last=not engine.half.serving)
        assert (len(engine.entries), asked) == (0, 1)
        engine.copiers[0].held = False
        engine.run()
        assert changes.take(stats, last=not engine.half.serving) is not None
    finally:
        engine.close()


def test_the_scheduler_half_has_a_value_for_every_metric() -> None:
    from kvladder.connectors.vllm.reports.metrics import Changes

    engine = Engine({"host": "1 MiB"})
    try:
        engine.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
        assert engine.half.serving
        engine.run()
        assert not engine.half.serving
        sent = Changes(time.monotonic).take(engine.half.stats, last=True)
    finally:
        engine.close()
    assert sent is not None
    for metric in METRICS:
        if metric.section in {"pool", "preemption", "rebalance"}:  # of engines of our own
            assert metric.name not in sent.data
        elif not (BELOW_HOST | SHARED) & set(metric.fields):
            assert metric.name in sent.data or metric.name.startswith(
                (
                    "kvladder_tier_breaker",
                    "kvladder_tier_left_out",
                    "kvladder_tier_dropped",
                    "kvladder_tier_tenant",
                    "kvladder_tier_server",
                    "kvladder_events",  # present while events are published
                    "kvladder_export",  # present while a cache is exported
                    "kvladder_http",  # present with a port or a control socket
                    "kvladder_ranks",  # of engines whose processes share a cache
                    "kvladder_record",  # present with `record: PATH`
                    "kvladder_shadow",  # present with `shadow: true`
                )
            )
    assert sent.data["kvladder_copied_bytes_total"]["offload"] > 0
