"""What is done to all blocks of a long prompt at once, where each is as the others are.

These are the costs of an engine's own thread, block by block: built-in functions that run over all
of them are three to four times as fast as a loop that asks of each what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.policy.eviction import BULK_MIN
from kvladder.tiers.fetch import Fetch
from kvladder.tiers.host import HostLevel
from kvladder.tiers.index import Meta
from kvladder.tiers.level import Level
from kvladder.tiers.saving import Saving
from kvladder.tiers.terms import HOST

if TYPE_CHECKING:
    from kvladder.tiers.loader import Loader


def all_new(keys: Sequence[BlockKey], host: HostLevel, loader: Loader, saving: Saving) -> bool:
    """Whether none of ``keys`` is in host memory, or on its way there."""
    return host.index.disjoint(keys) and loader.keys().isdisjoint(keys) and saving.disjoint(keys)


def alike(metas: Sequence[Meta]) -> bool:
    """Whether all of them are the same, as they are where nothing was said of any."""
    return bool(metas) and metas.count(metas[0]) == len(metas)


def publish_alike(
    keys: Sequence[BlockKey],
    slots: Sequence[Slot],
    host: HostLevel,
    loader: Loader,
    saving: Saving,
) -> bool:
    """Insert all blocks into host, the tail first, if nothing happened to any of them meanwhile.

    They leave ``saving`` then; else nothing has changed, and False is returned.
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
    saving.drop(keys)
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
