"""Texts are free of the turns of phrase that ``.ci/words.py`` lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kit.scripts import script
from tests.kit.source import ROOT, uncollected

words: Any = script("words")

FOLDERS = ("kvladder", "connectors", "gpu", "policy", "tiers", "examples", "benchmarks")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
GENERATED = "seeds.md"


def read() -> list[Path]:
    """Return the checked files: product code and pages, not decisions."""
    found = [ROOT / name for name in PAGES]
    pages = sorted((ROOT / "docs").rglob("*.md"))
    found += [path for path in pages if path.name != GENERATED and path.parent.name != "decisions"]
    for folder in FOLDERS:
        found += sorted([*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("README.md")])
    return [path for path in found if not path.parent.is_symlink()]


def test_no_text_has_a_banned_turn() -> None:
    with uncollected():
        found = [
            f"{path.relative_to(ROOT)}:{line}: {turn}"
            for path in read()
            for line, turn in words.offenders(path)
        ]
    assert not found, "\n".join(["CONTRIBUTING.md says what to write instead", *found])


def test_banned_turns_are_found(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    text = 'def f():\n    """Whether nobody waits,\n    in\n    vain."""\n    # whoever asks\n'
    code.write_text(text)
    assert sorted(words.offenders(code)) == [
        (2, "a function's docstring that begins with Whether"),
        (2, "nobody"),
        (3, "in vain"),
        (5, "whoever"),
    ]
    page = tmp_path / "page.md"
    page.write_text("Plain.\n```\nnobody\n```\n`whoever` is code, of\nwhich this is not.\n")
    assert list(words.offenders(page)) == [(5, "of which")]
