"""Make the SVGs in docs/drawings: ``python .ci/drawings.py``; a test holds that they are current.

Drawings are described below; plots are made of tables in ``benchmarks/results``. On the site an SVG
stands inside its page, which sets the colours; elsewhere each has colours of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "drawings"
RESULTS = ROOT / "benchmarks" / "results"
INK, PAPER = "var(--kv-ink, #1f2933)", "var(--kv-paper, #ffffff)"
SOFT, LINE, WARM = "var(--kv-soft, #e0f2f1)", "var(--kv-line, #00796b)", "var(--kv-warm, #d84315)"
GREY = "var(--kv-grey, #90a4ae)"
COLOURS = (GREY, LINE, WARM, "var(--kv-other, #7e57c2)")
STEP = 34
"""Height of a message in a sequence."""


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a drawing of these parts."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" font-size="13">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *parts, "</svg>", ""])


def text(
    x: float, y: float, said: str, *, at: str = "middle", size: int = 13, fill: str = INK
) -> str:
    """Return a line of text."""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{at}" font-size="{size}"'
    return f'<text {place} fill="{fill}">{escape(said)}</text>'


def box(x: float, y: float, width: float, height: float, *said: str, stroke: str = LINE) -> str:
    """Return a box with lines of text in its middle."""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
    top = y + height / 2 + 5 - 8 * (len(said) - 1)
    lines = [text(x + width / 2, top + 16 * number, line) for number, line in enumerate(said)]
    return "\n".join([f'{shape} fill="{SOFT}" stroke="{stroke}"/>', *lines])


def arrow(x: float, y: float, to_x: float, to_y: float, *, dashed: bool = False) -> str:
    """Return an arrow; dashed for an answer."""
    length = max(((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5, 1)
    along_x, along_y = (to_x - x) / length, (to_y - y) / length
    back_x, back_y = to_x - 9 * along_x, to_y - 9 * along_y
    head = (
        f"{to_x:.1f},{to_y:.1f} {back_x - 4 * along_y:.1f},{back_y + 4 * along_x:.1f} "
        f"{back_x + 4 * along_y:.1f},{back_y - 4 * along_x:.1f}"
    )
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    line = f'<line x1="{x:g}" y1="{y:g}" x2="{back_x:.1f}" y2="{back_y:.1f}" stroke="{INK}"{dash}/>'
    return f'{line}\n<polygon points="{head}" fill="{INK}"/>'


# ---- sequences


class Message(NamedTuple):
    """A call from one part to another, an answer, or a note at one part."""

    source: int
    target: int
    said: str
    is_answer: bool = False


def sequence(title: str, parts: Sequence[str], messages: Sequence[Message]) -> str:
    """Return who calls whom, from top to bottom."""
    gap, left, top = 190, 90, 20
    height = top + 40 + STEP * (len(messages) + 1)
    where = [left + gap * number for number in range(len(parts))]
    drawn = []
    for x, name in zip(where, parts, strict=True):
        drawn.append(
            f'<line x1="{x}" y1="{top + 34}" x2="{x}" y2="{height - 10}" stroke="{LINE}" '
            'stroke-dasharray="2 4"/>'
        )
        drawn.append(box(x - 70, top, 140, 34, name))
    for number, one in enumerate(messages):
        y = top + 34 + STEP * (number + 1)
        x, to_x = where[one.source], where[one.target]
        if one.source == one.target:
            drawn.append(box(x - 88, y - 17, 176, 25, one.said, stroke=WARM))
            continue
        drawn.append(arrow(x, y, to_x, y, dashed=one.is_answer))
        drawn.append(text((x + to_x) / 2, y - 6, one.said, size=12))
    return svg(left * 2 + gap * (len(parts) - 1), height, title, drawn)


def request() -> str:
    """Return how a request is served and saved."""
    parts = ("engine", "kvladder", "host", "tier")
    return sequence(
        "A request: hits are loaded, the rest is computed and saved",
        parts,
        [
            Message(0, 1, "match: names of the blocks"),
            Message(1, 2, "pin blocks held here"),
            Message(1, 3, "read the others, one batch"),
            Message(3, 2, "bytes, label checked", True),
            Message(1, 0, "how many blocks arrived", True),
            Message(2, 0, "copy to the device", True),
            Message(0, 0, "computes the rest"),
            Message(0, 1, "save: new blocks"),
            Message(0, 2, "copy from the device"),
            Message(0, 1, "commit: a hit from now on"),
            Message(1, 3, "write in the background"),
        ],
    )


def failure() -> str:
    """Return what happens when a tier hangs."""
    return sequence(
        "A tier hangs: the request is computed, the tier is left alone and tried again",
        ("engine", "kvladder", "tier"),
        [
            Message(0, 1, "match: names of the blocks"),
            Message(1, 2, "read"),
            Message(2, 2, "does not answer"),
            Message(1, 0, "deadline: what arrived", True),
            Message(0, 0, "computes the rest"),
            Message(1, 2, "timeout: cancel the call"),
            Message(1, 1, "3 failures: no calls"),
            Message(0, 1, "match"),
            Message(1, 0, "at once: a miss", True),
            Message(1, 2, "after 5 s: one trial call"),
            Message(2, 1, "answers: calls resume", True),
        ],
    )


def purge() -> str:
    """Return what a purge of a tenant does."""
    return sequence(
        "A purge of one salt: removed at once, then overwritten",
        ("operator", "kvladder", "host", "files"),
        [
            Message(0, 1, "kvladder purge --salt S"),
            Message(1, 2, "remove: misses from now on"),
            Message(1, 3, "remove; sync the index log"),
            Message(1, 1, "drops writes in flight"),
            Message(1, 3, "overwrite with zeros, sync"),
            Message(3, 1, "nothing of S is left", True),
            Message(1, 0, "exit status 0", True),
        ],
    )


def states() -> str:
    """Return the states of a block in a level below host."""
    places = {
        "queued": (30, 110), "writing": (200, 110), "held": (370, 110), "reading": (540, 110),
        "abandoned": (200, 220), "leaving": (370, 220), "gone": (285, 20),
    }  # fmt: skip
    size = (110, 40)
    drawn = []

    def edge(
        a: str, b: str, start: tuple[float, float], end: tuple[float, float], **more: bool
    ) -> None:
        (x, y), (to_x, to_y) = places[a], places[b]
        begin = x + size[0] * start[0], y + size[1] * start[1]
        drawn.append(arrow(*begin, to_x + size[0] * end[0], to_y + size[1] * end[1], **more))

    edge("queued", "writing", (1, 0.5), (0, 0.5))
    edge("writing", "held", (1, 0.5), (0, 0.5))
    edge("held", "reading", (1, 0.3), (0, 0.3))
    edge("reading", "held", (0, 0.7), (1, 0.7))
    edge("writing", "abandoned", (0.5, 1), (0.5, 0))
    edge("held", "leaving", (0.5, 1), (0.5, 0))
    edge("writing", "leaving", (0.9, 1), (0, 0.2))
    edge("abandoned", "leaving", (1, 0.3), (0, 0.6))
    edge("leaving", "abandoned", (0, 0.9), (1, 0.9))
    edge("reading", "leaving", (0.4, 1), (1, 0.3))
    edge("queued", "gone", (0.7, 0), (0, 0.7))
    edge("writing", "gone", (0.6, 0), (0.2, 1))
    edge("held", "gone", (0.4, 0), (0.8, 1))
    edge("reading", "gone", (0.4, 0), (1, 0.6))
    for name, (x, y) in places.items():
        drawn.append(box(x, y, *size, name, stroke=WARM if name in {"abandoned", "gone"} else LINE))
    drawn.append(
        text(30, 290, "An arrow to gone: evicted, expired or dropped.", at="start", size=12)
    )
    leaves = "An arrow to leaving: the tier has still to forget the block."
    drawn.append(text(30, 308, leaves, at="start", size=12))
    return svg(680, 320, "States of a block in a level below host", drawn)


# ---- plots of benchmarks


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of every table in a file of results, by the names of their columns."""
    found: list[dict[str, str]] = []
    heads: list[str] = []
    for line in (RESULTS / name).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells or not heads:
            heads = cells
        elif set(line) - set("|-: "):
            found.append(dict(zip(heads, cells, strict=True)))
    return found


