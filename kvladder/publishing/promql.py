"""Writes queries for Prometheus in terms of the metrics of ``metrics.yaml``.

vLLM exposes each metric with the prefix ``vllm:``, other programs without it. A query that names a
metric selects both, so one board and one file of rules serve a fleet of either kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from kvladder.publishing.exposition import Metric

PREFIX: Final = "(vllm:)?"
"""Regular expression for what may stand before the name of a metric."""
OTHERS: Final = frozenset({"job", "instance"})
"""Labels that Prometheus adds to all series."""
ENDS: Final = {"histogram": ("_bucket", "_sum", "_count")}
"""Ends of the names of series, by the kind of metric; others have none."""
_SELECTOR = re.compile(r"\b(kvladder_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*[=!]~?\s*\"")


class UnknownMetric(LookupError):
    """A query names a metric, or a label of one, that ``metrics.yaml`` does not have."""


def series(metrics: Iterable[Metric]) -> dict[str, frozenset[str]]:
    """Return the labels of the series of some metrics, by the name of the series."""
    return {
        metric.name + end: frozenset(metric.labels) | ({"le"} if end == "_bucket" else set())
        for metric in metrics
        for end in ENDS.get(metric.kind, ("",))
    }


def named(query: str) -> Iterator[tuple[str, str]]:
    """Yield each series that a query names, with the text of its matchers."""
    for found in _SELECTOR.finditer(query):
        yield found[1], found[2] or ""


def is_known(query: str, metrics: Iterable[Metric]) -> bool:
    """Return whether all series that a query names exist."""
    known = series(metrics)
    return all(name in known for name, _ in named(query))


def selecting(query: str, metrics: Iterable[Metric], *more: str) -> str:
    """Return a query that selects its series with and without the prefix of vLLM.

    Parameters
    ----------
    query:
        PromQL with names as in ``metrics.yaml``.
    metrics:
        The metrics that exist.
    more:
        Matchers to add to each series, such as ``job=~"$job"``.

    Raises
    ------
    UnknownMetric
        The query names a series, or a label of one, that does not exist.
    """
    known = series(metrics)
    for name, matchers in named(query):
        if name not in known:
            raise UnknownMetric(f"{name}: no such series in metrics.yaml, in: {query}")
        unknown = {*_LABEL.findall(matchers)} - known[name] - OTHERS
        if unknown:
            raise UnknownMetric(f"{name}: no label {', '.join(sorted(unknown))}, in: {query}")

    def replaced(found: re.Match[str]) -> str:
        parts = (f'__name__=~"{PREFIX}{found[1]}"', found[2], *more)
        return "{" + ", ".join(part for part in parts if part) + "}"

    return _SELECTOR.sub(replaced, " ".join(query.split()))
