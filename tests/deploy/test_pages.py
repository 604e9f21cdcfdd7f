"""Pages for operators name tests that hold their claims, and commands that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.deploy.commands import require_command, require_vllm
from tests.deploy.held import missing

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "how-to" / "deploy.md"
PAGES = [DEPLOY, DEPLOY.with_name("operations.md")]
_HELD = re.compile(r"<!-- held by: (.*?) -->", re.DOTALL)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_section_of_claims_names_tests_that_exist(page):
    held = _HELD.findall(page.read_text(encoding="utf-8"))
    assert len(held) >= 8
    assert not missing([name.strip() for one in held for name in one.split(",")])


def test_a_missing_test_is_found():
    here = "tests/deploy/test_pages.py"
    wrong = [f"{here}::test_no", "tests/none.py::test_a", "kvladder/keys.py::test_a"]
    assert missing([f"{here}::test_a_missing_test_is_found", *wrong]) == wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_section_of_operations_is_without_a_test(page):
    """A section with subsections holds what they do."""
    if page != DEPLOY:
        sections = re.split(r"^##+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        assert len(sections) > 10
        bare = [one.splitlines()[0] for one in sections if not _HELD.search(one)]
        assert bare == ["Day 0", "Day 1", "Day 2"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_exist(page):
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    lines = [line for kind, text in found if kind == "text" for line in text.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("kvladder ")]
    assert commands
    for words in commands:
        require_command(words)


def test_a_foreign_chart_gets_the_flags_of_the_readme():
    found = _BLOCK.findall(DEPLOY.read_text(encoding="utf-8"))
    stack, kserve = (yaml.safe_load(text) for kind, text in found if kind == "yaml")
    (model,) = stack["servingEngineSpec"]["modelSpec"]
    require_vllm(model["vllmConfig"]["extraArgs"])
    (main,) = kserve["spec"]["template"]["containers"]
    require_vllm(shlex.split(main["env"][0]["value"]))
