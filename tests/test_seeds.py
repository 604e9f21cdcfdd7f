"""contributing/seeds.md matches its data; the places, tests and faults that it names exist."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.scripts import script
from tests.kit.source import uncollected

seeds: Any = script("seeds")
FAULT = {"file": "setup.py", "text": "optional=True", "becomes": "optional=False"}
GOOD = {
    "seed": "001:1",
    "names": "x",
    "status": "held",
    "code": ["setup.py"],
    "tests": ["setup.py"],
    "faults": [FAULT],
}


def test_the_page_matches_its_data() -> None:
    assert seeds.PAGE.read_text() == seeds.render(seeds.load()), "run python .ci/seeds.py"


def test_every_place_and_test_exists() -> None:
    rows = [row for section in seeds.load() for row in section["rows"]]
    assert len(rows) == 147
    with uncollected():
        found = {row["names"]: list(seeds.problems(row)) for row in rows}
    assert {names: said for names, said in found.items() if said} == {}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"status": "done"}, "status 'done'"),
        ({"tests": []}, "held: expected code and a test"),
        ({"code": ["gone.py"]}, "there is no file gone.py"),
        ({"tests": ["tests/test_seeds.py::test_gone"]}, "has no test_gone"),
        ({"status": "part"}, "part: expected a note that says what is missing"),
        (
            {"status": "refused", "note": "docs/decisions/none.md"},
            "refused: expected a note that begins with its record",
        ),
        ({"line": 3}, "unknown keys"),
        ({"faults": [FAULT | {"text": "e"}]}, "setup.py has the text of a fault"),
        ({"faults": [FAULT | {"text": "not there"}]}, "has the text of a fault 0 times"),
        ({"faults": [FAULT | {"becomes": FAULT["text"]}]}, "expected once, and a change"),
        ({"faults": [FAULT | {"becomes": "= ="}]}, "breaks the syntax of setup.py"),
        ({"faults": [FAULT | {"file": "gone.py"}]}, "there is no file gone.py"),
        ({"faults": [FAULT | {"test": "tests/test_docs.py"}]}, "test is not one of the row's"),
        ({"faults": [{"file": "setup.py"}]}, "a fault with the keys"),
        ({"faults": []}, "expected faults, or the reason"),
        ({"unplanted": "a layout"}, "expected faults, or the reason"),
        (
            {"status": "open", "note": "x", "unplanted": "a layout"},
            "open: expected unplanted only in rows",
        ),
    ],
)
def test_wrong_rows_are_found(changed: dict[str, Any], says: str) -> None:
    assert list(seeds.problems(GOOD)) == []
    assert list(seeds.problems(GOOD | {"faults": [], "unplanted": "a layout"})) == []
    assert any(says in problem for problem in seeds.problems(GOOD | changed))
