"""The calls between a cache and the exporter's process. Both map the arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from kvladder.arena import Arena
from kvladder.children.interface import Interface
from kvladder.children.pipe import Pipe
from kvladder.errors import TierError
from kvladder.export.offers import OfferCalls, Pinned, Surveyed
from kvladder.tiers.label import Facts


class Serve(msgspec.Struct, frozen=True, array_like=True):
    """The settings of the exporter's process."""

    arena: tuple[int, int, int] = (0, 0, 0)
    """Descriptor, number of slots, bytes of a slot."""
    block_bytes_max: int = 0
    writable: bool = False
    guarded: bool = True
    """True if clients can write to granted slots only."""
    listen: str = ""
    """Host and port."""
    keys: str = ""
    transports: str = "tcp"
    interfaces: str = "all"
    roster: str = ""
    host: str = ""
    """Host name or address that clients use to connect."""
    name: str = ""
    namespace: bytes = b""
    """Namespace of an engine and of its clients; empty for a server."""


class ExporterCalls(Protocol):
    """The exporter's process. ``serve`` comes first."""

    async def serve(self, told: Serve) -> str:
        """Begin to serve clients with these settings; return the address."""
        ...

    def close(self) -> None:
        """Disconnect the clients and exit."""
        ...


class ExportListener(Protocol):
    """The cache's process; it is notified."""

    def said(self, text: str) -> None:
        """Take a message to the operator of the cache."""
        ...

    def counted(self, counts: dict[str, int | dict[str, int]]) -> None:
        """Take the exporter's gauges and counters, sent at intervals; some are by client."""
        ...


# mypy allows no protocol where a class is expected, since the class might be instantiated
EXPORTER: Final = Interface(ExporterCalls)  # type: ignore[type-abstract]
LISTENER: Final = Interface(ExportListener)  # type: ignore[type-abstract]
OFFERS: Final = Interface(OfferCalls, one_way=["release"])  # type: ignore[type-abstract]


class FarOffers:
    """``Offers`` of a cache in another process, called over a pipe by the exporter's process."""

    def __init__(self, arena: Arena, told: Serve, pipe: Pipe) -> None:
        self.arena = arena
        self.block_bytes_max = told.block_bytes_max
        self.writable = told.writable
        self._cache = pipe.stub(OFFERS)
        self.say = pipe.stub(LISTENER).said
        """Sends a message to the operator of the cache."""
        self._open: dict[tuple[int, int], list[int]] = {}
        """Slots that clients may write to, by session and operation."""

    async def hello(self, session: int, namespace: bytes, block_bytes: int, client: str) -> str:
        """See ``Offers``."""
        return await self._cache.hello(session, namespace, block_bytes, client)

    async def have(self, session: int, keys: Sequence[bytes]) -> bytes:
        """See ``Offers``."""
        return await self._cache.have(session, keys)

    async def pin(self, session: int, op: int, keys: Sequence[bytes]) -> Sequence[Pinned | None]:
        """See ``Offers``."""
        return await self._cache.pin(session, op, keys)

    async def release(self, session: int, op: int) -> None:
        """See ``Offers``. Does not wait; later calls are answered after it has been done."""
        await self._cache.release(session, op)

    async def grant(
        self,
        session: int,
        op: int,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        facts: Sequence[Facts],
    ) -> Sequence[int]:
        """See ``Offers``. Only granted slots are writable, until commit or abort.

        Raises TierError also if the kernel cannot keep more ranges with different protection.
        """
        slots = await self._cache.grant(session, op, keys, lengths, facts)
        granted = self._open[session, op] = [slot for slot in slots if slot >= 0]
        try:
            self.arena.allow_writes(granted)
        except OSError as error:
            raise TierError(f"cannot make slots writable: {error.strerror}") from error
        return slots

    def _shut(self, session: int, op: int) -> None:
        """Forbid writes to the slots of a grant, before they are checked or reused."""
        try:
            self.arena.forbid_writes(self._open.pop((session, op), ()))
        except OSError as error:  # the exit unmaps all slots
            raise SystemExit(f"cannot make slots read-only again: {error}") from error

    async def commit(self, session: int, op: int, labels: Sequence[bytes]) -> Sequence[bool]:
        """See ``Offers``."""
        self._shut(session, op)
        return await self._cache.commit(session, op, labels)

    async def abort(self, session: int, op: int) -> None:
        """See ``Offers``."""
        self._shut(session, op)
        await self._cache.abort(session, op)

    async def remove(self, session: int, keys: Sequence[bytes]) -> None:
        """See ``Offers``."""
        await self._cache.remove(session, keys)

    async def purge(self, session: int, salt: bytes | None) -> int:
        """See ``Offers``."""
        return await self._cache.purge(session, salt)

    async def survey(self, session: int, of: int, salt: bytes | None) -> Surveyed:
        """See ``Offers``."""
        return await self._cache.survey(session, of, salt)

    async def gone(self, session: int) -> None:
        """See ``Offers``."""
        for number, op in [one for one in self._open if one[0] == session]:
            self._shut(number, op)
        await self._cache.gone(session)
