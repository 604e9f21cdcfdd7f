"""A real Prometheus scrapes a real cache: the board has data, and a fault fires its alert.

The rules are the shipped ones; only the time for which they must hold is a second here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import kvladder
from kvladder.cli import main
from kvladder.cli.dashboards import BOARD, RULES
from kvladder.layout import Layout
from kvladder.manager import CacheManager
from kvladder.publishing.exposition import METRICS, samples
from kvladder.testing.redisserver import RedisServer, free_ports
from tests.kit.traffic import forgotten, keys, loaded, save, stored
from tests.patience import until
from tests.publishing.monitoring import Prometheus

pytest.importorskip("prometheus_client")
pytest.importorskip("redis")
pytestmark = pytest.mark.slow
LAYOUT = Layout(block_tokens=16, block_bytes=64 << 10, fields={"model": "scraped"})
CALLS = {"timeout": "300 ms", "breaker": {"failures": 2, "retry": "200 ms", "retry_max": "200 ms"}}
WRITTEN = {"when": "commit", "capacity": "64 MiB"}


class Scraped(NamedTuple):
    """A cache over a directory and a Redis server, and the Prometheus that scrapes it."""

    cache: CacheManager
    server: RedisServer
    prometheus: Prometheus
    board: dict[str, Any]


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[Scraped]:
    from prometheus_client import CollectorRegistry, start_http_server

    from kvladder.publishing.prometheus import StatsCollector

    folder = tmp_path
    assert main(["dashboards", "--out", str(folder)]) == 0
    made = msgspec.yaml.decode((folder / RULES).read_bytes())
    for rule in made["groups"][0]["rules"]:
        rule["for"] = "1s"
    (folder / RULES).write_bytes(msgspec.yaml.encode(made))
    with RedisServer(folder) as server:
        tiers = [
            {"type": "host"},
            {"type": "files", "path": str(folder / "kv"), **WRITTEN},
            {"type": "redis", "url": server.url, **WRITTEN, **CALLS},
        ]
        source = {"arena": {"size": 32 * LAYOUT.slot_bytes}, "tiers": tiers}
        with kvladder.open_cache(source, layout=LAYOUT) as cache:
            registry = CollectorRegistry()
            registry.register(StatsCollector(cache.stats))
            port = free_ports(1)[0]
            serving, thread = start_http_server(port, "127.0.0.1", registry)
            try:
                with Prometheus(folder, [f"127.0.0.1:{port}"], [folder / RULES]) as prometheus:
                    board = msgspec.json.decode((folder / BOARD).read_bytes())
                    yield Scraped(cache, server, prometheus, board)
            finally:
                serving.shutdown()
                serving.server_close()
                thread.join()


def queries(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title of each panel of a board, and each of its queries with choices made."""
    for outer in board["panels"]:
        for panel in outer.get("panels", (outer,)):
            for target in panel["targets"]:
                chosen = re.sub(r"\$(job|instance)\b", ".*", target["expr"])
                yield panel["title"], chosen.replace("$__rate_interval", "1m")


def work(scraped: Scraped, number: int) -> None:
    """Save a prefix of two blocks, and load it from below."""
    wanted = keys("scraped", number)
    stored(scraped.cache, wanted)
    forgotten(scraped.cache, wanted)
    assert not loaded(scraped.cache, wanted).wrong_bytes


def test_each_query_of_the_board_is_answered_with_series_of_the_scrape(scraped: Scraped) -> None:
    work(scraped, 0)
    counted = 'rate({__name__=~"kvladder_tier_hit_blocks_total"}[1m])'
    until(lambda: scraped.prometheus.series(counted), every_s=0.1)
    numbers = iter(range(1, 1 << 30))

    def has_series(query: str) -> bool:
        work(scraped, next(numbers))
        return bool(scraped.prometheus.series(query))

    exposed = {sample.metric.name for sample in samples(scraped.cache.stats())}
    asked: set[str] = set()
    for title, query in queries(scraped.board):
        named = {*re.findall(r"kvladder_\w+?(?=_bucket\b|\b)", query)}
        asked |= named
        found = scraped.prometheus.series(query)  # an error of the query fails the test
        if named <= exposed:
            if not found:  # rates need two scrapes of a series
                until(partial(has_series, query), every_s=0.1)
        else:
            assert not found, (title, query)
    assert asked >= {metric.name for metric in METRICS}
    assert {one.name for one in METRICS if one.section in ("arena", "loop")} <= exposed


def test_the_alert_of_a_breaker_fires_when_its_server_is_killed(scraped: Scraped) -> None:
    def firing() -> set[tuple[str, str]]:
        found = scraped.prometheus.ask("alerts")["alerts"]
        return {
            (one["labels"]["alertname"], one["labels"].get("tier", ""))
            for one in found
            if one["state"] == "firing"
        }

    alert = "KvladderBreakerOpen"
    until(lambda: scraped.prometheus.series('{__name__=~"kvladder_tier_breaker_state"}'))
    assert not {tier for name, tier in firing() if name == alert}
    scraped.server.kill()
    numbers = iter(range(1 << 30, 1 << 31))

    def fails() -> bool:
        save(scraped.cache, keys("failing", next(numbers)))
        return (alert, "redis") in firing()

    until(fails, every_s=0.1)
    assert {tier for name, tier in firing() if name == alert} == {"redis"}
    rules = scraped.prometheus.ask("rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}
    scraped.server.start()

    def heals() -> bool:
        save(scraped.cache, keys("healing", next(numbers)))
        return (alert, "redis") not in firing()

    until(heals, every_s=0.1)