def number(cell: str) -> float:
    """Return the number in a cell; its unit is left out."""
    return float(cell.split()[0].replace(",", ""))


def one(name: str, row: str, column: str) -> float:
    """Return a number of the row whose name begins with ``row``."""
    [found] = [one for one in rows(name) if one.get("name", "").startswith(row)]
    return number(found[column])


def bars(
    title: str, unit: str, kinds: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]]
) -> str:
    """Return a plot with groups of horizontal bars, one bar for each kind."""
    longest = max(len(label) for label, _ in groups)
    left, wide, thick = 30 + 7 * longest, 330, 15
    largest = max(value for _, values in groups for value in values)
    drawn = [text(10, 24, f"{title}, {unit}", at="start", size=15)]
    x = 10
    for colour, kind in zip(COLOURS, kinds, strict=False):
        drawn.append(f'<rect x="{x}" y="36" width="11" height="11" fill="{colour}"/>')
        drawn.append(text(x + 16, 46, kind, at="start", size=12))
        x += 34 + 7 * len(kind)
    y = 64
    for label, values in groups:
        drawn.append(text(left - 10, y + thick * len(values) / 2 + 4, label, at="end", size=12))
        for colour, value in zip(COLOURS, values, strict=False):
            length = max(wide * value / largest, 1)
            drawn.append(
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{thick - 3}" '
                f'fill="{colour}"/>'
            )
            drawn.append(text(left + length + 6, y + 10, f"{value:,.4g}", at="start", size=11))
            y += thick
        y += 10
    return svg(left + wide + 90, y + 6, f"{title}, {unit}", drawn)


