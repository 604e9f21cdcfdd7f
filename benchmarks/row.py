"""One measured figure beside its limit and its peer."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table.

    Parameters
    ----------
    name:
        The measured thing.
    unit:
        Unit of the three figures, e.g. ``GB/s``.
    limit:
        The best that the machine allows, measured in the same run; None if there is no limit.
    peer:
        The result of another system, from the same run or as the note says.
    ours:
        The result of kvladder.
    ratio:
        None computes ours over the limit, or over the peer if there is no limit.
    goal:
        The target for the ratio or the figure, e.g. ``ratio >= 0.95``.
    note:
        Further facts that a reader needs to judge the line.
    """

    name: str
    unit: str
    ours: float
    limit: float | None = None
    peer: float | None = None
    ratio: float | None = None
    goal: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        bound = self.limit if self.limit is not None else self.peer
        if self.ratio is None and bound:
            object.__setattr__(self, "ratio", self.ours / bound)


HEADINGS = ("name", "unit", "limit", "peer", "ours", "ratio", "goal", "note")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row's cells as text, in the order of ``HEADINGS``."""
    figures = (row.limit, row.peer, row.ours)
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return (row.name, row.unit, *map(_figure, figures), ratio, row.goal, row.note)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def plain(rows: list[Row]) -> str:
    """Return a table for a terminal."""
    lines: list[tuple[str, ...]] = [HEADINGS, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if 2 <= i <= 5 else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(rows: list[Row]) -> str:
    """Return a table in Markdown."""
    lines: list[tuple[str, ...]] = [
        HEADINGS,
        ("---", "---", "---:", "---:", "---:", "---:", "---", "---"),
    ]
    lines += [tuple(text.replace("|", "\\|") for text in cells(row)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured_by(module: str, environment: Mapping[str, str] | None = None) -> list[Row]:
    """Run ``python -m module`` and return its rows; the module hands them to ``tell``."""
    command = [sys.executable, "-m", module]
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    measured: list[Row] = pickle.loads(child.stdout)
    return measured


def tell(rows: Iterable[Row]) -> NoReturn:
    """Hand the rows to the parent process, and exit without the interpreter's cleanup."""
    sys.stdout.buffer.write(pickle.dumps([*rows]))
    sys.stdout.flush()
    os._exit(0)
