"""A cache as its exporter sees it: what clients read and hold. An engine's is read-only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvladder.arena import Slot
from kvladder.export.offers import REFUSED, Pinned, Surveyed
from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.manager import BatchedFetch, CacheManager, SetFetch
from kvladder.metrics import shown, summed
from kvladder.tiers.context import Blocking
from kvladder.tiers.label import Facts, Labels
from kvladder.tiers.ladder.batched import PINNED_MAX
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.writing.transit import facts_of

GRANTED_MAX: Final = 0.25
"""Highest share of the slots that one session may hold granted and not committed."""


@dataclass
class GrantBatch:
    """Blocks of a grant with equal metadata, and their slots."""

    salt: bytes
    positions: list[int]
    names: list[BlockKey]
    slots: list[Slot]


@dataclass
class Granted:
    """Blocks that a client offered, and the slots that it may write them to."""

    keys: Sequence[bytes]
    lengths: Sequence[int]
    lots: list[GrantBatch]
    later: set[int] = field(default_factory=set[int])
    """Positions of blocks for which there is no room now."""

    @property
    def slots(self) -> list[Slot]:
        """All granted slots."""
        return [slot for lot in self.lots for slot in lot.slots]

    @property
    def end(self) -> int:
        """Number of blocks dealt with: 0 if only lack of room left them without slots, else all."""
        return 0 if self.later and not self.slots else len(self.keys)


@dataclass
class ClientHoldings:
    """A client's terms, and the slots that it has pinned or been granted, by operation."""

    namespace: bytes
    block_bytes: int
    name: str
    """Name of the client for operators."""
    pins: dict[int, BatchedFetch] = field(default_factory=dict[int, BatchedFetch])
    grants: dict[int, Granted] = field(default_factory=dict[int, Granted])
    surveys: dict[int, deque[BlockKey]] = field(default_factory=dict[int, deque[BlockKey]])
    """Blocks that each survey has yet to look at, by its number."""

    @property
    def pinned(self) -> int:
        """Number of slots that are pinned, or admitted for its pins."""
        return sum(paced.held for paced in [*self.pins.values()])

    @property
    def granted(self) -> int:
        """Number of slots that it may write to."""
        return sum(len(granted.slots) for granted in [*self.grants.values()])


class CacheOffers(ABC):
    """The blocks of a cache. The cache must stay open meanwhile; all calls are made on its loop.

    Parameters
    ----------
    run_blocking:
        Runs work that reads all bytes of blocks.
    levels:
        Names of the levels that blocks are read from, besides host; None for all.
    """

    def __init__(
        self,
        manager: CacheManager,
        run_blocking: Blocking,
        *,
        levels: Collection[str] | None = None,
        writable: bool,
        block_bytes_max: int,
    ) -> None:
        self.arena = manager.arena
        self.namespace = b"" if writable else manager.namespace
        """The namespace whose clients it serves; empty if it serves any namespace."""
        self.writable = writable
        self.block_bytes_max = block_bytes_max
        self._manager = manager
        self._run_blocking = run_blocking
        self._levels = levels
        self._sessions: dict[int, ClientHoldings] = {}
        self._counts = dict.fromkeys(("refused", "sent", "taken", "lies"), 0)

    @abstractmethod
    def _refusal(self, namespace: bytes, block_bytes: int) -> str:
        """Return why a client is refused; an empty string if it is not."""

    @abstractmethod
    def _names(self, session: ClientHoldings, keys: Sequence[bytes]) -> list[BlockKey]:
        """Return the keys of this cache for a client's keys."""

    @abstractmethod
    async def _labelled(
        self, session: ClientHoldings, found: Sequence[tuple[BlockKey, Slot | None]]
    ) -> list[Pinned | None]:
        """Return the pinned blocks with their labels; None where there is no slot."""

    @property
    def _pinned(self) -> int:
        """Number of slots that clients have pinned, or that are admitted for their pins."""
        return sum(client.pinned for client in self._sessions.values())

    def counts(self) -> dict[str, Any]:
        """Return the numbers of sessions and of slots that they hold, and the counters."""
        pinned, granted = self.held_by()
        return {
            "sessions": len(self._sessions),
            "pinned": sum(pinned.values()),
            "granted": sum(granted.values()),
            "client_slots": {
                kind: found
                for kind, held in (("pinned", pinned), ("granted", granted))
                if (found := shown(held))
            },
            **self._counts,
        }

    def held_by(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the number of slots that clients have pinned, and were granted, by name."""
        sessions = [*self._sessions.values()]
        return (
            summed((client.name, client.pinned) for client in sessions),
            summed((client.name, client.granted) for client in sessions),
        )

    @property
    def granted_max(self) -> int:
        """Highest number of slots that one session may hold granted and not committed."""
        return max(1, int(GRANTED_MAX * self.arena.slots)) if self.writable else 0

    @property
    def pinned_max(self) -> int:
        """Highest number of slots that all sessions together may pin."""
        return max(1, int(PINNED_MAX * self.arena.slots))

    async def hello(self, session: int, namespace: bytes, block_bytes: int, client: str) -> str:
        """See ``Offers``."""
        why = self._refusal(namespace, block_bytes)
        if why:
            self._counts["refused"] += 1
        else:
            self._sessions[session] = ClientHoldings(namespace, block_bytes, client)
        return why

    async def have(self, session: int, keys: Sequence[bytes]) -> bytes:
        """See ``Offers``."""
        known = self._sessions.get(session)
        if known is None:
            return bytes(len(keys))
        return bytes(self._manager.holding(self._names(known, keys), levels=self._levels))

    async def pin(self, session: int, op: int, keys: Sequence[bytes]) -> Sequence[Pinned | None]:
        """See ``Offers``."""
        known = self._sessions.get(session)
        if known is None:
            return [None] * len(keys)
        names = self._names(known, keys)
        paced = self._manager.fetch_paced(names, whole_set=True, levels=self._levels)
        known.pins[op] = paced
        await paced.settle()
        found = paced.fetch.found if isinstance(paced.fetch, SetFetch) else {}
        piece = names[: paced.count]
        pinned = await self._labelled(known, [(name, found.get(name)) for name in piece])
        self._counts["sent"] += len(pinned) - pinned.count(None)
        return pinned

    async def release(self, session: int, op: int) -> None:
        """See ``Offers``."""
        known = self._sessions.get(session)
        if known is not None and (paced := known.pins.pop(op, None)) is not None:
            paced.close()

    async def gone(self, session: int) -> None:
        """See ``Offers``."""
        known = self._sessions.pop(session, None)
        if known is not None:
            for paced in known.pins.values():
                paced.close()
            for granted in known.grants.values():
                self._abandon(granted)

    async def all_gone(self) -> None:
        """End all sessions and free their slots; no process may touch the slots any more."""
        for session in [*self._sessions]:
            await self.gone(session)

    def _abandon(self, granted: Granted) -> None:
        for lot in granted.lots:
            self._manager.ladder.abandon(lot.names, lot.slots)

    # ---- writes of clients

    async def grant(
        self,
        session: int,
        op: int,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        facts: Sequence[Facts],
    ) -> Sequence[int]:
        """Refuse all blocks, see ``Offers``; a writable subclass overrides this."""
        return [REFUSED] * len(keys)

    async def commit(self, session: int, op: int, labels: Sequence[bytes]) -> Sequence[bool]:
        """Publish no block, see ``Offers``: nothing was granted."""
        return [False] * len(labels)

    async def abort(self, session: int, op: int) -> None:
        """Do nothing, see ``Offers``: nothing was granted."""

    async def remove(self, session: int, keys: Sequence[bytes]) -> None:
        """Do nothing, see ``Offers``: clients do not own the blocks."""

    async def purge(self, session: int, salt: bytes | None) -> int:
        """Return 0, see ``Offers``: clients have put nothing."""
        return 0

    async def survey(self, session: int, of: int, salt: bytes | None) -> Surveyed:
        """List nothing, see ``Offers``: clients have put nothing."""
        return Surveyed([], more=False)


class EngineOffers(CacheOffers):
    """The blocks of an engine's cache, which engines of the same namespace read.

    Clients use the block's own key. The label of a block is made when it is pinned.
    """

    def __init__(
        self,
        manager: CacheManager,
        run_blocking: Blocking,
        levels: Collection[str] | None = None,
    ) -> None:
        size = manager.layout.block_bytes
        super().__init__(manager, run_blocking, levels=levels, writable=False, block_bytes_max=size)

    def _refusal(self, namespace: bytes, block_bytes: int) -> str:
        if namespace != self._manager.namespace:
            own = self._manager.namespace.hex()[:16]
            found = namespace.hex()[:16]
            return f"another model or layout: namespace {found}, expected {own}"
        if block_bytes != self.block_bytes_max:
            return f"blocks of {block_bytes} bytes: expected {self.block_bytes_max}"
        return ""

    def _names(self, session: ClientHoldings, keys: Sequence[bytes]) -> list[BlockKey]:
        return [BlockKey(key) for key in keys]

    async def _labelled(
        self, session: ClientHoldings, found: Sequence[tuple[BlockKey, Slot | None]]
    ) -> list[Pinned | None]:
        ladder, rows = self._manager.ladder, list[tuple[BlockKey, Slot | None, Facts]]()
        for start in range(0, len(found), STEP):
            with ladder.lock:
                for name, slot in found[start : start + STEP]:
                    meta = ladder.meta(name) or BlockMeta()
                    rows.append((name, slot, facts_of(meta, ttl_s=None, clock=ladder.clock)))
        labelled: list[Pinned | None] = await self._run_blocking(self._label, rows)
        return labelled

    def _label(self, rows: Sequence[tuple[BlockKey, Slot | None, Facts]]) -> list[Pinned | None]:
        """Return these blocks with labels. Runs in a thread, as it reads all of their bytes."""
        size, pinned = self.block_bytes_max, list[Pinned | None]()
        labels = Labels(self._manager.namespace, size, verify=True)
        for name, slot, facts in rows:
            if slot is None:
                pinned.append(None)
            else:
                label = labels.pack(name, self.arena.view(slot)[:size], facts)
                pinned.append(Pinned(slot, size, label))
        return pinned
