"""Commands about blocks that the ladder holds: rank them, send them down, give up copies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.metrics import MissCause
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.ranking import Ranking as Ranking
from kvladder.tiers.ladder.records.terms import ANYWHERE
from kvladder.tiers.ladder.stack import TierStack


class Moved(msgspec.Struct, frozen=True):
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

    lowered: int = 0
    """Blocks among those done that a limit to raised blocks has lowered again, in some level."""

    @property
    def left(self) -> list[BlockKey]:
        """Blocks for which the same command may do something later."""
        return [*self.missing, *self.away, *self.waiting]


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
        if sum([len(one.keys) for one in rankings]) <= STEP:
            return self._rank_few(rankings)
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
        steps = [*_steps(ranking.keys)]
        if ranking.is_prefix:  # its head is the last, so that its tail goes first
            steps.reverse()
        parts = [self._rank_few([ranking._replace(keys=one)])[0] for one in steps]
        if ranking.is_prefix:
            parts.reverse()
        missing = [key for part in parts for key in part.missing]
        done, lowered = sum(part.done for part in parts), 0
        tenants = [index.tenants for index in self._stack.indexes.values()]
        if any(one is not None and one.raises(ranking.priority) for one in tenants):
            # later parts may have lowered earlier ones
            for one in steps:
                with self._stack.lock:
                    lowered += self._lowered(one, {*missing}, ranking.priority)
        return Moved(done, missing, lowered=lowered)

    def _lowered(
        self, keys: Sequence[BlockKey], missing: Collection[BlockKey], priority: int
    ) -> int:
        """Return how many blocks have less than the priority just given; with the lock held."""
        metas = (self._stack.meta(key) for key in keys if key not in missing)
        return sum(meta is not None and meta.priority < priority for meta in metas)

    def _rank_few(self, rankings: Sequence[Ranking]) -> list[Moved]:
        """Rank as many blocks as the lock may be held for."""
        stack = self._stack
        with stack.lock:
            indexes = [*stack.indexes.values()]
            rules = [stack.host.rule, *(level.rule for level in stack.levels)]
            least = max(rule.min_priority for rule in rules)
            stay = [one.priority >= least and (one.is_prefix or not least) for one in rankings]
            if all(stay) and all(index.lasts for index in indexes):
                found = _ranked(rankings, indexes)
            else:  # some may expire, or leave a level
                found = [self._rank_each(one) for one in rankings]
            stack.host.doubt()
        return found

    def _rank_each(self, ranking: Ranking) -> Moved:
        """Rank blocks one by one; they leave levels whose thresholds they do not reach any more."""
        _, salt, priority, until_s, is_prefix = ranking
        stack, done, missing = self._stack, 0, list[BlockKey]()
        indexes = stack.indexes.values()
        for key in ranking.in_order:
            meta = _own(key, salt, indexes)
            if meta is None:
                missing.append(key)
                continue
            floor = priority if is_prefix else min(meta.floor, priority)
            stack.used(key, BlockMeta(priority, floor, meta.hits, until_s, meta.terms))
            done += 1
        lowered = self._lowered([*ranking.in_order], {*missing}, priority)
        return Moved(done, missing[::-1] if is_prefix else missing, lowered=lowered)

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


def _ranked(rankings: Sequence[Ranking], indexes: Sequence[LevelIndex[Any]]) -> list[Moved]:
    """Rank blocks. None of them expires, or leaves a level by it."""
    if len(indexes) == 1:
        results = indexes[0].rank(rankings)
        return [Moved(done, missing, 0, (), (), lowered) for done, missing, lowered in results]
    own, missing = list[Ranking](), list[list[BlockKey]]()
    for one in rankings:
        fates = {key: _own(key, one.salt, indexes) is not None for key in one.keys}
        own.append(one._replace(keys=[key for key, is_own in fates.items() if is_own]))
        missing.append([key for key, is_own in fates.items() if not is_own])
    each = [index.rank(own) for index in indexes]
    lowered = [max(one[number][2] for one in each) for number in range(len(own))]
    return [
        Moved(len(one.keys), left, lowered=count)
        for one, left, count in zip(own, missing, lowered, strict=True)
    ]


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
