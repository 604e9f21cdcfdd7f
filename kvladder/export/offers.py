"""What a cache offers to the process that serves its clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvladder.arena import Arena, Slot
from kvladder.tiers.label import Facts
from kvladder.tiers.nixl.messages import BATCH_MAX as BATCH_MAX  # keys of pin and grant
from kvladder.tiers.nixl.messages import HAVE as HAVE
from kvladder.tiers.nixl.messages import LATER as LATER
from kvladder.tiers.nixl.messages import LOOKUP_MAX as LOOKUP_MAX  # keys of have and remove
from kvladder.tiers.nixl.messages import REFUSED as REFUSED


class Pinned(NamedTuple):
    """A block that stays where it is until it is released."""

    slot: Slot
    length: int
    """Bytes at the beginning of the slot."""
    label: bytes
    """What lies beside them, ``LABEL_BYTES`` long."""


class Offers(Protocol):
    """A cache as its exporter sees it. All is called on one event loop.

    ``session`` numbers a client that is connected, ``op`` one of its operations; neither is used
    again. A key is the 32 bytes that the client named; in which way it names a block of this cache
    is the cache's affair, and may depend on what ``hello`` was told. Sequences of answers have the
    length and the order of the keys.

    For each ``pin`` there is one ``release``, for each ``grant`` one ``commit`` or ``abort``, also
    if the call failed or was cancelled, and never before it ended. Calls raise TierError if the
    cache cannot be asked now; whatever a session holds, ``gone`` lets go of.
    """

    arena: Arena
    """Mapped here; holds the slots that ``pin`` and ``grant`` name."""
    block_bytes_max: int
    """The longest block that fits into a slot, its label apart."""
    writable: bool
    """Whether anything is ever granted."""

    async def hello(self, session: int, namespace: bytes, block_bytes: int) -> str:
        """Begin a session of a client with this namespace; why it is refused, or nothing."""
        ...

    async def have(self, session: int, keys: Sequence[bytes]) -> bytes:
        """For each key a byte, 1 if its block could be pinned now: of a set, not of a prefix."""
        ...

    async def pin(self, session: int, op: int, keys: Sequence[bytes]) -> Sequence[Pinned | None]:
        """Hold the blocks that are there, until ``release``; colder levels are read for them.

        Of the first keys, as many as there is room for: the others are asked for after that.
        """
        ...

    async def release(self, session: int, op: int) -> None:
        """Nobody reads from the slots of this ``pin`` any more."""
        ...

    async def grant(
        self,
        session: int,
        op: int,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        facts: Sequence[Facts],
    ) -> Sequence[int]:
        """Slots for the client to write to, until ``commit`` or ``abort``; REFUSED, or HAVE.

        LATER if there will be room once these slots are committed.
        """
        ...

    async def commit(self, session: int, op: int, labels: Sequence[bytes]) -> Sequence[bool]:
        """Publish what was written; whether each is there now. Nobody writes to it any more.

        A label has to be that of the block: key, namespace, length, and checksum of the bytes.
        Those of blocks that were granted no slot are empty.
        """
        ...

    async def abort(self, session: int, op: int) -> None:
        """Let go of the slots of this ``grant``, to which nobody writes any more."""
        ...

    async def remove(self, session: int, keys: Sequence[bytes]) -> None:
        """Forget these blocks; those that are not there are ignored."""
        ...

    async def purge(self, session: int, salt: bytes | None) -> int:
        """Forget what clients of this namespace put, or what they put for one salt; how many."""
        ...

    async def gone(self, session: int) -> None:
        """The client is gone, and nothing of it touches a slot: all that it held is free."""
        ...
