"""A board for Grafana: the panels of ``board.yaml``, and one for each metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvladder.publishing.exposition import METRICS, Metric
from kvladder.publishing.promql import PREFIX, is_known, selecting

SCHEMA: Final = 39
"""Version of Grafana's format of boards: Grafana 11 and later read it."""
WIDTH: Final = 24
COLUMNS: Final = 3
HEIGHT: Final = 8
MATCHERS: Final = ('job=~"$job"', 'instance=~"$instance"')
"""Matchers that restrict each query to the board's choice of processes."""
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
QUANTILES: Final = (0.5, 0.9, 0.99)
UNITS: Final = {
    "_bytes": ("decbytes", "Bps"),
    "_seconds": ("s", "short"),
    "_ratio": ("percentunit", "short"),
}
"""Units of a value and of its rate, by the end of a metric's name; others are plain numbers."""
SECTIONS: Final = {
    "tier": "Levels",
    "pool": "Block pools on the device",
    "rebalance": "Block pools that share memory",
    "loop": "Event loop",
    "copies": "Copies between engine and host",
    "export": "Clients of this cache",
    "record": "Recording of requests",
    "shadow": "Shadow of other sizes",
}
"""Titles of rows; other sections have their own names."""
_STATES: Final = {"0": ("closed", "green"), "1": ("one trial", "yellow"), "2": ("open", "red")}


class Panel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One panel."""

    title: str
    says: str
    unit: str
    queries: Mapping[str, str]
    """PromQL by legend, with names as in ``metrics.yaml``."""
    kind: Literal["timeseries", "state-timeline"] = "timeseries"
    stacked: bool = False


GLANCE: Final = msgspec.yaml.decode(
    Path(__file__).with_name("board.yaml").read_bytes(), type=tuple[Panel, ...]
)


def board(metrics: Sequence[Metric] = METRICS) -> dict[str, Any]:
    """Return a board as Grafana imports it: an overview, and a closed row for each section."""
    ids = count(1)
    glance = [
        panel
        for panel in GLANCE
        if all(is_known(query, metrics) for query in panel.queries.values())
    ]
    panels = list(_grid(glance, metrics, ids, 0))
    top = _bottom(panels)
    ordered = sorted(metrics, key=lambda metric: metric.section != "tier")
    for section, members in groupby(ordered, key=lambda metric: metric.section):
        inner = list(_grid([_panel_of(one) for one in members], metrics, ids, top + 1))
        panels.append(
            {
                "type": "row",
                "id": next(ids),
                "title": SECTIONS.get(section, section.capitalize()),
                "collapsed": True,
                "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
                "panels": inner,
            }
        )
        top = _bottom(inner)
    return {
        "uid": "kvladder",
        "title": "kvladder",
        "description": "KV cache of LLM engines in tiers below the GPU",
        "tags": ["kvladder"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": list(_variables())},
        "panels": panels,
    }


def _bottom(panels: Sequence[dict[str, Any]]) -> int:
    return max((one["gridPos"]["y"] + one["gridPos"]["h"] for one in panels), default=0)


def _panel_of(metric: Metric) -> Panel:
    """Return the panel of one metric: rates of counters, quantiles of histograms."""
    end = f"_{metric.name.removesuffix('_total').rpartition('_')[2]}"
    value, rate = UNITS.get(end, ("short", "short"))
    labels = ", ".join(metric.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or "{{instance}}"
    by = f"by ({labels or 'instance'})"
    if metric.kind == "histogram":
        rates = f"sum by ({labels}, le) (rate({metric.name}_bucket[$__rate_interval]))"
        queries = {
            f"p{part * 100:g} {legend}": f"histogram_quantile({part}, {rates})"
            for part in QUANTILES
        }
    elif metric.kind == "counter":
        queries = {legend: f"sum {by} (rate({metric.name}[$__rate_interval]))"}
        value = rate
    else:
        queries = {legend: f"max {by} ({metric.name})"}
    return Panel(title=metric.name, says=metric.help, unit=value, queries=queries)


def _grid(
    panels: Sequence[Panel], metrics: Sequence[Metric], ids: Iterator[int], top: int
) -> Iterator[dict[str, Any]]:
    """Yield panels as Grafana has them, in rows of three from a height on."""
    wide = WIDTH // COLUMNS
    for number, panel in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        place = {"x": column * wide, "y": top + row * HEIGHT, "w": wide, "h": HEIGHT}
        yield {"id": next(ids), "gridPos": place, **_drawn(panel, metrics)}


def _drawn(panel: Panel, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return a panel without its id and place."""
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": selecting(query, metrics, *MATCHERS),
            "legendFormat": legend,
        }
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "state-timeline":
        options = {
            state: {"text": text, "color": color, "index": number}
            for number, (state, (text, color)) in enumerate(_STATES.items())
        }
        defaults["mappings"] = [{"type": "value", "options": options}]
    elif panel.stacked:
        custom = {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
        defaults |= {"min": 0, "custom": custom}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }


def _variables() -> Iterator[dict[str, Any]]:
    """Yield the choices above the board: source of data, job and process."""
    yield {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
    }
    slots = f'__name__=~"{PREFIX}kvladder_arena_slots"'
    for name, matchers in (("job", slots), ("instance", f'{slots}, job=~"$job"')):
        yield {
            "type": "query",
            "name": name,
            "label": name.capitalize(),
            "datasource": SOURCE,
            "query": f"label_values({{{matchers}}}, {name})",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }
