"""Connects an engine's block pools to the tiers.

Only this module and the manager see both the device and the tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from kvladder.arena import Slot
from kvladder.gpu.copy.copier import Copier, CopyJob, Direction, Finished, JobId
from kvladder.gpu.pool.below import BlockBelow, Taken, Victim
from kvladder.gpu.pool.pool import BlockPool
from kvladder.gpu.tree.names import DeviceSlot, Ticket
from kvladder.keys import BlockKey
from kvladder.lock import BULK_STEP, STEP
from kvladder.manager import CacheManager
from kvladder.policy.fetch_cost import ANYTHING
from kvladder.policy.sessions import LATER
from kvladder.tiers.ladder.loading.fetch import Fetch, PrefetchSet
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import NO_TERMS

REST_S = 0.002
"""Longest sleep of ``TierPort.wait`` while a load waits for a tier, which cannot wake it."""

WEIGHT = 0.2
"""Weight of the newest measurement in an average."""


def blended(old: float | None, new: float) -> float:
    """Return the next value of a moving average; ``old`` is None for the first."""
    return new if old is None else old + WEIGHT * (new - old)


class _Claim:
    """A fetch with blocks that are onboarded or given back one by one."""

    __slots__ = ("fetch", "left")

    def __init__(self, fetch: Fetch, left: int) -> None:
        self.fetch = fetch
        self.left = left

    def drop(self, blocks: int = 1) -> None:
        """Give back ``blocks`` of its blocks; release the fetch with the last one."""
        self.left -= blocks
        assert self.left >= 0
        if not self.left:
            self.fetch.release()


class _In(NamedTuple):
    """An onboarding in flight, with the claim that each block comes from."""

    group: int
    slots: Sequence[DeviceSlot]
    sources: list[tuple[_Claim, int]]


class TierPort:
    """Connects the block pools of one engine, one per group, to a cache manager: ``Below``.

    Blocks that a pool evicts are copied into slots of the arena if some level takes them, and
    committed when the copy has ended. Blocks that a pool claims are fetched and copied back.
    A journal lists the blocks that levels lose or give up; pools are told of those that no level
    has any more. All calls come from the engine's thread and return at once. The engine calls
    ``poll`` once a step.

    Parameters
    ----------
    manager:
        An open manager. The caller owns it and closes it after this.
    copier:
        Copies between the engine's tensors and the manager's arena; its groups are the pools'.
        ``close`` closes it.
    """

    def __init__(self, manager: CacheManager, copier: Copier) -> None:
        self._ladder = manager.ladder
        self.manager = manager
        self.copier = copier
        self._pools: dict[int, BlockPool] = {}
        self._ids = count(1)
        self._claims: dict[BlockKey, list[tuple[_Claim, int]]] = {}
        self._in: dict[Ticket, _In] = {}
        self._copying: dict[Ticket, tuple[Direction, Callable[[bool], None]]] = {}
        """Copies in flight, and the callback for the end of each."""
        self.byte_s: dict[Direction, float] = {}
        """Seconds per byte of recent copies."""
        self.rising = PrefetchSet()
        """Fetches that no caller waits for; the next claim finds what they bring."""
        with self._ladder.lock:
            self._journal = self._ladder.events.follow()

    def attach(self, group: int, pool: BlockPool) -> None:
        """Register the pool of a group, which is told what becomes of its blocks."""
        self._pools[group] = pool

    # ---- an engine's own copies, of blocks that no pool shares

    def lease(self, count: int) -> list[Slot] | None:
        """Lease ``count`` slots of the arena, or none (None).

        Evicts host blocks that other levels hold too, if it must.
        """
        slots = self._ladder.lease(count)
        if len(slots) < count:
            self.unlease(slots)
            return None
        return slots

    def room(self, count: int) -> int:
        """Free up to ``count`` slots, as ``lease`` does; return how many.

        The number holds as long as the caller holds the ladder's lock.
        """
        with self._ladder.lock:
            slots = self._ladder.lease(count)
            self._ladder.give_back(slots)
            return len(slots)

    def unlease(self, slots: Sequence[Slot]) -> None:
        """Give leased slots back."""
        self._ladder.give_back(slots)

    def copy(
        self,
        group: int,
        direction: Direction,
        blocks: Sequence[DeviceSlot],
        slots: Sequence[Slot],
        ended: Callable[[bool], None],
    ) -> Ticket:
        """Start a copy between held device slots and leased ones; ``poll`` calls ``ended(ok)``."""
        ticket = Ticket(next(self._ids))
        self._copy(ticket, group, direction, blocks, slots, ended)
        return ticket

    @property
    def busy(self) -> bool:
        """True if a copy is in flight or waits for a tier."""
        return bool(self._in or self._copying)

    @property
    def capacities(self) -> Mapping[str, int]:
        """Blocks per level, hottest first."""
        return self._ladder.capacities

    # ---- out

    def offload(self, group: int, victims: Sequence[Victim]) -> list[Taken | None]:
        """See ``Below.offload``. One copy moves all blocks that are taken and were in no level."""
        ticket = Ticket(next(self._ids))
        taken: list[Taken | None] = []
        keys, slots, device = list[BlockKey](), list[Slot](), list[DeviceSlot]()
        for start in range(0, len(victims), STEP):
            with self._ladder.lock:
                for victim in victims[start : start + STEP]:
                    meta = self._meta(group, victim)
                    if self._ladder.used(victim.key, meta) is not None:
                        taken.append(Taken())
                        continue
                    _, leased, _ = self._ladder.reserve([victim.key], [meta], explicit=True)
                    taken.append(Taken(ticket) if leased else None)
                    if leased:
                        keys.append(victim.key)
                        slots += leased
                        device.append(victim.slot)
        if keys:
            ended = partial(self._saved, group, ticket, keys, slots)
            self._copy(ticket, group, "offload", device, slots, ended)
        return taken

    def _saved(
        self, group: int, ticket: Ticket, keys: list[BlockKey], slots: list[Slot], ok: bool
    ) -> None:
        """Publish blocks copied into leased slots, or abandon them if the copy failed."""
        (self._ladder.publish if ok else self._ladder.abandon)(keys, slots)
        for start in range(0, len(keys), BULK_STEP):
            with self._ladder.lock:  # the next poll tells pools of those in no level
                self._journal.add(keys[start : start + BULK_STEP])
        self._pools[group].landed(ticket, ok=ok)

    def _meta(self, group: int, victim: Victim) -> BlockMeta:
        """Return a block's metadata for levels. Its salt lets ``CacheManager.purge`` find it."""
        plain = not victim.salt and not self.manager.kinds
        terms = NO_TERMS if plain else self.manager.terms(salt=victim.salt, group=group)
        return BlockMeta(victim.priority, victim.floor, victim.hits, victim.until_s, terms)

    def _copy(
        self,
        ticket: Ticket,
        group: int,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[Slot],
        ended: Callable[[bool], None],
    ) -> None:
        self._copying[ticket] = direction, ended
        self.copier.submit(CopyJob(JobId(ticket), direction, tuple(blocks), tuple(slots), group))

    # ---- in

    def holds(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See ``Below.holds``."""
        found: list[bool] = []
        for start in range(0, len(keys), STEP):
            with self._ladder.lock:
                found += [self._ladder.where(key) is not None for key in keys[start : start + STEP]]
        return found

    def claim(self, keys: Sequence[BlockKey], salt: str = "") -> int:
        """See ``Below.claim``. Starts fetching blocks that lie below host."""
        # With several groups, one group's hit alone saves nothing, and the others are not known.
        saves = None if len(self._pools) == 1 else ANYTHING
        fetch = self.manager.fetch(keys, salt=salt, saves=saves, session=LATER)
        count = len(fetch.planned)
        claim = _Claim(fetch, count)
        for at, key in enumerate(keys[:count]):
            self._claims.setdefault(key, []).append((claim, at))
        if fetch.asking and not count:  # a shared tier answers later, in time for the next claim
            self.rising.add([fetch])
        elif not count:
            fetch.release()
        return count

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """See ``Below.remove``."""
        self.manager.remove(keys)

    def clear(self) -> None:
        """See ``Below.clear``."""
        self.manager.clear()

    def known(self, keys: Sequence[BlockKey]) -> list[BlockBelow]:
        """See ``Below.known``."""
        found: list[BlockBelow] = []
        for start in range(0, len(keys), STEP):
            with self._ladder.lock:
                metas = [self._ladder.meta(key) for key in keys[start : start + STEP]]
            for meta in metas:
                held = BlockMeta() if meta is None else meta
                found.append(BlockBelow(held.priority, held.until_s, max(0, held.hits - 1)))
        return found

    def _unclaim(self, key: BlockKey) -> tuple[_Claim, int]:
        claims = self._claims[key]
        claim = claims.pop()
        if not claims:
            del self._claims[key]
        return claim

    def disclaim(self, keys: Sequence[BlockKey]) -> None:
        """See ``Below.disclaim``."""
        for key in keys:
            self._unclaim(key)[0].drop()

    def onboard(self, group: int, keys: Sequence[BlockKey], slots: Sequence[DeviceSlot]) -> Ticket:
        """See ``Below.onboard``. The copy begins when all of the blocks are in host slots."""
        ticket = Ticket(next(self._ids))
        self._in[ticket] = _In(group, slots, [self._unclaim(key) for key in keys])
        self._begin(ticket)
        return ticket

    def _begin(self, ticket: Ticket) -> bool:
        """Start the copy of an onboarding if all its blocks are in host slots.

        Return False if a block did not come; True also while some are still awaited.
        """
        arriving = self._in[ticket]
        if not all(claim.fetch.done for claim, _ in arriving.sources):
            return True
        if any(at >= claim.fetch.blocks for claim, at in arriving.sources):
            return False
        held = {claim: claim.fetch.slots for claim, _ in arriving.sources}
        slots = [held[claim][at] for claim, at in arriving.sources]

        def ended(ok: bool) -> None:
            self._arrived(ticket, ok=ok, damaged=not ok)

        self._copy(ticket, arriving.group, "onboard", arriving.slots, slots, ended)
        return True

    # ---- results of copies and fetches

    def poll(self) -> None:
        """Process finished copies and changes in the tiers; tell the pools. Call once a step."""
        for finished in self.copier.poll():
            self._ended(finished)
        for ticket in [ticket for ticket in self._in if ticket not in self._copying]:
            if not self._begin(ticket):
                self._arrived(ticket, ok=False)
        self.rising.settle()
        self._reconcile()

    def prefetch(self, keys: Sequence[BlockKey], salt: str) -> None:
        """Fetch these blocks to host, whatever that costs; ``poll`` releases them when done."""
        if keys:
            told: dict[str, Any] = {"saves": ANYTHING, "session": LATER, "is_use": False}
            fetch = self.manager.fetch(keys, salt=salt, **told)
            self.rising.add([fetch])

    def _ended(self, finished: Finished) -> None:
        ticket = Ticket(finished.id)
        direction, ended = self._copying.pop(ticket)
        if finished.bytes:
            per_byte_s = finished.seconds / finished.bytes
            self.byte_s[direction] = blended(self.byte_s.get(direction), per_byte_s)
        ended(finished.ok)

    def _arrived(self, ticket: Ticket, *, ok: bool, damaged: bool = False) -> None:
        arriving = self._in.pop(ticket)
        for claim, _ in arriving.sources:
            if damaged:
                claim.fetch.forget()
            claim.drop()
        self._pools[arriving.group].landed(ticket, ok=ok)

    def _reconcile(self) -> None:
        """Tell the pools of blocks that no level holds any more."""
        with self._ladder.lock:
            lost = self._journal.take()
        each = dict.fromkeys(lost)
        for pool in self._pools.values():
            known = [key for key in each if pool.knows(key)]
            held = self.holds(known)
            pool.forgotten([key for key, here in zip(known, held, strict=True) if not here])

    def wait(self, timeout_s: float) -> None:
        """Wait until a copy has ended, or a short time; for an engine without other work."""
        waiting = any(ticket not in self._copying for ticket in self._in)
        self.copier.rest(min(timeout_s, REST_S) if waiting else timeout_s)

    # ---- checks and end

    def check(self) -> None:
        """Assert that both sides agree on what is in flight, and the manager's own invariants."""
        self.manager.check()
        claims = [claim for held in self._claims.values() for claim, _ in held]
        claims += [claim for arriving in self._in.values() for claim, _ in arriving.sources]
        for claim in set(claims):
            assert claims.count(claim) == claim.left
        with self._ladder.lock:
            for pool in self._pools.values():
                pool.check()
                for key in pool.in_tiers():
                    assert self._ladder.where(key) is not None or key in self._journal

    def close(self) -> None:
        """End all copies and release all fetches and claims; may be called again."""
        self.copier.close()
        self.poll()
        for ticket in list(self._in):
            self._arrived(ticket, ok=False)
        self.rising.close()
        with self._ladder.lock:
            self._ladder.events.unfollow(self._journal)
