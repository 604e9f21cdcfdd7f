"""Commands about blocks that the ladder holds: rank them, send them down, give up copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.metrics import MissCause
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import ANYWHERE
from kvladder.tiers.ladder.stack import TierStack


class Moved(NamedTuple):
    """What a command did with each of its blocks."""

    done: int = 0
    missing: Sequence[BlockKey] = ()
    """Blocks that no level holds, and blocks of another salt."""
    refused: int = 0
    """Blocks that the level does not take."""
    away: Sequence[BlockKey] = ()
    """Blocks that are held, but not in host memory, from where they could be sent."""
    waiting: Sequence[BlockKey] = ()
    """Blocks for which the level's queue has no room now."""

    @property
    def left(self) -> list[BlockKey]:
        """Blocks for which the same command may do something later."""
        return [*self.missing, *self.away, *self.waiting]


class Ranking(NamedTuple):
    """Asks to give blocks of a salt a priority until a loop time; inf for good."""

    keys: Sequence[BlockKey]
    salt: bytes
    priority: int
    until_s: float
    is_prefix: bool
    """True if all ancestors of a block are among them: then a raised block counts with all its
    ancestors raised, too. Other blocks keep the floor that they have, or get a lower one."""


_Fate = Literal["done", "missing", "refused", "away", "waiting"]


