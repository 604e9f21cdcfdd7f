"""The board: Grafana's types read it without loss, and it shows each metric."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from kvladder.publishing.board import GLANCE, SECTIONS, board
from kvladder.publishing.exposition import METRICS
from kvladder.publishing.promql import is_known
from tests.publishing.test_alerts import WHOLE
from tests.publishing.test_scraped import queries


def test_each_metric_has_a_panel_of_its_own_in_the_row_of_its_section() -> None:
    rows = {one["title"]: one["panels"] for one in board()["panels"] if one["type"] == "row"}
    for metric in METRICS:
        row = rows[SECTIONS.get(metric.section, metric.section.capitalize())]
        panel = next(one for one in row if one["title"] == metric.name)
        assert panel["description"] == metric.help
    assert sum(map(len, rows.values())) == len(METRICS)


def test_only_panels_about_the_shadow_are_left_out() -> None:
    known = {
        panel.title
        for panel in GLANCE
        if all(is_known(one, METRICS) for one in panel.queries.values())
    }
    left = {panel.title for panel in GLANCE} - known
    assert left == ({"Hit rate at other sizes"} if WHOLE is not METRICS else set())
    shown = {one["title"] for one in board()["panels"]}
    assert known <= shown
    assert not left & shown
    assert {panel.title for panel in GLANCE} <= {one["title"] for one in board(WHOLE)["panels"]}


def test_no_two_panels_overlap_or_have_one_id() -> None:
    made = board(WHOLE)["panels"]
    panels = [inner for outer in made for inner in (outer, *outer.get("panels", ()))]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_each_query_is_restricted_to_the_chosen_processes() -> None:
    asked = list(queries(board(WHOLE)))
    assert len(asked) > len(METRICS)
    for _, query in asked:
        assert query.count("{__name__") == query.count('job=~".*", instance=~".*"')


def test_the_types_of_grafana_read_the_board_without_loss() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    encoder: Any = import_module("grafana_foundation_sdk.cog.encoder")
    plugins: Any = import_module("grafana_foundation_sdk.cog.plugins")
    models: Any = import_module("grafana_foundation_sdk.models.dashboard")
    plugins.register_default_plugins()

    def read(made: Any) -> Any:
        return json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(made)))

    def lost(before: Any, after: Any) -> bool:
        if isinstance(before, dict):
            return any(name not in after or lost(before[name], after[name]) for name in before)
        if isinstance(before, list):
            return len(before) != len(after) or any(map(lost, before, after))
        return bool(before != after)

    made = json.loads(json.dumps(board(WHOLE)))
    assert not lost(made, read(made))
    for path in (("fieldConfig", "defaults", "units"), ("targets", 0, "expression"), ("name",)):
        wrong = json.loads(json.dumps(made))
        place = wrong["panels"][0]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = "a name that Grafana does not have"
        assert lost(wrong, read(wrong)), path
