"""Print the shape of the code: reading lists, lines by room, what a block crosses and authors meet.

A reading list is what a newcomer reads before a change of one kind; ``docs/`` has a page of them.

Lines are those with code on them: no blank ones, comments or docstrings. A block crosses a file if
a function of it is called with the block's key, alone or within what carries it, between the call
of an engine's thread and its end, on any thread; a move is from one such call to one in another
file. Beside it stands how many files have code that runs for the block at all, the clock and the
lock included. What is done once, as opening, is not counted.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # not an installed kvladder
LINKS = ("connectors", "gpu", "policy", "tiers")
WHOLE = (
    "tiers/ladder",
    "tiers/files",
    "tiers/redis",
    "tiers/codecs",
    "kvladder/config",
    "gpu/pool",
    "gpu/requests",
    "connectors/vllm",
)
"""Rooms that are counted with the folders in them; gpu/pool with gpu/tree."""
TASKS = "tasks.md"
"""Name of the page of reading lists, below ``docs/``."""
FILES_MAX = 8
LINES_MAX = 2500
"""Most files and lines that a newcomer should have to read for one task."""
TEST_KIT = "kvladder/testing"
TIERS = ("custom_tier.py", "shared_folder.py")
"""Examples of tiers."""
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def product() -> Iterator[Path]:
    """Python files of the product, each once; relative to the project."""
    for folder in ("kvladder", *LINKS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT)
            if name.parts[0] != "kvladder" or name.parts[1] not in LINKS:
                yield name


def code_lines(path: Path) -> int:
    """Lines of a file with code on them."""
    text = path.read_text(encoding="utf-8")
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                docs.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT and token.type != tokenize.ENDMARKER:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docs)


def lines_of(path: Path, name: str) -> set[int]:
    """Return the numbers of a file's lines, or of those of one class or function in it."""
    text = path.read_text(encoding="utf-8")
    if not name:
        return set(range(1, len(text.splitlines()) + 1))
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        inner = [one for one in ast.walk(node) if getattr(one, "name", None) == part]
        if not inner:
            raise SystemExit(f"{path.relative_to(ROOT)} has no {name}: correct {TASKS}")
        node = inner[0]
    begin, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return set(range(begin, end + 1))


def reading_lists() -> Iterator[tuple[str, int, int]]:
    """Yield each task of the page, how many files its list has, and how many lines of them."""
    (page,) = (ROOT / "docs").rglob(TASKS)
    for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        seen: dict[Path, set[int]] = {}
        for name, inner in re.findall(r"^\d+\. `([\w./-]+)(?:::([\w.]+))?`", text, re.MULTILINE):
            seen.setdefault(ROOT / name, set()).update(lines_of(ROOT / name, inner))
        if seen:
            yield title, len(seen), sum(map(len, seen.values()))


def rooms() -> Iterator[tuple[str, int]]:
    """Yield each room and its lines; then the lines of all but the test kit."""
    lines: Counter[str] = Counter()
    total = 0
    for name in product():
        count = code_lines(ROOT / name)
        folder = str(name.parent)
        room = next((room for room in WHOLE if f"{folder}/".startswith(f"{room}/")), folder)
        lines["gpu/pool" if room == "gpu/tree" else room] += count
        total += 0 if folder.startswith(TEST_KIT) else count
    for room, count in sorted(lines.items()):
        yield room, count
    yield "all but kvladder/testing", total


class Crossing:
    """Counts product files while it is on; made before the threads that it is to see."""

    def __init__(self) -> None:
        self.key: bytes | None = None
        """Of the block that is on its way."""
        self.files: set[str] = set()
        self.running: set[str] = set()
        self.moves = 0
        self._last: dict[int, str] = {}
        self._names: dict[str, str] = {}
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if self.key is None or event != "call":
            return
        path = frame.f_code.co_filename
        if path not in self._names:
            real = Path(path).resolve()
            inside = real.is_relative_to(ROOT) and real.suffix == ".py"
            name = str(real.relative_to(ROOT)) if inside else ""
            self._names[path] = name if name.startswith(("kvladder/", *LINKS)) else ""
        name, thread = self._names[path], threading.get_ident()
        if not name:
            return
        self.running.add(name)
        if any(self._carries(value) for value in frame.f_locals.values()):
            self.files.add(name)
            self.moves += self._last.get(thread, name) != name
            self._last[thread] = name

    def _carries(self, value: object, depth: int = 3) -> bool:
        """Whether the value is the block's key, or has it within."""
        if isinstance(value, bytes):
            return value == self.key
        if depth and isinstance(value, dict):
            return self.key in value or any(self._carries(one, 1) for one in value.values())
        if depth and isinstance(value, list | tuple):
            return any(self._carries(one, depth - 1) for one in value)
        if getattr(value, "key", None) == self.key:
            return True
        keys = getattr(value, "keys", None)
        return isinstance(keys, list) and self.key in keys

    def end(self) -> None:
        """See no thread any more that begins from now on."""
        sys.setprofile(None)
        threading.setprofile(None)

    def result(self) -> tuple[list[str], int, int]:
        """Files crossed, moves between them, and how many ran at all; since the last result."""
        found = sorted(self.files), self.moves, len(self.running)
        self.files, self.running, self.moves = set(), set(), 0
        self._last.clear()
        return found