class StackCommands:
    """Does what a caller asks about held blocks of one salt; each step holds the lock briefly.

    A command finds only blocks whose recorded salt is the caller's. It never waits for a tier.
    Calls may come from any thread.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack

    @property
    def shared_levels(self) -> list[str]:
        """Names of the levels that other engines read, hottest first."""
        return [level.name for level in self._stack.levels if level.tier.shared]

    def rank(self, rankings: Sequence[Ranking]) -> list[Moved]:
        """Give blocks a priority, for each of ``rankings`` in order."""
        found: list[Moved] = []
        few, count = list[Ranking](), 0
        for one in rankings:
            count += len(one.keys)
            if few and count > STEP:
                found += self._rank_few(few)
                few, count = [], len(one.keys)
            if count > STEP:
                found.append(self._rank(one))
                count = 0
            else:
                few.append(one)
        return found + self._rank_few(few) if few else found

    def _rank(self, ranking: Ranking) -> Moved:
        """Rank any number of blocks, in steps."""
        parts = [self._rank_few([ranking._replace(keys=one)])[0] for one in _steps(ranking.keys)]
        missing = [key for part in parts for key in part.missing]
        return Moved(sum(part.done for part in parts), missing)

    def _rank_few(self, rankings: Sequence[Ranking]) -> list[Moved]:
        """Rank as many blocks as the lock may be held for."""
        stack, found = self._stack, list[Moved]()
        with stack.lock:
            indexes = stack.indexes.values()
            for keys, salt, priority, until_s, is_prefix in rankings:
                done, missing = 0, list[BlockKey]()
                for key in keys if len(keys) == 1 else dict.fromkeys(keys):
                    meta = _own(key, salt, indexes)
                    if meta is None:
                        missing.append(key)
                        continue
                    floor = priority if is_prefix else min(meta.floor, priority)
                    stack.used(key, BlockMeta(priority, floor, meta.hits, until_s, meta.terms))
                    done += 1
                found.append(Moved(done, missing))
        return found

    def send(self, keys: Sequence[BlockKey], salt: bytes, level: str) -> Moved:
        """Queue blocks that are in host memory to be written to a level; they stay in host.

        Raises KeyError if no level below host has this name.
        """
        target = self._level(level)
        return self._each(
            keys,
            salt,
            lambda key, meta: "refused" if target is None else self._send(key, meta, target),
        )

    def demote(self, keys: Sequence[BlockKey], salt: bytes, level: str | None) -> Moved:
        """Take blocks out of the levels above ``level``, which holds them or is to write them.

        With None, that is the hottest level below host that takes the block. Raises KeyError if no
        level below host has this name.
        """
        named = None if level is None else self._level(level)

        def demote(key: BlockKey, meta: BlockMeta) -> _Fate:
            target = named
            if level is None:
                target = next((one for one in self._stack.levels if one.admits(meta)), None)
            if target is None:
                return "refused"
            fate = self._send(key, meta, target)
            if fate == "done":
                self._leave_above(key, target)
            return fate

        return self._each(keys, salt, demote)

    def drop(self, keys: Sequence[BlockKey], salt: bytes) -> Moved:
        """Forget blocks in every level of this engine; a shared tier keeps them for others."""
        held: list[BlockKey] = []

        def drop(key: BlockKey, _: BlockMeta) -> _Fate:
            held.append(key)
            return "done"

        moved = self._each(keys, salt, drop)
        self._stack.remove(held, for_all=False)
        return moved

    def cause(self, key: BlockKey) -> MissCause:
        """Return why a block that a lookup did not find is not served; counts nothing."""
        with self._stack.lock:
            return self._stack.loader.misses.cause(key, ANYWHERE)

    def own(self, keys: Sequence[BlockKey], salt: bytes) -> int:
        """Return how many leading blocks are held, all of them as blocks of the salt."""
        count = 0
        for part in _steps(keys):
            with self._stack.lock:
                indexes = self._stack.indexes.values()
                for key in part:
                    if _own(key, salt, indexes) is None:
                        return count
                    count += 1
        return count

    def _each(
        self,
        keys: Sequence[BlockKey],
        salt: bytes,
        command: Callable[[BlockKey, BlockMeta], _Fate],
    ) -> Moved:
        """Run a command for each held block of the salt, in steps, and count what became of it."""
        done = refused = 0
        missing: list[BlockKey] = []
        away: list[BlockKey] = []
        waiting: list[BlockKey] = []
        for part in _steps(keys):
            with self._stack.lock:
                indexes = self._stack.indexes.values()
                for key in part:
                    meta = _own(key, salt, indexes)
                    fate: _Fate = "missing" if meta is None else command(key, meta)
                    if fate == "done":
                        done += 1
                    elif fate == "missing":
                        missing.append(key)
                    elif fate == "refused":
                        refused += 1
                    else:
                        (away if fate == "away" else waiting).append(key)
        return Moved(done, missing, refused, away, waiting)

    def _send(self, key: BlockKey, meta: BlockMeta, target: Level) -> _Fate:
        """Have a level hold a block or write it; with the lock held."""
        if target.holds(key):
            return "done"
        if not target.admits(meta):
            return "refused"
        slot = self._stack.host.find(key)
        if slot is None:
            return "away"
        target.offer([key], [slot], [meta], stay=True)
        return "done" if target.holds(key) else "waiting"

    def _leave_above(self, key: BlockKey, target: Level) -> None:
        """Give up the copies above a level; with the lock held."""
        if self._stack.host.find(key) is not None:
            self._stack.host.forget([key], "evicted")
        for level in self._stack.levels:
            if level is target:
                return
            if level.find(key) is not None:
                level.forget([key], "evicted")

    def _level(self, name: str) -> Level | None:
        """Return a level below host; None if it was detached."""
        below = {level.name: level for level in self._stack.levels}
        if name not in below and (name == self._stack.host.name or name not in self._stack.known):
            raise KeyError(name)
        return below.get(name)


def _own(key: BlockKey, salt: bytes, indexes: Iterable[LevelIndex[Any]]) -> BlockMeta | None:
    """Return what is known of a held block if each of its copies is one of the salt."""
    found: BlockMeta | None = None
    for index in indexes:
        place = index.place(key)
        if place is not None:
            if index.salt(place) != salt:
                return None
            if found is None:
                found = index.meta(place)
    return found


def _steps(keys: Sequence[BlockKey]) -> Iterator[Sequence[BlockKey]]:
    """Yield different keys in parts that the lock may be held for."""
    if len(keys) == 1:
        yield keys
        return
    unique = list(dict.fromkeys(keys))
    if len(unique) <= STEP:
        yield unique
        return
    for start in range(0, len(unique), STEP):
        yield unique[start : start + STEP]
