"""Upkeep by an operator: where a block lies, and evictions by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Final, NamedTuple

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.lock import BATCH, STEP
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.upkeep.verify import StackVerifier

RANK_MAX: Final = 4 * BATCH
"""Most blocks before another in the order of eviction that are counted."""


class LevelCopy(NamedTuple):
    """One level's copy of a block, or its write or read under way."""

    level: str
    state: str
    """``held``, ``queued`` (to be written), ``writing``, ``leaving`` (the tier has still to forget
    it) or ``arriving`` (in host, read from a level below)."""
    bytes: int = 0
    """Bytes that it takes at its place; 0 if codecs decide that, or without a place."""
    priority: int | None = None
    """Its priority; None unless it is held."""
    floor: int = 0
    """The lowest priority among the block and its ancestors: thresholds compare this one."""
    hits: int = 0
    """Uses since it was stored here, at most 255."""
    idle_s: float = 0.0
    """Seconds since it was stored here or used."""
    expires_s: float | None = None
    """Seconds until it expires; None if never."""
    retained_s: float | None = None
    """Seconds until its priority is the default again; None if it stays."""
    holds: int = 0
    """Fetches that have pinned it, and reads of it: it is not evicted meanwhile."""
    rank: int | None = None
    """Number of blocks of its level that are evicted before it; None if there are ``RANK_MAX``,
    or if it is pinned."""
    below: str = ""
    """Level to which it is written before host evicts it; empty if it needs no write."""


class Evicted(NamedTuple):
    """The result of evicting blocks from a level."""

    evicted: int = 0
    held: int = 0
    """Blocks that stay since a fetch or a read holds them."""
    missing: int = 0
    """Keys that the level does not have."""
    waiting: int = 0
    """Blocks of host that stay until the queue of the level below has room for them."""


class StackUpkeep(StackVerifier):
    """Does what an operator asks about the levels of a stack, in steps that hold the lock briefly.

    Calls may come from any thread, except ``verify``, which runs on the loop thread.
    """

    @property
    def levels(self) -> dict[str, HostLevel | Level]:
        """Levels by name, hottest first."""
        stack = self._stack
        below: dict[str, HostLevel | Level] = {level.name: level for level in stack.levels}
        return {stack.host.name: stack.host, **below}

    # ---- inspect

    def inspect(self, key: BlockKey) -> list[LevelCopy]:
        """Return the copies of a block, hottest first, and its moves; change nothing."""
        with self._stack.lock:
            found = [one for level in self.levels.values() for one in self._copies(level, key)]
            if key in self._stack.loader.arrivals:
                found.insert(0, LevelCopy(self._stack.host.name, "arriving"))
            return found

    def _copies(self, level: HostLevel | Level, key: BlockKey) -> list[LevelCopy]:
        place = level.index.place(key)
        found = [] if place is None else [self._held(level, key, place)]
        if isinstance(level, Level):
            states = {
                "queued": key in level.write_queue,
                "writing": level.is_written(key),
                "leaving": level.leaving(key),
            }
            found += [LevelCopy(level.name, state) for state, holds in states.items() if holds]
        return found

    def _held(self, level: HostLevel | Level, key: BlockKey, place: int) -> LevelCopy:
        index, now_s = level.index, self._shared.clock.now()
        meta, ends_s, holds = index.meta(place), index.expires_s(place), index.pins(place)
        size, below = self._shared.arena.slot_bytes, ""
        if isinstance(level, Level):
            holds += level.places.being_read(place)
            coded = level.client.pipeline.is_coded
            size = 0 if coded else size + level.tier.overhead_bytes
        else:
            (target,) = level.targets([key], [meta], {})
            below = "" if target is None else target.name
        victims = islice(index.victims(), RANK_MAX)
        rank = next((at for at, other in enumerate(victims) if other == place), None)
        return LevelCopy(
            level.name,
            "held",
            size,
            meta.priority,
            meta.floor,
            meta.hits,
            index.idle_s(place),
            None if ends_s == inf else ends_s - now_s,
            None if meta.until_s == inf else meta.until_s - now_s,
            holds,
            rank,
            below,
        )

    # ---- evict

    def evict(self, level: str, keys: Sequence[BlockKey]) -> Evicted:
        """Evict these blocks from one level, but none that is held; KeyError without the level.

        What host alone has is queued to be written below first. A level below host only forgets.
        """
        found = self.levels[level]
        result = Evicted()
        unique = list(dict.fromkeys(keys))
        for start in range(0, len(unique), STEP):
            with self._stack.lock:
                result = _sum(result, self._evict(found, unique[start : start + STEP]))
        self._stack.wake()
        return result

    def evict_next(self, level: str, count: int) -> Evicted:
        """Evict so many blocks, those that the level would evict next; see ``evict``.

        Fewer if the next ones are held, or wait: these are counted as the last step met them.
        """
        found = self.levels[level]
        result = Evicted()
        while result.evicted < count:
            with self._stack.lock:
                wanted = min(STEP, count - result.evicted)
                places, held = self._next(found, wanted)
                step = self._evict(found, found.index.keys_at(places))
            result = step._replace(evicted=result.evicted + step.evicted, held=held)
            if not step.evicted:
                break
        self._stack.wake()
        return result

    def _next(self, level: HostLevel | Level, wanted: int) -> tuple[list[int], int]:
        """Return the places of the next victims, and how many that are held were passed over."""
        places: list[int] = []
        held = 0
        for place in islice(level.index.victims(), RANK_MAX):
            if len(places) == wanted:
                break
            if self._is_held(level, place):
                held += 1
            else:
                places.append(place)
        return places, held

    def _evict(self, level: HostLevel | Level, keys: Sequence[BlockKey]) -> Evicted:
        going: list[BlockKey] = []
        held = missing = waiting = 0
        for key in keys:
            place = level.index.place(key)
            if place is None:
                missing += 1
            elif self._is_held(level, place):
                held += 1
            elif isinstance(level, HostLevel) and not self._is_below(level, key, Slot(place)):
                waiting += 1
            else:
                going.append(key)
        level.forget(going, "evicted")
        return Evicted(len(going), held, missing, waiting)

    def _is_held(self, level: HostLevel | Level, place: int) -> bool:
        if level.index.pins(place):
            return True
        return isinstance(level, Level) and level.places.being_read(place)

    def _is_below(self, host: HostLevel, key: BlockKey, slot: Slot) -> bool:
        """Return whether a block of host needs no copy below, or is queued to be written there."""
        meta = host.index.meta(slot)
        (target,) = host.targets([key], [meta], {})
        if target is None:
            return True
        target.offer([key], [slot], [meta], stay=True)
        return target.holds(key)


def _sum(one: Evicted, other: Evicted) -> Evicted:
    return Evicted(*map(sum, zip(one, other, strict=True)))
