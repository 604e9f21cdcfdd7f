"""Every statistic is exposed, under names and units as Prometheus wants them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvladder.export.cache import EngineOffers
from kvladder.keys import BlockKey
from kvladder.metrics import DISTANCES, SECTIONS
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.policy.prices import Prices
from kvladder.publishing.exposition import METRICS, OPEN_METRICS, exposed, samples
from kvladder.shadow.level import ShadowSpec
from kvladder.shadow.live import LiveShadow, ShadowClocks
from kvladder.shadow.worth import WorthSource
from kvladder.testing.fakes import FakeTier
from kvladder.testing.sim import inline_blocking
from kvladder.testing.stacks import LevelSpec
from kvladder.traces.recorder import RecordCounts
from tests.stack.caches import COMMIT, cache_of

DERIVED = re.compile(r"dropped_\w+|breaker(_open|_opened)?")
"""Statistics derived from others."""
QUANTITIES = (
    *("_blocks", "_bytes", "_seconds", "_slots", "_state", "_calls", "_clients", "_requests"),
    *("_ratio", "_money", "_tokens"),
)
EVENTS = (
    *("_errors", "_timeouts", "_openings", "_failures", "_faults", "_messages", "_ends"),
    *("_preemptions", "_resumptions", "_moves"),
)


def test_metric_names_follow_the_rules() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"kvladder_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.removesuffix("_total").endswith(QUANTITIES + EVENTS), metric.name
        assert metric.section in ("tier", "pool", *SECTIONS)


def shadow_stats() -> dict[str, Any]:
    """Return the figures of a shadow that knows all prices."""
    now = iter(range(1000))
    clocks = ShadowClocks(lambda: float(next(now)), lambda: 0.0)
    spec = ShadowSpec("host", 10, PrioritizedLRU, is_written_through=True)
    prices = Prices(memory=1.0, disk=1.0, gpu=1.0)
    shadow = LiveShadow([spec], arena_bytes=1 << 20, prices=prices, clocks=clocks, post=repr)
    shadow.value(lambda: 0.1, {"host": WorthSource(4096, "memory", lambda: 0.0)})
    shadow.asked([BlockKey(bytes(32))], 0)
    return shadow.stats()


async def test_every_statistic_is_exposed() -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT)) as cache:
        stats = cache.manager.stats()
        stats["copies"] = {"offload_bytes": 1, "offload_s": 1.0, "onboard_bytes": 0, "onboard_s": 0}
        gauges: dict[str, Any] = dict.fromkeys(
            ("messages_refused", "clients_lost", "process_ends"), 0
        )
        stats["shadow"] = shadow_stats()
        gauges |= {"client_requests": {"a": 1}, "client_messages": {"a": 1}}
        counts = {"HTTP port": 1}
        stats["listeners"] = {"places": {"HTTP port": {"::1": 1}}} | dict.fromkeys(
            ("displaced", "refused"), counts
        )
        stats["events"] = {"clients": {"::1": 1}} | dict.fromkeys(
            ("replays", "refused", "turned_away"), 1
        )
        one = {"process 1": 1}
        stats["ranks"] = {"clients": one, "client_requests": one, "client_messages": one}
        stats["ranks"] |= {"client_slots": {"save": one}} | dict.fromkeys(
            ("displaced", "refused", "clients_lost", "messages_refused"), 1
        )
        stats["record"] = RecordCounts().as_dict()
        stats["export"] = {**EngineOffers(cache.manager, inline_blocking).counts(), **gauges}
        device = ("pool", "preemption", "rebalance")
        ours = [metric for metric in METRICS if metric.section not in device]
        known = {(metric.section, key) for metric in ours for key in metric.fields}
        for name, values in stats.items():
            section = name if name in SECTIONS else "tier"
            missing = [key for key in values if (section, key) not in known]
            assert not [key for key in missing if not DERIVED.fullmatch(key)]
        for section, key in known:
            assert any(key in values for name, values in stats.items()), (section, key)


async def test_each_sample_has_its_labels() -> None:
    async with cache_of(LevelSpec(FakeTier(), COMMIT), slots=2) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()
        await cache.load(cache.keys(1, 2, 3))
        held = cache.manager.save(cache.keys(7, 8))
        cache.save(cache.keys(9), priorities=[47])
        found = {(s.metric.name, s.labels): s.value for s in samples(cache.manager.stats())}
        held.abort()
    assert found["kvladder_tier_queried_blocks_total", ("host",)] == 3
    assert found["kvladder_tier_hit_blocks_total", ("host",)] == 2
    assert found["kvladder_tier_transferred_bytes_total", ("level1", "store")] == 2 * 64
    assert found["kvladder_tier_removed_blocks_total", ("host", "evicted")] == 2
    assert found["kvladder_tier_dropped_blocks_total", ("host", "room", "40")] == 1
    assert found["kvladder_arena_slots", ()] == 2
    assert found["kvladder_tier_reuse_distance_blocks", ("host",)]["counts"][0] == 2


async def test_prometheus_parses_the_output_of_the_collector() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    from kvladder.publishing.prometheus import StatsCollector

    async with cache_of(LevelSpec(FakeTier(), COMMIT)) as cache:
        cache.save(cache.keys(1, 2))
        await cache.settle()
        for _ in range(2):
            await cache.load(cache.keys(1, 2))
        registry = CollectorRegistry()
        registry.register(StatsCollector(cache.manager.stats))
        text = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    hits = families["kvladder_tier_hit_blocks"]
    assert hits.type == "counter"
    assert {s.labels["tier"]: s.value for s in hits.samples} == {"host": 4, "level1": 0}
    reuse = {
        (s.name.rpartition("_")[2], s.labels.get("le")): s.value
        for s in families["kvladder_tier_reuse_distance_blocks"].samples
        if s.labels["tier"] == "host"
    }
    assert reuse["bucket", "16.0"] == reuse["bucket", "+Inf"] == reuse["count", None] == 4
    assert len(reuse) == len(DISTANCES) + 3


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
async def test_the_text_is_what_the_collector_and_the_library_write(accept: str) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
    from prometheus_client.parser import text_string_to_metric_families as plain

    from kvladder.publishing.prometheus import StatsCollector

    async with cache_of(LevelSpec(FakeTier(), COMMIT)) as cache:
        cache.save(cache.keys(1, 2), priorities=[35, 47])
        await cache.settle()
        await cache.load(cache.keys(1, 2))
        stats = cache.manager.stats()
    stats['a "b" \\ 1%s c\n'] = {"blocks": 3, "queue_age_s": float("inf"), "tenants": {}}
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: stats))
    encode, _ = choose_encoder(accept)
    parse = open_metrics if accept else plain
    text, kind = exposed(stats, accept)
    assert kind.startswith(accept or "text/plain")
    ours, theirs = ({f.name: f for f in parse(t.decode())} for t in (text, encode(registry)))
    assert ours.keys() == theirs.keys()
    for name, family in ours.items():
        same = theirs[name]
        assert (family.type, family.documentation) == (same.type, same.documentation)
        told = {(s.name, *sorted(s.labels.items())): s.value for s in family.samples}
        assert told == {(s.name, *sorted(s.labels.items())): s.value for s in same.samples}
