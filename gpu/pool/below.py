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


class Known(NamedTuple):
    """What the tiers know of a block that a pool does not know."""

    priority: int = PRIORITY_DEFAULT
    until_s: float = inf
    """When the priority reverts to the default, in the pool's time; inf for never."""
    hits: int = 0
    """How often it was used again, without the use that claimed it."""


class Taken(NamedTuple):
    """The tiers took a victim's bytes over, or had them."""

    level: str
    """Where it can be got from."""
    ticket: Ticket | None = None
    """The copy that still reads the device slot; None if the slot may be written at once."""


class Arrival(NamedTuple):
    """Blocks are being brought to the device."""

    ticket: Ticket | None = None
    """The copy that still writes the device slots; None if the bytes are there."""
    kept: bool = False
    """Whether the tiers keep their copies, so that these blocks need no offload later."""


class Below(Protocol):
    """The tiers as a pool sees them. Every call is synchronous and returns at once.

    A tier may forget, it must never lie. The answers come back by ``BlockPool.landed``,
    ``forgotten`` and ``moved``, called on the pool's thread.
    """

    @property
    def capacities(self) -> Mapping[str, int]:
        """Blocks per level, hottest first."""
        ...

    def offload(self, victims: Sequence[Victim]) -> Sequence[Taken | None]:
        """These leave the device: take them over, as far as rules and room allow; an answer each.

        What is held already was used on the device and may have been retained anew: it gets the
        victim's priority, floor, time and hits, is the most recently used, and leaves the levels
        whose thresholds it does not reach any more. Parents come before their children. A slot is
        read until its ticket lands; of what is answered None the bytes are forgotten.
        """
        ...

    def where(self, keys: Sequence[BlockKey]) -> Sequence[str | None]:
        """The level that holds each of ``keys``, or None; changes nothing, promises nothing."""
        ...

    def claim(self, keys: Sequence[BlockKey], salt: str = "") -> Sequence[str]:
        """The levels of the leading ``keys`` that can be onboarded now, as many as there are.

        ``salt`` is bound into the keys. They stay until ``onboard`` or ``disclaim`` is called for
        each.
        """
        ...

    def known(self, keys: Sequence[BlockKey]) -> Sequence[Known]:
        """What is known of each of these, which were claimed and are new to the pool."""
        ...

    def disclaim(self, keys: Sequence[BlockKey]) -> None:
        """These claimed blocks are not wanted after all."""
        ...

    def onboard(
        self, keys: Sequence[BlockKey], slots: Sequence[DeviceSlot], *, keep: bool
    ) -> Arrival:
        """Begin to copy ``keys``, which were claimed, to these device slots.

        With ``keep`` the tiers must keep their copies, else they may give them up when the bytes
        have arrived. Copies that they say they keep count as theirs if the bytes do not arrive.
        """
        ...

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forget these blocks; no copy under way brings them back."""
        ...

    def clear(self) -> None:
        """Forget every block."""
        ...
