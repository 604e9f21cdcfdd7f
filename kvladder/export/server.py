"""The blocks of a cache server: clients put them, own them, and take them away."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import compress
from math import inf
from typing import Final

from kvladder.arena import Slot
from kvladder.errors import TierError
from kvladder.export.cache import CacheOffers, ClientHoldings, GrantBatch, Granted
from kvladder.export.offers import BATCH_MAX, HAVE, LATER, REFUSED, Pinned, Surveyed
from kvladder.export.sealed import TAIL, SealedBlocks
from kvladder.export.spaces import blocks_in, own_salt, salts_in
from kvladder.keys import BlockKey
from kvladder.manager import CacheManager, SetFetch
from kvladder.tiers.context import Blocking
from kvladder.tiers.label import Facts, told
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import Terms
from kvladder.tiers.nixl.plane import INLINE_BYTES

SURVEYS_MAX: Final = 4
"""Most surveys of one session at a time; the oldest is given up for another one."""
PURGED_S: Final = 0.02
"""Seconds between checks whether all tiers have forgotten purged blocks; tiers do not notify."""


class ServerOffers(CacheOffers):
    """The blocks of a cache server. They belong to its clients; the server cannot interpret them.

    A block's key is a digest of its client's namespace and key, so that any number of models
    share a server. Behind the block's bytes lie their length and the client's label: ``sealed.py``.
    """

    def __init__(self, manager: CacheManager, run_blocking: Blocking) -> None:
        size = manager.layout.block_bytes - TAIL.size
        super().__init__(manager, run_blocking, writable=True, block_bytes_max=size)
        self._sealed = SealedBlocks(manager.arena, size)

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
        return [None if slot is None else self._sealed.read(slot) for _, slot in found]

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
                good = self._seal(known, granted, labels)
            else:
                good = await self._run_blocking(self._seal, known, granted, labels)
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

    def _seal(self, session: ClientHoldings, granted: Granted, labels: Sequence[bytes]) -> set[int]:
        """Check blocks against their labels and write each good label behind its block.

        Return the positions of good blocks. Reads all of their bytes.
        """
        good: set[int] = set()
        for lot in granted.lots:
            for position, slot in zip(lot.positions, lot.slots, strict=True):
                label = labels[position] if position < len(labels) else b""
                wanted = granted.keys[position], session.namespace, granted.lengths[position]
                if self._sealed.seal(slot, label, wanted):
                    good.add(position)
        return good

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
            labels = [told(self._sealed.read(found[name]).label) for name in part if name in found]
            absent = [name for name in part if name not in found]
        finally:
            paced.close()
        ladder = self._manager.ladder
        with ladder.lock:
            is_unread = any(ladder.meta(name) is not None for name in absent)
        if is_unread or not part:
            raise TierError("some blocks cannot be read now")
        return [label.key for label in labels if label is not None], len(part)
