"""Alert rules for Prometheus, made from ``alerts.yaml`` and the metrics that exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvladder.publishing.exposition import METRICS, Metric
from kvladder.publishing.promql import is_known, selecting

PAGE: Final = "docs/how-to/alerts.md"
"""Page with a section for each alert, in the source tree."""


class Alert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One alert."""

    name: str
    expr: str
    """Query that has series while the alert is due, with names as in ``metrics.yaml``."""
    for_: str = msgspec.field(name="for", default="0s")
    """Time for which the query must have a series."""
    severity: Literal["warning", "info"]
    summary: str
    says: str
    """Description with the labels and the value of the series."""


ALERTS: Final = msgspec.yaml.decode(
    Path(__file__).with_name("alerts.yaml").read_bytes(), type=tuple[Alert, ...]
)


def alerts_of(metrics: Sequence[Metric] = METRICS) -> list[Alert]:
    """Return the alerts whose metrics all exist."""
    return [alert for alert in ALERTS if is_known(alert.expr, metrics)]


def rules(page: str = PAGE, metrics: Sequence[Metric] = METRICS) -> dict[str, Any]:
    """Return the content of a file of rules; annotations lead to sections of ``page``."""
    found = [
        {
            "alert": alert.name,
            "expr": selecting(alert.expr, metrics),
            "for": alert.for_,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "description": alert.says,
                "runbook_url": f"{page}#{alert.name.lower()}",
            },
        }
        for alert in alerts_of(metrics)
    ]
    return {"groups": [{"name": "kvladder", "rules": found}]}
