"""Alert rules: their metrics exist, promtool accepts them, and each fires when it should."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvladder.cli.dashboards import RULES
from kvladder.publishing.alerts import ALERTS, PAGE, alerts_of, rules
from kvladder.publishing.exposition import METRICS, Metric
from kvladder.publishing.promql import PREFIX, UnknownMetric, selecting, series
from tests.kit.source import ROOT
from tests.publishing.monitoring import tool

CASES: dict[str, Any] = msgspec.yaml.decode(Path(__file__).with_name("alerts.yaml").read_bytes())
SHADOW = Metric(
    name="kvladder_shadow_hit_ratio",
    help="Fraction of the blocks that a size serves",
    fields={"hit_ratio": ()},
    labels=("tier", "size"),
    section="shadow",
)
NAMES = [alert.name for alert in ALERTS]
WHOLE = METRICS if any(one.section == "shadow" for one in METRICS) else (*METRICS, SHADOW)
"""The metrics, with one of the shadow."""


def test_only_alerts_about_the_shadow_are_left_out() -> None:
    left = {*NAMES} - {alert.name for alert in alerts_of()}
    assert left == ({"KvladderTierTooSmall"} if WHOLE is not METRICS else set())
    assert [alert.name for alert in alerts_of(WHOLE)] == NAMES


def test_a_query_about_an_unknown_metric_or_label_is_refused() -> None:
    assert selecting('kvladder_arena_slots{job="a"} > 0', METRICS, 'instance="b"') == (
        f'{{__name__=~"{PREFIX}kvladder_arena_slots", job="a", instance="b"}} > 0'
    )
    with pytest.raises(UnknownMetric, match="kvladder_arena_slot: no such series"):
        selecting("kvladder_arena_slot", METRICS)
    with pytest.raises(UnknownMetric, match="no label tiers"):
        selecting('kvladder_tier_blocks{tiers="host"}', METRICS)
    with pytest.raises(UnknownMetric, match="no such series"):
        selecting("kvladder_tier_eviction_age_seconds", METRICS)  # a histogram has three


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_each_alert_has_a_section_that_its_annotation_leads_to(alert: Any) -> None:
    found = {one["alert"]: one["annotations"] for one in rules(metrics=WHOLE)["groups"][0]["rules"]}
    page, _, anchor = found[alert.name]["runbook_url"].partition("#")
    sections = re.findall(r"^## (\w+)\n\n\w", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {name.lower() for name in sections}


def test_the_page_has_a_section_for_each_alert_and_no_other() -> None:
    sections = re.findall(r"^## (Kvladder\w+)$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert sections == NAMES


def promtool(folder: Path, name: str, samples: dict[str, str], expected: list[Any]) -> str:
    """Run one case of ``promtool test rules``; return its output, or nothing if it holds."""
    (folder / RULES).write_bytes(msgspec.yaml.encode(rules(metrics=WHOLE)))
    times: list[tuple[str, list[Any]]] = [(CASES[name]["at"], expected)]
    if "pending" in CASES[name]:
        times.append((CASES[name]["pending"], []))
    case = {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in samples.items()],
        "alert_rule_test": [
            {"eval_time": at, "alertname": name, "exp_alerts": alerts} for at, alerts in times
        ],
    }
    every = CASES[name].get("every", "1m")
    content = {"rule_files": [RULES], "evaluation_interval": every, "tests": [case]}
    (folder / "case.yaml").write_bytes(msgspec.yaml.encode(content))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", "case.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == ("FAILED" not in done.stdout + done.stderr)
    return done.stdout + done.stderr if done.returncode else ""


def minutes(text: str) -> int:
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?|0s", text)
    assert found, text
    return 60 * int(found[1] or 0) + int(found[2] or 0)


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_a_case_is_evaluated_at_the_times_that_its_rule_needs(alert: Any) -> None:
    case = CASES[alert.name]
    windows = re.findall(r"\[(\d+m)\]", alert.expr)
    times = [case["at"], case.get("pending", "0s"), *windows, alert.for_]
    assert not any(minutes(time) % minutes(case.get("every", "1m")) for time in times)


def series_of(case: dict[str, Any]) -> set[str]:
    sets = [case["fires"], *case["quiet"]]
    return {one.partition("{")[0].removeprefix("vllm:") for samples in sets for one in samples}


@pytest.mark.slow
@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_each_alert_fires_when_it_is_due_and_only_then(alert: Any, tmp_path: Path) -> None:
    case = CASES[alert.name]
    assert series_of(case) <= series(WHOLE).keys()
    told = {
        "exp_labels": {"severity": alert.severity, **case["tells"]["labels"]},
        "exp_annotations": {
            "summary": alert.summary,
            "description": case["tells"]["says"],
            "runbook_url": f"{PAGE}#{alert.name.lower()}",
        },
    }
    assert not promtool(tmp_path, alert.name, case["fires"], [told])
    assert promtool(tmp_path, alert.name, case["fires"], [])
    for samples in case["quiet"]:
        assert not promtool(tmp_path, alert.name, samples, [])


@pytest.mark.slow
def test_the_fault_drill_has_a_fault_for_each_alert_and_rules_with_short_times(
    tmp_path: Path,
) -> None:
    drill = pytest.importorskip("benchmarks.drill")
    made = drill.shortened()
    assert [rule["alert"] for rule in made["groups"][0]["rules"]] == [
        one.name for one in alerts_of()
    ]
    path = tmp_path / RULES
    path.write_bytes(msgspec.yaml.encode(made))
    subprocess.run([tool("promtool"), "check", "rules", str(path)], check=True, capture_output=True)
    text = Path(drill.__file__).read_text()
    assert not [name for name in NAMES if f'"{name}",\n' not in text]


@pytest.mark.slow
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    path = tmp_path / RULES
    path.write_bytes(msgspec.yaml.encode(rules(metrics=WHOLE)))
    subprocess.run([tool("promtool"), "check", "rules", str(path)], check=True, capture_output=True)
