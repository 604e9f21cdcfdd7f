"""The table of supported versions names tests that exist, and README's table is made from it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from tests.kit.scripts import script
from tests.kit.source import ROOT

support: Any = script("support")
DATA = support.load()
VLLM = DATA["rows"][0]
HERE = "tests/test_support.py::test_the_page_matches_its_data"


def test_the_page_matches_its_data() -> None:
    assert support.PAGE.read_text() == support.render(DATA), "run python .ci/support.py"


def test_the_readmes_table_matches_the_data() -> None:
    assert support.readme(DATA) in (ROOT / "README.md").read_text()


def test_every_cell_names_tests_that_exist() -> None:
    found = [list(support.problems(row, DATA["tiers"])) for row in DATA["rows"]]
    assert found == [[]] * len(DATA["rows"])
    assert all(support.exists(suite) for suite in DATA["tiers"].values())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"run": {"host": "tests/vllm/test_serving.py::test_gone"}}, "does not exist"),
        ({"run": {"host": "kvladder/keys.py::KeyScheme"}}, "does not exist"),
        ({"run": {"tape": VLLM["run"]["host"]}}, "there is no tier tape"),
        ({"run": {"host": HERE}}, "starts no real engine"),
        ({"run": {"host": "tests/vllm/test_serving.py"}}, "starts no real engine"),
        ({"newer": True}, "lacks the mark versions"),
        ({"contract": HERE}, "is no test of a connector"),
        ({"gpu": [HERE]}, "lacks the mark gpu"),
    ],
)
def test_a_wrong_row_is_found(changed: dict[str, Any], says: str) -> None:
    assert says in "\n".join(support.problems(VLLM | changed, DATA["tiers"]))


def test_no_cell_says_more_than_its_tests() -> None:
    data = copy.deepcopy(DATA)
    del data["rows"][0]["run"]["redis"]
    assert support.cell(data["rows"][0], "redis") == support.CONTRACT
    first = support.readme(data).splitlines()[2]
    assert first.count(support.RUN) == 1
    assert support.ON_GPU in first
    data["rows"][0]["gpu"] = []
    assert support.NEVER in support.readme(data).splitlines()[2]


def test_make_runs_each_file_with_the_mark_versions_twice() -> None:
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.versions" in path.read_text() and path.name != "test_support.py"
    }
    [line] = re.findall("^RUNS_TWICE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {path.relative_to(ROOT).as_posix() for glob in line.split() for path in ROOT.glob(glob)}
    others = {one for one in named if not one.startswith("tests/connectors/test_vllm_")}
    assert {one for one in marked if not one.startswith("tests/connectors/test_vllm_")} == others


def test_a_test_that_did_not_run_is_found() -> None:
    """With a newer vLLM, a test has to be there twice."""
    tests = dict.fromkeys(test for row in DATA["rows"] for test in row["run"].values())
    ran = "".join(f"1.00\t0.50\t{test}[a]\n1.00\t0.50\t{test}[b]\n" for test in tests)
    newer = [row for row in DATA["rows"] if row.get("newer")]
    assert len(list(support.unrun(DATA, ran))) == sum(len(row["run"]) for row in newer) > 0
    assert not list(support.unrun(DATA, ran * 2))
    redis = VLLM["run"]["redis"]
    left = "".join(line for line in (ran * 2).splitlines(keepends=True) if redis not in line)
    assert list(support.unrun(DATA, left)) == [f"vLLM 0.32.0, redis: {redis} did not run"]
