"""Draw the rooms of the code: ``python .ci/rooms.py``; a test holds that the drawings are current.

Each file or folder stands above those that it imports. An arrow is left out if a longer way leads
to the same room. A red arrow leads up: two rooms import each other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from drawings import FOLDER, GREY, ROOT, WARM, box, svg, text

LINKS = ("connectors", "gpu", "policy", "tiers")
"""Packages that lie beside ``kvladder`` in the tree and in it when installed."""
Graph = Mapping[str, set[str]]
WIDTH, ROW, GAP, HIGH = 980, 74, 16, 30
CHAR = 6.6
"""Width of a character of a box's text."""


def module_of(path: Path) -> str:
    """Return the name of a file's module, without ``kvladder.`` and ``.__init__``."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kvladder":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Return the product's files by module."""
    found: dict[str, Path] = {}
    for folder in ("kvladder", *LINKS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT).parts
            if inside[0] == "kvladder" and inside[1] in LINKS:  # a link to the folder beside it
                continue
            found[module_of(path)] = path
    return found


@cache
def imports(path: Path) -> set[str]:
    """Return the product's modules that a file imports; those for type checkers count, too."""
    known, found = modules(), set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            base = node.module.split(".")
            if base[0] == "kvladder":
                whole = ".".join(base[1:])
                names = {".".join([*base[1:], one.name]) for one in node.names}
                found |= {one for one in names if one in known} or {whole}
    return {one for one in found if one in known}


def graph(room: Callable[[str], str | None]) -> dict[str, set[str]]:
    """Return the imports between rooms; ``room`` names a module's room, None for one not drawn."""
    found: dict[str, set[str]] = {}
    for module, path in modules().items():
        source = room(module)
        if source is None:
            continue
        targets = found.setdefault(source, set())
        targets |= {to for to in map(room, imports(path)) if to is not None and to != source}
    return found


def upward(rooms: Graph) -> set[tuple[str, str]]:
    """Return the imports that close a circle, by a walk in the order of names."""
    state: dict[str, int] = {}
    found: set[tuple[str, str]] = set()

    def visit(room: str) -> None:
        state[room] = 1
        for to in sorted(rooms[room]):
            if state.get(to) == 1:
                found.add((room, to))
            elif to not in state:
                visit(to)
        state[room] = 2

    for room in sorted(rooms):
        if room not in state:
            visit(room)
    return found


def floors(rooms: Graph) -> dict[str, int]:
    """Return the floor of each room, one above the highest that it imports; the ground is 0."""
    found: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in found:
            found[room] = max((floor(to) + 1 for to in rooms[room]), default=0)
        return found[room]

    for room in sorted(rooms):
        floor(room)
    return found


def reduced(rooms: Graph) -> set[tuple[str, str]]:
    """Return the imports to which no longer way leads."""
    below: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in below:
            below[room] = set(rooms[room]).union(*(reach(to) for to in rooms[room]))
        return below[room]

    return {
        (room, to)
        for room, targets in rooms.items()
        for to in targets
        if not any(to in reach(other) for other in targets if other != to)
    }


def width_of(name: str) -> float:
    """Return the width of a room's box."""
    return max(CHAR * len(name) + 24, 64)


def wrapped(names: list[str]) -> list[list[str]]:
    """Return the rooms of a floor in rows that fit the width."""
    found: list[list[str]] = [[]]
    used = 0.0
    for name in names:
        wide = width_of(name) + GAP
        if found[-1] and used + wide > WIDTH - GAP:
            found.append([])
            used = 0.0
        found[-1].append(name)
        used += wide
    return found


