"""A cache as its exporter sees it: an engine's cache, which others read, or a cache server's."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf
from struct import Struct
from typing import Any, Final

from kvladder.arena import Slot
from kvladder.errors import TierError
from kvladder.export.offers import BATCH_MAX, HAVE, LATER, REFUSED, Pinned, Surveyed
from kvladder.export.spaces import blocks_in, own_salt, salts_in
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.lock import STEP
from kvladder.manager import BatchedFetch, CacheManager, SetFetch
from kvladder.metrics import shown, summed
from kvladder.tiers.context import Blocking
from kvladder.tiers.label import LABEL_BYTES, Facts, Labels, told
from kvladder.tiers.ladder.batched import PINNED_MAX
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import Terms
from kvladder.tiers.ladder.writing.transit import facts_of
from kvladder.tiers.nixl.plane import INLINE_BYTES

TAIL: Final = Struct(f"<Q{LABEL_BYTES}s")
"""End of a server's block: the length of the client's block, and its label."""
GRANTED_MAX: Final = 0.25
"""Highest share of the slots that one session may hold granted and not committed."""
SURVEYS_MAX: Final = 4
"""Most surveys of one session at a time; the oldest is given up for another one."""
PURGED_S: Final = 0.02
"""Seconds between checks whether all tiers have forgotten purged blocks; tiers do not notify."""


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


def server_layout(block_bytes: int) -> Layout:
    """Return the layout of a server with clients' blocks of up to ``block_bytes`` bytes."""
    fields = {"kvladder.serve": "1"}
    return Layout(block_tokens=1, block_bytes=block_bytes + TAIL.size, fields=fields)


class ServerOffers(CacheOffers):
    """The blocks of a cache server. They belong to its clients; the server cannot interpret them.

    A block's key is a digest of its client's namespace and key, so that any number of models
    share a server. Behind the block's bytes lie their length and the client's label.
    """

    def __init__(self, manager: CacheManager, run_blocking: Blocking) -> None:
        size = manager.layout.block_bytes - TAIL.size
        super().__init__(manager, run_blocking, writable=True, block_bytes_max=size)

    def _refusal(self, namespace: bytes, block_bytes: int) -> str:
        if block_bytes > self.block_bytes_max:
            return f"blocks of {block_bytes} bytes: the server takes {self.block_bytes_max} at most"
        return ""

    def _names(self, session: ClientHoldings, keys: Sequence[bytes]) -> list[BlockKey]:
        space, digest = session.namespace, hashlib.sha256
        return [BlockKey(digest(space + key).digest()) for key in keys]

    async def _labelled(
        self, session: ClientHoldings, found: Sequence[tuple[BlockKey, Slot | None]]
    ) -> list[Pinned | None]:
        return [None if slot is None else self._read(slot) for _, slot in found]

    def _read(self, slot: Slot) -> Pinned:
        """Return a block as its client stored it."""
        length, label = TAIL.unpack_from(self.arena.view(slot), self.block_bytes_max)
        return Pinned(slot, length, label)

    # ---- writes of clients

    async def grant(
        self,
        session: int,
        op: int,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        facts: Sequence[Facts],
    ) -> Sequence[int]:
        """See ``Offers``."""
        known = self._sessions.get(session)
        if known is None:
            return [REFUSED] * len(keys)
        names = self._names(known, keys)

        def reserve(_first: int, patient: bool) -> Granted:
            return self._reserved(known, Granted(keys, lengths, []), names, facts, patient)

        paced = self._manager.reserve_paced(len(keys), reserve)
        try:
            await paced.settle()
            granted = paced.piece
        finally:
            paced.close()
        if granted is None or session not in self._sessions:
            if granted is not None:
                self._abandon(granted)
            return [REFUSED] * len(keys)
        known.grants[op] = granted
        here = self._manager.holding(names)
        answers = [HAVE if is_here else REFUSED for is_here in here]
        # Without any slot the wait for room has failed already: those blocks stay REFUSED.
        for position in granted.later if granted.slots else ():
            answers[position] = HAVE if here[position] else LATER
        for lot in granted.lots:
            for position, slot in zip(lot.positions, lot.slots, strict=True):
                answers[position] = slot
        return answers

    def _reserved(
        self,
        known: ClientHoldings,
        granted: Granted,
        names: Sequence[BlockKey],
        facts: Sequence[Facts],
        patient: bool,
    ) -> Granted:
        """Lease slots, limited by the room in the arena and by the session's share."""
        held = sum(len(other.slots) for other in known.grants.values())
        left = self.granted_max - held
        alike: dict[BlockMeta, list[int]] = {}
        for position, (length, fact) in enumerate(zip(granted.lengths, facts, strict=True)):
            if 0 < length <= known.block_bytes:
                alike.setdefault(self._meta(known, fact), []).append(position)
        for meta, positions in alike.items():
            first = 0
            while first < len(positions) and left > 0:
                asked = positions[first : first + left]
                lot, end = self._lot(meta, asked, names, patient)
                granted.lots.append(lot)
                first, left = first + end, left - len(lot.slots)
                if end < len(asked):
                    break
            granted.later.update(positions[first:])
        return granted

    def _lot(
        self, meta: BlockMeta, positions: Sequence[int], names: Sequence[BlockKey], patient: bool
    ) -> tuple[GrantBatch, int]:
        """Return slots for blocks with equal metadata, and the number of blocks looked at."""
        wanted = [names[position] for position in positions]
        indices, slots, end = self._manager.ladder.reserve(
            wanted, [meta] * len(wanted), explicit=True, patient=patient
        )
        taken = [positions[index] for index in indices]
        return GrantBatch(
            meta.terms.salt, taken, [names[position] for position in taken], slots
        ), end

    def _meta(self, session: ClientHoldings, facts: Facts) -> BlockMeta:
        """Return this cache's metadata for a block that the client describes by ``facts``."""
        clock = self._manager.ladder.clock
        end_s, expires_s = facts.expires_wall_s, inf
        if end_s is not None:
            expires_s = end_s - clock.wall() + clock.now()
        terms = Terms(expires_s=expires_s, salt=own_salt(session.namespace, facts.salt))
        return BlockMeta(facts.priority, min(facts.floor, facts.priority), terms=terms)

    async def commit(self, session: int, op: int, labels: Sequence[bytes]) -> Sequence[bool]:
        """See ``Offers``."""
        done = [False] * len(labels)
        known = self._sessions.get(session)
        granted = None if known is None else known.grants.pop(op, None)
        if known is None or granted is None:
            return done
        good: set[int] = set()
        try:
            if sum(granted.lengths) <= INLINE_BYTES:
                good = self._sealed(known, granted, labels)
            else:
                good = await self._run_blocking(self._sealed, known, granted, labels)
        finally:
            if session not in self._sessions:  # it ended meanwhile: no client awaits the answer
                good = set()
            self._settle(granted, good)
        for position in good:
            done[position] = True
        return done

    def _settle(self, granted: Granted, good: set[int]) -> None:
        """Publish the blocks at the positions ``good``, and abandon the others."""
        ladder = self._manager.ladder
        for lot in granted.lots:
            is_good = [position in good for position in lot.positions]
            is_bad = [not good for good in is_good]
            ladder.publish([*compress(lot.names, is_good)], [*compress(lot.slots, is_good)])
            ladder.abandon([*compress(lot.names, is_bad)], [*compress(lot.slots, is_bad)])
        bad = sum(len(lot.slots) for lot in granted.lots) - len(good)
        self._counts["taken"] += len(good)
        self._counts["lies"] += bad

    def _sealed(
        self, session: ClientHoldings, granted: Granted, labels: Sequence[bytes]
    ) -> set[int]:
        """Check blocks against their labels and write each good label behind its block.

        Return the positions of good blocks. Reads all of their bytes.
        """
        good: set[int] = set()
        for lot in granted.lots:
            for position, slot in zip(lot.positions, lot.slots, strict=True):
                label = labels[position] if position < len(labels) else b""
                wanted = granted.keys[position], session.namespace, granted.lengths[position]
                if self._is_good(label, wanted, slot):
                    good.add(position)
        return good

    def _is_good(self, label: bytes, wanted: tuple[bytes, bytes, int], slot: Slot) -> bool:
        """Return whether a slot holds what its label says and what was granted; if so, seal it.

        The bytes themselves are not checked if the client's level makes no checksums.
        """
        said, view, (*_, length) = told(label), self.arena.view(slot), wanted
        if said is None or (said.key, said.namespace, said.length) != wanted:
            return False
        if said.checksum and not said.is_of([view[:length]]):
            return False
        # A former block's bytes would be stored with this one, and survive their own purge.
        view[length : self.block_bytes_max] = bytes(self.block_bytes_max - length)
        TAIL.pack_into(view, self.block_bytes_max, length, label)
        return True

    async def abort(self, session: int, op: int) -> None:
        """See ``Offers``."""
        known = self._sessions.get(session)
        granted = None if known is None else known.grants.pop(op, None)
        if granted is not None:
            self._abandon(granted)

    async def remove(self, session: int, keys: Sequence[bytes]) -> None:
        """Return when all tiers have forgotten the blocks for good, see ``Offers``.

        Raise TierError if a tier has no rights to remove blocks.
        """
        known = self._sessions.get(session)
        if known is not None:
            denied = self._manager.denied
            is_left = self._manager.ladder.remove(self._names(known, keys))
            while is_left() and session in self._sessions:  # noqa: ASYNC110 - tiers do not notify
                await asyncio.sleep(PURGED_S)
            self._require_rights(denied)

    def _require_rights(self, denied: int) -> None:
        """Raise TierError if more removals than these were denied by now."""
        if self._manager.denied > denied:
            raise TierError("a tier of this server has no rights to remove blocks")

    async def purge(self, session: int, salt: bytes | None) -> int:
        """Return when all tiers have forgotten and overwritten the blocks, like ``remove``."""
        known = self._sessions.get(session)
        if known is None:
            return 0
        denied = self._manager.denied
        salts = {own_salt(known.namespace, salt or b"")}
        if salt is None:
            granted = [one for each in self._sessions.values() for one in each.grants.values()]
            put = [lot.salt for one in granted for lot in one.lots]
            salts |= await salts_in(self._manager.ladder, known.namespace, put)
        gone = 0
        for own in salts:
            counts: Mapping[str, int] = {}
            for step in self._manager.ladder.purge(own):
                counts = step
                await asyncio.sleep(0)
            gone += max(counts.values(), default=0)  # a block may be in several levels
        while self._manager.removals and session in self._sessions:  # noqa: ASYNC110 - as it says
            await asyncio.sleep(PURGED_S)
        self._require_rights(denied)
        return gone

    async def survey(self, session: int, of: int, salt: bytes | None) -> Surveyed:
        """Read the labels of the next blocks, see ``Offers``: only they have the clients' keys.

        Raises
        ------
        TierError
            A block is here that cannot be read now, or the survey is not known any more.
        """
        known = self._sessions.get(session)
        if known is None:
            return Surveyed([], more=False)
        if of not in known.surveys:
            if known.surveys and of <= max(known.surveys):
                raise TierError("the survey is not known any more")
            names = await blocks_in(self._manager.ladder, known.namespace, salt)
            known.surveys[of] = deque(names)
            while len(known.surveys) > SURVEYS_MAX:
                del known.surveys[min(known.surveys)]
        left = known.surveys[of]
        names = [left[n] for n in range(min(BATCH_MAX, len(left)))]
        keys, count = await self._keys_of(names) if names else ([], 0)
        for _ in range(min(count, len(left))):
            left.popleft()
        if not left:
            known.surveys.pop(of, None)
        return Surveyed(keys, more=bool(left))

    async def _keys_of(self, names: Sequence[BlockKey]) -> tuple[list[bytes], int]:
        """Return the clients' keys of the first blocks that there is room for, and their number."""
        paced = self._manager.fetch_paced(names, whole_set=True)
        try:
            await paced.settle()
            found = paced.fetch.found if isinstance(paced.fetch, SetFetch) else {}
            part = names[: paced.count]
            labels = [told(self._read(found[name]).label) for name in part if name in found]
            absent = [name for name in part if name not in found]
        finally:
            paced.close()
        ladder = self._manager.ladder
        with ladder.lock:
            is_unread = any(ladder.meta(name) is not None for name in absent)
        if is_unread or not part:
            raise TierError("some blocks cannot be read now")
        return [label.key for label in labels if label is not None], len(part)
