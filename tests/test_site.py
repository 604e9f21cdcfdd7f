"""The site shows the product as it is."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from kvladder.config.registry import BUILT_IN
from kvladder.config.settings import Sections
from kvladder.schema import keys_of
from tests.kit.scripts import script
from tests.kit.source import LINKS, ROOT, python_files
from tests.test_docs import blocks, configurations
from tests.test_readmes import missing

settings: Any = script("settings")
drawings: Any = script("drawings")
command_line: Any = script("commands")
jsonschema: Any = importlib.import_module("jsonschema")
OF_USERS = {"stack.yaml"}
"""Files that a page has its reader make."""
_LINK = re.compile(r"\]\([^)]*\)")
HOST = "tiers: [{type: host}, "


@cache
def schema() -> dict[str, Any]:
    """Return the schema of a stack; making it takes longer than most of these tests."""
    found: dict[str, Any] = settings.whole()
    return found


def wrong(text: str) -> list[str]:
    """Return the schema's errors for a stack."""
    checker = jsonschema.Draft7Validator(schema())
    return [error.message for error in checker.iter_errors(yaml.safe_load(text))]


def test_the_pages_of_settings_are_current() -> None:
    for path, text in settings.render().items():
        assert path.read_text(encoding="utf-8") == text, "run python .ci/settings.py"


def test_the_page_of_commands_is_current() -> None:
    text = command_line.PAGE.read_text(encoding="utf-8")
    assert text == command_line.page(), "run python .ci/commands.py"


def test_the_drawings_are_current() -> None:
    made = drawings.render()
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, "run python .ci/drawings.py"
        ElementTree.fromstring(text)
    others = {path for path in drawings.FOLDER.iterdir() if not path.name.startswith("rooms-")}
    assert others == set(made)


def test_a_plot_shows_the_values_of_its_table() -> None:
    assert drawings.one("2026-11-23-shared-tiers.md", "redis put, 16 of 1 MiB", "ours") == 1.576
    plot = drawings.shared_tiers()
    assert ">1.576<" in plot
    with pytest.raises(ValueError, match="unpack"):
        drawings.one("2026-11-23-shared-tiers.md", "no such row", "ours")


@pytest.mark.parametrize("folder", ["explanation", "tutorials", "contributing"])
def test_files_that_pages_name_exist(folder: str) -> None:
    pages = sorted((ROOT / "docs" / folder).glob("*.md"))
    assert pages
    for page in pages if folder != "contributing" else [ROOT / "docs" / folder / "index.md"]:
        text = page.read_text(encoding="utf-8")
        named = [name for name in missing(_LINK.sub("", text), ROOT) if name not in OF_USERS]
        assert not named, page


@pytest.mark.parametrize(
    ("page", "script", "rows"), [("vllm", "demo", 8), ("sglang", "demo_sglang", 7)]
)
def test_a_tutorial_names_the_runs_of_its_demo(page: str, script: str, rows: int) -> None:
    source = (ROOT / "examples" / f"{script}.py").read_text(encoding="utf-8")
    path = ROOT / "docs" / "tutorials" / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    [shown] = [block for _, block in blocks(path, "text") if "can come from" in block]
    table = shown.split("\n\n")[1].splitlines()[1:]
    names = [line.partition("  ")[0] for line in table]
    assert len(names) == rows
    assert not [name for name in names if f'"{name}"' not in source]
    assert not [line for line in shown.split("\n\n")[2].splitlines() if line[:6] != "ok    "]
    explained = {*re.findall(r"\*([^*]+)\*", text[text.index("How to read the table") :])}
    assert {name.removeprefix("control: ") for name in names} <= explained


def test_a_symptom_quotes_words_of_the_product() -> None:
    symptoms = [symptom for symptom, *_ in cells("docs/how-to/troubleshoot.md", "symptom")]
    quoted = {word for symptom in symptoms for word in re.findall(r"`([^`]+)`", symptom)}
    assert len(quoted) > 8
    files = [*python_files("kvladder", *LINKS), "kvladder/publishing/metrics.yaml"]
    product = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in files)
    parts = {part for word in quoted for part in re.split(r"[. :]+", word) if part}
    assert not [part for part in parts if part not in product]


def cells(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a text."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(heading)[2]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = (ROOT / "docs").rglob("*.md")
    names = [str(page.relative_to(ROOT / "docs")) for page in pages]
    left = [name for name in names if f"{name}\n" not in text]
    assert not [name for name in left if not name.startswith("decisions/0")]


def test_every_setting_has_a_description() -> None:
    lines = [line for line in settings.page().splitlines() if line.startswith("| `")]
    assert len(lines) > 80
    assert not [line for line in lines if line.endswith("|  |")]


def test_the_schema_is_valid_and_has_every_section_tier_and_codec() -> None:
    found = schema()
    jsonschema.Draft7Validator.check_schema(found)
    assert {*keys_of(Sections), "tiers"} < set(found["properties"])
    assert {f"tier-{name}" for name in BUILT_IN["tiers"]} < set(found["$defs"])
    assert {f"codec-{name}" for name in BUILT_IN["codecs"]} < set(found["$defs"])
    assert json.loads(settings.SCHEMA.read_text()) == found


@pytest.mark.parametrize("text", list(configurations()))
def test_the_schema_accepts_the_configurations_on_pages(text: str) -> None:
    assert not wrong(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arena: {sise: 1 GiB}", "'sise' was unexpected"),
        ("host: 1 GiB\nfile: /tmp/a", "'file' was unexpected"),
        ("fetch: {when: sometimes}", "is not valid"),
        ("limits: {priority: 101}", "is not valid"),
        (HOST + "{type: files, capacity: 1 GiB}]", "'path' is a required property"),
        (HOST + "{type: files, path: /a, capacity: 1 GiB, url: b}]", "'url' was unexpected"),
        (HOST + "{type: memory, capacity: 1 GiB, codecs: [{name: zstd, lever: 3}]}]", "'lever'"),
        ("tiers: [{name: a}]", "'type' is a required property"),
    ],
)
def test_the_schema_refuses_configurations_that_a_start_refuses(text: str, says: str) -> None:
    assert any(says in one for one in wrong(text)), wrong(text)


def test_the_schema_accepts_variables_and_plug_ins() -> None:
    assert not wrong("limits: {priority: '${TOP}'}\nmodel:\nblock: 1 MiB\ncontrol: /tmp/a")
    assert not wrong(HOST + "{type: mine, colour: red}]")


_OURS = re.compile(r"^ *(?:from|import) kvladder\b", re.MULTILINE)
SCRIPTS = [path for path in sorted((ROOT / ".ci").glob("*.py")) if _OURS.search(path.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_uses_its_own_tree_whichever_is_installed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "kvladder.py").write_text("raise ImportError('another tree')")
    run = f"import runpy; runpy.run_path({str(path)!r}); import kvladder; print(kvladder.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", run],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(ROOT / "kvladder" / "__init__.py")
