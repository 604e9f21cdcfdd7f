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


class _Field(NamedTuple):
    """One statistic of a section as a metric."""

    metric: Metric
    key: str
    labels: tuple[str, ...]
    """Its labels; a statistic with more of them has one value for each, by label."""
    start: str
    """Its line without the value; empty if it has more labels, and for histograms."""


@lru_cache(256)
def _fields(name: str) -> tuple[_Field, ...]:
    """Return the metrics of the statistics that are called ``name``."""
    section = name if name in SECTIONS else "tier"
    if name.startswith(POOL):
        section, name = "pool", name.removeprefix(POOL)
    first = (name,) if section in ("tier", "pool") else ()
    found: list[_Field] = []
    for metric in _BY_SECTION.get(section, ()):
        for key, own in metric.fields.items():
            labels = (*first, *own)
            plain = len(labels) == len(metric.labels) and not metric.bounds
            start = f"{metric.name}{_braced(metric.labels, labels)} " if plain else ""
            found.append(_Field(metric, key, labels, start))
    return tuple(found)


def samples(stats: Stats) -> Iterator[Sample]:
    """Yield the values of all metrics in some statistics."""
    for name, values in stats.items():
        for metric, key, labels, _ in _fields(name):
            if key in values:
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
    for name, values in stats.items():
        for metric, key, labels, start in _fields(name):
            if key not in values:
                continue
            if start:
                lines = [start + _number(values[key])]
            else:
                inner = _samples(metric, labels, values[key])
                lines = [_line(metric, within, value) for _, within, value in inner]
            if lines and metric.name not in found:
                heading = _heading(metric.name, metric.kind, metric.help, is_open)
                found[metric.name] = [*heading, *lines]
            elif lines:
                found[metric.name] += lines
    text = "\n".join([*chain.from_iterable(found.values()), "# EOF" if is_open else "", ""])
    if is_open:
        return text.encode(), f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"
    return text.removesuffix("\n").encode(), "text/plain; version=0.0.4; charset=utf-8"


@lru_cache(1024)
def _heading(name: str, kind: str, text: str, is_open: bool) -> tuple[str, str]:
    name = name.removesuffix("_total") if is_open else name
    text = text.translate(_ESCAPES) if is_open else text.replace("\\", "\\\\")
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _line(metric: Metric, labels: tuple[str, ...], value: Any) -> str:
    """Return the line of a value, or the lines of a histogram."""
    if metric.bounds:
        return _starts(metric.name, metric.bounds, metric.labels, labels) % _told(value)
    return f"{metric.name}{_braced(metric.labels, labels)} {_number(value)}"


@lru_cache(4096)
def _starts(name: str, bounds: str, names: tuple[str, ...], labels: tuple[str, ...]) -> str:
    """Return a histogram's lines with ``%s`` for values: its buckets, the count and the sum."""
    les = (*(str(float(bound)) for bound in _BOUNDS[bounds]), "+Inf")
    braced = _braced(names, labels)
    starts = (
        *(f"{name}_bucket{_braced((*names, 'le'), (*labels, le))}" for le in les),
        f"{name}_count{braced}",
        f"{name}_sum{braced}",
    )
    return "\n".join(start.replace("%", "%%") + " %s" for start in starts)


def _told(plain: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of a histogram's lines."""
    totals = [*accumulate(plain["counts"])]
    return (*totals, totals[-1], _number(plain["sum"]))


@lru_cache(4096)
def _braced(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return labels as they follow a metric's name."""
    pairs = zip(names, values, strict=True)
    inner = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
    return f"{{{inner}}}" if inner else ""


def _number(value: float) -> str:
    if isinstance(value, int) or isfinite(value):
        return str(value)
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
