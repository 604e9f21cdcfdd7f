"""Hooks of mkdocs for the site: pages from outside docs/, drawings inside pages, no foreign loads.

A page of docs/ may link to files of the repository as it does on GitHub. Pages, results of
benchmarks and examples become pages of the site below ``project/``, and links follow them.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("*.md", "benchmarks/README.md", "benchmarks/results/*.md", "examples/*.py")
PREFIX = "project/"
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_DRAWING = re.compile(r'<p><img alt="([^"]*)" src="[^"]*?drawings/([\w-]+\.svg)" ?/?></p>')
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):(?=<code|<a|<span)")
_LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?(?:https?:)?//[^\s\">]+"
)


def page_of(path: Path) -> str:
    """Return the place on the site of a file or folder of the repository; empty if it has none."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        path, name = path / "README.md", f"{name}/README.md"
    if not path.is_file():
        return ""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if any(Path(name).match(pattern) for pattern in OUTSIDE):
        return f"{PREFIX}{name.removesuffix('.py')}{'' if name.endswith('.md') else '.md'}"
    return ""


def source_of(place: str) -> Path:
    """Return the file of the repository that the page at a place of the site shows."""
    if not place.startswith(PREFIX):
        return ROOT / "docs" / place
    name = place.removeprefix(PREFIX)
    return ROOT / (name if (ROOT / name).exists() else f"{name.removesuffix('.md')}.py")


def example(path: Path) -> str:
    """Return the page of an example: its name, what it says, and its code."""
    text = path.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(text)) or ""
    return f"# {path.name}\n\n{said}\n\n```python\n{text}```\n"


def on_files(files: Files, *, config: Any) -> Files:
    """Add pages for the files outside docs/."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = page_of(path)
            is_code = path.suffix == ".py"
            text = example(path) if is_code else path.read_text(encoding="utf-8")
            files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Let links lead to the pages of the files that they name."""
    place = page.file.src_uri
    folder = source_of(place).parent

    def follow(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / found[2]))
        if not target.exists():
            return found[0]  # mkdocs warns
        is_results = target == ROOT / "benchmarks" / "results"
        there = "reference/benchmarks.md" if is_results else page_of(target)
        if not there:
            if target.suffix == ".svg" or target.is_relative_to(ROOT / "docs"):
                return found[0]
            raise PluginError(f"{place}: {found[2]} is not a page of the site: write it as code")
        return f"{found[1]}{os.path.relpath(there, Path(place).parent or '.')}{found[3]}"

    parts = []
    last = 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(follow, markdown[last : code.start()]), code[0]]
        last = code.end()
    parts.append(_LINK.sub(follow, markdown[last:]))
    return "".join(parts)


def on_page_content(html: str, *, page: Any, config: Any, files: Files) -> str:
    """Put drawings into the page, so that it sets their colours; drop what only Sphinx reads."""

    def draw(found: re.Match[str]) -> str:
        svg = (ROOT / "docs" / "drawings" / found[2]).read_text(encoding="utf-8").strip()
        return f'<figure class="drawing" aria-label="{found[1]}">{svg}</figure>'

    return _ROLE.sub("", _DRAWING.sub(draw, html))


def on_post_build(*, config: Any) -> None:
    """Refuse a site that loads scripts, styles or pictures from elsewhere."""
    for path in sorted(Path(config["site_dir"]).rglob("*.html")):
        if found := _LOADED.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.name} loads from elsewhere: {found[0]}")
