"""The list of the public API is what packages export, and what pages and examples import."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "public-api.md"
EXPORTING = [
    "kvladder", "kvladder.device", "kvladder.routing", "kvladder.testing", "kvladder.tiers",
    "kvladder.tiers.codecs",
]  # fmt: skip
"""Packages that export all that they import under its own name."""
INSIDE = {"kvladder.tiers.files.header"}
"""Modules that examples need to show damage, and users do not."""
_PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]


def public() -> dict[str, list[str]]:
    """Return the listed names by module."""
    return {module.strip("`"): re.findall(r"`(\w+)`", names) for module, names in rows("Names")}


def exported(package: str) -> set[str]:
    """Return the names that a package imports to export them, and its own ``__all__``."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    found = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name and not alias.name.startswith("_")
    }
    return found | {*getattr(module, "__all__", ())}


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of kvladder."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvladder"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_every_listed_name_exists() -> None:
    assert len(public()) == len(rows("Names")) > 20
    for module, names in public().items():
        found = importlib.import_module(module)
        assert names == sorted(names), module
        assert not [name for name in names if not hasattr(found, name)], module


@pytest.mark.parametrize("package", EXPORTING)
def test_the_list_has_what_a_package_exports(package: str) -> None:
    assert set(public()[package]) == exported(package)


def test_pages_and_examples_import_only_listed_names() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("examples/*.py")}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        texts[page.name] = "".join(_PYTHON.findall(page.read_text(encoding="utf-8")))
    found = {(file, *one) for file, text in texts.items() for one in imported(text)}
    assert len(found) > 50
    known = {(module, name) for module, names in public().items() for name in names}
    assert not [one for one in found if one[1:] not in known and one[1] not in INSIDE]


def test_the_list_has_what_the_pages_of_the_api_describe() -> None:
    """A module described as a whole explains more than is public."""
    known = {name for names in public().values() for name in names}
    pages = [page.read_text(encoding="utf-8") for page in ROOT.glob("docs/reference/api/*.md")]
    described = [one for text in pages for one in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
    names = [one.rpartition(".")[2] for one in described]
    objects = [name for name in names if not name.islower() or name == "open_cache"]
    assert len(objects) > 10
    assert not [name for name in objects if name not in known]


def test_a_deprecated_name_works_until_its_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert rows("Deprecated")
    for old, new, until in rows("Deprecated"):
        (package, _, name), (other, _, instead) = (
            one.strip("`").rpartition(".") for one in (old, new)
        )
        found = getattr(importlib.import_module(package), name)
        assert found is getattr(importlib.import_module(other), instead)
        assert Version(project["version"]) < Version(until), f"remove {old} and its row"
