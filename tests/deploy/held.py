"""Tests that a page names, compared with those that exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def names_of(file: Path) -> frozenset[str]:
    """Return the names of a file's tests, methods of classes as ``Class::name``."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = [
            one for one in inside if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        found |= {prefix + one.name for one in functions if one.name.startswith("test_")}
    return frozenset(found)


def missing(names: list[str]) -> list[str]:
    """Return those of ``path::name`` that are not tests."""
    wrong = []
    for name in names:
        path, _, test = name.partition("::")
        file = ROOT / path
        if not path.startswith("tests/") or not file.is_file() or test not in names_of(file):
            wrong.append(name)
    return wrong