def places(rooms: Graph) -> tuple[dict[str, tuple[float, float]], int]:
    """Return the middle of each room's box, and the height of the drawing.

    The rooms of a floor are ordered by the middle of the rooms above that import them.
    """
    of = floors(rooms)
    found: dict[str, tuple[float, float]] = {}
    above: dict[str, list[str]] = {room: [] for room in rooms}
    for room, targets in rooms.items():
        for to in targets:
            above[to].append(room)
    y = 60
    for floor in range(max(of.values()), -1, -1):

        def middle(room: str) -> tuple[float, str]:
            over = [found[one][0] for one in above[room] if one in found]
            return (sum(over) / len(over) if over else WIDTH / 2, room)

        names = sorted((room for room in rooms if of[room] == floor), key=middle)
        for row in wrapped(names):
            used = sum(width_of(one) + GAP for one in row) - GAP
            x = (WIDTH - used) / 2
            for one in row:
                wide = width_of(one)
                found[one] = (x + wide / 2, y)
                x += wide + GAP
            y += ROW
    return found, y - ROW + HIGH + 20


def within(folder: str) -> Callable[[str], str | None]:
    """Return the function that names rooms by the files of a folder, ``a.b.c`` as ``b/c``."""

    def room(module: str) -> str | None:
        if not module.startswith(folder + ".") or module.endswith(".type"):
            return None
        return module.removeprefix(folder + ".").replace(".", "/")

    return room


def of_the_house(module: str) -> str | None:
    """Return the room of a module in the whole house: a folder, or a file at the top."""
    parts = module.split(".")
    if parts[0] in ("", "__main__", "testing"):
        return None
    if parts[0] == "tiers" and len(parts) > 1 and parts[1] in BASES:
        return "tiers/base"
    if parts[0] in ("connectors", "gpu", "tiers") and len(parts) > 1:
        return "/".join(parts[:2])
    return parts[0]


BASES = ("base", "blocking", "context", "label", "type")


def bare(rooms: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without rooms that nothing ties to the others."""
    tied = {to for targets in rooms.values() for to in targets}
    return {room: targets for room, targets in rooms.items() if targets or room in tied}


# ---- the drawings


def import_arrow(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    """Return a curve from one room to another that it imports."""
    bend, tip = (to_y - y) / 2, 7 if to_y > y else -7
    curve = f"M{x:.0f},{y:.0f} C{x:.0f},{y + bend:.0f} {to_x:.0f},{to_y - bend:.0f}"
    left, right = f"{to_x - 4:.0f},{to_y - tip:.0f}", f"{to_x + 4:.0f},{to_y - tip:.0f}"
    end = f"{to_x:.0f},{to_y:.0f}"
    style = f'fill="none" stroke="{colour}" stroke-width="1.2"'
    return f'<path d="{curve} {end} M{left} L{end} L{right}" {style}/>'


def floor_plan(title: str, room: Callable[[str], str | None]) -> str:
    """Return the drawing of the rooms that ``room`` names."""
    whole = bare(graph(room))
    up = upward(whole)
    down = {name: {to for to in tos if (name, to) not in up} for name, tos in whole.items()}
    where, height = places(down)
    drawn = [text(WIDTH / 2, 24, title, size=14)]
    for arrows, side, colour in ((reduced(down), HIGH / 2, GREY), (up, -HIGH / 2, WARM)):
        for source, target in sorted(arrows):
            (x, y), (to_x, to_y) = where[source], where[target]
            drawn.append(import_arrow(x, y + side, to_x, to_y - side, colour))
    for name, (x, y) in sorted(where.items()):
        drawn.append(box(x - width_of(name) / 2, y - HIGH / 2, width_of(name), HIGH, name))
    return svg(WIDTH, height, title, drawn)


def render() -> dict[Path, str]:
    """Return the content of each file."""
    return {
        FOLDER / "rooms-house.svg": floor_plan("Folders, and files at the top", of_the_house),
        FOLDER / "rooms-ladder.svg": floor_plan("Files of tiers/ladder", within("tiers.ladder")),
        FOLDER / "rooms-vllm.svg": floor_plan(
            "Files of connectors/vllm", within("connectors.vllm")
        ),
        FOLDER / "rooms-pool.svg": floor_plan("Files of gpu", within("gpu")),
    }


def main() -> int:
    """Write the files."""
    for path, drawn in render().items():
        path.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
