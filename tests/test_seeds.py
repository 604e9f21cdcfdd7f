"""docs/seeds.md is what its data give, and every place and test that it names exists."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
if not all((ROOT / name).exists() for name in (".ci/seeds.py", "tiers")):
    pytest.skip("the tests run beside an installed package", allow_module_level=True)
SPEC = importlib.util.spec_from_file_location("seeds", ROOT / ".ci" / "seeds.py")
assert SPEC is not None
assert SPEC.loader is not None
seeds: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(seeds)
ROWS = [row for section in seeds.load() for row in section["rows"]]
GOOD = {
    "seed": "001:1",
    "names": "x",
    "status": "held",
    "code": ["setup.py"],
    "tests": ["setup.py"],
}


def test_the_page_is_what_the_data_give() -> None:
    assert seeds.PAGE.read_text() == seeds.render(seeds.load()), "run python .ci/seeds.py"


def test_every_place_and_test_exists() -> None:
    assert len(ROWS) == 140
    found = {row["names"]: list(seeds.problems(row)) for row in ROWS}
    assert {names: said for names, said in found.items() if said} == {}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"status": "done"}, "status 'done'"),
        ({"tests": []}, "without a test"),
        ({"code": ["gone.py"]}, "there is no file gone.py"),
        ({"tests": ["tests/test_seeds.py::test_gone"]}, "has no test_gone"),
        ({"status": "part"}, "does not say what is missing"),
        ({"status": "refused", "note": "docs/decisions/none.md"}, "refused by no record"),
        ({"line": 3}, "keys that nobody knows"),
    ],
)
def test_rows_that_are_wrong_are_found(changed: dict[str, Any], says: str) -> None:
    assert list(seeds.problems(GOOD)) == []
    assert any(says in problem for problem in seeds.problems(GOOD | changed))
