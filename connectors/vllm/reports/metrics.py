"""Sends statistics from the scheduler's process to vLLM's log and Prometheus, as changes.

The scheduler half sends the changes since the last time. vLLM adds them up where it logs and where
it exposes metrics, which is in one or several other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvladder.metrics import Stats
from kvladder.publishing.exposition import METRICS, samples

VLLM_PREFIX: Final = "vllm:"
"""Prefix of all metrics' names, so that vLLM treats them as its own."""
EVERY_S: Final = 1.0
"""Minimum seconds between two sends while requests run."""

Values = dict[str, dict[str, Any]]
"""Values by metric and labels (joined by commas): a number, or a histogram's sum and counts."""

_MADE_OF: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "counter": (Counter, {}),
    "gauge": (Gauge, {"multiprocess_mode": "mostrecent"}),
    "histogram": (Histogram, {}),
}
_KINDS = {metric.name: metric.kind for metric in METRICS}
_BOUNDS = {metric.name: metric.le for metric in METRICS}
_LOGGED = ("queried", "hit", "late", "dropped", "corrupt")


class KVLadderStats(KVConnectorStats):  # type: ignore[misc]
    """Changes of metrics, as plain data that crosses processes."""

    data: Values

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, values in other.data.items():
            mine = self.data.setdefault(name, {})
            for labels, value in values.items():
                if labels not in mine or _KINDS[name] == "gauge":
                    mine[labels] = value
                elif _KINDS[name] == "counter":
                    mine[labels] += value
                else:
                    mine[labels] = [a + b for a, b in zip(mine[labels], value, strict=True)]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for the log: blocks queried, hit, late, dropped and corrupt by tier."""
        found: dict[str, int | float] = {}
        for what in _LOGGED:
            for labels, value in self.data.get(f"kvladder_tier_{what}_blocks_total", {}).items():
                name = f"{labels.partition(',')[0]} {what}"
                found[name] = found.get(name, 0) + value
        return found


class Changes:
    """Computes what to send: differences of counters and histograms, current values of gauges.

    Parameters
    ----------
    now:
        Returns monotonic seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._sent: Values = {}
        self._due_s = now()

    def take(self, stats: Callable[[], Stats], *, last: bool) -> KVLadderStats | None:
        """Return the changes since the last send; None if there are none, or if it is too soon.

        ``last`` is True if no call may follow for a long time; then it is never too soon.
        """
        now_s = self._now()
        if now_s < self._due_s and not last:
            return None
        self._due_s = now_s + EVERY_S
        found: Values = {}
        for metric, labels, value in samples(stats()):
            joined = ",".join(labels)
            if metric.kind == "histogram":
                value = [value["sum"], *value["counts"]]
            sent = self._sent.setdefault(metric.name, {})
            before = sent.get(joined)
            sent[joined] = value
            if value == before:
                continue
            if before is not None and metric.kind != "gauge":
                value = _added(value, before)
            found.setdefault(metric.name, {})[joined] = value
        return KVLadderStats(data=found) if found else None


def _added(now: Any, before: Any) -> Any:
    """Return what was counted since ``before``; of a counter that began anew, all of it.

    A counter falls when a server, a tier's process or a level is replaced. Prometheus' client
    raises an error if it is told to subtract, and this error would end vLLM.
    """
    if isinstance(now, list):
        counts = cast("list[float]", now)
        added = [a - b for a, b in zip(counts, before, strict=True)]
        return counts if min(added) < 0 else added
    return now if now < before else now - before


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """kvladder's metrics in vLLM's Prometheus output, in the process that exposes them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            kind, more = _MADE_OF[metric.kind]
            if metric.le:
                more = {"buckets": list(metric.le)}
            names = [*labelnames, *metric.labels]
            self._metrics[metric.name] = metric_types[kind](
                VLLM_PREFIX + metric.name, metric.help, labelnames=names, **more
            )

    def observe(self, transfer_stats_data: Values, engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            for labels, value in values.items():
                child = self._metrics[name].labels(*engine, *(labels.split(",") if labels else ()))
                if _KINDS[name] == "gauge":
                    child.set(value)
                elif _KINDS[name] == "counter":
                    child.inc(value)
                else:
                    _add(child, _BOUNDS[name], value)


def _add(child: Any, le: tuple[float, ...], value: list[float]) -> None:
    """Add ``value``, a sum and counts, to a histogram that takes one observation at a time.

    A step may evict thousands of blocks. So if the buckets are accessible, they are incremented
    directly. Otherwise each observation counts as its bucket's bound, and the sum is approximate.
    """
    total, *counts = value
    buckets = getattr(child, "_buckets", None)
    if buckets is not None:
        for bucket, count in zip(buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        child._sum.inc(total)
        return
    for bound, count in zip((*le, 2 * le[-1]), counts, strict=True):
        for _ in range(int(count)):
            child.observe(bound)
