"""Which block each saved block follows, and when it was saved: purges by prefix and by age need it.

Levels do not know it: a key is a digest, so it does not tell its parent, and labels name neither
parent nor time. This is one table for all levels, 24 bytes a block, which may be kept in a file. A
block that the table does not know may descend from any other, and may have any age.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvladder.keys import KEY_BYTES, START, BlockKey

ROWS_MIN: Final = 4096
ROWS_MAX: Final = 1 << 22
KEEP, MATCH, UNKNOWN = 0, 1, 2
"""A block is outside of a scope, inside, or may be inside."""
ROUNDS_MAX: Final = 48
COPY_ROWS: Final = 1 << 14
"""Number of rows that are copied while saves have to wait."""
_ROW = np.dtype([("tag", "<u8"), ("parent", "<u8"), ("saved_us", "<u8")])
NOWHERE: Final = bytes(KEY_BYTES)
"""Stands for a parent that is not known."""
_MAGIC: Final = int.from_bytes(b"kvline\0\1", "little")
_WORDS: Final = KEY_BYTES // 8

Tags: TypeAlias = npt.NDArray[np.uint64]
Verdicts: TypeAlias = npt.NDArray[np.uint8]
Judge: TypeAlias = Callable[[Sequence[BlockKey]], Verdicts]
"""Returns KEEP, MATCH or UNKNOWN for each of some blocks."""


def tags_of(keys: Sequence[BlockKey]) -> Tags:
    """Return the first eight bytes of each key."""
    return np.frombuffer(b"".join(keys), "<u8")[::_WORDS]


class _Rows(NamedTuple):
    """Columns of rows of the table, ordered by tag."""

    tags: Tags
    parents: Tags
    saved_us: npt.NDArray[np.uint64]
    """Microseconds since the epoch; 0 for a block that only links others."""
    numbers: npt.NDArray[np.int64]
    """Numbers of the rows, in the order of writing."""


class Lineage:
    """The parents and times of the last ``rows`` saved blocks; the oldest row gives way.

    Any thread may call it. Of several rows of one block, the youngest counts. Two blocks with the
    same first eight bytes, one in 2**64, count as one: then a purge removes a block too many.

    Parameters
    ----------
    rows:
        Number of blocks to remember.
    path:
        File that keeps the table when the process ends or is killed; None keeps it in memory. A
        file that is of another size or damaged is made anew. After a loss of power its last rows
        may be missing.
    """

    def __init__(self, rows: int, path: Path | None = None) -> None:
        self.rows = max(ROWS_MIN, min(rows, ROWS_MAX))
        size = (self.rows + 1) * _ROW.itemsize
        self._lock = Lock()
        self._is_closed = False
        before: tuple[npt.NDArray[np.void], int] | None = None
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            with path.open("r+b" if path.exists() else "w+b") as file:
                if file.seek(0, 2) not in {0, size}:
                    file.seek(0)
                    before = _stored(file.read())
                    file.truncate(0)
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        self._all = np.frombuffer(self._map, _ROW)
        self._head = self._all[:1]
        if self._head["tag"][0] != _MAGIC:
            self._all[:] = np.zeros(1, _ROW)
            self._head["tag"] = _MAGIC
        if before is not None:  # the file had another size
            self._restore(*before)

    def _restore(self, rows: npt.NDArray[np.void], count: int) -> None:
        """Put back the last rows of another table, oldest first; ``count`` were written there."""
        rows = rows[-self.rows :]
        self._all[1:][np.arange(count - len(rows), count) % self.rows] = rows
        self._head["parent"] = count

    @classmethod
    def kept(cls, path: Path) -> Lineage | None:
        """Return a copy of the table in a file; None if there is none."""
        try:
            rows, count = _stored(path.read_bytes())
        except OSError:
            return None
        found = cls(len(rows))
        found._restore(rows, count)
        return found

    @property
    def mark(self) -> int:
        """Number of rows so far. It tells what was saved before now from what is saved later."""
        with self._lock:
            return int(self._head["parent"][0])

    def note(
        self,
        keys: Sequence[BlockKey],
        saved: Sequence[int],
        parent: BlockKey | None,
        wall_s: float,
        *,
        links: bool = False,
    ) -> None:
        """Record blocks that are being saved.

        Parameters
        ----------
        keys:
            Consecutive blocks of a prefix.
        saved:
            Positions in ``keys`` of the blocks that are being saved now.
        parent:
            The block before the first one: ``START`` if there is none, None if it is not known.
        wall_s:
            Seconds since the epoch.
        links:
            True to record the parents of the blocks between, too: those that are never saved.
        """
        if not saved:
            return
        first = NOWHERE if parent is None else parent
        stamp, never = int(wall_s * 1e6).to_bytes(8, "little"), bytes(8)
        known = {*saved} if links else None
        parts: list[bytes] = []
        for at in range(saved[-1] + 1) if known else saved:
            parts.append(keys[at][:8])
            parts.append((keys[at - 1] if at else first)[:8])
            parts.append(stamp if known is None or at in known else never)
        data = b"".join(parts[-3 * self.rows :])  # for one block, arrays take ten times as long
        size = _ROW.itemsize
        with self._lock:
            if self._is_closed:
                return
            count = int(self._head["parent"][0])
            begin = size * (1 + count % self.rows)
            until = min(begin + len(data), len(self._map))
            self._map[begin:until] = data[: until - begin]
            rest = len(data) - (until - begin)
            self._map[size : size + rest] = data[len(data) - rest :]
            self._head["parent"] = count + len(data) // size

    def _latest(self, *, saved: bool = False) -> _Rows:
        """Return the youngest row of each block, or of each that was ``saved``, ordered by tag."""
        rows, count = self._copied()
        # columns apart, the youngest first: steps of 24 bytes would take four times as long
        tags, parents, saved_us = (
            np.ascontiguousarray(rows[name][::-1]) for name in ("tag", "parent", "saved_us")
        )
        numbers = np.arange(count - 1, count - 1 - len(rows), -1, dtype=np.int64)
        if saved:
            is_saved = saved_us != 0
            tags, parents, saved_us, numbers = (
                column[is_saved] for column in (tags, parents, saved_us, numbers)
            )
        tags, first = np.unique(tags, return_index=True)
        if len(tags) and not tags[0]:  # rows that were never written
            tags, first = tags[1:], first[1:]
        return _Rows(tags, parents[first], saved_us[first], numbers[first])

    def _copied(self) -> tuple[npt.NDArray[np.void], int]:
        """Return a copy of all rows, oldest first, and their number; no save waits long for it.

        If the ring overflows meanwhile, some of the oldest rows are newer ones: they count as old.
        """
        with self._lock:
            count = 0 if self._is_closed else int(self._head["parent"][0])
        table = np.zeros(min(count, self.rows), _ROW)
        for start in range(0, len(table), COPY_ROWS):
            with self._lock:
                if self._is_closed:
                    return np.empty(0, _ROW), 0
                part = self._all[1 + start : 1 + min(start + COPY_ROWS, len(table))]
                table[start : start + len(part)] = part
        return (_in_order(table, count) if count else table), count

    def descends(self, seeds: Sequence[BlockKey]) -> Judge:
        """Return a function that tells the blocks that are among ``seeds``, or descend from the
        last one.

        It takes about a second for a million blocks.
        """
        tags, parents, _, _ = self._latest()
        count, own = len(tags), tags_of(seeds)
        # three nodes more: an unknown parent, the start of a prefix, and what is to go
        unknown, start, goes = count, count + 1, count + 2
        order, at = np.argsort(parents), np.zeros(count, np.intp)
        at[order] = np.searchsorted(tags, parents[order])  # in order, which takes a tenth as long
        at[at == count] = 0
        is_known = tags[at] == parents if count else np.zeros(0, bool)
        up = np.append(np.where(is_known, at, unknown), [unknown, start, goes])
        up[:count][parents == tags_of([START])[0]] = start
        up[:count][parents == own[-1]] = goes
        up[:count][tags == own[-1]] = goes
        for _ in range(ROUNDS_MAX):
            further = up[up]
            if (further == up).all():
                break
            up = further
        verdict = np.full(count + 1, UNKNOWN, np.uint8)
        verdict[:count][up[:count] == start] = KEEP
        verdict[:count][up[:count] == goes] = MATCH

        def judge(keys: Sequence[BlockKey]) -> Verdicts:
            asked = tags_of(keys)
            found = verdict[_places(tags, asked)]
            found[np.isin(asked, own)] = MATCH
            return found

        return judge

    def before(self, wall_s: float) -> Judge:
        """Return a function that tells the blocks that were saved before a time."""
        tags, _, saved_us, _ = self._latest(saved=True)
        verdict = np.full(len(tags) + 1, UNKNOWN, np.uint8)
        end_us = np.uint64(max(0.0, min(wall_s * 1e6, 2.0**63)))
        verdict[:-1] = np.where(saved_us < end_us, MATCH, KEEP)
        return lambda keys: verdict[_places(tags, tags_of(keys))]

    def until(self, mark: int) -> Judge:
        """Return a function that tells the blocks that were not saved again since a ``mark``."""
        tags, _, _, numbers = self._latest(saved=True)
        verdict = np.full(len(tags) + 1, UNKNOWN, np.uint8)
        verdict[:-1] = np.where(numbers < mark, MATCH, KEEP)
        return lambda keys: verdict[_places(tags, tags_of(keys))]

    def close(self) -> None:
        """Let go of the file; later saves are not noted. May be called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            del self._head, self._all
            self._map.close()


def _in_order(table: npt.NDArray[np.void], count: int) -> npt.NDArray[np.void]:
    """Return a copy of the rows of a ring, oldest first; ``count`` were written there."""
    begin = count % len(table)
    both = (table[begin:], table[:begin]) if count > len(table) else (table[:count],)
    return np.concatenate(both)


def _stored(data: bytes) -> tuple[npt.NDArray[np.void], int]:
    """Return the rows of a whole file, oldest first, and their number; none if it is damaged."""
    rows = np.frombuffer(data[: len(data) // _ROW.itemsize * _ROW.itemsize], _ROW)
    if len(rows) < 2 or rows["tag"][0] != _MAGIC:
        return np.empty(0, _ROW), 0
    count = int(rows["parent"][0])
    return _in_order(rows[1:], count), count


def _places(tags: Tags, asked: Tags) -> npt.NDArray[np.intp]:
    """Return the place of each asked tag among ordered ``tags``; their number for those missing."""
    at = np.searchsorted(tags, asked)
    if len(tags):
        inside = np.minimum(at, len(tags) - 1)
        at = np.where(tags[inside] == asked, inside, len(tags))
    return at
