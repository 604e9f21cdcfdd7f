"""What statistics mean to somebody who watches: names, kinds, units and labels of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvladder.metrics import AGES_S, DISTANCES, POOL, SECTIONS, Stats


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One metric; counters end in ``_total``."""

    name: str
    """As it is exposed."""
    help: str
    fields: Mapping[str, tuple[str, ...]]
    """From which statistics it comes, and what labels of its own each of them has."""
    labels: tuple[str, ...] = ("tier",)
    section: str = "tier"
    bounds: Literal["", "ages", "distances"] = ""

    @property
    def le(self) -> tuple[float, ...]:
        """Of a histogram: the inclusive upper bounds of its buckets."""
        return {"": (), "ages": AGES_S, "distances": DISTANCES}[self.bounds]

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """What its values are."""
        if self.bounds:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


METRICS: Final = msgspec.yaml.decode(
    Path(__file__).with_name("metrics.yaml").read_bytes(), type=tuple[Metric, ...]
)


class Sample(NamedTuple):
    """One value of a metric under some labels; a histogram's is its plain data."""

    metric: Metric
    labels: tuple[str, ...]
    value: Any


def samples(stats: Stats) -> Iterator[Sample]:
    """The values of all metrics in some statistics."""
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
    """One sample, or one per label that ``value`` has as its keys."""
    if len(labels) == len(metric.labels):
        yield Sample(metric, labels, value)
        return
    for label, inner in value.items():
        yield from _samples(metric, (*labels, label), inner)
