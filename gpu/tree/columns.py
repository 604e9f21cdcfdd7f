"""Loops over columns, in C if the package was built with a compiler, else in Python.

Both do the same; ``NATIVE`` tells which one is used. ``docs/decisions/`` says why there are two.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from operator import itemgetter
from typing import Any, TypeVar

T = TypeVar("T")
Key = TypeVar("Key")
Row = TypeVar("Row", bound=int)
Value = TypeVar("Value", bound=int)


def gather(column: list[T], rows: Sequence[int]) -> list[T]:
    """Return ``column[row]`` of each row."""
    if len(rows) > 1:
        return list(itemgetter(*rows)(column))
    return [column[row] for row in rows]


def scatter(column: list[T], rows: Sequence[int], values: Sequence[T]) -> None:
    """Set ``column[row]`` of each row to its value; both sequences have the same length."""
    for row, value in zip(rows, values, strict=True):
        column[row] = value


def fill(column: list[T], rows: Sequence[int], value: T) -> None:
    """Set ``column[row]`` of each row to ``value``."""
    for row in rows:
        column[row] = value


def number(column: list[int], rows: Sequence[int], first: int, step: int) -> None:
    """Set ``column[row]`` of the rows, in order, to ``first``, ``first + step`` ..."""
    for row in rows:
        column[row] = first
        first += step


def split(column: list[Value], rows: Sequence[Row], empty: Value) -> tuple[list[Row], list[Value]]:
    """Return the rows where ``column`` is ``empty``, and the other rows' values, last row first."""
    without: list[Row] = []
    held: list[Value] = []
    for row in rows:
        value = column[row]
        if value == empty:
            without.append(row)
        else:
            held.append(value)
    held.reverse()
    return without, held


def drop_ones(column: list[int], rows: Sequence[int]) -> bool:
    """Set ``column[row]`` of each row from 1 to 0.

    Return False and change nothing if one of them is not 1.
    """
    size, done = len(column), 0
    try:
        for row in rows:
            if not 0 <= row < size or column[row] != 1:
                break
            column[row] = 0
            done += 1
    finally:  # a value that is not an integer raises, and is undone as well
        if done < len(rows):
            fill(column, rows[:done], 1)
    return done == len(rows)


def leading(known: dict[Key, Row], keys: Sequence[Key], column: list[T], empty: T) -> list[Row]:
    """Return the rows of the leading keys, up to the first without a row or with an empty one.

    A row is empty if ``column`` holds ``empty`` there.
    """
    found: list[Row] = []
    for key in keys:
        row = known.get(key)
        if row is None or column[row] == empty:
            break
        found.append(row)
    return found


def forget(held: dict[T, Any], keys: Sequence[T]) -> None:
    """Delete these keys, all of which exist."""
    for key in keys:
        del held[key]


def forget_single(held: dict[T, Any], keys: Sequence[T]) -> dict[T, int]:
    """Delete those of ``keys`` that have a number as value; all of ``keys`` exist.

    Return how often each of the other keys occurs in ``keys``.
    """
    left: dict[T, int] = {}
    for key in keys:
        if isinstance(held[key], int):
            del held[key]
        else:
            left[key] = left.get(key, 0) + 1
    return left


def drain(
    nodes: list[Row], marks: Sequence[int], at: int, end: int, stamp: list[int], kids: list[int],
    parent: list[Row], parked: set[Row], victims: list[Row],
) -> tuple[int, int]:  # fmt: skip
    """Run the inner loop of ``EvictionOrder.select``, from ``at`` to ``end`` of a run.

    Return the position where it stopped, and a parked node that has lost its last child, or -1.
    """
    for node, mark in zip(nodes[at:end], marks[at:end], strict=True):
        at += 1
        if stamp[node] != mark:
            continue
        if kids[node]:
            parked.add(node)
            stamp[node] = mark | 1
            continue
        stamp[node] = -mark
        victims.append(node)
        above = parent[node]
        kids[above] = left = kids[above] - 1
        if not left and parked and above in parked:
            return at, above
    return at, -1


NAMES = (
    "drain", "drop_ones", "fill", "forget", "forget_single", "gather", "leading", "number",
    "scatter", "split",
)  # fmt: skip
PYTHON = {name: globals()[name] for name in NAMES}
"""The functions that are used without a compiler, for tests."""
_native: Any = None
with suppress(ImportError):
    _native = import_module("kvladder.gpu.tree._columns")
NATIVE = _native is not None
if NATIVE:
    globals().update({name: getattr(_native, name) for name in NAMES})
