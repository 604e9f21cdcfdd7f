"""Maps statistics to metrics, with names, kinds, units and labels, and writes them as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
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
    """Its labels; a statistic with fewer than its metric has one value for each further label."""


@lru_cache(256)
def _fields(name: str) -> tuple[_Field, ...]:
    """Return the metrics of the statistics that are called ``name``."""
    section = name if name in SECTIONS else "tier"
    if name.startswith(POOL):
        section, name = "pool", name.removeprefix(POOL)
    first = (name,) if section in ("tier", "pool") else ()
    return tuple(
        _Field(metric, key, (*first, *own))
        for metric in _BY_SECTION.get(section, ())
        for key, own in metric.fields.items()
    )


def samples(stats: Stats) -> Iterator[Sample]:
    """Yield the values of all metrics in some statistics."""
    for name, values in stats.items():
        for metric, key, labels in _fields(name):
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
    form = _form(tuple((name, tuple(values)) for name, values in stats.items()), is_open)
    numbers: list[Any] = []
    for name, key, is_histogram in form.places:
        value = stats[name][key]
        if is_histogram:
            numbers += _numbers(value)
        else:
            numbers.append(_number(value))
    parts = [form.text % tuple(numbers)]
    for metric, fields in form.open:
        values = ((labels, stats[name][key]) for name, key, labels in fields)
        found = [one for labels, value in values for one in _samples(metric, labels, value)]
        if found:
            parts.append(_heading(metric, is_open=is_open))
        for _, labels, value in found:
            parts.append(f"{metric.name}{_braced(metric.labels, labels)} {_number(value)}")
    if is_open:
        text = "\n".join([*parts, "# EOF", ""])
        return text.encode(), f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"
    return "\n".join([*parts, ""]).encode(), "text/plain; version=0.0.4; charset=utf-8"


_Named = tuple[str, str, tuple[str, ...]]
"""Name and key of a statistic, and its labels."""


class _Form(NamedTuple):
    """The text for statistics of certain names, with ``%s`` for each number."""

    text: str
    places: Sequence[tuple[str, str, bool]]
    """Names and keys of the numbers in it, and whether they are those of a histogram."""
    open: Sequence[tuple[Metric, Sequence[_Named]]]
    """Metrics that are not in it: some of their labels are keys of the statistics."""


@lru_cache(64)
def _form(names: tuple[tuple[str, tuple[str, ...]], ...], is_open: bool) -> _Form:
    """Return the form for statistics of these names, each with its keys."""
    found: dict[str, tuple[Metric, list[_Named]]] = {}
    for name, keys in names:
        for metric, key, labels in _fields(name):
            if key in keys:
                found.setdefault(metric.name, (metric, []))[1].append((name, key, labels))
    text, places, rest = list[str](), list[tuple[str, str, bool]](), list[tuple[Metric, Any]]()
    for metric, fields in found.values():
        if any(len(labels) < len(metric.labels) for _, _, labels in fields):
            assert not metric.bounds, f"{metric.name}: a histogram has all its labels"
            rest.append((metric, fields))
            continue
        text.append(_heading(metric, is_open=is_open).replace("%", "%%"))
        text += [_line(metric, labels) for _, _, labels in fields]
        places += [(name, key, bool(metric.bounds)) for name, key, _ in fields]
    return _Form("\n".join(text), places, rest)


def _heading(metric: Metric, *, is_open: bool) -> str:
    name = metric.name.removesuffix("_total") if is_open else metric.name
    text = metric.help.translate(_ESCAPES) if is_open else metric.help.replace("\\", "\\\\")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.kind}"


def _line(metric: Metric, labels: tuple[str, ...]) -> str:
    """Return the line of a value with ``%s`` for it, or a histogram's: buckets, count and sum."""
    name, braced = metric.name, _braced(metric.labels, labels)
    starts = [f"{name}{braced}"]
    if metric.bounds:
        les = (*(str(float(bound)) for bound in metric.le), "+Inf")
        within = [_braced((*metric.labels, "le"), (*labels, le)) for le in les]
        starts = [f"{name}_bucket{each}" for each in within]
        starts += [f"{name}_count{braced}", f"{name}_sum{braced}"]
    return "\n".join(start.replace("%", "%%") + " %s" for start in starts)


def _numbers(histogram: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the numbers in a histogram's lines."""
    totals = [*accumulate(histogram["counts"])]
    return (*totals, totals[-1], _number(histogram["sum"]))


@lru_cache(4096)
def _braced(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return labels as they follow a metric's name."""
    pairs = zip(names, values, strict=True)
    inner = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
    return f"{{{inner}}}" if inner else ""


def _number(value: float) -> float | str:
    """Return what stands for a number: itself, but for those that the format spells otherwise."""
    if isinstance(value, int) or isfinite(value):
        return value
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
