"""Metrics of a cache for ``prometheus_client``, for programs without an engine that exposes them.

REGISTRY.register(StatsCollector(cache.stats))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from kvladder.errors import needed

with needed("prometheus"):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector

from kvladder.metrics import Stats
from kvladder.publishing.exposition import METRICS, Sample, samples

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class StatsCollector(Collector):
    """Reads the statistics at each scrape.

    Parameters
    ----------
    stats:
        ``CacheManager.stats``. Called from the threads that scrape.
    """

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Return an empty list, because registering must not read statistics."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that has a value."""
        found: dict[str, list[Sample]] = {}
        for sample in samples(self._stats()):
            found.setdefault(sample.metric.name, []).append(sample)
        for metric in METRICS:
            values = found.get(metric.name, [])
            if values and metric.kind == "histogram":
                yield _histogram(values)
            elif values:
                family = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
                for _, labels, value in values:
                    family.add_metric(labels, value)
                yield family


def _histogram(values: list[Sample]) -> HistogramMetricFamily:
    metric = values[0].metric
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for _, labels, plain in values:
        counts: list[int] = plain["counts"]
        bounds = [*(str(float(bound)) for bound in plain["le"]), "+Inf"]
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric(labels, buckets, plain["sum"])
    return family
