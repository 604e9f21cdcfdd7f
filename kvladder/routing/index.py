"""Which engine holds which blocks, at which level: in columns, for tens of millions of blocks."""

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
"""Media of vLLM's, SGLang's and kvladder's events; what is none of them is colder."""
LEVELS_MAX: Final = 16
"""Levels of one engine: a row has a bit for each."""
SIZES_MAX: Final = 8
"""Block sizes of one engine. A prompt is hashed once for each size that any engine has."""
BLOCKS_MAX: Final = 1 << 24
"""Blocks of one engine, unless the index was told otherwise: 600 MB of rows."""
ENGINES_MAX: Final = 1 << 16
ROWS_MIN: Final = 1024

Words = npt.NDArray[np.uint64]


class Match(NamedTuple):
    """What one engine holds of a prompt."""

    engine: str
    tokens: int
    """Of the longest prefix."""
    levels: dict[str, int]
    """Blocks of that prefix by the hottest level that holds each, hottest first."""


def names(
    tokens: Sequence[int],
    block_size: int,
    *,
    parent: int | None = None,
    lora: str | None = None,
    extra: Mapping[int, Sequence[Any]] | None = None,
) -> list[int]:
    """64-bit names of the whole blocks of ``tokens``, each of which names the prefix up to it.

    They are this index's own, so that engines which hash in different ways are compared.

    Parameters
    ----------
    tokens:
        Token ids, each in ``0 .. 2**32 - 1``.
    parent:
        Name of the block before them; None at the start of a prompt.
    lora:
        Name of the adapter.
    extra:
        By position of a block, what else its content depends on, as in vLLM's ``extra_keys``
        without the adapter's name: images as (hash, offset), the cache salt in the first block.

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
    """A hash table over one column of the rows: chains of rows, by the low bits of a word."""

    def __init__(self, words: Words, capacity: int) -> None:
        self.mask = capacity - 1
        """``capacity``, a power of 2, is how many chains there are."""
        self.heads = np.full(capacity, -1, np.int32)
        self.after = np.full(capacity, -1, np.int32)
        chains = (words & np.uint64(self.mask)).astype(np.int64)
        order = np.argsort(chains, kind="stable")
        chains = chains[order]
        alike = chains[1:] == chains[:-1]
        self.after[order[1:][alike]] = order[:-1][alike]
        last = np.append(~alike, True)[: len(order)]
        self.heads[chains[last]] = order[last]
        # single items of a memoryview take a third of the time that those of an array take
        self._heads, self._after = self.heads.data, self.after.data

    def add(self, row: int, word: int) -> None:
        """``row`` has this word, and was in no chain."""
        chain = word & self.mask
        self._after[row] = self._heads[chain]
        self._heads[chain] = row

    def replace(self, row: int, word: int, other: int) -> None:
        """``other`` takes the place of ``row`` in its chain; what follows ``row`` if it is -1."""
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
        """Rows that may have this word."""
        row = self._heads[word & self.mask]
        while row >= 0:
            yield row
            row = self._after[row]


class Engine:
    """What the index knows of one engine beside its rows.

    Parameters
    ----------
    number:
        What its rows have in the column of engines.
    levels:
        The bit of each level, hotter levels first.
    """

    def __init__(self, name: str, number: int, levels: Mapping[str, int]) -> None:
        self.name = name
        self.number = number
        self.levels = dict(levels)
        self.sizes = set[int]()
        """Tokens in a block; several if its groups of layers differ."""
        self.blocks = 0
        """Rows of this engine."""

    def require(self, level: str, block_size: int | None) -> None:
        """Raise ValueError if the level or the block size, where there is one, is one too many."""
        if level not in self.levels and len(self.levels) == LEVELS_MAX:
            raise ValueError(f"{level}: {self.name} has {LEVELS_MAX} levels, expected no more")
        if block_size not in {None, *self.sizes} and len(self.sizes) == SIZES_MAX:
            what = f"{self.name} has blocks of {SIZES_MAX} sizes"
            raise ValueError(f"block_size {block_size}: {what}, expected no more")

    def bit(self, level: str) -> int:
        """Return the bit of a level, which is new or known."""
        return self.levels.setdefault(level, 1 << len(self.levels))


class Index:
    """What engines said that they hold. Its calls come from one thread.

    A row stands for one block of one engine, with a bit for each level that holds it. Chains lead
    to rows by the content's name, for routers, and by the engine's hash, for events. That takes
    36 bytes a row; up to twice as much after the columns grew.

    Names and hashes are compared by 64 bits of a digest: among 10^7 blocks some two are confused
    with a probability of 3e-6, and what that costs is a request's best engine.

    Every bound is one engine's own: an engine that invents levels, block sizes or blocks takes
    nothing from the others, and ``forget`` frees all that it took.

    Parameters
    ----------
    levels:
        Names of levels, hottest first; those that events add are colder.
    blocks_max:
        How many blocks one engine may hold. Further ones are refused until some are removed.
    """

    def __init__(
        self, levels: Iterable[str] = HOT_TO_COLD, *, blocks_max: int = BLOCKS_MAX
    ) -> None:
        self._known = {name: 1 << number for number, name in enumerate(levels)}
        self._blocks_max = blocks_max
        self._engines: dict[str, Engine] = {}
        self._by_number: dict[int, Engine] = {}
        self.rows = 0
        """Blocks that are held, counted once for each engine that holds them."""
        self.unplaced = 0
        """Blocks that came without tokens, or without the beginning of their prompt: matched by
        nothing until an engine tells more."""
        self._resize(ROWS_MIN)

    def _resize(self, capacity: int) -> None:
        """Make room for so many rows, a power of 2."""
        used = self.rows
        names, hashes = np.zeros(capacity, np.uint64), np.zeros(capacity, np.uint64)
        engines, held = np.zeros(capacity, np.uint16), np.zeros(capacity, np.uint16)
        if used:
            columns: tuple[Any, ...] = (names, hashes, engines, held)
            for new, old in zip(columns, self._columns, strict=True):
                new[:used] = old[:used]
        self._fill(names, hashes, engines, held)

    def _fill(self, names: Words, hashes: Words, engines: Any, held: Any) -> None:
        """These are the columns from now on, ``rows`` of which are used."""
        self._columns = names, hashes, engines, held
        self._name, self._hash = names.data, hashes.data
        self._engine, self._held = engines.data, held.data
        self._by_name = Chains(names[: self.rows], len(names))
        self._by_hash = Chains(hashes[: self.rows], len(names))

    # ---- what events tell

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
        """An engine holds these consecutive blocks at a level from now on.

        ``hashes`` are its own, ``parent`` that of the block before them, ``tokens`` those of all of
        them, or none if it does not know; ``lora`` and ``extra`` as in ``names``.

        Raises
        ------
        ValueError
            There are not as many tokens as the blocks have, or one of them is out of its range, or
            there are too many engines, or too many levels, block sizes or blocks of this engine;
            no row changed.
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
            before = -1  # it was told without tokens
        told: list[int] = []
        if tokens and before != -1:  # -1: its beginning is not known
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
            elif told and self._name[row] == word:  # it was not placed
                self._by_name.replace(row, word, -1)
                self._name[row] = told[at]
                self._by_name.add(row, told[at])
            self._held[row] |= bit

    def removed(self, engine: str, level: str, hashes: Iterable[Hash]) -> None:
        """A level of an engine holds these blocks no more; what it did not hold is ignored."""
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
        """An engine holds nothing any more, or nobody knows what."""
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

    # ---- what routers ask

    def match(
        self,
        tokens: Sequence[int],
        *,
        lora: str | None = None,
        salt: str | None = None,
        extra: Mapping[int, Sequence[Any]] | None = None,
    ) -> list[Match]:
        """The engines that hold a prefix of a prompt, the longest first, then the hottest.

        ``salt`` is the request's cache salt; the rest as in ``names``.
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
        """By engine, how many of these blocks it holds without a gap; what to sort by, first."""
        names, _, engines, held = self._columns
        at = np.arange(len(wanted))
        rows = self._by_name.heads[wanted & np.uint64(self._by_name.mask)]
        parts: list[tuple[Any, ...]] = []
        while len(rows):  # all chains at once, a link each
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
        """Return the engine of this name, which may be new."""
        one = self._engines.get(name)
        if one is None:
            if len(self._engines) == ENGINES_MAX:
                raise ValueError(f"{name}: there are {ENGINES_MAX} engines, expected no more")
            number = next(number for number in count() if number not in self._by_number)
            one = self._engines[name] = Engine(name, number, self._known)
            self._by_number[number] = one
        return one

    @staticmethod
    def _digest(block_hash: Hash, engine: int) -> int:
        """64 bits for a hash of an engine, whose number is no seed: one cancels out."""
        if isinstance(block_hash, int):
            block_hash = (block_hash & ((1 << 64) - 1)).to_bytes(8, "little")
        return xxhash.xxh3_64_intdigest(block_hash + engine.to_bytes(2, "little"))

    def _row(self, word: int) -> int:
        """Of the block with this digest of an engine's hash; -1 if there is none."""
        hashes = self._hash
        for row in self._by_hash.rows(word):
            if hashes[row] == word:
                return row
        return -1

    def _require_room(self, engine: Engine, words: Sequence[int]) -> None:
        new = sum(self._row(word) < 0 for word in set(words))
        if engine.blocks + new > self._blocks_max:
            what = f"{engine.name} holds {engine.blocks} blocks, and {new} more are told"
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
        """The last row takes the place of this one."""
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
