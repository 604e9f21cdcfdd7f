"""List turns of phrase that readers had to read twice: ``python .ci/words.py [PATH...]``.

Looks at docstrings and comments of Python files, and at pages. CONTRIBUTING.md says what to write
instead. Prints ``path:line: turn`` and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

BANNED = (
    "whoever", "whomever", "whom", "whosesoever", "nobody", "in vain", "of which",
    "what came of it", "what comes of it", "takes leave", "take leave", "is none that",
)  # fmt: skip
_SPACED = [turn.replace(" ", r"\s+") for turn in BANNED]
_BANNED = re.compile(rf"\b(?:{'|'.join(_SPACED)})\b", re.IGNORECASE)
STARTS = ("Of", "By", "Who", "Whom", "What", "How", "Whether", "From when", "Until when")
_STARTS = re.compile(rf"(?:{'|'.join(STARTS)})\b")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def texts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it documents a function, for each text of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, _CODE.sub(lambda code: "\n" * code[0].count("\n"), source), False
        return
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for number, child in enumerate(body if isinstance(body, list) else ()):
            text = child.value if isinstance(child, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield child.lineno, text.value, is_function and number == 0
    if not _BANNED.search(source):  # nor has a comment: no need to split the file into tokens
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def offenders(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and turn for each turn of a file that is banned."""
    for line, text, is_function in texts(path):
        for found in _BANNED.finditer(text):
            yield line + text.count("\n", 0, found.start()), " ".join(found[0].split())
        if is_function and (start := _STARTS.match(text)):
            yield line, f"a function's docstring that begins with {start[0]}"


def main(*names: str) -> int:
    """Print the offenders in the files named and below the folders named; return the status."""
    paths = [Path(name) for name in names]
    files = [path for path in paths if path.is_file()]
    for folder in (path for path in paths if path.is_dir()):
        files += sorted([*folder.rglob("*.py"), *folder.rglob("*.md")])
    found = [f"{file}:{line}: {turn}" for file in files for line, turn in offenders(file)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