def crossings() -> Iterator[tuple[str, list[str], int, int]]:
    """A block saved by an engine down to a file, and loaded from it by another one."""
    import torch

    import kvladder
    from kvladder.connectors.inline import InlineConnector

    crossing = Crossing()
    with tempfile.TemporaryDirectory() as folder:
        level = {"name": "nvme", "type": "files", "path": folder, "capacity": "64 MiB"}
        stack = {"arena": {"size": "16 MiB"}, "tiers": [{"type": "host"}, level]}
        level["when"] = "commit"
        for what in ("save", "load"):
            kv = torch.randn(4, 2, 16, 4, 32)
            fields = {"model": "shape"}
            layout = kvladder.Layout(block_tokens=16, block_bytes=kv[0].nbytes, fields=fields)
            with kvladder.open_cache(stack, layout=layout) as cache:
                connector = InlineConnector(cache, kv)
                keys = connector.keys(range(17))
                (crossing.key,) = keys
                if what == "save":
                    connector.wait(connector.save(keys, blocks=[0]))
                    cache.flush(timeout_s=10)
                else:
                    match = connector.match(keys)
                    match.wait()
                    assert match.blocks == 1, "the block was not found"
                    connector.wait(connector.load(match, blocks=[1]))
                crossing.key = None
                connector.close()
            yield what, *crossing.result()
    crossing.end()


def import_ms(module: str) -> float:
    """Milliseconds that an import takes, the least of five processes."""
    code = f"import time; begun = time.perf_counter(); import {module}; "
    code += "print(1000 * (time.perf_counter() - begun))"
    command = [sys.executable, "-c", code]
    runs = (
        subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - ours
        for _ in range(5)
    )
    return min(float(run.stdout) for run in runs)


def offered_to_authors() -> set[str]:
    """What the door of the tiers names, but for errors, and public names in the classes there."""
    import kvladder.tiers as door
    from kvladder.errors import KvladderError

    names = {name for name in vars(door) if name[:1].isupper()} | {"told"}
    things = {name: getattr(door, name) for name in names}
    classes = [one for one in things.values() if isinstance(one, type)]
    errors = {
        name
        for name in names
        if things[name] in classes and issubclass(things[name], KvladderError)
    }
    inner = {
        name
        for one in classes
        if not issubclass(one, KvladderError)
        for name in {*vars(one), *getattr(one, "__annotations__", {})}
    }
    return {name for name in names - errors | inner if not name.startswith("_")}


def met_by_author(example: Path) -> set[str]:
    """Those of them that the tier in an example has to do with."""
    tree = ast.parse(example.read_text(encoding="utf-8"))
    (tier,) = (node for node in tree.body if getattr(node, "name", "").endswith("Tier"))
    used: set[str] = set()
    for node in ast.walk(tier):
        for field in ("attr", "id", "name"):
            used.add(str(getattr(node, field, "")))
    return used & offered_to_authors()


def main() -> None:
    """Print it; with ``--files`` the files' names, too."""
    print(f"| task | files (aim: {FILES_MAX}) | lines (aim: {LINES_MAX:,}) |\n|---|---|---|")
    for task, files, count in reading_lists():
        print(f"| {task} | {files} | {count:,} |")
    print("\n| room | lines of code |\n|---|---|")
    for room, count in rooms():
        print(f"| {room} | {count:,} |")
    print("\n| a block's | crosses files | moves | runs code of files |\n|---|---|---|---|")
    for what, files, moves, running in crossings():
        print(f"| {what} | {len(files)} | {moves} | {running} |")
        if "--files" in sys.argv:
            print("\n".join(f"    {name}" for name in files))
    private, shared = (len(met_by_author(ROOT / "examples" / name)) for name in TIERS)
    print(f"\nnames that an author uses: {private} for a tier of one engine,")
    print(f"{shared} for a shared tier; {len(offered_to_authors())} are offered")
    for module in ("kvladder", "kvladder.tiers"):
        print(f"import {module}: {import_ms(module):.0f} ms")


if __name__ == "__main__":
    main()
