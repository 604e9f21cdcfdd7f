"""What is done to all blocks of a long prompt at once, where each is as the others are.

These are the costs of an engine's own thread, block by block: built-in functions that run over all
of them are three to four times as fast as a loop that asks of each what it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.tiers.host import HostLevel
from kvladder.tiers.index import Meta
from kvladder.tiers.loader import Loader

Saving = dict[BlockKey, tuple[Slot, Meta]]
"""Blocks that are being copied out of an engine: their slots, and what goes with them."""


def all_new(keys: Sequence[BlockKey], host: HostLevel, loader: Loader, saving: Saving) -> bool:
    """Whether none of ``keys`` is in host memory, or on its way there."""
    return (
        host.index.disjoint(keys)
        and loader.keys().isdisjoint(keys)
        and saving.keys().isdisjoint(keys)
    )


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
    found = [saving.pop(key, None) for key in keys]
    known = [one for one in found if one is not None]
    if known and len(known) == len(keys):
        reserved, metas = zip(*known, strict=True)
        if (
            list(reserved) == list(slots)
            and alike(metas)
            and host.admits(metas[0])
            and host.index.disjoint(keys)
            and loader.keys().isdisjoint(keys)
        ):
            host.insert_all(keys[::-1], slots[::-1], metas[0])
            return True
    saving.update((key, one) for key, one in zip(keys, found, strict=True) if one is not None)
    return False
