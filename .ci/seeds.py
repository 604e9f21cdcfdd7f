"""Make docs/contributing/seeds.md from seeds.yaml: ``python .ci/seeds.py``; 1 if a row is wrong.

A row has what a seed names (``seed`` is its number and line), a status, where it is in the code and
which tests hold it (files, or ``file::name``), and a note.

A row may have ``faults``. Each breaks what the row claims: ``text``, which occurs once in ``file``,
becomes ``becomes``. A row that is held, or in part, and has none says why in ``unplanted``.
``make mutants ARGS=seeds`` plants each fault in a copy of the tree, and runs the row's first test
there, or ``test`` of the fault: see ``tests/kit/mutants.py``.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "contributing"
DATA, PAGE = FOLDER / "seeds.yaml", FOLDER / "seeds.md"
STATUSES = {
    "held": "done, and a test checks it",
    "part": "done in part; the note says which part is done or missing",
    "open": "not done",
    "refused": "done in another way; the decision in the note gives the reason",
    "unused": "the text itself calls it unused",
    "n/a": "not applicable here; the note gives the reason",
}
HEAD = """# Features of the systems that kvladder follows, and their code here

kvladder follows four systems and a card. The systems are TensorRT-LLM's KV cache manager (000,
001), PagedAttention with prefix caching and its operation (002), AutoDeploy's cache architecture
(003) and OpenVINO's growing caches (004). The card says what to build. Each capability, setting and
behavior in their texts has a row here, with the text's number and line. `.ci/seeds.py` makes this
page from `seeds.yaml`. A test checks that every file, name and test in it exists.

Rows marked with * have a planted fault, a change that breaks the row's claim.
`make mutants ARGS=seeds` plants each fault in a copy of the tree, and checks that the row's test
fails there. Other rows with the status held or part have a note that says why they have no fault.
"""
KEYS = {"seed", "names", "status", "code", "tests", "note", "faults", "unplanted"}
FAULT_KEYS = {"file", "text", "becomes", "test"}


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions and classes of a file, and the classes that it assigns to a name."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assigned = [node.targets[0] for node in nodes if isinstance(node, ast.Assign)]
    assigned += [node.target for node in nodes if isinstance(node, ast.AnnAssign)]
    named = [node.id for node in assigned if isinstance(node, ast.Name)]
    return frozenset([*named, *(node.name for node in nodes if isinstance(node, kinds))])


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
    if set(row) - KEYS:
        yield f"unknown keys: expected some of {sorted(KEYS)}, found {sorted(row)}"
    if status not in STATUSES:
        yield f"status {status!r}: expected one of {', '.join(STATUSES)}"
    if status in {"held", "part", "refused"} and not (code and tests):
        yield f"{status}: expected code and a test"
    if status in {"part", "open", "n/a"} and not note:
        yield f"{status}: expected a note that says what is missing, or why"
    if status == "refused" and not (note.startswith("docs/decisions/") and not wrong(note)):
        yield f"refused: expected a note that begins with its record, found {note!r}"
    unplanted = bool(row.get("unplanted"))
    if status in {"held", "part"} and unplanted == bool(row.get("faults")):
        yield f"{status}: expected faults, or the reason why there are none in unplanted"
    if unplanted and status not in {"held", "part"}:
        yield f"{status}: expected unplanted only in rows that are held or in part"
    yield from filter(None, map(wrong, [*code, *tests]))
    for fault in row.get("faults", []):
        yield from wrong_faults(fault, tests)


def wrong_faults(fault: dict[str, str], tests: Sequence[str]) -> Iterator[str]:
    """What is wrong with a fault of a row that has these tests."""
    if set(fault) - FAULT_KEYS or FAULT_KEYS - {"test"} - set(fault):
        yield f"a fault with the keys {sorted(fault)}: expected {sorted(FAULT_KEYS)}, test optional"
        return
    if not tests or fault.get("test", tests[0]) not in tests:
        yield "a fault whose test is not one of the row's"
    yield from misplanted(fault["file"], fault["text"], fault["becomes"])


def misplanted(file: str, text: str, becomes: str) -> Iterator[str]:
    """What is wrong with a fault: ``text``, which occurs once in ``file``, becomes ``becomes``."""
    if said := wrong(file):
        yield said
        return
    source = (ROOT / file).read_text(encoding="utf-8")
    if (count := source.count(text)) != 1 or text == becomes:
        yield f"{file} has the text of a fault {count} times: expected once, and a change: {text!r}"
    elif file.endswith(".py"):
        try:
            ast.parse(source.replace(text, becomes))
        except SyntaxError as error:
            yield f"a fault breaks the syntax of {file}: {error}"


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
            names = row["names"] + " *" * bool(row.get("faults"))
            why = f"no fault: {row['unplanted']}" if "unplanted" in row else ""
            note = "; ".join(filter(None, (row.get("note"), why)))
            cells = [row["seed"], names, row["status"], code, tests, note]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def load() -> list[dict[str, Any]]:
    """The sections, each with its rows."""
    found: list[dict[str, Any]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Write the page and print what is wrong."""
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
