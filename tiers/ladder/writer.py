"""The one writer of a level: removals, writes, and the room that they need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.metrics import DropReason
from kvladder.tiers.base import NO_PLACE, NO_TERMS, Item
from kvladder.tiers.ladder.gate import Answer, Results, supervised
from kvladder.tiers.ladder.index import Meta, alike
from kvladder.tiers.ladder.queue import Inbox, Pending, Removals

if TYPE_CHECKING:
    from kvladder.tiers.ladder.level import Level

LOST_MAX = 4096
"""Of how many blocks it is remembered that what a shared tier has of them is of no use."""
FULL_RETRY_S = 60.0
"""After a full disk, how long a level works within the places it has before it tries for more."""


class Writer:
    """Drains a level's inbox in batches, at its own pace, one call after the other.

    Sync methods are called with the stack's lock held, coroutines run on the loop thread.
    """

    def __init__(self, level: Level) -> None:
        self._level = level
        self._tier = level.tier
        self._edge = level.edge
        self._rule = level.rule
        self._gate = level.gate
        self._index = level.index
        self._places = level.places
        self._stats = level.stats
        self._shared = level.shared
        self._lock = level.shared.lock
        self._inbox = Inbox(level.shared.arena, blocks_max=level.settings.queue_blocks)
        self._writing: dict[BlockKey, Pending] = {}
        self._tombstones: set[BlockKey] = set()
        self._removals = Removals()
        self._limbo: dict[BlockKey, bytes] = {}
        """Blocks of a write or removal that was left behind and has not ended yet; their salts."""
        self._unwanted: set[BlockKey] = set()
        """Those of them that a user has had removed meanwhile, or purged."""
        self._lost: dict[BlockKey, None] = {}
        """Blocks that a shared tier did not deliver, or damaged: to be replaced there."""
        self._full_until_s = -inf
        self._wakeup = asyncio.Event()
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ---- sync, with the lock held

    def __len__(self) -> int:
        return len(self._inbox) + len(self._writing)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._inbox or key in self._writing

    def keys(self) -> list[BlockKey]:
        """The blocks that wait to be written or are being written."""
        return [*self._inbox, *self._writing]

    @property
    def pending(self) -> bool:
        """Whether there is something to do."""
        purges = self._level.purges.due(quiet=not self._limbo)
        return bool(self._inbox or self._writing or self._removals or purges)

    @property
    def full(self) -> bool:
        """Whether nothing more may wait."""
        return self._inbox.full

    @property
    def left_behind(self) -> int:
        """Blocks of calls that were left behind and have not ended yet."""
        return len(self._limbo)

    def oldest_s(self) -> float:
        """Seconds for which the oldest block that is not stored has waited; 0 without one."""
        waiting = [*self._writing.values(), *self._inbox.oldest()]
        now = self._shared.clock.now()
        return max((now - pending.since_s for pending in waiting), default=0.0)

    def offer(self, key: BlockKey, slot: Slot, meta: Meta, *, stays: bool) -> bool:
        """``Level.offer``; False too while a call left behind could still undo the write."""
        if key in self._limbo:
            self._level.settled([key], stored=False)
            return False
        if self._inbox.full:
            loser = self._inbox.loser(meta.priority)
            if loser is None:
                if not stays:
                    self._stats.drop("queue", meta.priority)
                return False
            self._lose("queue", [loser])
        self._inbox.add(key, slot, meta, self._shared.clock.now())
        return True

    def offer_all(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], metas: Sequence[Meta]
    ) -> bool:
        """``offer`` each, if that is as simple for all of them; else nothing has changed."""
        inbox = self._inbox
        if len(keys) > inbox.room or not inbox.disjoint(keys):
            return False
        if not (self._writing.keys().isdisjoint(keys) and self._limbo.keys().isdisjoint(keys)):
            return False
        inbox.add_all(keys, slots, metas, self._shared.clock.now())
        return True

    def _give_up(self, key: BlockKey) -> None:
        self._inbox.remove(key)
        self._level.settled([key], stored=False)

    def recall(self, key: BlockKey) -> bool:
        """The block was removed: it is not written, or removed as soon as it is: then True."""
        if key in self._inbox:
            self._give_up(key)
        if key in self._writing:
            self._tombstones.add(key)
        if key in self._limbo:
            self._unwanted.add(key)
        return key in self._writing or key in self._limbo

    def recall_salted(self, keys: Iterable[BlockKey], salt: bytes) -> None:
        """``recall`` for those of ``keys`` that are of this salt."""
        for key in keys:
            pending = self._inbox.get(key) or self._writing.get(key)
            if pending is not None and pending.meta.terms.salt == salt:
                self.recall(key)

    def recall_all(self) -> Iterator[None]:
        """``recall`` for all blocks, in steps, without the lock; nothing is offered meanwhile."""
        is_over = False
        while not is_over:
            with self._lock:
                for key in list(islice(self._inbox, STEP)):
                    self.recall(key)
                is_over = not self._inbox
                if is_over:
                    self._tombstones.update(self._writing)
            yield

    def purged(self, salt: bytes | None) -> None:
        """A shared tier is going to be purged: what comes there after that of this salt goes."""
        if self._tier.shared:
            writing = ((key, one.meta.terms.salt) for key, one in self._writing.items())
            self._tombstones.update(key for key, its in writing if salt in {None, its})
            self._unwanted.update(key for key, its in self._limbo.items() if salt in {None, its})

    @property
    def removals(self) -> int:
        """Blocks that the tier still has to forget."""
        return len(self._removals) + len(self._tombstones) + len(self._limbo)

    def remove_later(self, items: Iterable[Item]) -> None:
        """Have the tier forget blocks that have left the index; their places are free after it."""
        self._removals.add(items)

    def begin_anew(self) -> None:
        """Nothing is known of the tier any more; called before it was asked for anything."""
        self._removals = Removals()

    def let_go(self, items: Sequence[Item]) -> None:
        """Blocks have left the index, by no user's wish: others may use what a shared tier has."""
        if self._tier.shared:
            self._places.give([item.place for item in items])
        else:
            self._removals.add(items)

    def lost(self, keys: Sequence[BlockKey]) -> None:
        """What a shared tier has of these is of no use, if it has anything."""
        if self._tier.shared:
            self._lost.update(dict.fromkeys(keys))
            for key in list(islice(self._lost, max(0, len(self._lost) - LOST_MAX))):
                del self._lost[key]

    def leaving(self, key: BlockKey) -> bool:
        """Whether the tier has still to forget the block, or may still come to store it."""
        return key in self._removals or key in self._limbo

    def check(self) -> None:
        """Assert bounds and claims; for tests."""
        self._inbox.check()
        assert self._tombstones <= self._writing.keys()
        assert self._unwanted <= self._limbo.keys()
        claims = self._shared.arena.claims
        assert all(claims(pending.slot) > 0 for pending in self._writing.values())

    # ---- on the loop

    def wake(self) -> None:
        """Look at what waits."""
        self._wakeup.set()

    def start(self) -> None:
        """Begin to work."""
        name = f"kvladder-writer-{self._level.name}"
        working = supervised(self._run, self._level.died)
        self._task = asyncio.create_task(working, name=name)

    async def _run(self) -> None:
        while True:
            was_ill = self._gate.ill("put", "remove")
            with suppress(TimeoutError):  # wait_for would swallow a cancellation in 3.11
                async with asyncio.timeout(self._gate.retry_in_s("put", "remove")):
                    await self._wakeup.wait()
            self._wakeup.clear()
            while self.due:
                await self._step()
            if not self._level.writable:
                self._lose_all()
            with self._lock:
                if was_ill and self._level.writable:
                    self._level.stir()  # others may have something for it again
            self._idle.set()

    @property
    def due(self) -> bool:
        """Whether there is something to do that may be done now."""
        if self._inbox and self._level.writable:
            return True
        forgets = self._removals or self._level.purges.due(quiet=not self._limbo)
        return bool(forgets) and self._gate.open("remove")

    def _lose(self, reason: DropReason, keys: Sequence[BlockKey]) -> None:
        """These do not wait any longer: they would only keep slots from others."""
        for key in keys:
            self._stats.drop(reason, self._inbox[key].meta.priority)
            self._give_up(key)

    def _lose_all(self) -> None:
        """What waits now does not wait any longer, since the tier is left alone."""
        for _ in range(0, len(self._inbox), STEP):
            with self._lock:
                self._lose("breaker", list(islice(self._inbox, STEP)))

    async def _step(self) -> None:
        """One purge, one batch of removals, or one of writes and a step of erasing: what is due."""
        may_remove = self._gate.open("remove")
        if self._tier.shared and self._level.purges:  # nothing else is due until it is over
            await self._level.purges.step()
            return
        with self._lock:
            removals = self._removals.take(self._level.batch_max) if may_remove else []
        if removals:
            await self._remove_from_tier(removals)
            return
        self._take()
        try:
            await self._write()
        finally:
            with self._lock:
                self._settle([], Answer(()))
        erasing = not self._removals and self._level.purges.due(quiet=not self._limbo)
        if erasing and may_remove:
            await self._level.purges.step()

    def _take(self) -> None:
        """Begin to write the oldest that wait, a batch; the tier is asked without the lock."""
        with self._lock:
            oldest = list(islice(self._inbox, self._level.batch_max))
            salts = dict.fromkeys(self._inbox[key].meta.terms.salt for key in oldest)
        spare = {salt: self._gate.spare(self._tier, salt) for salt in salts}
        with self._lock:
            # a removal that has to wait must not meet the block that is written after it
            self._lose("breaker", self._removals.among(self._inbox.among(oldest)))
            if min(spare.values(), default=inf) < inf:
                self._lose("quota", self._inbox.above(self._inbox.among(oldest), spare))
            self._writing = self._inbox.take(self._inbox.among(oldest))

    async def _remove_from_tier(self, items: Sequence[Item]) -> None:
        """Have the tier forget ``items``, then free their places; if it fails, later again."""
        keys = [item.key for item in items]

        answer = await self._gate.call(
            "remove", lambda: self._tier.remove(items), lambda: self._late(items, self.remove_later)
        )
        with self._lock:
            self._removals.ended(items)
            if answer.results is not None:
                self._places.give([item.place for item in items if item.place != NO_PLACE])
            elif answer.quiet:
                self.remove_later(items)
                self.wake()
            else:
                self._limbo.update(dict.fromkeys(keys, b""))
                for key in keys:  # those that came back meanwhile
                    if key in self._inbox:
                        self._give_up(key)

    async def _write(self) -> None:
        """Make room for what is in ``_writing`` and store it, the most valuable first."""
        with self._lock:
            priorities = [pending.meta.priority for pending in self._writing.values()]
            if len({*priorities}) > 1:
                ranked = sorted(self._writing.items(), key=lambda item: -item[1].meta.priority)
                self._writing = dict(ranked)
                priorities.sort(reverse=True)
        reason = await self._make_room(priorities)
        now = self._shared.clock.now()
        with self._lock:
            places = self._places.take(len(self._writing))
            if self._places.limited:
                reason = "full"
            for pending in list(self._writing.values())[len(places) :]:
                self._stats.drop(reason, pending.meta.priority)
            items = [
                pending.item(
                    key,
                    place,
                    ttl_s=self._rule.ttl_s,
                    clock=self._shared.clock,
                    replace=key in self._lost,
                )
                for place, (key, pending) in zip(places, self._writing.items(), strict=False)
            ]
        if not items:
            return
        answer = await self._gate.call(
            "put",
            lambda: self._edge.put(items),
            lambda: self._late(items, self._unstored),
            slots=[item.slot for item in items],
            expected=len(items),
        )
        with self._lock:
            self._stats.stored_s += self._shared.clock.now() - now
            self._settle(items, answer)

    def _settle(self, items: Sequence[Item], answer: Answer) -> None:
        """End the write under way: publish what was stored, free the rest, tell the stack."""
        if answer.full:
            self._full(items)
        elif answer.results is None:
            self._drop("failed", items)
            self._unwanted.update(item.key for item in items if item.key in self._tombstones)
            if answer.quiet:
                self._unstored(items)
                self.wake()
            else:
                self._limbo.update((item.key, item.salt) for item in items)
        else:
            self._publish(items, answer.results)
        writing, self._writing = self._writing, {}
        self._shared.arena.release([pending.slot for pending in writing.values()])
        stored = [*filter(self._index.keys().__contains__, writing)]
        self._level.settled(stored, stored=True)
        if len(stored) < len(writing):
            lost = [key for key in writing if key not in self._index]
            self._level.settled(lost, stored=False)
        self._tombstones.clear()

    def _late(self, items: Sequence[Item], then: Callable[[Sequence[Item]], None]) -> None:
        """A call that was left behind has ended."""
        for item in items:
            self._limbo.pop(item.key, None)
        then(items)
        self._unwanted &= self._limbo.keys()
        self.wake()

    def _unstored(self, items: Sequence[Item]) -> None:
        """A write failed or has ended late: some of it may be there.

        A tier of our own has to forget it. In a shared one it is as good as any block, but for
        what a user had removed or purged meanwhile.
        """
        unwanted = [item for item in items if item.key in self._unwanted]
        self._unwanted.difference_update(item.key for item in unwanted)
        self.remove_later(unwanted)
        gone = {item.key for item in unwanted}
        self.let_go([item for item in items if item.key not in gone])

    def _publish(self, items: Sequence[Item], results: Results) -> None:
        ttl_s = self._rule.ttl_s
        expires_s = inf if ttl_s is None else self._shared.clock.now() + ttl_s
        stored: list[BlockKey] = []
        metas = [self._writing[item.key].meta for item in items]
        if all(results) and alike(metas) and metas[0].terms == NO_TERMS and not self._tombstones:
            assert metas[0].floor >= self._rule.min_priority
            stored = [item.key for item in reversed(items)]
            places = [item.place for item in reversed(items)]
            self._index.insert_all(stored, places, metas[0], expires_s=expires_s)
            items, results = (), ()
            for key in stored if self._lost else ():
                self._lost.pop(key, None)
        for item, kept in zip(reversed(items), reversed(results), strict=True):
            if not kept:
                self._places.give([item.place])
                self._drop("refused", [item])
            elif item.key in self._tombstones:
                self.remove_later([item])
            elif not self._writing[item.key].meta.terms.last(self._shared.clock):
                self.let_go([item])
            else:
                self._lost.pop(item.key, None)
                meta = self._writing[item.key].meta
                assert meta.floor >= self._rule.min_priority
                assert meta.terms.levels & self._level.bit
                self._index.insert(item.key, item.place, meta, expires_s=expires_s)
                stored.append(item.key)
        self._stats.stored += len(stored)
        self._stats.stored_bytes += len(stored) * self._shared.block_bytes
        self._shared.events.stored(self._level.name, stored[::-1])

    def _drop(self, reason: DropReason, items: Sequence[Item]) -> None:
        for item in items:
            self._stats.drop(reason, self._writing[item.key].meta.priority)

    def _full(self, items: Sequence[Item]) -> None:
        """The medium is full: work within the places in use, try for more after a while."""
        self._drop("full", items)
        self._places.withhold([item.place for item in items])
        if self._tier.shared:  # a place that was free is not room that is kept for us
            self._places.withhold_free()
        self._full_until_s = self._shared.clock.now() + FULL_RETRY_S
        self._shared.notices.say(
            f"{self._level.name} full",
            f"tier {self._level.name}: its medium is full with {len(self._index)} of"
            f" {self._level.capacity_blocks} blocks; older blocks give way from now on",
        )

    async def _make_room(self, priorities: Sequence[int]) -> DropReason:
        """Evict exactly as much as blocks of these priorities need, the highest first.

        None gives way to one that is worth less. Victims go to a level below first. Returns why
        those have no place that get none: blocks are worth more that hold one, or they cannot be
        removed now, or are busy.
        """
        with self._lock:
            now = self._shared.clock.now()
            if self._places.limited and now >= self._full_until_s:
                self._places.unlimit()
            self._index.revert(now)
            # of a shared tier, room in the index is one thing, and room on a full medium another
            is_told = not self._tier.shared or self._places.limited
            if is_told and not self._gate.open("remove"):
                return "breaker"
            victims, outranked = self._victims(priorities[self._places.free :])
        reason: DropReason = "outranked" if outranked else "busy"
        if not victims:
            return reason
        await self._demote(victims)
        with self._lock:
            gone: list[Item] = []
            for key, place in victims:
                if self._index.place(key) == place and not self._places.being_read(place):
                    self._index.evict(key, now)
                    gone.append(Item(key, place))
            self._level.evicted([item.key for item in gone])
            if is_told:
                self._removals.begun(gone)
            else:
                self.let_go(gone)
        for start in range(0, len(gone) if is_told else 0, self._level.batch_max):
            await self._remove_from_tier(gone[start : start + self._level.batch_max])
        return reason

    def _victims(self, newcomers: Sequence[int]) -> tuple[list[tuple[BlockKey, int]], bool]:
        """Who gives way to blocks of these priorities, one each, in the order of eviction.

        None that is being read, and none that is worth more than its newcomer: then True.
        """
        chosen: list[tuple[BlockKey, int]] = []
        if not newcomers:
            return chosen, False
        for place in self._index.victims():
            key = self._index.key_at(place)
            if key is None or self._places.being_read(place):
                continue
            if self._index.priority(place) > newcomers[len(chosen)]:
                return chosen, True
            chosen.append((key, place))
            if len(chosen) == len(newcomers):
                break
        return chosen, False

    async def _demote(self, victims: Sequence[tuple[BlockKey, int]]) -> None:
        """Read those victims that a level below admits and hand them to it."""
        arena = self._shared.arena
        moves: list[tuple[Item, Meta, Level]] = []
        with self._lock:
            for key, place in victims:
                meta = self._index.meta(place)
                target = self._level.target(key, meta)
                if target is None:
                    continue
                slots = self._level.room(1, meta.priority)
                if not slots:
                    self._stats.drop("arena", meta.priority)
                    continue
                self._places.begin_reads([place])
                moves.append((Item(key, place, slots[0]), meta, target))
        found: Sequence[bool] = [False] * len(moves)
        try:
            found = await self._level.read([item for item, _, _ in moves])
        finally:
            with self._lock:
                for (item, meta, target), ok in zip(moves, found, strict=True):
                    if ok and self._index.place(item.key) == item.place:
                        target.offer(item.key, item.slot, meta)
                    arena.release([item.slot])
                    target.wake()

    async def drain(self) -> None:
        """Wait until everything offered was written or given up."""
        while self.due or self._writing:
            self._idle.clear()
            self.wake()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Stop, and give up what waits; may be called again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        self._lose_all()
