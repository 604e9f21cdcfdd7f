"""Interface of a block pool to the tiers below it; the device cache implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from kvladder.gpu.tree.names import DeviceSlot, Ticket
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT


class Victim(NamedTuple):
    """A block that leaves the device, with the data that travels with it."""

    key: BlockKey
    slot: DeviceSlot
    tokens: int
    """Number of tokens in it; fewer than a whole block's for the tail of a prompt."""
    priority: int
    floor: int
    """The lowest priority among the block and its ancestors, see ``OffloadRule``."""
    hits: int
    until_s: float
    """Time in the pool's clock when the priority reverts to the default; inf for never."""
    salt: str = ""
    """Cache salt of the request that made it."""


class BlockBelow(NamedTuple):
    """Data that the tiers have about a block that is unknown to the pool."""

    priority: int = PRIORITY_DEFAULT
    until_s: float = inf
    """Time in the pool's clock when the priority reverts to the default; inf for never."""
    hits: int = 0
    """Number of times it was reused, not counting the use that claimed it."""


class Taken(NamedTuple):
    """Answer for a victim: the tiers take its bytes over, or had them already."""

    ticket: Ticket | None = None
    """Copy that still reads the device slot; None if the slot may be written at once."""


class Below(Protocol):
    """The tiers as an engine's pools see them. Every call is synchronous and returns at once.

    A tier may forget; it must never lie. It reports by ``BlockPool.landed`` and ``forgotten``, on
    the pool's thread and between the pool's calls, never during one.
    """

    @property
    def capacities(self) -> Mapping[str, int]:
        """Blocks per level, hottest first."""
        ...

    def offload(self, group: int, victims: Sequence[Victim]) -> Sequence[Taken | None]:
        """Take over blocks that leave a pool, as far as rules and room allow; one answer for each.

        A block that the tiers hold already was used on the device and may have a new retention. It
        gets the victim's priority, floor, time and hits, becomes the most recently used, and leaves
        levels with thresholds that it does not reach any more. Parents come before their children.
        A slot is read until its ticket lands. For an answer of None, the bytes are lost.
        """
        ...

    def holds(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return whether a level holds each of ``keys``; changes nothing and promises nothing."""
        ...

    def claim(self, keys: Sequence[BlockKey], salt: str = "") -> int:
        """Claim the longest leading run of ``keys`` that can be onboarded; return its length.

        ``salt`` is bound into the keys. Claimed blocks stay until ``onboard`` or ``disclaim`` is
        called for each.
        """
        ...

    def known(self, keys: Sequence[BlockKey]) -> Sequence[BlockBelow]:
        """Return what the tiers know of these claimed blocks, which are new to the pool."""
        ...

    def disclaim(self, keys: Sequence[BlockKey]) -> None:
        """Release claimed blocks that are not wanted after all."""
        ...

    def onboard(
        self, group: int, keys: Sequence[BlockKey], slots: Sequence[DeviceSlot]
    ) -> Ticket | None:
        """Begin to copy claimed blocks to these device slots.

        Return the copy that still writes the slots, or None if the bytes are already in place. The
        tiers keep their blocks, or report later that they do not.
        """
        ...

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove these blocks; no copy in flight may bring them back."""
        ...

    def clear(self) -> None:
        """Remove every block."""
        ...
