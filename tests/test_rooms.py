"""The drawings of the rooms show the imports as they are, and no room imports one above it."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from tests.kit.scripts import script
from tests.kit.source import uncollected

rooms: Any = script("rooms")


def test_the_drawings_of_rooms_are_current() -> None:
    with uncollected():
        made = rooms.render()
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, "run python .ci/rooms.py"
        ElementTree.fromstring(text)
    assert set(rooms.FOLDER.glob("rooms-*")) == set(made)


def test_no_rooms_import_each_other() -> None:
    folders = map(rooms.within, ("tiers.ladder", "connectors.vllm", "gpu"))
    for room in (rooms.of_the_house, *folders):
        assert rooms.upward(rooms.graph(room)) == set()


def test_a_circle_is_found_and_left_out_of_the_floors() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"b"}}
    assert rooms.upward(graph) == {("c", "b")}
    down = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert rooms.floors(down) == {"a": 2, "b": 1, "c": 0}
    assert rooms.reduced(down) == {("a", "b"), ("b", "c")}
