"""The stack: the host level and the levels below it, hot to cold, as one cache."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Any, Protocol

from kvladder.arena import Slot
from kvladder.errors import ClosedError
from kvladder.keys import BlockKey
from kvladder.lock import BULK_STEP, STEP
from kvladder.policy.worth import Worth
from kvladder.tiers.base import ANYWHERE, HOST, NO_TERMS, Shared
from kvladder.tiers.ladder.alike import all_new, publish_alike, route_of
from kvladder.tiers.ladder.endings import Alarm, clear, purge, sweep
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.host import HostSettings as HostSettings
from kvladder.tiers.ladder.index import Meta, alike
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.fetch import Fetch
from kvladder.tiers.ladder.loading.loader import Loader
from kvladder.tiers.ladder.saving import Saving
from kvladder.tiers.ladder.seam import Seam

EVICT_STEP = 4 * STEP
"""Blocks for which others leave host in one hold."""
RESET_STEPS = 16
"""Steps of a reset that its caller takes; the loop thread takes the others."""


class Post(Protocol):
    """Has the loop thread call ``function(*args)`` soon; may be called from any thread."""

    def __call__(self, function: Callable[..., object], /, *args: Any) -> object: ...


class TierStack(Seam):
    """Levels hot to cold. Sync methods may be called from any thread and never wait for a tier.

    One lock guards all bookkeeping; it is never held across an await or an I/O call, and calls
    with many blocks release it between steps: what they do is done block by block. Every block is
    reserved, filled and then published once; what fails below is a miss.
    """

    def __init__(
        self,
        host: HostSettings,
        levels: Sequence[Level],
        shared: Shared,
        *,
        post: Post,
        fetch_blocks_max: int,
        worth: Worth | None = None,
    ) -> None:
        self.levels = list(levels)
        self.shared = shared
        self.lock = shared.lock
        self.host = HostLevel(
            host.name,
            host.rule,
            policy=host.policy,
            reserve_blocks=host.reserve_blocks,
            shared=shared,
            router=lambda: route_of(self.levels, self._refused),
            left=self._left,
        )
        self._post = post
        self._saving = Saving()
        self._refused: dict[BlockKey, int] = {}
        """Blocks of the host level: which levels did not take them, or gave them up again."""
        self._backlog: dict[Level, OrderedDict[BlockKey, None]] = {
            level: OrderedDict() for level in levels if level.rule.when == "commit"
        }
        """Per write-through level, blocks of the host level that its queue had no room for."""
        self._gates: list[bool] = []
        """Which levels took calls when the next to go were looked at."""
        self._scheduled = False
        self._resetting: Generator[None] | None = None
        self._closed = False
        self.worth = worth or Worth()
        self.loader = Loader(
            self.host,
            self.levels,
            shared,
            post=post,
            blocks_max=fetch_blocks_max,
            landed=self._schedule,
            discard=partial(self.remove, for_all=False),
            worth=self.worth,
        )
        self._alarm = Alarm((self.host, *self.levels), shared)
        for position, level in enumerate(self.levels):
            level.bit = HOST << (position + 1)
            level.below = self.levels[position + 1 :]
            level.observer = self._written
            level.stir = self._schedule
            level.room = self.host.room

    # ---- where blocks go when they leave the host level

    def _target(self, key: BlockKey, meta: Meta) -> Level | None:
        """The level that a block of the host level still has to be written to, if any."""
        for level in self.levels:
            if level.admits(meta):
                refused = self._refused.get(key, 0) & level.bit
                return None if refused or key in level.index else level
        return None

    def _written(self, level: Level, keys: Sequence[BlockKey], *, stored: bool) -> None:
        """A level settled blocks: if it did not take them, host need not wait for it."""
        for key in keys if self._refused or not stored else ():
            refused = self._refused.pop(key, 0) & ~level.bit
            if not stored and key in self.host.index:
                refused |= level.bit
            if refused:
                self._refused[key] = refused
        if not stored:
            self.shared.events.given_up(keys)
        self.host.settled(len(keys), stored=stored)
        self._schedule()

    def _left(self, keys: Sequence[BlockKey]) -> None:
        """Blocks left the host level: nothing is remembered of them."""
        for key in keys if self._refused else ():
            self._refused.pop(key, None)
        for waiting in self._backlog.values():
            for key in keys if waiting else ():
                waiting.pop(key, None)

    def _schedule(self) -> None:
        """Have the loop thread look after the levels soon, once; with the lock held."""
        if not self._scheduled and (self.levels or self.host.index.next_end_s != inf):
            self._scheduled = True
            self._post(self._tidy)

    def _tidy(self) -> None:
        """Write the next victims of the host level before their slots are needed (loop thread)."""
        if self._closed:
            return
        is_behind = False
        for level, keys in self._backlog.items():
            with self.lock:
                is_behind |= self._catch_up(level, keys)
        with self.lock:
            gates = [level.writable for level in self.levels]
            if gates != self._gates:
                self.host.doubt()
            self._gates = gates
            self.host.clean()
            self._alarm.set()
            self._scheduled = False  # what was offered just now need not be looked at again
            if is_behind:
                self._schedule()
        for level in self.levels:
            if level.due:
                level.wake()
        self.loader.resume()

    def _catch_up(self, level: Level, keys: OrderedDict[BlockKey, None]) -> bool:
        """Offer a write-through level what it had no room for, oldest first; if there is more."""
        for _ in range(STEP):
            if not keys or level.queue_full or not level.writable:
                return False
            key, _ = keys.popitem(last=False)
            slot = self.host.find(key)
            if slot is not None:
                level.offer(key, slot, self.host.index.meta(slot))
        return True

    # ---- save

    def reserve(
        self, keys: Sequence[BlockKey], metas: Sequence[Meta], *, explicit: bool
    ) -> tuple[list[int], list[Slot]]:
        """Lease slots for those ``keys``, consecutive blocks of a prefix, that are to be saved.

        Left out is what is here already and what no level takes, with all that follows it. Returns
        positions in ``keys`` and their slots. ``explicit`` metas replace those of blocks that are
        here. Each key returned must be given to ``publish`` or ``abandon``.
        """
        self._require_open()
        wanted: list[int] = []
        slots: list[Slot] = []
        start = 0
        while start < len(keys):
            with self.lock:
                is_short = self._closed or len(slots) < len(wanted)
                found, end = self._missing(keys, metas, start, explicit=explicit)
                leased = [] if is_short or not found else self._lease(found, metas)
                if len(leased) == end - start:
                    self._saving.put(keys[start:end], leased, metas[start:end])
                elif leased:
                    kept = found[: len(leased)]
                    said = [metas[index] for index in kept]
                    self._saving.put([keys[index] for index in kept], leased, said)
                for index in found[len(leased) :]:
                    self.host.stats.drop("room", metas[index].priority)
            wanted += found
            slots += leased
            start = end
        del wanted[len(slots) :]
        return wanted, slots

    def _missing(
        self, keys: Sequence[BlockKey], metas: Sequence[Meta], start: int, *, explicit: bool
    ) -> tuple[Sequence[int], int]:
        """Positions from ``start`` on that are to be saved, and up to where that is known.

        A range of them has metas that are alike.
        """
        first = metas[start]
        is_plain = first.terms == NO_TERMS and first.until_s == inf
        end, part, said = len(keys), keys, metas
        if end > STEP:
            has_room = self.shared.arena.free >= BULK_STEP  # or else some have to leave
            step = BULK_STEP if has_room else EVICT_STEP
            end = min(end, start + (step if is_plain else STEP))
            part, said = keys[start:end], metas[start:end]
        new = alike(said) and all_new(part, self.host, self.loader, self._saving)
        if new and self._admitted(first):
            return range(start, end), end
        wanted: list[int] = []
        if end > start + STEP:
            end = start + STEP
        for index in range(start, end):
            key, meta = keys[index], metas[index]
            place = self.host.find(key)
            if place is not None:
                if explicit:
                    self.used(key, meta)
                if key in self.host.index:
                    self.host.index.widen(key, meta.terms)
                self.host.doubt()
            elif key not in self._saving and key not in self.loader:
                if not self._admitted(meta):
                    return wanted, len(keys)
                wanted.append(index)
        return wanted, end

    def _lease(self, wanted: Sequence[int], metas: Sequence[Meta]) -> list[Slot]:
        """Slots for blocks at these positions, fewer if room is short."""
        some = wanted[:1] if isinstance(wanted, range) else wanted
        slots = self.host.room(len(wanted), min(metas[index].priority for index in some))
        if len(slots) < len(wanted):
            self._schedule()
        return slots

    def _admitted(self, meta: Meta) -> bool:
        return self.host.admits(meta) or any(level.admits(meta) for level in self.levels)

    def publish(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """The bytes of these reserved blocks are complete: from now on they are hits."""
        parts: list[Sequence[BlockKey]] = []
        end, goes_on = len(keys), False
        while end:  # the tail first, so that a prefix outlives what follows it
            with self.lock:
                start, part, places = 0, keys, slots
                if len(keys) > STEP:
                    start = max(0, end - self._saving.together(keys[end - 1], STEP))
                    part, places = keys[start:end], slots[start:end]
                if publish_alike(part, places, self.host, self.loader, self._saving):
                    stored = part
                else:
                    if len(part) > STEP:
                        start += len(part) - STEP
                        part, places = part[-STEP:], places[-STEP:]
                    stored = self._publish_each(part, places)
                self.host.stats.stored += len(stored)
                self.host.stats.stored_bytes += len(stored) * self.shared.block_bytes
                self.shared.events.stored(self.host.name, stored)
                self._schedule()
                goes_on = not start and self._saving.forget()
            parts.append(stored)
            end = start
        while goes_on:
            with self.lock:
                goes_on = self._saving.forget()
        for stored in reversed(parts) if self._backlog else ():
            with self.lock:
                self._write_through(stored)

    def _publish_each(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> list[BlockKey]:
        """Publish blocks one by one, the tail first; those that are in host now."""
        stored: list[BlockKey] = []
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            meta = self._saving.pop(key, slot)
            if meta is None or key in self.loader or key in self.host.index:
                # removed or saved anew meanwhile, or a level below had it after all
                self.shared.arena.release([slot])
            elif self.host.admits(meta):
                self.host.insert(key, slot, meta)
                stored.append(key)
            else:
                if (target := self._target(key, meta)) is not None:
                    target.offer(key, slot, meta)
                self.shared.arena.release([slot])
        stored.reverse()
        return stored

    def _write_through(self, keys: Sequence[BlockKey]) -> None:
        """Queue new blocks of the host level, head first, where they are written on commit."""
        for level, waiting in self._backlog.items():
            waiting.update(dict.fromkeys(keys))
            if self._catch_up(level, waiting):
                self._schedule()

    def abandon(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """These reserved blocks will not be filled: their slots are free again."""
        for start in range(0, len(keys), STEP):
            part = slots[start : start + STEP]
            with self.lock:
                for key, slot in zip(keys[start : start + STEP], part, strict=True):
                    self._saving.pop(key, slot)
                self.shared.arena.release(part)

    # ---- load

    def lookup(self, keys: Sequence[BlockKey], levels: int = ANYWHERE) -> tuple[int, int]:
        """How many leading ``keys`` the host level holds, and how many one of ``levels`` does."""
        if len(keys) <= BULK_STEP:
            with self.lock:
                return self._lookup(keys, levels)
        host = total = 0
        while total < len(keys):
            part = keys[total : total + BULK_STEP]
            with self.lock:
                here, found = self._lookup(part, levels)
            host += here if host == total else 0
            total += found
            if found < len(part):
                break
        return host, total

    def _lookup(self, keys: Sequence[BlockKey], levels: int) -> tuple[int, int]:
        host = self.host.index.prefix(keys) if levels & HOST else 0
        if host == len(keys):
            return host, host
        in_host = self.host.index.keys()
        below = [lv.index.keys() for lv in self.levels if lv.bit & levels and lv.readable]
        for index in range(host, len(keys)):
            key = keys[index]
            if key in in_host:
                if levels & HOST:
                    continue
                return host, index
            for held in below:
                if key in held:
                    break
            else:
                return host, index
        return host, len(keys)

    def reach(self, keys: Sequence[BlockKey], levels: int = ANYWHERE) -> int:
        """How many leading ``keys`` it is worth to fetch: all, if a shared tier has to be asked."""
        _, total = self.lookup(keys, levels)
        with self.lock:
            asks = total < len(keys) and self.loader.prober.may_know(keys[total], levels)
        return len(keys) if asks else total

    def meta(self, key: BlockKey) -> Meta | None:
        """What the hottest level that holds the block knows of it; with the lock held."""
        for index in (self.host.index, *(level.index for level in self.levels)):
            place = index.place(key)
            if place is not None:
                return index.meta(place)
        return None

    def used(self, key: BlockKey, meta: Meta) -> str | None:
        """A block that was used elsewhere is worth ``meta`` now; with the lock held.

        It leaves the levels whose thresholds it does not reach any more. The hottest that holds it
        then, or is about to, None if there is none.
        """
        slot = self.host.find(key)
        if slot is not None:
            self.host.index.note(key, meta)
            self.host.doubt()
            if meta.floor < self.host.rule.min_priority:
                if (target := self._target(key, self.host.index.meta(slot))) is not None:
                    target.offer(key, slot, meta)
                self.host.refuse(key)
        for level in self.levels:
            if level.find(key) is not None:
                level.index.note(key, meta)
                if meta.floor < level.rule.min_priority:
                    level.refuse(key)
        return self.where(key)

    def where(self, key: BlockKey) -> str | None:
        """The hottest level that holds the block or is about to; with the lock held."""
        if key in self.host.index:
            return self.host.name
        return next((level.name for level in self.levels if level.holds(key)), None)

    def fetch(self, fetch: Fetch) -> None:
        """See ``Loader.fetch``."""
        self._require_open()
        self.loader.fetch(fetch)

    def bits(self, names: Collection[str]) -> int:
        """The levels of these names as a mask; KeyError if there is none of a name."""
        known = {level.name: level.bit for level in self.levels} | {self.host.name: HOST}
        return sum(known[name] for name in set(names))

    # ---- everything else

    def remove(self, keys: Sequence[BlockKey], *, for_all: bool = True) -> None:
        """Forget these blocks, in shared tiers ``for_all``; what is under way brings none back."""
        unique = list(dict.fromkeys(keys))
        for start in range(0, len(unique), STEP):
            part = unique[start : start + STEP]
            with self.lock:
                for key in part:
                    self._saving.discard(key)
                    self.loader.recall(key)
                self.host.remove(part)
                for level in self.levels:
                    (level.remove if for_all else level.discard)(part)

    def clear(self, *, erase: bool = False) -> Iterator[None]:
        """Forget every block; ``erase`` has tiers overwrite what they keep.

        In steps, as with ``purge``: nothing is stored until the iteration is over or closed.
        """
        recall = self._recall_answers
        return clear([self.host, *self.levels], self.shared, recall=recall, erase=erase)

    def _recall_answers(self) -> Iterator[None]:
        """``_recall_all``, and what shared tiers are being asked for."""
        with self.lock:
            self.loader.prober.void()
        return self._recall_all()

    def reset(self) -> None:
        """Forget what no other engine has: blocks of the host level and of private tiers.

        Returns at once, however many there are. Until ``resetting`` is over, nothing is stored.
        Shared tiers keep what they have.
        """
        with self.lock:
            if self._resetting is not None:
                return
            private = [level for level in self.levels if not level.tier.shared]
            self._resetting = sweep([self.host, *private], self.shared, recall=self._recall_all)
        self._reset_on(RESET_STEPS)

    @property
    def resetting(self) -> bool:
        """Whether a reset goes on."""
        return self._resetting is not None

    def _reset_on(self, steps: int = 1) -> None:
        resetting = self._resetting
        if resetting is None:
            return
        for _ in range(steps):
            if self._closed or next(resetting, self) is self:
                resetting.close()
                self._resetting = None
                return
        self._post(self._reset_on)

    def _recall_all(self) -> Iterator[None]:
        """Nothing that is under way gets anywhere, in steps; nothing is taken meanwhile."""
        while self._saving:
            with self.lock:
                for key in list(islice(self._saving, STEP)):
                    self._saving.discard(key)
            yield
        yield from self.loader.recall_all()

    def purge(self, salt: bytes) -> Iterator[dict[str, int]]:
        """Forget every block of a salt: after each step, how many by level so far.

        Nothing of this salt is stored until the iteration is over or closed. No step holds the
        lock for long; steps may be taken by any thread.
        """
        return purge([self.host, *self.levels], self.shared, salt, recall=self._recall)

    def _recall(self, salt: bytes) -> None:
        """What is under way of a salt does not get anywhere."""
        with self.lock:
            self.loader.prober.void()
            coming = list(self._saving)
        with self.lock:
            coming += self.loader.keys()
        for level in self.levels:
            with self.lock:
                coming += level.coming()
        for start in range(0, len(coming), STEP):
            part = coming[start : start + STEP]
            with self.lock:
                self._saving.discard_if(part, lambda meta: meta.terms.salt == salt)
                self.loader.recall_salted(part, salt)
                for level in self.levels:
                    level.recall(part, salt)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These blocks were used, by whichever way: they are the most recent, the head last."""
        self._post(self._touch, list(keys))

    def _touch(self, keys: list[BlockKey]) -> None:
        batch = keys[-STEP:]
        del keys[-STEP:]
        with self.lock:
            for index in (self.host.index, *(level.index for level in self.levels)):
                places = map(index.place, reversed([*dict.fromkeys(batch)]))
                index.touch([place for place in places if place is not None])
        if keys:
            self._post(self._touch, keys)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the cache is closed")

    async def flush(self) -> None:
        """Write what only the host level holds to the levels that outlive it and admit it."""
        left: list[BlockKey] = []
        durable = [level for level in self.levels if level.outlives]
        for start in range(0, self.host.index.places if durable else 0, BULK_STEP):
            with self.lock:
                left += self.host.index.held(start, start + BULK_STEP)
        step = min([STEP, *(level.settings.queue_blocks for level in durable)])
        for start in range(0, len(left) + step if durable else 0, step):
            for level in durable:  # so that its queue has room
                await level.drain()
            with self.lock:
                for key in left[start : start + step]:
                    self._flush_one(durable, key)
        for level in durable:
            await level.drain(erased=True)

    def _flush_one(self, durable: Sequence[Level], key: BlockKey) -> None:
        slot = self.host.find(key)
        if slot is None or any(level.holds(key) for level in durable):
            return
        meta = self.host.index.meta(slot)
        for level in durable:
            if level.offer(key, slot, meta):
                return

    async def aclose(self, *, flush_timeout_s: float) -> None:
        """Flush, end every transfer, close every tier, release every slot; may be called again."""
        if self._closed:
            return
        with self.lock:
            self._closed = True
            self._alarm.cancel()
        flushing = asyncio.ensure_future(self.flush())
        _, late = await asyncio.wait({flushing}, timeout=flush_timeout_s)
        if late:
            what = f"what {self.host.name} alone held was not all written in {flush_timeout_s:g} s"
            self.shared.notices.say("flush", f"closing: {what}: the rest is lost")
        flushing.cancel()
        await asyncio.wait({flushing})
        await self.loader.aclose()
        for level in self.levels:  # hot to cold, as their writers hand blocks over
            await level.stop()
        await asyncio.gather(*(level.aclose() for level in self.levels))
        for start in range(0, self.host.index.places, STEP):
            with self.lock:
                for key in self.host.index.held(start, start + STEP):
                    self.shared.arena.release([self.host.drop(key)])

    @property
    def pending(self) -> bool:
        """Whether a level has something left to write."""
        return any(level.pending for level in self.levels) or any(
            waiting and level.writable for level, waiting in self._backlog.items()
        )

    def check(self) -> None:
        """Assert every invariant that can be seen from here; O(n), for tests."""
        with self.lock:
            self.host.check()
            self.shared.arena.check()
            for level in self.levels:
                level.check()
            slots = self._saving.slots()
            assert len(set(slots)) == len(slots)
            assert all(self.shared.arena.claims(slot) >= 1 for slot in slots)
            assert all(self.host.index.key_at(slot) is None for slot in slots)
            self.loader.check()
