"""Files of the project as ``tests/test_tidy.py`` reads them: each is read and parsed once."""

from __future__ import annotations

import ast
import gc
import io
import tokenize
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKS = ("connectors", "gpu", "policy", "tiers")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""The parts of a node that hold statements."""


@contextmanager
def uncollected() -> Generator[None]:
    """Collect no garbage, and never visit what is made meanwhile: syntax trees have many parts."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Source:
    """A Python file: its text, its syntax tree and the nodes of that tree."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text

    @cached_property
    def lines(self) -> list[str]:
        """Lines of the text, without their ends."""
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree of the text."""
        with uncollected():
            return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def statements(self) -> list[ast.AST]:
        """The module, and all its statements, at any depth: a tenth of the nodes."""
        found: list[ast.AST] = [self.tree]
        for node in found:
            for name in BLOCKS:
                block = getattr(node, name, None)
                found += block if isinstance(block, list) else ()
        return found

    def imported(self) -> Iterator[tuple[int, str]]:
        """Yield line and name of each import, anywhere in the file: a module or ``module.name``."""
        for node in self.statements:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)

    def named(self) -> Iterator[tuple[int, str]]:
        """Yield line and text of each identifier, comment and docstring."""
        docs = set()
        for node in self.statements:
            body = getattr(node, "body", None)
            for child in body if isinstance(body, list) else ():
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    docs.add(child.lineno)
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            is_doc = token.type == tokenize.STRING and token.start[0] in docs
            if is_doc or token.type in {tokenize.NAME, tokenize.COMMENT}:
                yield token.start[0], token.string


Check = Callable[[Source], Iterable[tuple[int, str]]]
"""Yields line and description of each breach of a rule in a file."""


def python_files(*folders: str) -> list[str]:
    """List Python files below folders of the project, each once; paths relative to the project."""
    links = tuple(f"kvladder/{name}/" for name in LINKS)
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    relative = [str(path.relative_to(ROOT)) for path in found]
    return [name for name in relative if not name.startswith(links)]


def read(names: Iterable[str]) -> list[Source]:
    """Read files of the project."""
    return [Source(name, (ROOT / name).read_text(encoding="utf-8")) for name in names]


def offenders(check: Check, sources: Iterable[Source]) -> list[str]:
    """List each breach of a rule as ``path:line: what``."""
    return [f"{one.name}:{line}: {what}" for one in sources for line, what in check(one)]


def dotted(node: ast.AST | None) -> str:
    """Return ``a.b.c`` for a chain of attributes, otherwise an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def classes(sources: Iterable[Source]) -> dict[str, tuple[list[str], Source]]:
    """Return ``class name -> (names of its bases, its file)`` for the classes in files."""
    found = {}
    for source in sources:
        for node in source.statements:
            if isinstance(node, ast.ClassDef):
                bases = [
                    dotted(base.value if isinstance(base, ast.Subscript) else base)
                    for base in node.bases
                ]
                found[node.name] = ([base.rpartition(".")[2] for base in bases], source)
    return found


def derived(base: str, known: dict[str, tuple[list[str], Source]]) -> set[str]:
    """Return the names of the classes below ``base``, at any distance."""
    found: set[str] = set()
    while more := {c for c, (bases, _) in known.items() if {base, *found} & set(bases)} - found:
        found |= more
    return found
