"""Write docs/seeds.md from docs/seeds.yaml: ``python .ci/seeds.py``; 1 if a row is wrong.

A row has what a seed names (``seed`` is its number and line), a status, where it is in the code and
which tests hold it (files, or ``file::name``), and a note.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs" / "seeds.yaml", ROOT / "docs" / "seeds.md"
STATUSES = {
    "held": "done, and a test holds it",
    "part": "done in part; the note says what there is or is missing",
    "open": "not done",
    "refused": "done otherwise; the record that the note names says why",
    "unused": "the text itself says that it is out of use",
}
HEAD = """# What the systems that kvladder follows name, and where it is

kvladder follows TensorRT-LLM's KV cache manager (000, 001), PagedAttention with prefix caching as
it is operated (002), AutoDeploy's cache architecture (003), OpenVINO's growing caches (004), and a
card that says what to build. Each capability, knob and behaviour that they name has a row, with the
line that names it. `.ci/seeds.py` makes this page of `seeds.yaml`, and a test holds that every
file, name and test in it exists.
"""


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions and classes of a file."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def wrong(place: str) -> str:
    """What is wrong with ``file`` or ``file::name``; empty if it exists."""
    file, _, name = place.partition("::")
    path = ROOT / file
    if not path.is_file():
        return f"there is no file {file}"
    if name and name not in names_in(path):
        return f"{file} has no {name}"
    return ""


def problems(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a row."""
    status, note = row.get("status"), row.get("note", "")
    code, tests = row.get("code", []), row.get("tests", [])
    if set(row) - {"seed", "names", "status", "code", "tests", "note"}:
        yield f"keys that nobody knows: {sorted(row)}"
    if status not in STATUSES:
        yield f"status {status!r}: expected one of {', '.join(STATUSES)}"
    if status in {"held", "part", "refused"} and not (code and tests):
        yield f"{status}, without code or without a test"
    if status in {"part", "open"} and not note:
        yield f"{status}, and the note does not say what is missing"
    if status == "refused" and not (note.startswith("docs/decisions/") and not wrong(note)):
        yield f"refused by no record: {note!r}"
    yield from filter(None, map(wrong, [*code, *tests]))


def render(sections: list[dict[str, Any]]) -> str:
    """The page."""
    counts = Counter(row["status"] for section in sections for row in section["rows"])
    lines = [HEAD, "| status | rows | |", "|---|---|---|"]
    lines += [f"| {name} | {counts[name]} | {says} |" for name, says in STATUSES.items()]
    for section in sections:
        lines += [
            "",
            f"## {section['title']}",
            "",
            "| line | what it names | | code | tests | note |",
        ]
        lines.append("|---|---|---|---|---|---|")
        for row in section["rows"]:
            code, tests = (
                ", ".join(f"`{one}`" for one in row.get(key, [])) for key in ("code", "tests")
            )
            cells = [row["seed"], row["names"], row["status"], code, tests, row.get("note", "")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def load() -> list[dict[str, Any]]:
    """The sections, each with its rows."""
    found: list[dict[str, Any]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Write the page, and print what is wrong."""
    sections = load()
    found = [
        f"{row['seed']} {row['names']}: {problem}"
        for section in sections
        for row in section["rows"]
        for problem in problems(row)
    ]
    print(*found, sep="\n", end="\n" if found else "")
    PAGE.write_text(render(sections), encoding="utf-8")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
