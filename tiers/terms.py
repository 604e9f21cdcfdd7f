"""What a request may say of its blocks: where they may be, until when, and whose they are."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from kvladder.tiers.base import Clock, Item

ANYWHERE = -1
"""A set of levels as a bit mask, 1 for host, 2 for the first below it: all of them."""
HOST = 1

_HERE, _HOST_TOO, _ENDS = 1, 2, 4


class Terms(NamedTuple):
    """Travels with a block, beside its priority."""

    levels: int = ANYWHERE
    """Where it may be stored."""
    expires_s: float = inf
    """Loop time at which every level forgets it."""
    salt: bytes = b""
    """Digest of its request's cache salt, 8 bytes; empty without one."""

    def last(self, clock: Clock) -> bool:
        """Whether the block need not be forgotten yet."""
        return self.expires_s == inf or self.expires_s > clock.now()

    def merged(self, other: Terms) -> Terms:
        """What a block may that two requests offer: all that one of them allows."""
        return Terms(
            self.levels | other.levels,
            max(self.expires_s, other.expires_s),
            self.salt or other.salt,
        )

    def packed(self) -> int:
        """``Item.terms``: what of it outlives the process. Which level is which may change."""
        bits = _ENDS if self.expires_s != inf else 0
        if self.levels != ANYWHERE:
            bits |= _HERE | (_HOST_TOO if self.levels & HOST else 0)
        return bits

    @classmethod
    def unpacked(cls, item: Item, here: int, behind_s: float) -> Terms:
        """The terms of a block that the level with the bit ``here`` recovered.

        Of several levels that it might be stored in, this one and host are left. ``behind_s`` is
        loop time minus wall time.
        """
        levels, expires_s = ANYWHERE, inf
        if item.terms & _HERE:
            levels = here | (HOST if item.terms & _HOST_TOO else 0)
        if item.terms & _ENDS and item.expires_wall_s is not None:
            expires_s = item.expires_wall_s + behind_s
        return cls(levels, expires_s, item.salt)


NO_TERMS = Terms()
