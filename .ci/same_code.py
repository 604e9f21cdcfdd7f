"""Show that a change of words is one: ``python .ci/same_code.py BASE [PATH...]``.

Compares each Python file of the working tree with its version in the commit ``BASE``, both without
docstrings and comments, and names the files that differ. Exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path


def code_of(text: str) -> str:
    """Return the syntax tree of ``text`` without docstrings, and without the positions."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            plain = [child for child in body if not is_text(child)]
            node.body = plain or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)


def is_text(node: ast.stmt) -> bool:
    """Return whether a statement is a string alone: a docstring of what is around or above it."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def git(*arguments: str) -> str:
    """Return what git prints."""
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603


def main(base: str, *paths: str) -> int:
    """Print the files whose code differs from ``base``, and return the exit status."""
    changed = git("diff", "--name-only", "--no-renames", base, "--", *(paths or ["."])).split()
    different = []
    for path in (path for path in changed if path.endswith(".py")):
        try:
            same = code_of(Path(path).read_text("utf-8")) == code_of(git("show", f"{base}:{path}"))
        except (OSError, subprocess.CalledProcessError):  # added or removed
            same = False
        different += [] if same else [path]
    for path in different:
        print(f"{path}: its code differs from {base}")
    print(f"{len(changed)} files changed; the code of {len(different)} of them changed")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
