"""The chart of ``deploy/chart``, rendered by Helm's own library, and what its manifests contain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
WORKLOADS = {"StatefulSet", "DaemonSet"}


def values_of(name: str) -> dict[str, Any]:
    """Return the values of an example; none for the defaults."""
    found = {path.stem: path for path in EXAMPLES}
    return yaml.safe_load(found[name].read_text()) if name else {}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests, as ``helm install kv --namespace llm`` would send them."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name="kv", namespace="llm")
    return [one for text in rendered.values() for one in yaml.safe_load_all(text) if one]


def of_kind(manifests: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [one for one in manifests if one["kind"] in kinds]


def pods(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the specifications of pods by their workload's name."""
    found = of_kind(manifests, *WORKLOADS)
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in found}


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod.get("initContainers", ())
    yield from pod["containers"]


def stacks(manifests: list[dict[str, Any]]) -> dict[str, str]:
    """Return the text of each stack by the name of its ConfigMap."""
    found = of_kind(manifests, "ConfigMap")
    return {one["metadata"]["name"]: text for one in found for text in one["data"].values()}
