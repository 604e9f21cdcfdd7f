"""Maps statistics to metrics: their names, kinds, units and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvladder.metrics import AGES_S, DISTANCES, DURATIONS_S, POOL, SECTIONS, Stats


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One metric. Names of counters end in ``_total``."""

    name: str
    """Name under which it is exposed."""
    help: str
    fields: Mapping[str, tuple[str, ...]]
    """Statistics that it is made of, and the labels that each of them adds."""
    labels: tuple[str, ...] = ("tier",)
    section: str = "tier"
    bounds: Literal["", "ages", "distances", "durations"] = ""

    @property
    def le(self) -> tuple[float, ...]:
        """Inclusive upper bounds of a histogram's buckets; empty for other kinds."""
        bounds = {"ages": AGES_S, "distances": DISTANCES, "durations": DURATIONS_S}
        return bounds.get(self.bounds, ())

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """Kind of the metric."""
        if self.bounds:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


METRICS: Final = msgspec.yaml.decode(
    Path(__file__).with_name("metrics.yaml").read_bytes(), type=tuple[Metric, ...]
)


class Sample(NamedTuple):
    """One value of a metric under some labels. A histogram's value is its plain data."""

    metric: Metric
    labels: tuple[str, ...]
    value: Any


def samples(stats: Stats) -> Iterator[Sample]:
    """Yield the values of all metrics in some statistics."""
    for name, values in stats.items():
        section = name if name in SECTIONS else "tier"
        if name.startswith(POOL):
            section, name = "pool", name.removeprefix(POOL)
        first = (name,) if section in ("tier", "pool") else ()
        for metric in METRICS:
            if metric.section == section:
                for key, own in metric.fields.items():
                    if key in values:
                        yield from _samples(metric, (*first, *own), values[key])


def _samples(metric: Metric, labels: tuple[str, ...], value: Any) -> Iterator[Sample]:
    """Yield one sample, or one for each label among the keys of ``value``."""
    if len(labels) == len(metric.labels):
        yield Sample(metric, labels, value)
        return
    for label, inner in value.items():
        yield from _samples(metric, (*labels, label), inner)
