"""Does what an order says with blocks that are in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvladder.hints.outcomes import end_s
from kvladder.hints.protocol import (
    DemoteHint,
    Order,
    PinHint,
    PrefetchHint,
    RefusedHint,
    RetainHint,
    ShareHint,
)
from kvladder.hints.rankings import clipped
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers.ladder.upkeep.commands import Moved, Ranking

OUT = "out"
"""Name of no level: where demoted blocks are forgotten."""
Move: TypeAlias = DemoteHint | ShareHint


def require(manager: CacheManager, order: Move) -> None:
    """Raise ``RefusedHint`` if an order names a level that cannot take blocks for it."""
    if isinstance(order, DemoteHint):
        names = [*list(manager.ladder.indexes)[1:], OUT]
        if order.to is not None and order.to not in names:
            expected = ", ".join(names)
            raise RefusedHint(f"no level below host has the name {order.to!r}: expected {expected}")
        return
    shared = manager.commands.shared_levels
    if not shared:
        raise RefusedHint("no level is shared: expected a Redis, NIXL, Mooncake or object tier")
    if order.to is not None and order.to not in shared:
        raise RefusedHint(f"level {order.to!r} is not shared: expected {' or '.join(shared)}")


def move(manager: CacheManager, order: Move, keys: Sequence[BlockKey], salt: bytes) -> Moved:
    """Move or copy blocks that are in host memory, as an order says.

    An order that has waited may name a level that is gone: its blocks are then refused.
    """
    commands = manager.commands
    try:
        require(manager, order)
    except RefusedHint:
        return Moved(refused=len(keys))
    if isinstance(order, ShareHint):
        return commands.send(keys, salt, order.to or commands.shared_levels[0])
    if order.to == OUT:
        return commands.drop(keys, salt)
    return commands.demote(keys, salt, order.to)


def do_late(
    manager: CacheManager, order: Order, keys: Sequence[BlockKey], salt: bytes, since_s: float
) -> Moved:
    """Do an order about a request that finished at the loop time ``since_s``."""
    match order:
        case PinHint() | RetainHint():
            asked = order.priority if isinstance(order, RetainHint) else PRIORITY_MAX
            (priority, within_s), _ = clipped(manager.limits, asked, order.ttl_s)
            until_s = end_s(priority, within_s, since_s)
            (moved,) = manager.commands.rank([Ranking(keys, salt, priority, until_s, True)])
            return moved
        case DemoteHint() | ShareHint():
            return move(manager, order, keys, salt)
        case PrefetchHint():  # the request has fetched its blocks itself
            return Moved()
