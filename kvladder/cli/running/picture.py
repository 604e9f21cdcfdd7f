"""Draws a glance at a running cache for terminals, with rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvladder.cli.running.glance import (
    Glance,
    LevelGlance,
    bytes_text,
    rate_text,
    share_text,
    spread_text,
    time_text,
)

WIDE: Final = 78
"""Width from which all columns of a table stand side by side."""
NOTICES_MAX: Final = 8
Column = tuple[str, Sequence[str]]


def picture(found: Glance, width: int) -> RenderableType:
    """Return the picture of one cache, at most ``width`` columns wide."""
    levels = found.levels
    parts: list[RenderableType] = [_head(found)]
    if not levels:
        parts.append(Text("This cache has no levels."))
    else:
        parts += [_title("ladder, hottest level first"), _ladder(levels, width)]
        parts.append(_title("hits and speed (means of 5 s; p50 / p99 of 60 s)"))
        parts += _tables(levels, _flow(levels), width)
        parts.append(_title("queues and breakers"))
        parts += _tables(levels, _health(levels), width)
        parts.append(_title("drops and misses by reason"))
        parts.append(_losses(found, width))
    if found.shadow:
        parts += [_title("other sizes, by the live shadow"), Text("\n".join(found.shadow))]
    parts += [_title("last notices"), _notices(found)]
    return Group(*parts)


def _title(text: str) -> Rule:
    return Rule(Text(text, style="bold"), align="left", style="dim", characters="─")


def _head(found: Glance) -> Text:
    blocks = bytes_text(found.block_bytes) if found.block_bytes else "unknown size"
    lines = Text()
    lines.append("kvladder ", "bold")
    lines.append(
        f"{found.version}, process {found.process}, blocks of {blocks},"
        f" namespace {found.namespace[:16]}, {found.name}\n",
        "dim",
    )
    facts = {
        "hit rate": share_text(found.hit_rate),
        "served": f"{found.served:,}",
        "read": rate_text(found.read_per_s),
        "write": rate_text(found.written_per_s),
        "free slots": f"{found.free:,} of {found.slots:,}",
        "sessions": f"{found.sessions:,}",
        "pinned": f"{found.pinned:,}",
        "open": time_text(found.open_s),
    }
    for at, (name, value) in enumerate(facts.items()):
        lines.append(f"{'  ' if at else ''}{name}\N{NO-BREAK SPACE}", "dim")
        lines.append(value.replace(" ", "\N{NO-BREAK SPACE}"), "bold")
    return lines


def _grid(heads: Iterable[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=False, header_style="dim")
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left", overflow="fold")
    return table


def _ladder(levels: Sequence[LevelGlance], width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(overflow="fold", max_width=max(8, width // 5))
    table.add_column(width=max(6, min(40, width // 3)))
    for _ in range(3):
        table.add_column(justify="right", overflow="fold")
    table.add_column(overflow="fold")
    for one in levels:
        name = Text(one.name, "bold")
        if one.type and one.type != one.name:
            name.append(f" {one.type}", "not bold dim")
        bar = ProgressBar(
            total=1.0, completed=one.filled, complete_style="cyan", finished_style="cyan"
        )
        state = Text(one.trouble, "bold red") if one.trouble else Text("works", "green")
        share, blocks = f"{one.filled:.0%}", f"{one.blocks:,}"
        table.add_row(name, bar, share, blocks, bytes_text(one.held_bytes), state)
    return table


def _flow(levels: Sequence[LevelGlance]) -> list[Column]:
    return [
        ("queried", [f"{one.queried:,}" for one in levels]),
        ("hits", [f"{one.hits:,}" for one in levels]),
        ("rate", [share_text(one.hit_rate) for one in levels]),
        ("read", [rate_text(one.read_per_s) for one in levels]),
        ("write", [rate_text(one.written_per_s) for one in levels]),
        ("read p50 / p99", [spread_text(one.read_s) for one in levels]),
        ("write p50 / p99", [spread_text(one.write_s) for one in levels]),
    ]


def _health(levels: Sequence[LevelGlance]) -> list[Column]:
    return [
        ("queued", [f"{one.queued:,}" for one in levels]),
        ("oldest", [time_text(one.queue_age_s) for one in levels]),
        ("pinned", [f"{one.pinned:,}" for one in levels]),
        ("evicted", [f"{one.evicted:,}" for one in levels]),
        ("removals left", [f"{one.removals:,}" for one in levels]),
        ("breaker openings", [f"{one.opened:,}" for one in levels]),
    ]


def _tables(levels: Sequence[LevelGlance], columns: list[Column], width: int) -> list[Table]:
    """Return tables of these columns by level, as many as the width needs."""
    names = [one.name for one in levels]
    found: list[Table] = []
    while columns:
        left, taken = width - max(len("level"), *map(len, names)) - 1, 0
        for head, cells in columns:
            left -= max(len(head), *map(len, cells)) + 1
            if left < 0 and taken:
                break
            taken += 1
        part, columns = columns[:taken], columns[taken:]
        table = _grid(["level", *(head for head, _ in part)])
        for at, name in enumerate(names):
            table.add_row(name, *(cells[at] for _, cells in part))
        found.append(table)
    return found


def _losses(found: Glance, width: int) -> RenderableType:
    if not found.losses:
        return Text("none so far", "dim")
    names = [one.name for one in found.levels]
    by_level = sum(max(8, len(name)) + 1 for name in names) + 24 <= width
    if by_level:
        table = _grid(["reason", *names])
        for reason, counts in found.losses.items():
            table.add_row(reason, *(f"{counts.get(name, 0):,}" for name in names))
        return table
    lines = (
        f"{reason}: {', '.join(f'{count:,} {name}' for name, count in counts.items())}"
        for reason, counts in found.losses.items()
    )
    return Text("\n".join(lines))


def _notices(found: Glance) -> RenderableType:
    if not found.notices:
        return Text("none", "dim")
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for one in found.notices[:NOTICES_MAX]:
        table.add_row(time_text(one["age_s"]), Text(one["text"]))
    return table