def first_token() -> str:
    """Return the plot of the time to first token."""
    vllm, sglang = "2026-11-21-vllm.md", "2026-11-23-sglang.md"
    computed = [
        number(row["note"].partition(mark)[2])
        for name, begins, mark in (
            (vllm, "time to first token, 16 requests, median", "without a cache"),
            (sglang, "SGLang, first token, from the arena, beside SGLang's host", "computed:"),
        )
        for row in rows(name)
        if row.get("name", "").startswith(begins)
    ]
    arena = one(sglang, "SGLang, first token, from the arena, beside SGLang's host", "ours")
    files = one(sglang, "SGLang, first token, from files, beside SGLang's host", "ours")
    shared = one(vllm, "time to first token, 16 requests, median", "ours")
    return bars(
        "Median time to first token",
        "ms",
        ("computed", "loaded by kvladder"),
        [
            ("vLLM, 2,048 shared tokens, files", (computed[0], shared)),
            ("SGLang, 3,000 tokens, host memory", (computed[1], arena)),
            ("SGLang, 3,000 tokens, files", (computed[1], files)),
        ],
    )


def shared_tiers() -> str:
    """Return the plot of the throughput of shared tiers."""
    name, tiers = "2026-11-23-shared-tiers.md", ("redis", "nixl", "mooncake", "object")
    batches = [
        (call, batch)
        for batch in ("1 of 1 MiB", "16 of 1 MiB", "64 of 1 MiB")
        for call in ("put", "get")
    ]
    groups = [
        (f"{call}, {batch}", [one(name, f"{tier} {call}, {batch}", "ours") for tier in tiers])
        for call, batch in batches
    ]
    return bars("Throughput of shared tiers", "GB/s", tiers, groups)


def files() -> str:
    """Return the plot of the files tier beside the bare device."""
    name = "2026-11-21-files.md"
    groups = [
        (
            f"{call}, {size} blocks",
            [one(name, f"files tier {call}, {size}", column) for column in ("limit", "ours")],
        )
        for size in ("1 MiB", "4 MiB")
        for call in ("write", "read")
    ]
    return bars("Files", "GB/s", ("bare device", "with labels and checksums"), groups)


def failover() -> str:
    """Return the plot of the time until a level serves again after a fault."""
    found = [row for row in rows("2026-11-24-failover.md") if "again, median" in row]
    groups = [
        (f"{row['servers']}: {row['victim']} {row['fault']}", [number(row["again, median"])])
        for row in found
    ]
    return bars("Time until the level serves again", "ms, median", ("after the fault",), groups)


def soak() -> str:
    """Return the plot of the longest wait for an answer around each fault of the soak."""
    found = [row for row in rows("2026-11-26-soak.md") if "times alone" in row]
    groups = [
        (f"{row['level']}: {row['victim']} {row['fault']}", [number(row["times alone"])])
        for row in found
    ]
    title = "Longest wait for an answer"
    return bars(title, "times vLLM alone", ("around the fault",), groups)


ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="none" stroke="#00796b" '
    'stroke-width="2"><path d="M7 2v20M17 2v20M7 7h10M7 12h10M7 17h10"/></svg>\n'
)


def trace() -> str:
    """Return the spans of one request, over the time in which it is loaded."""
    spans = rows("2026-11-25-trace.md")
    shown_ms, left, wide, high = 60.0, 190, 480, 24
    drawn = [text(10, 24, "Spans of a request, milliseconds", at="start", size=15)]
    for tick in range(0, int(shown_ms) + 1, 10):
        x = left + wide * tick / shown_ms
        bottom = 48 + high * len(spans)
        drawn.append(f'<line x1="{x:g}" y1="44" x2="{x:g}" y2="{bottom}" stroke="{SOFT}"/>')
        drawn.append(text(x, 40, str(tick), size=11))
    for number_of, span in enumerate(spans):
        y, depth = 50 + high * number_of, int(span["below"])
        begun, ended = number(span["starts ms"]), number(span["ends ms"])
        said = f"{span['what']}: {ended - begun:.1f} ms" if span["what"] else f"{ended:.0f} ms"
        drawn.append(text(10 + 14 * depth, y + 13, span["span"], at="start", size=12))
        if begun >= shown_ms:
            later = f"{span['what']}: from {begun:.0f} to {ended:.0f} ms"
            drawn.append(text(left + 8, y + 13, later, at="start", size=11))
            continue
        x, end = left + wide * begun / shown_ms, left + wide * min(ended, shown_ms) / shown_ms
        fill = LINE if span["span"].startswith("kvladder") else GREY
        length = max(end - x, 2)
        drawn.append(
            f'<rect x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="12" fill="{fill}"/>'
        )
        if ended > shown_ms:
            drawn.append(arrow(end, y + 9, end + 22, y + 9))
        drawn.append(text(end + (28 if ended > shown_ms else 6), y + 13, said, at="start", size=11))
    return svg(left + wide + 130, 56 + high * len(spans), "Spans of a request", drawn)


def render() -> dict[Path, str]:
    """Return the content of each file."""
    made = (
        *(request, states, failure, purge, first_token, shared_tiers, files, failover),
        soak,
        trace,
    )
    found = {FOLDER / f"{draw.__name__.replace('_', '-')}.svg": draw() for draw in made}
    return found | {FOLDER / "icon.svg": ICON}


def main() -> int:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for path, drawn in render().items():
        path.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
