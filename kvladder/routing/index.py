"""Index for routers: engines, blocks and levels, in columns; for 10^7 and more blocks."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvladder.publishing.wire import Hash

HOT_TO_COLD: Final = ("GPU", "CPU", "CPU_PINNED", "STORAGE", "DISK", "EXTERNAL")
"""Media in events of vLLM, SGLang and kvladder, hottest first. Other media are colder."""
LEVELS_MAX: Final = 16
"""Highest number of levels of one engine: a row has a bit for each."""
SIZES_MAX: Final = 8
"""Highest number of block sizes of one engine. A prompt is hashed once for each size in use."""
BLOCKS_MAX: Final = 1 << 24
"""Default for the highest number of blocks of one engine: 600 MB of rows."""
ENGINES_MAX: Final = 1 << 16
ROWS_MIN: Final = 1024

Words = npt.NDArray[np.uint64]


class Match(NamedTuple):
    """The prefix of a prompt that one engine holds."""

    engine: str
    tokens: int
    """Tokens of the longest prefix."""
    levels: dict[str, int]
    """Number of the prefix's blocks by the hottest level that holds each, hottest level first."""


def names(
    tokens: Sequence[int],
    block_size: int,
    *,
    parent: int | None = None,
    lora: str | None = None,
    extra: Mapping[int, Sequence[Any]] | None = None,
) -> list[int]:
    """Return 64-bit names of the whole blocks of ``tokens``; each names the prefix up to its end.

    The names are this index's own, so engines that hash in different ways can be compared.

    Parameters
    ----------
    tokens:
        Token ids, each in ``0 .. 2**32 - 1``.
    parent:
        Name of the block before them; None at the start of a prompt.
    lora:
        Name of the adapter.
    extra:
        What else a block's content depends on, by the block's position: as in vLLM's
        ``extra_keys`` without the adapter's name. Images are (hash, offset); the cache salt is in
        the first block.

    Raises
    ------
    ValueError
        A token id is out of its range.
    """
    step, digest = block_size * 4, xxhash.xxh3_64_intdigest
    try:
        data = array("I", tokens[: len(tokens) // block_size * block_size]).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are integers in 0 .. 2**32 - 1: {error}") from None
    name = digest(msgspec.msgpack.encode((block_size, lora))) if parent is None else parent
    found: list[int] = []
    for number, start in enumerate(range(0, len(data), step)):
        content = data[start : start + step]
        if extra is not None and (more := extra.get(number)):
            content += msgspec.msgpack.encode(more)
        name = digest(name.to_bytes(8, "little") + content)
        found.append(name)
    return found


class Chains:
    """A hash table over one column of the rows. Rows with equal low bits of a word form a chain."""

    def __init__(self, words: Words, capacity: int) -> None:
        self.mask = capacity - 1
        """Bits of a word that choose its chain; ``capacity``, a power of 2, is the chain count."""
        self.heads = np.full(capacity, -1, np.int32)
        self.after = np.full(capacity, -1, np.int32)
        chains = (words & np.uint64(self.mask)).astype(np.int64)
        order = np.argsort(chains, kind="stable")
        chains = chains[order]
        alike = chains[1:] == chains[:-1]
        self.after[order[1:][alike]] = order[:-1][alike]
        last = np.append(~alike, True)[: len(order)]
        self.heads[chains[last]] = order[last]
        # Reading single items of a memoryview takes a third of the time of an array's.
        self._heads, self._after = self.heads.data, self.after.data

    def add(self, row: int, word: int) -> None:
        """Add ``row``, which has this word and is in no chain."""
        chain = word & self.mask
        self._after[row] = self._heads[chain]
        self._heads[chain] = row

    def replace(self, row: int, word: int, other: int) -> None:
        """Put ``other`` in the place of ``row`` in its chain; if it is -1, remove ``row``."""
        after, at = self._after, self._heads[word & self.mask]
        follows = after[row] if other < 0 else other
        if other >= 0:
            after[other] = after[row]
        if at == row:
            self._heads[word & self.mask] = follows
            return
        while after[at] != row:
            at = after[at]
        after[at] = follows

    def rows(self, word: int) -> Iterator[int]:
        """Yield the rows that may have this word."""
        row = self._heads[word & self.mask]
        while row >= 0:
            yield row
            row = self._after[row]


class Engine:
    """An engine's levels and block sizes, and its number of rows.

    Parameters
    ----------
    number:
        Value of its rows in the column of engines.
    levels:
        The bit of each level, hotter levels first.
    """

    def __init__(self, name: str, number: int, levels: Mapping[str, int]) -> None:
        self.name = name
        self.number = number
        self.levels = dict(levels)
        self.sizes = set[int]()
        """Tokens per block; several values if its groups of layers differ."""
        self.blocks = 0
        """Number of rows of this engine."""

    def require(self, level: str, block_size: int | None) -> None:
        """Raise ValueError if the level, or the block size if given, exceeds an engine's limit."""
        if level not in self.levels and len(self.levels) == LEVELS_MAX:
            raise ValueError(f"{level}: {self.name} already has {LEVELS_MAX} levels, the maximum")
        if block_size not in {None, *self.sizes} and len(self.sizes) == SIZES_MAX:
            what = f"{self.name} already has blocks of {SIZES_MAX} sizes"
            raise ValueError(f"block_size {block_size}: {what}, the maximum")

    def bit(self, level: str) -> int:
        """Return the bit of a level; add the level if it is new."""
        return self.levels.setdefault(level, 1 << len(self.levels))


class Index:
    """The blocks that engines say they hold. All calls come from one thread.

    A row stands for one block of one engine, with a bit for each level that holds it. Routers find
    rows by the content's name, events by the engine's hash; each way has its chains. That takes
    36 bytes per row, and up to twice as much after the columns have grown.

    Names and hashes are compared by 64 bits of a digest. Among 10^7 blocks, two collide with a
    probability of 3e-6. A collision may only send a request to an engine that is not the best.

    Every limit applies to each engine by itself. An engine that invents levels, block sizes or
    blocks takes no room from the others, and ``forget`` frees all that it took.

    Parameters
    ----------
    levels:
        Names of levels, hottest first. Levels that events add are colder.
    blocks_max:
        Highest number of blocks of one engine. Further ones are refused until some are removed.
    """

    def __init__(
        self, levels: Iterable[str] = HOT_TO_COLD, *, blocks_max: int = BLOCKS_MAX
    ) -> None:
        self._known = {name: 1 << number for number, name in enumerate(levels)}
        self._blocks_max = blocks_max
        self._engines: dict[str, Engine] = {}
        self._by_number: dict[int, Engine] = {}
        self.rows = 0
        """Number of blocks that are held, counted once for each engine that holds them."""
        self.unplaced = 0
        """Number of times a block came without tokens, or without the beginning of its prompt. No
        prompt matches such a block until its engine tells more."""
        self._resize(ROWS_MIN)

    def _resize(self, capacity: int) -> None:
        """Allocate columns of ``capacity`` rows, a power of 2, and keep the rows in use."""
        used = self.rows
        names, hashes = np.zeros(capacity, np.uint64), np.zeros(capacity, np.uint64)
        engines, held = np.zeros(capacity, np.uint16), np.zeros(capacity, np.uint16)
        if used:
            columns: tuple[Any, ...] = (names, hashes, engines, held)
            for new, old in zip(columns, self._columns, strict=True):
                new[:used] = old[:used]
        self._fill(names, hashes, engines, held)

    def _fill(self, names: Words, hashes: Words, engines: Any, held: Any) -> None:
        """Take these columns, with ``rows`` rows in use, and build their chains."""
        self._columns = names, hashes, engines, held
        self._name, self._hash = names.data, hashes.data
        self._engine, self._held = engines.data, held.data
        self._by_name = Chains(names[: self.rows], len(names))
        self._by_hash = Chains(hashes[: self.rows], len(names))

    # ---- updates by events

    def stored(
        self,
        engine: str,
        level: str,
        hashes: Sequence[Hash],
        *,
        parent: Hash | None = None,
        tokens: Sequence[int] = (),
        block_size: int = 0,
        lora: str | None = None,
        extra: Mapping[int, Sequence[Any]] | None = None,
    ) -> None:
        """Note that an engine holds these consecutive blocks at a level.

        ``hashes`` are the engine's own, and ``parent`` is the hash of the block before them.
        ``tokens`` are those of all blocks; empty if the engine does not know them. ``lora`` and
        ``extra`` are as in ``names``.

        Raises
        ------
        ValueError
            The number of tokens does not fit the blocks, or a token id is out of range. Or there
            are too many engines, or too many levels, block sizes or blocks of this engine. No row
            has changed then.
        """
        if tokens and len(tokens) != len(hashes) * block_size:
            what = f"{len(tokens)} tokens for {len(hashes)} blocks of {block_size}"
            raise ValueError(f"{engine}: {what}, expected {len(hashes) * block_size}")
        one = self._engine_of(engine)
        number = one.number
        words = [self._digest(block_hash, number) for block_hash in hashes]
        one.require(level, block_size if tokens else None)
        if one.blocks + len(words) > self._blocks_max:
            self._require_room(one, words)
        before = None if parent is None else self._row(self._digest(parent, number))
        if before is not None and before >= 0 and self._name[before] == self._hash[before]:
            before = -1  # the parent was told without tokens
        told: list[int] = []
        if tokens and before != -1:  # -1: the beginning of the prompt is not known
            start = None if before is None else self._name[before]
            told = names(tokens, block_size, parent=start, lora=lora, extra=extra)
            one.sizes.add(block_size)
        else:
            self.unplaced += len(hashes)
        bit = one.bit(level)
        for at, word in enumerate(words):
            row = self._row(word)
            if row < 0:
                row = self._add(told[at] if told else word, word, one)
            elif told and self._name[row] == word:  # it had no name until now
                self._by_name.replace(row, word, -1)
                self._name[row] = told[at]
                self._by_name.add(row, told[at])
            self._held[row] |= bit

    def removed(self, engine: str, level: str, hashes: Iterable[Hash]) -> None:
        """Note that a level of an engine no longer holds these blocks; others are ignored."""
        one = self._engines.get(engine)
        if one is None:
            return
        bit = one.levels.get(level, 0)
        for block_hash in hashes:
            row = self._row(self._digest(block_hash, one.number))
            if row >= 0:
                self._held[row] &= ~bit
                if not self._held[row]:
                    self._drop(row)
                    one.blocks -= 1

    def forget(self, engine: str) -> None:
        """Remove an engine and all its rows: it holds no blocks, or it is not known which."""
        one = self._engines.pop(engine, None)
        if one is None:
            return
        del self._by_number[one.number]
        if not one.blocks:
            return
        others = np.flatnonzero(self._columns[2][: self.rows] != one.number)
        self.rows = len(others)
        capacity = max(ROWS_MIN, 1 << self.rows.bit_length())
        columns = [np.zeros(capacity, column.dtype) for column in self._columns]
        for new, old in zip(columns, self._columns, strict=True):
            new[: self.rows] = old[others]
        self._fill(*columns)

    # ---- queries of routers

    def match(
        self,
        tokens: Sequence[int],
        *,
        lora: str | None = None,
        salt: str | None = None,
        extra: Mapping[int, Sequence[Any]] | None = None,
    ) -> list[Match]:
        """Return the engines that hold a prefix of a prompt: the longest first, then the hottest.

        ``salt`` is the request's cache salt. The other arguments are as in ``names``.
        """
        more = dict(extra or {})
        if salt is not None:
            more[0] = [*more.get(0, ()), salt]
        found: list[tuple[int, int, Match]] = []
        for size in set[int]().union(*(one.sizes for one in self._engines.values())):
            wanted = names(tokens, size, lora=lora, extra=more)
            found += self._matches(np.array(wanted, np.uint64), size)
        return [match for *_, match in sorted(found, key=lambda one: one[:2])]

    def _matches(self, wanted: Words, size: int) -> Iterator[tuple[int, int, Match]]:
        """Yield for each engine the blocks that it holds without a gap, as a match.

        Each item begins with two numbers to sort by: minus its tokens, and its levels' bits.
        """
        names, _, engines, held = self._columns
        at = np.arange(len(wanted))
        rows = self._by_name.heads[wanted & np.uint64(self._by_name.mask)]
        parts: list[tuple[Any, ...]] = []
        while len(rows):  # follows all chains at once, one link per turn
            there = rows >= 0
            rows, at = rows[there], at[there]
            hit = names[rows] == wanted[at]
            parts.append((at[hit], engines[rows[hit]], held[rows[hit]]))
            rows = self._by_name.after[rows]
        if not parts:
            return
        at, whose, levels = (np.concatenate(column) for column in zip(*parts, strict=True))
        for number in np.unique(whose):
            mine = whose == number
            positions, first = np.unique(at[mine], return_index=True)
            length = int(np.argmin(np.append(positions == np.arange(len(positions)), False)))
            if length:
                bits = levels[mine][first][:length].astype(np.int32)
                hottest = bits & -bits
                one = self._by_number[int(number)]
                counts = {name: int((hottest == bit).sum()) for name, bit in one.levels.items()}
                match = Match(
                    one.name,
                    length * size,
                    {name: blocks for name, blocks in counts.items() if blocks},
                )
                yield -match.tokens, int(hottest.sum()), match

    # ---- rows

    def _engine_of(self, name: str) -> Engine:
        """Return the engine of this name; add it if it is new."""
        one = self._engines.get(name)
        if one is None:
            if len(self._engines) == ENGINES_MAX:
                raise ValueError(f"{name}: there are already {ENGINES_MAX} engines, the maximum")
            number = next(number for number in count() if number not in self._by_number)
            one = self._engines[name] = Engine(name, number, self._known)
            self._by_number[number] = one
        return one

    @staticmethod
    def _digest(block_hash: Hash, engine: int) -> int:
        """Return 64 bits for a hash and its engine. The number is no seed: a seed cancels out."""
        if isinstance(block_hash, int):
            block_hash = (block_hash & ((1 << 64) - 1)).to_bytes(8, "little")
        return xxhash.xxh3_64_intdigest(block_hash + engine.to_bytes(2, "little"))

    def _row(self, word: int) -> int:
        """Return the row of the block with this digest of an engine's hash; -1 if there is none."""
        hashes = self._hash
        for row in self._by_hash.rows(word):
            if hashes[row] == word:
                return row
        return -1

    def _require_room(self, engine: Engine, words: Sequence[int]) -> None:
        new = sum(self._row(word) < 0 for word in set(words))
        if engine.blocks + new > self._blocks_max:
            what = f"{engine.name} holds {engine.blocks} blocks, and it reports {new} more"
            raise ValueError(f"{what}: expected {self._blocks_max} at most (blocks_max)")

    def _add(self, name: int, word: int, engine: Engine) -> int:
        if self.rows == len(self._name):
            self._resize(2 * self.rows)
        row = self.rows
        self.rows += 1
        self._name[row], self._hash[row], self._engine[row] = name, word, engine.number
        self._held[row] = 0
        engine.blocks += 1
        self._by_name.add(row, name)
        self._by_hash.add(row, word)
        return row

    def _drop(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        last = self.rows - 1
        for chains, words in ((self._by_name, self._name), (self._by_hash, self._hash)):
            chains.replace(row, words[row], -1)
            if last != row:
                chains.replace(last, words[last], row)
        for column in (self._name, self._hash, self._engine, self._held):
            column[row] = column[last]
        self.rows = last

    def check(self) -> None:
        """Assert that chains lead to every row, and rows to a level; O(n), for tests."""
        assert {one.number: one for one in self._engines.values()} == self._by_number
        held = Counter[int](self._engine[: self.rows].tolist())
        for row in range(self.rows):
            assert row in self._by_name.rows(self._name[row])
            assert row in self._by_hash.rows(self._hash[row])
            assert self._held[row]
        assert held == {one.number: one.blocks for one in self._by_number.values() if one.blocks}
