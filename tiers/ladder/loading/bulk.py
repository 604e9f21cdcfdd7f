"""What is done to all blocks of a long prompt at once, where each is as the others are.

These are the costs of an engine's own thread, block by block: built-in functions that run over all
of them are three to four times as fast as a loop that asks of each what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, cast

from kvladder.keys import BlockKey
from kvladder.policy.eviction import BULK_MIN
from kvladder.tiers.label import LevelRead
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.index import alike
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Arrival, Want
from kvladder.tiers.ladder.shelf import Shared


def wants_bulk(
    keys: Sequence[BlockKey],
    first: int,
    host: HostLevel,
    arrivals: Mapping[BlockKey, Arrival],
    levels: Sequence[Level],
) -> list[Want] | None:
    """Where the next blocks of a prefix are, if one level has all of them for good.

    None if that is not so, or if one of them is in host or a hotter level, or on its way there.
    ``first`` is the position of the first of them.
    """
    if len(keys) < BULK_MIN or not host.index.disjoint(keys):
        return None
    if not arrivals.keys().isdisjoint(keys):
        return None
    for level in levels:
        places = level.index.lasting(keys)
        if places is not None:
            positions = range(first, first + len(keys))
            wants = zip(positions, keys, repeat(level), places, strict=False)
            make = cast("Any", tuple.__new__)  # pyright: ignore[reportUnknownMemberType] - in C
            return [*map(make, repeat(Want), wants)]
        if not level.index.disjoint(keys):
            return None
    return None


def land_bulk(
    level: Level,
    batch: Sequence[LevelRead],
    host: HostLevel,
    shared: Shared,
    arrivals: dict[BlockKey, Arrival],
) -> bool:
    """Publish what ``level`` delivered of a batch, all of it, if one fetch waits for all of it.

    Else nothing has changed, and False is returned.
    """
    if len(batch) < BULK_MIN:
        return False
    keys = [block.key for block in batch]
    came = [arrivals[key] for key in keys]
    waiters = came[0].waiters
    fetch = waiters[0][0] if waiters else None
    positions: list[int] = []
    for one in came:
        if one.dead or len(one.waiters) != 1 or one.waiters[0][0] is not fetch:
            return False
        positions.append(one.waiters[0][1])
    if fetch is None or not fetch.waits_for(positions):
        return False
    if not alike([one.meta for one in came]) or not host.admits(came[0].meta):
        return False
    for key in keys:
        del arrivals[key]
    slots = [block.slot for block in batch]
    shared.arena.share(slots)
    host.hold(keys[::-1], slots[::-1], came[0].meta, pins=1)
    fetch.arrived(positions, slots, level.name)
    level.stats.hits += len(keys)
    shared.events.stored(host.name, keys)
    return True
