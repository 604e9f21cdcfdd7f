"""What is done to all blocks of a long prompt at once, where each is as the others are.

These are the costs of an engine's own thread, block by block: built-in functions that run over all
of them are three to four times as fast as a loop that asks of each what it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, cast

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.policy.eviction import BULK_MIN
from kvladder.tiers.base import HOST, Item, Shared, Terms
from kvladder.tiers.ladder.host import HostLevel, Route
from kvladder.tiers.ladder.index import Meta, alike
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Arrival, Fetch, Want
from kvladder.tiers.ladder.saving import Saving

if TYPE_CHECKING:
    from kvladder.tiers.ladder.loading.loader import Loader


def all_new(keys: Sequence[BlockKey], host: HostLevel, loader: Loader, saving: Saving) -> bool:
    """Whether none of ``keys`` is in host memory, or on its way there."""
    return host.index.disjoint(keys) and loader.keys().isdisjoint(keys) and saving.disjoint(keys)


def publish_alike(
    keys: Sequence[BlockKey],
    slots: Sequence[Slot],
    host: HostLevel,
    loader: Loader,
    saving: Saving,
) -> bool:
    """Insert all blocks into host, the tail first, if nothing happened to any of them meanwhile.

    They are published in ``saving`` then; else nothing has changed, and False is returned.
    """
    metas = saving.metas(keys, slots) if len(keys) >= BULK_MIN else None
    if (
        metas is None
        or not alike(metas)
        or not host.admits(metas[0])
        or not host.index.disjoint(keys)
        or not loader.keys().isdisjoint(keys)
    ):
        return False
    saving.publish(keys[0])
    host.insert_all(keys[::-1], slots[::-1], metas[0])
    return True


def serve_alike(
    fetch: Fetch, keys: Sequence[BlockKey], host: HostLevel, levels: Sequence[Level]
) -> bool:
    """Pin the next blocks of a fetch as hits, if all of them are in host for good.

    Else nothing has changed, and False is returned; as where a level wants what was hit so often.
    """
    wanting = any(level.rule.when == "commit" and level.rule.min_hits for level in levels)
    if len(keys) < BULK_MIN or wanting or not fetch.levels & HOST:
        return False
    places = host.index.lasting(keys)
    if places is None or len({*places}) < len(places):
        return False
    slots = cast("list[Slot]", list(places))
    host.pin(slots)
    host.index.hit_all(places)
    fetch.fill(slots, host.name)
    return True


def wants_alike(
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
        if places is not None and len({*places}) == len(places):
            positions = range(first, first + len(keys))
            return [*map(Want._make, zip(positions, keys, repeat(level), places, strict=False))]
        if not level.index.disjoint(keys):
            return None
    return None


def land_alike(
    level: Level,
    batch: Sequence[Item],
    host: HostLevel,
    shared: Shared,
    arrivals: dict[BlockKey, Arrival],
) -> bool:
    """Publish what ``level`` delivered of a batch, all of it, if one fetch waits for all of it.

    Else nothing has changed, and False is returned.
    """
    if len(batch) < BULK_MIN:
        return False
    keys = [item.key for item in batch]
    came = [arrivals[key] for key in keys]
    waiters = came[0].waiters
    fetch = waiters[0][0] if waiters else None
    positions: list[int] = []
    for one in came:
        if one.dead or len(one.waiters) != 1 or one.waiters[0][0] is not fetch:
            return False
        positions.append(one.waiters[0][1])
    if fetch is None or not fetch.waits_for_all(positions):
        return False
    if not alike([one.meta for one in came]) or not host.admits(came[0].meta):
        return False
    for key in keys:
        del arrivals[key]
    slots = [item.slot for item in batch]
    shared.arena.share(slots)
    host.insert_all(keys[::-1], slots[::-1], came[0].meta, pins=1)
    fetch.all_arrived(positions, slots, level.name)
    level.stats.hits += len(keys)
    shared.events.stored(host.name, keys)
    return True


def route_of(levels: Sequence[Level], refused: Mapping[BlockKey, int]) -> Route:
    """Where blocks of host still have to be written: levels are asked once for each kind of them.

    ``refused`` has the bits of the levels that did not take a block.
    """
    admitting: dict[tuple[int, int, Terms], Level | None] = {}

    def admits(meta: Meta) -> Level | None:
        kind = meta.floor, meta.hits, meta.terms
        if kind not in admitting:
            admitting[kind] = next((level for level in levels if level.admits(meta)), None)
        return admitting[kind]

    def route(keys: Sequence[BlockKey], metas: Sequence[Meta]) -> list[Level | None]:
        found: list[Level | None] = []
        last: Meta | None = None
        level: Level | None = None
        held: Collection[BlockKey] = ()
        for key, meta in zip(keys, metas, strict=True):
            if meta is not last:  # mostly it is: see ``LevelIndex.metas``
                last, level = meta, admits(meta)
                held = () if level is None else level.index.keys()
            if level is None or key in held or (refused and refused.get(key, 0) & level.bit):
                found.append(None)
            else:
                found.append(level)
        return found

    return route
