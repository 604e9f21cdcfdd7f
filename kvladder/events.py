"""Events: which blocks were stored in or removed from a level, as plain objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvladder.keys import BlockKey

Reason = Literal["evicted", "removed", "expired", "lost"]


class Stored(NamedTuple):
    """These blocks are available from ``level`` from now on."""

    level: str
    keys: tuple[BlockKey, ...]


class Removed(NamedTuple):
    """These blocks are no longer available from ``level``.

    Evicted by the cache, removed by the user, expired by time, or lost by the tier.
    """

    level: str
    keys: tuple[BlockKey, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Overflow:
    """``lost`` events did not fit into the buffer; the events after this one are complete again."""

    lost: int


Event = Stored | Removed | Overflow
