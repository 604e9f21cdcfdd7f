"""READMEs of packages name only existing things, and their reading orders omit no file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvladder.tiers.ladder.loading import pending
from kvladder.tiers.ladder.writing.transit import NEXT, WriteState
from tests.kit.source import LINKS, ROOT

PAGES = [page for folder in LINKS for page in sorted((ROOT / folder).rglob("README.md"))]
"""None where tests run against an installed wheel, which has no READMEs."""

STATES: dict[str, tuple[str, Mapping[Any, Sequence[Any]]]] = {
    "States of a block on its way up": ("tiers/ladder", pending.NEXT),
}
"""Tables of states by title: the folder of the page, and the states that can follow each state."""

_FILE = re.compile(r"(?<![\w./<-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|toml))\b(?:::([\w.]+))?")
_FOLDER = re.compile(r"`((?:[\w-]+/)+)`")


@cache
def names(path: Path) -> frozenset[str]:
    """Dotted names of the functions, classes and variables of a file."""

    def inside(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from inside(child, f"{prefix}{child.name}.")
            targets = child.targets if isinstance(child, ast.Assign) else []
            targets = [child.target] if isinstance(child, ast.AnnAssign) else targets
            yield from (prefix + one.id for one in targets if isinstance(one, ast.Name))

    return frozenset(inside(ast.parse(path.read_text(encoding="utf-8")), ""))


def found(name: str, folder: Path) -> Path | None:
    """The file or folder of this name, below a page's folder or the project's root."""
    return next((at / name for at in (folder, ROOT) if (at / name).exists()), None)


def missing(text: str, folder: Path) -> list[str]:
    """Return the names on a page in ``folder`` that do not exist."""
    wrong = [name for name in _FOLDER.findall(text) if found(name, folder) is None]
    for name, inner in _FILE.findall(text):
        path = found(name, folder)
        if path is None:
            wrong.append(name)
        elif inner and inner.rstrip(".") not in names(path):
            wrong.append(f"{name}::{inner}")
    return wrong


def unread(text: str, folder: Path) -> list[str]:
    """Files of a package that the reading order of its page leaves out."""
    order = text.partition("## Reading order")[2].partition("\n## ")[0]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
    return [name for name in files if order and f"`{name}`" not in order]


def test_every_name_in_a_readme_exists():
    assert PAGES or not (ROOT / "tiers").is_dir()
    wrong = {page: missing(page.read_text(encoding="utf-8"), page.parent) for page in PAGES}
    assert not [f"{page.relative_to(ROOT)}: {name}" for page in PAGES for name in wrong[page]]


def test_a_reading_order_has_every_file():
    left = {page: unread(page.read_text(encoding="utf-8"), page.parent) for page in PAGES}
    assert not [f"{page.relative_to(ROOT)}: {name}" for page in PAGES for name in left[page]]


def following(text: str, title: str) -> dict[str, set[str]]:
    """The last column of a page's table of states, by the first."""
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
    return {row[0].strip(): {*re.findall(r"\w+", row[-1])} for row in rows[1:]}


def in_code(states: Mapping[Any, Sequence[Any]]) -> dict[str, set[str]]:
    return {one.name.lower(): {after.name.lower() for after in states[one]} for one in states}


@pytest.mark.parametrize("title", STATES)
def test_a_table_of_states_matches_the_code(title: str):
    folder, states = STATES[title]
    for page in (page for page in PAGES if page.parent == ROOT / folder):
        assert following(page.read_text(encoding="utf-8"), title) == in_code(states)


class Both(Enum):
    A = 1
    B = 2


def test_a_step_that_a_table_lacks_is_found():
    text = "## T\n\n| state | slot | then |\n|---|---|---|\n| a | x | b, c |\n| b | y | |\n\n## U\n"
    assert following(text, "T") == {"a": {"b", "c"}, "b": set()}
    assert in_code({Both.A: [Both.B], Both.B: []}) == {"a": {"b"}, "b": set()}


def states(text: str) -> dict[str, tuple[bool, list[str]]]:
    """Return a page's table of states: whether each is a ``PendingWrite``'s, and its successors."""
    table = text.partition("\n## States")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    cells = [row for row in rows if len(row) == 5][2:]
    return {row[0]: ("`PendingWrite`" in row[1], row[4].split(", ")) for row in cells}


def misplaced(rows: dict[str, tuple[bool, list[str]]]) -> list[str]:
    """Return the differences between a table of states and ``WriteState`` with ``NEXT``."""
    moving = [state.value for state in WriteState if state is not WriteState.SETTLED]
    wrong = [] if [name for name in rows if rows[name][0]] == moving else ["the states"]
    for name in moving:
        then, after = rows.get(name, (True, []))[1], NEXT[WriteState(name)]
        wrong += [f"{name}: {other}" for other in then if other not in rows]
        settled = [other for other in then if other not in moving]
        if bool(settled) != (WriteState.SETTLED in after):
            wrong.append(f"{name}: its end")
        if {*then} & {*moving} != {state.value for state in after} & {*moving}:
            wrong.append(f"{name}: what follows")
    return wrong


def test_the_table_of_a_blocks_states_matches_the_code():
    pages = [page for page in PAGES if page.parent.name == "ladder"]
    assert bool(pages) == bool(PAGES)
    for page in pages:
        assert not misplaced(states(page.read_text(encoding="utf-8")))


def test_a_table_that_differs_from_the_states_is_found():
    row = "| {} | `PendingWrite` | | | {} |\n"
    then = {state: [other.value for other in WriteState if other in NEXT[state]] for state in NEXT}
    rows = {state.value: ", ".join(then[state]).replace("settled", "gone") for state in NEXT}
    del rows["settled"]
    text = "\n## States\n\n| a | b | c | d | e |\n|--|--|--|--|--|\n{}| gone | | | | queued |\n"
    right = "".join(row.format(*each) for each in rows.items())
    assert not misplaced(states(text.format(right)))
    for a, b, wrong in (
        ("| tombstone |", "| headstone |", "the states"),
        ("writing, gone", "writing", "queued: its end"),
        ("writing, gone", "abandoned, gone", "queued: what follows"),
        ("writing, gone", "writing, lost", "queued: lost"),
    ):
        assert wrong in misplaced(states(text.format(right.replace(a, b, 1))))


def test_missing_names_are_found():
    kit = ROOT / "tests" / "kit"
    text = "`source.py::Source.lines`, `tests/test_readmes.py::PAGES`, `kit/`, source.py."
    assert missing(text, kit) == ["kit/"]
    text = "`sauce.py`, source.py::Source.no and tests/kit/none/a.md, [there](../kit/none.md)"
    wrong = ["sauce.py", "source.py::Source.no", "tests/kit/none/a.md", "../kit/none.md"]
    assert missing(text, kit) == wrong
    assert "source.py" in unread("## Reading order\n\n`stuck.py`\n\n## Rest\n\n`source.py`", kit)
    assert not unread("No order", kit)
