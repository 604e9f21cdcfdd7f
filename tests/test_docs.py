"""The documentation is true: its Python runs, its YAML is accepted, its links work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from kvladder.config.registry import BUILT_IN
from kvladder.config.stack import load_config
from kvladder.metrics import DropReason, MissReason
from kvladder.publishing.exposition import METRICS
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
PAGES = [path for path in sorted(ROOT.glob("*.md")) if path.name != "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
METRICS_PAGE = "docs/reference/metrics.md"
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


def blocks(page, language):
    """``(line, text)`` of the blocks of a language on a page."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start(2)), found[2])
        for found in _BLOCK.finditer(text)
        if found[1] == language
    ]


def name(page):
    return str(page.relative_to(ROOT))


def configurations():
    for page in PAGES:
        for line, text in blocks(page, "yaml"):
            if re.match(r"(#.*\n)*(model|block|gpu|arena|fetch|events|control|tiers|host):", text):
                yield pytest.param(text, id=f"{name(page)}:{line}")


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name)
def test_the_python_of_a_page_runs(page, tmp_path):
    """Runs from top to bottom as one script, with the line numbers of the page."""
    script = ""
    for line, text in blocks(page, "python"):
        script += "\n" * (line - script.count("\n")) + text
    path = tmp_path / "page.py"  # not the page's name, which a library may have
    path.write_text(script)
    environment = os.environ | ({"PYTHONPATH": str(ROOT)} if (ROOT / "kvladder").is_dir() else {})
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = "".join(text for _, text in blocks(page, "output"))
    assert not shown or done.stdout == shown


@pytest.mark.parametrize("text", list(configurations()))
def test_a_configuration_is_accepted(text, tmp_path):
    whole = (
        text
        if re.search(r"^(arena|host):", text, re.MULTILINE)
        else f"arena: {{size: 1 GiB}}\n{text}"
    )
    path = tmp_path / "stack.yaml"
    path.write_text(whole)
    assert load_config(path, env={}).describe()


def test_every_command_that_serves_gives_an_engine_time_to_end():
    commands = [
        line
        for page in PAGES
        for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))
        for line in found[2].splitlines()
        if line.lstrip("$ ").startswith("vllm serve ")
    ]
    assert len(commands) >= 4
    assert not [line for line in commands if " --shutdown-timeout " not in line]


PACKAGES = ("connectors/", "gpu/", "kvladder/", "policy/", "tiers/")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_has_a_target(page):
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    links = _LINK.findall(prose)
    assert not [link for link in links if not (page.parent / link).exists()]
    code = [link for link in links if re.sub(r"^(\.\./)+", "", link).startswith(PACKAGES)]
    assert not code, "name the path instead: beside a wheel there are no such folders"


def test_no_page_has_the_marks_of_a_merge():
    """Git leaves them where two changes meet; Markdown would show them to readers."""
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    rooms = [page for room in PACKAGES for page in (ROOT / room).rglob("*.md")]
    pages = [ROOT / "CHANGELOG.md", *PAGES, *rooms]
    assert not [name(page) for page in pages if marks.search(page.read_text(encoding="utf-8"))]


def test_every_setting_is_explained():
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    source = {
        "gpu": {},
        "arena": {"size": "1 B"},
        "tiers": [{"type": "host"}, {"type": "memory", "capacity": "1 B"}],
    }
    settings = [
        re.sub(r"^tiers\[\d\]\.", "", row.path) for row in load_config(source, env={}).rows()
    ]
    assert len(settings) > 20
    assert not [setting for setting in settings if f"| `{setting}` |" not in page]


def rows(page, heading):
    """The cells of the table below a heading, without their backticks."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(heading)[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    return [
        [cell.strip().replace("`", "") for cell in line.split("|")[1:-1]]
        for line in table[0].splitlines()[2:]
    ]


def test_the_page_explains_exactly_the_existing_metrics():
    explained = {name: labels for name, labels, *_ in rows(METRICS_PAGE, "## Metrics")}
    assert explained == {metric.name: ", ".join(metric.labels) for metric in METRICS}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_metric_that_a_page_names_exists(page):
    named = {*re.findall(r"\bkvladder_[a-z_]*[a-z]\b", page.read_text(encoding="utf-8"))}
    ends = {"histogram": ("", "_bucket", "_count", "_sum")}
    exposed = {one.name + end for one in METRICS for end in ends.get(one.kind, ("",))}
    assert named - exposed == set()


def test_the_advice_for_low_hits_names_existing_metrics():
    *looks, last = [look for look, *_ in rows(METRICS_PAGE, "## When hits are low")]
    assert last == "none of these"
    words = {word for look in looks for word in re.findall(r"(?:^|, )(\w+)", look)}
    names = "\n".join(metric.name for metric in METRICS)
    absent = [
        word
        for word in words
        if not re.search(rf"^kvladder_tier_{word}(_blocks)?(_total)?$", names, re.MULTILINE)
    ]
    assert not absent


def test_every_tier_is_in_the_table():
    assert {name for name, *_ in rows("README.md", "## Tiers")} == set(BUILT_IN["tiers"])


def test_every_reason_for_a_drop_is_explained():
    named = set(get_args(DropReason))
    assert {reason for reason, *_ in rows(METRICS_PAGE, "Why blocks are dropped")} == named


def test_every_reason_for_a_miss_is_explained():
    named = set(get_args(MissReason))
    assert {reason for reason, *_ in rows("docs/reference/misses.md", "The reasons")} == named


def test_decisions_have_numbers_of_their_own():
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    assert [path.name[:4] for path in pages] == [f"{n:04d}" for n in range(1, len(pages) + 1)]


def test_every_decision_is_listed_once_with_its_title():
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(
        r"^- \[(.+?)\]\((.+?)\) (.+)$", (folder / "README.md").read_text(), re.MULTILINE
    )
    titles = {path.name: path.read_text().partition("\n")[0] for path in folder.glob("0*.md")}
    assert {name: f"# {number} {title}" for number, name, title in listed} == titles
    assert len(listed) == len(titles)
