"""What a block pool needs of the tiers below it, given to it by whoever has both in view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from kvladder.gpu.tree.names import DeviceSlot, Ticket
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT


class Victim(NamedTuple):
    """A block that leaves the device, and what travels with it."""

    key: BlockKey
    slot: DeviceSlot
    tokens: int
    """How many tokens it holds; less than a whole block for the tail of a prompt."""
    priority: int
    floor: int
    """The lowest priority among the block and its ancestors, see ``OffloadRule``."""
    hits: int
    until_s: float
    """When the priority reverts to the default, in the pool's time; inf for never."""
    salt: str = ""
    """The cache salt of the request that it was made for."""


class BlockBelow(NamedTuple):
    """What the tiers know of a block that a pool does not know."""

    priority: int = PRIORITY_DEFAULT
    until_s: float = inf
    """When the priority reverts to the default, in the pool's time; inf for never."""
    hits: int = 0
    """How often it was used again, without the use that claimed it."""


class Taken(NamedTuple):
    """The tiers took a victim's bytes over, or had them."""

    ticket: Ticket | None = None
    """The copy that still reads the device slot; None if the slot may be written at once."""


class Below(Protocol):
    """The tiers as the pools of an engine see them. Every call is synchronous and returns at once.

    A tier may forget, it must never lie. The answers come back by ``BlockPool.landed`` and
    ``forgotten``, on the pool's thread and between its calls, never during one.
    """

    @property
    def capacities(self) -> Mapping[str, int]:
        """Blocks per level, hottest first."""
        ...

    def offload(self, group: int, victims: Sequence[Victim]) -> Sequence[Taken | None]:
        """These leave a pool: take them over, as far as rules and room allow; an answer each.

        What is held already was used on the device and may have been retained anew: it gets the
        victim's priority, floor, time and hits, is the most recently used, and leaves the levels
        whose thresholds it does not reach any more. Parents come before their children. A slot is
        read until its ticket lands; of what is answered None the bytes are forgotten.
        """
        ...

    def holds(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Whether a level holds each of ``keys``; changes nothing, promises nothing."""
        ...

    def claim(self, keys: Sequence[BlockKey], salt: str = "") -> int:
        """How many of the leading ``keys`` can be onboarded now.

        ``salt`` is bound into the keys. They stay until ``onboard`` or ``disclaim`` is called for
        each.
        """
        ...

    def known(self, keys: Sequence[BlockKey]) -> Sequence[BlockBelow]:
        """What is known of each of these, which were claimed and are new to the pool."""
        ...

    def disclaim(self, keys: Sequence[BlockKey]) -> None:
        """These claimed blocks are not wanted after all."""
        ...

    def onboard(
        self, group: int, keys: Sequence[BlockKey], slots: Sequence[DeviceSlot]
    ) -> Ticket | None:
        """Begin to copy ``keys``, which were claimed, to these device slots.

        The copy that still writes the slots, None if the bytes are there. The tiers keep theirs, or
        say later that they do not.
        """
        ...

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forget these blocks; no copy under way brings them back."""
        ...

    def clear(self) -> None:
        """Forget every block."""
        ...
