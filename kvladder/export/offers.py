"""The interface of a cache to the process that serves its clients."""

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
    """A block that stays in its slot until it is released."""

    slot: Slot
    length: int
    """Bytes of the block, from the beginning of the slot."""
    label: bytes
    """Label of the block, ``LABEL_BYTES`` long."""


class Surveyed(NamedTuple):
    """Some of the blocks that a survey found."""

    keys: list[bytes]
    more: bool
    """True if there are others."""


class OfferCalls(Protocol):
    """The calls of ``Offers``, which another process can make. All are made on one event loop.

    ``session`` is the number of a connected client, ``op`` that of one of its operations. Numbers
    are not reused. A key is the 32 bytes that the client sent. The cache decides which of its
    blocks that is, and may use the arguments of ``hello`` for it. Sequences of answers have the
    length and the order of the keys.

    Each ``pin`` is followed by one ``release``, each ``grant`` by one ``commit`` or ``abort``. That
    holds for failed and cancelled calls too, and never before they have ended. Calls raise
    TierError if the cache cannot be asked now. ``gone`` releases all that a session holds.
    """

    async def hello(self, session: int, namespace: bytes, block_bytes: int, client: str) -> str:
        """Begin a session of a client; return why it is refused, or an empty string.

        ``client`` is its name for operators; several sessions may have the same.
        """
        ...

    async def have(self, session: int, keys: Sequence[bytes]) -> bytes:
        """Return a byte for each key: 1 if its block could be pinned now, whatever the others."""
        ...

    async def pin(self, session: int, op: int, keys: Sequence[bytes]) -> Sequence[Pinned | None]:
        """Pin the blocks that exist until ``release``; read colder levels for them.

        Answers may be fewer than keys: only the first keys that there is room for. The caller asks
        for the others after ``release``.
        """
        ...

    async def release(self, session: int, op: int) -> None:
        """Release the slots of this ``pin``; no process reads from them any more."""
        ...

    async def grant(
        self,
        session: int,
        op: int,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        facts: Sequence[Facts],
    ) -> Sequence[int]:
        """Lease slots that the client may write to until ``commit`` or ``abort``.

        Return for each key its slot, or REFUSED, HAVE, or LATER. LATER means that there will be
        room once these slots are committed.
        """
        ...

    async def commit(self, session: int, op: int, labels: Sequence[bytes]) -> Sequence[bool]:
        """Publish what was written; return for each block whether it is in the cache now.

        No process may write to the slots any more. A label must match its block in key, namespace,
        length and checksum. Labels of blocks without a slot are empty.
        """
        ...

    async def abort(self, session: int, op: int) -> None:
        """Release the slots of this ``grant``; no process may write to them any more."""
        ...

    async def remove(self, session: int, keys: Sequence[bytes]) -> None:
        """Forget these blocks; missing ones are ignored."""
        ...

    async def purge(self, session: int, salt: bytes | None) -> int:
        """Forget what clients of this namespace put, or only for one salt; return the number."""
        ...

    async def survey(self, session: int, of: int, salt: bytes | None) -> Surveyed:
        """Return the next blocks of a client's namespace, or of one salt, under the client's keys.

        ``of`` is the number of the survey's first operation. Its first call decides which blocks
        are looked at; those that have gone since are left out.
        """
        ...

    async def gone(self, session: int) -> None:
        """End the session of a client that has gone and free all that it held.

        Neither the client nor its transfers may touch a slot any more.
        """
        ...


class Offers(OfferCalls, Protocol):
    """A cache as its exporter sees it."""

    arena: Arena
    """The arena, mapped in this process; ``pin`` and ``grant`` return its slots."""
    block_bytes_max: int
    """Bytes of the longest block that fits into a slot, without its label."""
    writable: bool
    """True if clients may be granted slots."""
