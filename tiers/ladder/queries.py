"""Questions to a stack beside saving and loading; see ``Ladder``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.lock import BATCH, StackLock
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers.answers import KINDS
from kvladder.tiers.context import Clock
from kvladder.tiers.label import Outcome
from kvladder.tiers.ladder.base_level import EventBuffer, Shared
from kvladder.tiers.ladder.calling.breaker import BREAKER_STATES
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import ANYWHERE, HOST

DAY_S: Final = 86400.0
WEAR_MIN_S: Final = 3600.0
"""Least time over which bytes written a day are counted; earlier, a start's burst would count."""


class PrivateLevels(Collection[str]):
    """Names of the levels below host that no other engine shares, as they are now."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self._levels = levels

    def __iter__(self) -> Iterator[str]:
        return iter([level.name for level in self._levels if not level.tier.shared])

    def __len__(self) -> int:
        return len([*self])

    def __contains__(self, name: object) -> bool:
        return name in [*self]


class StackQueries:
    """Answers of a stack about its levels."""

    host: HostLevel
    levels: list[Level]
    shared: Shared
    lock: StackLock
    known: dict[str, int]
    """Bits of all levels since the start, by name; the last one of each name."""
    _all_levels: Sequence[HostLevel | Level]
    """All levels, hottest first."""

    @property
    def clock(self) -> Clock:
        """The only clock."""
        return self.shared.clock

    @property
    def events(self) -> EventBuffer:
        """Blocks that come to a level and leave one; the lock is held around its calls."""
        return self.shared.events

    @property
    def indexes(self) -> dict[str, LevelIndex[Any]]:
        """Blocks that each level holds, by name, hottest first."""
        return {level.name: level.index for level in self._all_levels}

    @property
    def private_levels(self) -> PrivateLevels:
        """Names of the levels below host that no other engine shares; it follows changes."""
        return PrivateLevels(self.levels)

    @property
    def media(self) -> dict[str, str]:
        """Medium of each level, by name, hottest first."""
        below = {level.name: level.tier.medium for level in self.levels}
        return {self.host.name: self.host.medium, **below}

    @property
    def capacities(self) -> dict[str, int]:
        """Blocks that each level has room for, by name, hottest first."""
        below = {level.name: level.capacity_blocks for level in self.levels}
        return {self.host.name: self.shared.arena.slots, **below}

    def lasting(self) -> dict[str, bool]:
        """Return the levels that outlive the engine, and whether each takes blocks now."""
        given = [level for level in self.levels if level.outlives and level.rule.when != "never"]
        return {level.name: level.writable for level in given}

    def lease(self, count: int) -> list[Slot]:
        """Lease up to ``count`` slots, evicting from host blocks that levels below hold too."""
        slots: list[Slot] = []
        while (wanted := min(BATCH, count - len(slots))) > 0:
            with self.shared.lock:
                part = self.host.room(wanted, PRIORITY_MAX)
            slots += part
            if len(part) < wanted:
                break
        return slots

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Give back leased slots that are not used any more."""
        step = self.shared.bulk_step
        for start in range(0, len(slots), step):
            with self.shared.lock:
                self.shared.arena.release(slots[start : start + step])

    def lookup(self, keys: Sequence[BlockKey], levels: int = ANYWHERE) -> tuple[int, int]:
        """Return how many leading ``keys`` the host level holds, and how many one of ``levels``
        does.
        """
        if len(keys) <= BATCH:
            with self.lock:
                return self._lookup(keys, levels)
        step = self.shared.bulk_step
        host = total = 0
        while total < len(keys):
            part = keys[total : total + step]
            with self.lock:
                here, found = self._lookup(part, levels)
            host += here if host == total else 0
            total += found
            if found < len(part):
                break
        return host, total

    def _lookup(self, keys: Sequence[BlockKey], levels: int) -> tuple[int, int]:
        host = self.host.index.prefix(keys) if levels & HOST else 0
        if host == len(keys):
            return host, host
        in_host = self.host.index.keys()
        below = [lv.index.keys() for lv in self.levels if lv.bit & levels and lv.readable]
        for index in range(host, len(keys)):
            key = keys[index]
            if key in in_host:
                if levels & HOST:
                    continue
                return host, index
            for held in below:
                if key in held:
                    break
            else:
                return host, index
        return host, len(keys)

    def holding(self, keys: Sequence[BlockKey], levels: int = ANYWHERE) -> list[bool]:
        """Return whether host or one of ``levels`` holds each of ``keys``: a set, no prefix."""
        found: list[bool] = []
        step = self.shared.bulk_step
        for start in range(0, len(keys), step):
            part = keys[start : start + step]
            with self.lock:
                below = [level for level in self.levels if level.bit & levels and level.readable]
                indexes: list[LevelIndex[Any]] = [self.host.index, *(lv.index for lv in below)]
                rows = [map(index.__contains__, part) for index in indexes]
                found += map(any, zip(*rows, strict=True))
        return found

    def meta(self, key: BlockKey) -> BlockMeta | None:
        """Return what the hottest level that holds the block knows of it; with the lock held."""
        for level in self._all_levels:
            place = level.index.place(key)
            if place is not None:
                return level.index.meta(place)
        return None

    def where(self, key: BlockKey) -> str | None:
        """Return the hottest level that holds the block or is about to; with the lock held."""
        if key in self.host.index:
            return self.host.name
        return next((level.name for level in self.levels if level.holds(key)), None)

    def bits(self, names: Collection[str]) -> int:
        """Return the levels of these names as a mask; raise KeyError if a name is unknown.

        A level that was detached is still known, and holds nothing.
        """
        return sum(self.known[name] for name in set(names))


def _written_bytes(level: Level) -> int:
    """Return the bytes written to the medium, with the tier's own beside each block."""
    stored, pipeline = level.stats.stored, level.client.pipeline
    plain = 0 if pipeline.is_coded else stored * level.shared.arena.slot_bytes
    return plain + pipeline.encoded_bytes + stored * level.tier.overhead_bytes


def level_counts(level: Level) -> dict[str, Any]:
    """Return the occupancy of a level below host and the state of its client; lock held."""
    client, pipeline = level.client, level.client.pipeline
    passed_s, written = level.shared.clock.now() - level.shared.began_s, _written_bytes(level)
    states = {kind: BREAKER_STATES.index(state) for kind, state in client.states.items()}
    opened = {kind: breaker.opened for kind, breaker in client.breakers.items()}
    return {
        **level.index.as_dict(),
        "capacity": level.capacity_blocks,
        "queued": level.queued,
        "removals": level.removals,
        "queue_age_s": level.queue_age_s,
        "corrupt": pipeline.refused[Outcome.CORRUPT],
        "foreign": pipeline.refused[Outcome.STALE],
        "unreadable": pipeline.refused[Outcome.UNREADABLE],
        "encoded_bytes": pipeline.encoded_bytes,
        "written_bytes": written,
        "written_bytes_day": written / max(passed_s, WEAR_MIN_S) * DAY_S,
        "endurance_bytes": level.endurance_bytes or 0,
        "calls_behind": client.behind,
        "breakers": states,
        "breakers_opened": opened,
        "breaker": max(states.values()),
        "breaker_open": int(any(not client.open(kind) for kind in KINDS)),
        "breaker_opened": sum(opened.values()),
        "left_out": int(client.absent),
    }
