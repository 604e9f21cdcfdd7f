"""The tiers as an engine's block pools see them.

The one place beside the manager that has both the device and the tiers in view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

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
from kvladder.tiers.ladder.records.index import BlockMeta
from kvladder.tiers.ladder.records.terms import NO_TERMS

REST_S = 0.002
"""How long ``TierPort.wait`` sleeps at most while nothing but a tier can wake it."""

WEIGHT = 0.2
"""Of the newest measurement in an average."""


def blended(old: float | None, new: float) -> float:
    """A moving average that begins with its first value."""
    return new if old is None else old + WEIGHT * (new - old)


class _Claim:
    """A fetch whose blocks are onboarded or given back one by one."""

    __slots__ = ("fetch", "left")

    def __init__(self, fetch: Fetch, left: int) -> None:
        self.fetch = fetch
        self.left = left

    def drop(self, blocks: int = 1) -> None:
        """So many of its blocks are not needed any more."""
        self.left -= blocks
        assert self.left >= 0
        if not self.left:
            self.fetch.release()


class _In(NamedTuple):
    """An onboarding under way: where each block comes from, once its fetch is done."""

    group: int
    slots: Sequence[DeviceSlot]
    sources: list[tuple[_Claim, int]]


class TierPort:
    """Stands between the block pools of one engine, a group each, and a cache manager: ``Below``.

    Blocks that a pool evicts are copied into slots of the arena, as far as some level takes them,
    and committed when the copy has ended; blocks that a pool claims are fetched and copied back.
    What levels lose or give up is in a journal, of which the pools are told what no level has.
    Everything is called on the engine's thread and returns at once; the engine calls ``poll`` once
    a step.

    Parameters
    ----------
    manager:
        Open, and owned by the caller, who closes it after this.
    copier:
        Between the engine's tensors and the manager's arena; its groups are the pools'. Closed by
        ``close``.
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
        """Copies under way, and what is called when they have ended."""
        self.byte_s: dict[Direction, float] = {}
        """Seconds per byte of recent copies."""
        self.rising = PrefetchSet()
        """Fetches that nobody waits for; what they bring is there for the next claim."""
        with self._ladder.lock:
            self._journal = self._ladder.events.follow()

    def attach(self, group: int, pool: BlockPool) -> None:
        """Tell this pool what becomes of its blocks."""
        self._pools[group] = pool

    # ---- copies of an engine's own, of blocks that no pool offers to others

    def lease(self, count: int) -> list[Slot] | None:
        """So many slots of the arena, evicting from host what others hold too; all or none."""
        slots = self._ladder.lease(count)
        if len(slots) < count:
            self.unlease(slots)
            return None
        return slots

    def room(self, count: int) -> int:
        """Have up to ``count`` slots free, as ``lease`` does: how many, while the lock is held."""
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
        """Copy between held device slots and leased ones; ``poll`` calls ``ended(ok)``."""
        ticket = Ticket(next(self._ids))
        self._copy(ticket, group, direction, blocks, slots, ended)
        return ticket

    @property
    def busy(self) -> bool:
        """Whether a copy is under way or waits for a tier."""
        return bool(self._in or self._copying)

    @property
    def capacities(self) -> Mapping[str, int]:
        """Blocks per level, hottest first."""
        return self._ladder.capacities

    # ---- out

    def offload(self, group: int, victims: Sequence[Victim]) -> list[Taken | None]:
        """See ``Below.offload``; one copy for all that is taken and was not there."""
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
        """Blocks were copied into leased slots, or were not."""
        (self._ladder.publish if ok else self._ladder.abandon)(keys, slots)
        for start in range(0, len(keys), BULK_STEP):
            with self._ladder.lock:  # what nothing took after all is in no level
                self._journal.add(keys[start : start + BULK_STEP])
        self._pools[group].landed(ticket, ok=ok)

    def _meta(self, group: int, victim: Victim) -> BlockMeta:
        """What a level is told of it; whose it is, for ``CacheManager.purge``."""
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
        """See ``Below.claim``; what lies below host is on its way up from now on."""
        # of several groups one alone saves nothing, and what all of them save is not known here
        saves = None if len(self._pools) == 1 else ANYTHING
        fetch = self.manager.fetch(keys, salt=salt, saves=saves, session=LATER)
        count = len(fetch.planned)
        claim = _Claim(fetch, count)
        for at, key in enumerate(keys[:count]):
            self._claims.setdefault(key, []).append((claim, at))
        if fetch.asking and not count:  # a shared tier answers later: for the next claim
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
        """See ``Below.onboard``; the copy begins when all of the blocks are in host slots."""
        ticket = Ticket(next(self._ids))
        self._in[ticket] = _In(group, slots, [self._unclaim(key) for key in keys])
        self._begin(ticket)
        return ticket

    def _begin(self, ticket: Ticket) -> bool:
        """Copy a load whose blocks are in host slots by now; False if one of them did not come."""
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

    # ---- what came of it

    def poll(self) -> None:
        """Take note of what ended and of what the tiers did; tell the pools. Call once a step."""
        for finished in self.copier.poll():
            self._ended(finished)
        for ticket in [ticket for ticket in self._in if ticket not in self._copying]:
            if not self._begin(ticket):
                self._arrived(ticket, ok=False)
        self.rising.settle()
        self._reconcile()

    def prefetch(self, keys: Sequence[BlockKey], salt: str) -> None:
        """Have these blocks brought to host, whatever that takes; ``poll`` lets go of them."""
        if keys:
            fetch = self.manager.fetch(keys, salt=salt, saves=ANYTHING, session=LATER)
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
        """Tell the pools of blocks that are in no level any more."""
        with self._ladder.lock:
            lost = self._journal.take()
        each = dict.fromkeys(lost)
        for pool in self._pools.values():
            known = [key for key in each if pool.knows(key)]
            held = self.holds(known)
            pool.forgotten([key for key, here in zip(known, held, strict=True) if not here])

    def wait(self, timeout_s: float) -> None:
        """Return when a copy ended, or soon; for an engine that has nothing else to do."""
        waiting = any(ticket not in self._copying for ticket in self._in)
        self.copier.rest(min(timeout_s, REST_S) if waiting else timeout_s)

    # ---- for people and tests

    def check(self) -> None:
        """Assert that both sides agree on what is under way, and the manager's own invariants."""
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
        """End all copies and let everything go; may be called again."""
        self.copier.close()
        self.poll()
        for ticket in list(self._in):
            self._arrived(ticket, ok=False)
        self.rising.close()
        with self._ladder.lock:
            self._ladder.events.unfollow(self._journal)
