"""Maps statistics to metrics, with names, kinds, units and labels, and writes them as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate, chain
from math import isfinite, isnan
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from kvladder.metrics import AGES_S, DISTANCES, DURATIONS_S, POOL, SECTIONS, Stats

_BOUNDS: Final[dict[str, tuple[float, ...]]] = {
    "": (), "ages": AGES_S, "distances": DISTANCES, "durations": DURATIONS_S,
}  # fmt: skip


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
        return _BOUNDS[self.bounds]

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """Kind of the metric."""
        if self.bounds:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


METRICS: Final = msgspec.yaml.decode(
    Path(__file__).with_name("metrics.yaml").read_bytes(), type=tuple[Metric, ...]
)


_BY_SECTION: Final = {
    section: [metric for metric in METRICS if metric.section == section]
    for section in {metric.section for metric in METRICS}
}


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
        for metric in _BY_SECTION.get(section, ()):
            for key, own in metric.fields.items():
                if key in values:
                    labels = (*first, *own)
                    if len(labels) == len(metric.labels):  # as nearly all are
                        yield Sample(metric, labels, values[key])
                    else:
                        yield from _samples(metric, labels, values[key])


def _samples(metric: Metric, labels: tuple[str, ...], value: Any) -> Iterator[Sample]:
    """Yield one sample, or one for each label among the keys of ``value``."""
    if len(labels) == len(metric.labels):
        yield Sample(metric, labels, value)
        return
    for label, inner in value.items():
        yield from _samples(metric, (*labels, label), inner)


OPEN_METRICS: Final = "application/openmetrics-text"
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def exposed(stats: Stats, accept: str) -> tuple[bytes, str]:
    """Return all metrics as text, and its content type.

    It is OpenMetrics if the header ``accept`` names that, else Prometheus' format. The library
    prometheus-client writes the same with several times the processor time.
    """
    is_open = OPEN_METRICS in accept
    found: dict[str, list[str]] = {}
    for metric, labels, value in samples(stats):
        lines = found.get(metric.name)
        if lines is None:
            lines = found[metric.name] = [*_heading(metric.name, metric.kind, metric.help, is_open)]
        if metric.bounds:
            lines += _buckets(metric, labels, value)
        else:
            lines.append(f"{metric.name}{_braced(metric.labels, labels)} {_number(value)}")
    text = "\n".join([*chain.from_iterable(found.values()), "# EOF" if is_open else "", ""])
    if is_open:
        return text.encode(), f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"
    return text.removesuffix("\n").encode(), "text/plain; version=0.0.4; charset=utf-8"


@lru_cache(1024)
def _heading(name: str, kind: str, text: str, is_open: bool) -> tuple[str, str]:
    name = name.removesuffix("_total") if is_open else name
    text = text.translate(_ESCAPES) if is_open else text.replace("\\", "\\\\")
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _buckets(metric: Metric, labels: tuple[str, ...], plain: Mapping[str, Any]) -> Iterator[str]:
    starts = _starts(metric.name, metric.bounds, metric.labels, labels)
    totals = [*accumulate(plain["counts"])]
    values = (*totals, totals[-1], _number(plain["sum"]))
    return map("{} {}".format, starts, values)


@lru_cache(4096)
def _starts(
    name: str, bounds: str, names: tuple[str, ...], labels: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the lines of a histogram without their values: its buckets, the count and the sum."""
    les = (*(str(float(bound)) for bound in _BOUNDS[bounds]), "+Inf")
    braced = _braced(names, labels)
    return (
        *(f"{name}_bucket{_braced((*names, 'le'), (*labels, le))}" for le in les),
        f"{name}_count{braced}",
        f"{name}_sum{braced}",
    )


@lru_cache(4096)
def _braced(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return labels as they follow a metric's name."""
    pairs = zip(names, values, strict=True)
    inner = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
    return f"{{{inner}}}" if inner else ""


def _number(value: float) -> str:
    if isfinite(value):
        return str(value)
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
