"""One level below host: what is known of its blocks, and each step that a block takes there.

The table of a block's states is in ``tiers/ladder/README.md``: who holds the claim on its slot, and
who holds its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, repeat
from math import inf

from kvladder.arena import Slot
from kvladder.events import Reason
from kvladder.keys import BlockKey
from kvladder.lock import BATCH, STEP
from kvladder.metrics import DropReason
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.fetch_cost import Pace
from kvladder.tiers.base import NO_PLACE, Tier
from kvladder.tiers.label import LevelRead, LevelWrite, Ref
from kvladder.tiers.ladder.base_level import BaseLevel, Shared, StackCallbacks
from kvladder.tiers.ladder.breaker import Results
from kvladder.tiers.ladder.client import CallOutcome, LevelDefinition, TierClient
from kvladder.tiers.ladder.purges import PurgeQueue
from kvladder.tiers.ladder.queue import QueuedWrite, RemovalQueue, WriteQueue, ranks
from kvladder.tiers.ladder.records.index import BlockMeta, alike, runs
from kvladder.tiers.ladder.records.places import PlaceAllocator
from kvladder.tiers.ladder.records.terms import NO_TERMS, Terms

LOST_MAX = 4096
"""Most blocks that are remembered as lost or damaged by a shared tier."""


class Level(BaseLevel[int]):
    """Keeps a tier's place in the stack: rule, index, exact capacity, queues, statistics.

    Every call has the stack's lock held and never waits; ``client`` makes the calls that await the
    tier. Whatever the tier does, the level answers with a miss or a drop.
    """

    def __init__(
        self, spec: LevelDefinition, shared: Shared, above: StackCallbacks, *, bit: int
    ) -> None:
        super().__init__(spec, shared, bit=bit, blocks_max=spec.capacity_blocks)
        self.tier: Tier = spec.tier
        self.settings = spec.settings
        self.capacity_blocks = spec.capacity_blocks
        self.client = TierClient(spec, shared, self.stats, on_calm=above.wake)
        self.batch_max = min(spec.tier.batch_max, BATCH)
        """The largest batch that is given to the tier, so that its bookkeeping stays short."""
        self.places = PlaceAllocator(spec.capacity_blocks)
        self.pace = Pace()
        """Measured time of reads."""
        self.write_queue = WriteQueue(shared.arena, blocks_max=spec.settings.queue_blocks)
        self._above = above
        self._writing: dict[BlockKey, QueuedWrite] = {}
        self._slots: dict[BlockKey, Slot] = {}  # slots of the blocks in ``_writing``
        self._tombstones: set[BlockKey] = set()
        self._removal_queue = RemovalQueue(spec.capacity_blocks)
        self._lost: dict[BlockKey, None] = {}
        """Blocks that a shared tier did not deliver or damaged. The next write replaces them there.
        """
        self.purges = PurgeQueue(self.client, self.stats, busy=lambda: bool(self._removal_queue))

    # ---- what may be done now

    def admits(self, meta: BlockMeta) -> bool:
        return super().admits(meta) and self.writable

    @property
    def writable(self) -> bool:
        """True if blocks may be put now. A shared tier takes none while a purge cannot run."""
        if self.purges and self.tier.shared and not self.client.open("remove"):
            return False
        return self.client.open("put")

    @property
    def readable(self) -> bool:
        """True if blocks may be got now."""
        return self.client.open("get")

    @property
    def answers(self) -> bool:
        """True if a shared tier can now be asked for blocks that others put there."""
        return self.readable and self.client.open("contains") and not self.purges

    @property
    def outlives(self) -> bool:
        """True if what is written here outlives the engine."""
        return self.tier.durable or self.tier.shared

    # ---- what comes

    def holds(self, key: BlockKey) -> bool:
        """Return whether the block is held here, queued or being written."""
        return key in self.index or key in self.write_queue or key in self._writing

    def offer(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot],
        metas: Sequence[BlockMeta],
        *,
        stay: bool = False,
        new: bool = False,
    ) -> bool:
        """Queue blocks to be written, with claims of the level's own on their slots.

        Returns False if some were not taken. The level has them already (it has none of ``new``
        blocks), does not admit them, or has an abandoned call about them. Or its queue is full and
        holds nothing less valuable: that counts as a drop, unless blocks ``stay`` in host and are
        offered again.
        """
        now_s = self.shared.clock.now()
        kinds = metas[:1] if alike(metas) else {id(meta): meta for meta in metas}.values()
        if (
            self.write_queue.fits(keys)
            and (new or self.index.disjoint(keys))
            and self._writing.keys().isdisjoint(keys)
            and self._removal_queue.behind.keys().isdisjoint(keys)
            and all(map(self.admits, kinds))
        ):
            self.write_queue.add(keys, slots, metas, now_s)
            self._above.wake()
            return True
        taken = 0
        for key, slot, meta in zip(keys, slots, metas, strict=True):
            if self.holds(key) or not self.admits(meta):
                continue
            loser = self.write_queue.loser(meta.priority)
            if key in self._removal_queue.behind:  # an abandoned call could undo the write
                self._above.settled(self, [key], stored=False)
            elif loser is not None or not self.write_queue.full:
                self._lose("queue", [] if loser is None else [loser])
                self.write_queue.add([key], [slot], [meta], now_s)
                taken += 1
            elif not stay:
                self.stats.drop("queue", meta.priority)
        self._above.wake()
        return taken == len(keys)

    def coming(self) -> list[BlockKey]:
        """Return every block that is queued or being written."""
        return [*self.write_queue, *self._writing]

    def recall(self, keys: Iterable[BlockKey], salt: bytes | None = None) -> set[BlockKey]:
        """Cancel writes of ``keys``, only those of ``salt`` if one is given.

        Queued blocks leave the queue. Blocks that are being written are removed after that. Returns
        the keys that may still come to be stored.
        """
        found: set[BlockKey] = set()
        for key in keys if self.write_queue or self._writing or self._removal_queue.behind else ():
            if salt is not None:
                pending = self.write_queue.get(key) or self._writing.get(key)
                if pending is None or pending.meta.terms.salt != salt:
                    continue
            if key in self.write_queue:
                self._give_up([key])
            if key in self._writing:
                self._tombstones.add(key)
                found.add(key)
            if self._removal_queue.recall(key):
                found.add(key)
        return found

    def adopt(self, keys: Sequence[BlockKey], salt: bytes, spare: AbstractSet[BlockKey]) -> None:
        """Hold blocks of a salt that others put into a shared tier, as many as fit, head first.

        If places are short, the next victims are evicted, but none of ``spare``. A block that is
        being removed from here is not held again; it ends the prefix, as does one that is held or
        coming.
        """
        if not self.answers or self.shared.refuses(salt):
            return
        wanted: list[BlockKey] = []
        for key in keys:
            if self.holds(key) or self.leaving(key):
                break
            wanted.append(key)
        lowest = max(PRIORITY_DEFAULT, self.rule.min_priority)
        reads, at = self.places.being_read, self.index.key_at
        own, room = self.index.give_way(
            salt, [lowest] * len(wanted), lambda place: reads(place) or at(place) in spare
        )
        del wanted[room:]
        self.places.give(self._evict(self.index.keys_at(own)))
        self._make_way(len(wanted) - self.places.free, lowest, spare)
        places = self.places.take(len(wanted))
        adopted, meta = wanted[: len(places)], BlockMeta(lowest, lowest, terms=Terms(salt=salt))
        self.hold(adopted[::-1], places[::-1], meta)
        self.stats.found += len(adopted)
        self.shared.events.stored(self.name, adopted)

    def _make_way(self, count: int, priority: int, spare: AbstractSet[BlockKey]) -> None:
        """Free up to ``count`` places of a shared tier at once: places are no addresses there."""
        gone: list[BlockKey] = []
        for place in self.index.victims():
            if len(gone) >= count or self.index.priority(place) > priority:
                break
            (key,) = self.index.keys_at([place])
            if key not in spare and not self.places.being_read(place):
                gone.append(key)
        self.places.give(self._evict(gone))

    # ---- what goes

    def leaving(self, key: BlockKey) -> bool:
        """Return whether the tier has still to forget the block, or may still come to store it."""
        return key in self._removal_queue

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Remove unusable blocks; a shared tier keeps them, as other engines may be able to use
        them.
        """
        if self.tier.shared:
            self.forget([key for key in keys if key in self.index], "lost")
        else:
            self.remove(keys)

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Forget the blocks and return how many were here. No earlier transfer brings one back.

        A shared tier forgets them for all engines.
        """
        self.purges.condemn(*keys)
        recalled = self.recall(keys)
        if self.tier.shared:  # others may have put it there
            foreign = [key for key in keys if key not in self.index and key not in recalled]
            self.remove_later([Ref(key, NO_PLACE) for key in foreign])
        return super().remove(keys)

    def _freed(self, keys: Sequence[BlockKey], places: Sequence[int], reason: Reason) -> None:
        blocks = [*map(Ref, keys, places)]
        if reason == "removed":
            self.remove_later(blocks)
        else:
            self._let_go(blocks)
        if reason == "lost" and self.tier.shared:
            self._lost.update(dict.fromkeys(keys))
            for key in list(islice(self._lost, max(0, len(self._lost) - LOST_MAX))):
                del self._lost[key]
        self._above.wake()

    def remove_later(self, blocks: Sequence[Ref]) -> None:
        """Queue the removal of blocks that have left the index; it frees their places."""
        if blocks:
            self._removal_queue.add(blocks)
            self._above.wake()

    def _let_go(self, blocks: Sequence[Ref]) -> None:
        """Give up blocks that left the index by no user's wish; a shared tier keeps them for
        others.
        """
        if self.tier.shared:
            self._free(blocks)
        else:
            self.remove_later(blocks)

    def _free(self, blocks: Sequence[Ref]) -> None:
        self.places.give([place for _, place in blocks if place != NO_PLACE])

    def _evict(self, keys: Sequence[BlockKey]) -> list[int]:
        """Drop blocks to make room, and return their places.

        Host does not write them again, or they would move up and down for ever.
        """
        places = self.index.drop(keys, evicted_s=self.shared.clock.now())
        self.stats.evicted += len(keys)
        self.shared.events.removed(self.name, keys, "evicted")
        self._above.settled(self, keys, stored=False)
        return places

    def _lose(self, reason: DropReason, keys: Sequence[BlockKey]) -> None:
        """Take blocks out of the write queue, which frees their slots, and count them as drops."""
        for key in keys:
            self.stats.drop(reason, self.write_queue[key].meta.priority)
        self._give_up(keys)

    def _give_up(self, keys: Sequence[BlockKey]) -> None:
        if keys:
            self.write_queue.remove(keys)
            self._above.settled(self, keys, stored=False)

    def lose_some(self) -> bool:
        """Drop a step of queued blocks, and return whether more are queued."""
        self._lose("breaker", list(islice(self.write_queue, STEP)))
        return bool(self.write_queue)

    def purge(self, salt: bytes | None) -> None:
        """Queue a purge of a salt, or of everything for None.

        A shared tier is purged before anything else is done with it, and is not asked until then.
        Blocks of the salt that are stored there meanwhile are removed again. Another tier erases
        step by step between writes, once all removals have ended.
        """
        self.purges.add(salt)
        if self.tier.shared:
            writing = ((key, one.meta.terms.salt) for key, one in self._writing.items())
            self._tombstones.update(key for key, its in writing if salt in {None, its})
            self._removal_queue.purge(salt)
        self._above.wake()

    # ---- what its writer and its readers do, step by step

    def take_removals(self) -> list[Ref]:
        """Begin the oldest removals, one batch, if the tier may be called for them now."""
        return self._removal_queue.take(self.batch_max) if self.client.open("remove") else []

    def forgotten(self, blocks: Sequence[Ref], answer: CallOutcome) -> None:
        """End a removal: its places are free, or it is tried again later."""
        self._removal_queue.ended(blocks)
        if answer.results is not None:
            self._free(blocks)
        elif answer.quiet:
            self.remove_later(blocks)
        else:  # the call may still remove a block offered meanwhile
            self._removal_queue.leave_behind(dict.fromkeys((key for key, _ in blocks), b""))
            self._give_up(self.write_queue.among(key for key, _ in blocks))

    def forgotten_late(self, blocks: Sequence[Ref]) -> None:
        """End a removal that was an abandoned call, and queue it again."""
        self._removal_queue.come_back({block.key for block in blocks})
        self.remove_later(blocks)

    def next_batch(self) -> dict[BlockKey, bytes]:
        """Return the oldest queued blocks, one batch, with their salts."""
        return {key: one.meta.terms.salt for key, one in self.write_queue.oldest(self.batch_max)}

    def begin(self, oldest: Iterable[BlockKey], spare: Mapping[bytes, float]) -> list[int]:
        """Begin to write the blocks of a batch that are still queued, and return their priorities.

        The highest priority comes first. ``spare`` says how many more blocks of each salt there may
        be.
        """
        # a removal may be repeated, and must not remove a block written after it
        queue = self.write_queue
        self._lose("breaker", queue.among(self._removal_queue.among(oldest)))
        if self.index.has_quota:
            some, busy = queue.ranks(queue.among(oldest)), self.places.being_read
            rooms = {salt: self.index.give_way(salt, said, busy)[1] for salt, said in some.items()}
            spare = {salt: min(left, rooms.get(salt, inf)) for salt, left in spare.items()}
        if min(spare.values(), default=inf) < inf:
            self._lose("quota", queue.above(queue.ranked(oldest), spare))
        self._writing, self._slots = queue.take(queue.among(oldest))
        return [pending.meta.priority for pending in self._writing.values()]

    @property
    def _tells(self) -> bool:
        """True if the tier is told of evictions: a shared one only while its medium is full."""
        return not self.tier.shared or self.places.limited

    def victims(self, priorities: Sequence[int]) -> tuple[list[tuple[Ref, BlockMeta]], DropReason]:
        """Choose victims for blocks of these priorities, the highest first, in the order of
        eviction.

        Chooses as many as are needed. No victim is being read or has a higher priority than its
        newcomer. Also returns why newcomers without a place get none.
        """
        now_s = self.shared.clock.now()
        self.places.retry(now_s)
        self.index.revert(now_s)
        if self._tells and not self.client.open("remove"):
            return [], "breaker"
        chosen, own = list[int](), self._own_victims()
        newcomers = priorities[self.places.free + len(own) :]
        reason: DropReason = "busy"
        for place in self.index.victims():
            if len(chosen) == len(newcomers):
                break
            if self.places.being_read(place) or place in own:
                continue
            if self.index.priority(place) > newcomers[len(chosen)]:
                reason = "outranked"
                break
            chosen.append(place)
        chosen = [*own, *chosen]
        if not chosen:
            return [], reason
        refs = map(Ref, self.index.keys_at(chosen), chosen)
        return [*zip(refs, self.index.metas(chosen), strict=True)], reason

    def _own_victims(self) -> list[int]:
        """Choose places of salts at their quota for the blocks of these salts that are being
        written.
        """
        busy, blocks = self.places.being_read, self._writing.values()
        asked = ranks(blocks).items() if self.index.has_quota else ()
        return [at for salt, said in asked for at in self.index.give_way(salt, said, busy)[0]]

    def trim(self) -> bool:
        """Evict a step of what salts hold beyond their quota, and return whether any block went."""
        if keys := self.index.excess(STEP, self.places.being_read):
            self._let_go([*map(Ref, keys, self._evict(keys))])
        return bool(keys)

    def evict(self, victims: Sequence[Ref]) -> list[Ref]:
        """Evict those victims that nothing reads, and return what the tier has to be told."""
        there = self.index.at([one.place for one in victims])
        held = [one for one, key in zip(victims, there, strict=True) if key == one.key]
        gone = [one for one in held if not self.places.being_read(one.place)]
        self._evict([one.key for one in gone])
        if self._tells:
            self._removal_queue.begin(gone)
            return gone
        self._free(gone)
        return []

    def placed(self, reason: DropReason) -> list[LevelWrite]:
        """Return the writes with their places, and drop blocks without a place for this reason."""
        places = self.places.take(len(self._writing))
        keys, blocks = [*self._writing], [*self._writing.values()]
        for one in blocks[len(places) :]:
            self.stats.drop("full" if self.places.limited else reason, one.meta.priority)
        slots, lost = [*map(self._slots.__getitem__, keys)], map(self._lost.__contains__, keys)
        placed, side = list[LevelWrite](), self.client.pipeline.side
        for meta, run in runs([one.meta for one in blocks[: len(places)]]):
            facts = blocks[run][0].facts(ttl_s=self.rule.ttl_s, clock=self.shared.clock)
            same = repeat(side), repeat(facts), repeat(meta.terms.kind)
            placed += map(LevelWrite, keys[run], places[run], slots[run], *same, lost)
        return placed

    def settle(self, blocks: Sequence[LevelWrite], answer: CallOutcome) -> None:
        """End the write under way: publish what was stored, free the rest, tell the stack."""
        self.stats.stored_s += answer.took_s
        stored = 0
        if answer.full:
            self._full(blocks)
        elif answer.results is None:
            self._drop("failed", blocks)
            salts = {block.key: block.facts.salt for block in blocks}
            unwanted = self._tombstones & salts.keys()
            self._tombstones -= unwanted
            # an abandoned call may still store blocks, which ``stored_late`` then removes
            if answer.quiet:
                self._unstored(blocks, unwanted)
            else:
                self._removal_queue.leave_behind(salts, unwanted)
        else:
            stored = self._publish(blocks, answer.results)
        self.shared.arena.release([*self._slots.values()])
        writing, self._writing, self._slots = self._writing, {}, {}
        gone = [k for k in writing if k not in self.index] if stored < len(writing) else []
        there = [k for k in writing if k in self.index] if gone else [*writing]
        self._above.settled(self, there, stored=True)
        self._above.settled(self, gone, stored=False)
        if self.tier.shared:  # others may have stored a block that we did not
            self.remove_later([Ref(key, NO_PLACE) for key in self._tombstones])
        self._tombstones.clear()
        self.trim()

    def stored_late(self, blocks: Sequence[LevelWrite]) -> None:
        """End a write that was an abandoned call."""
        self._unstored(blocks, self._removal_queue.come_back({block.key for block in blocks}))
        self._above.wake()

    def _unstored(self, blocks: Sequence[LevelWrite], unwanted: AbstractSet[BlockKey]) -> None:
        """Clean up after a write that failed or ended late: some of its blocks may be stored.

        A private tier has to forget them all. A shared one forgets only ``unwanted`` blocks, which
        a user removed or purged meanwhile; the others are as good as any.
        """
        self.remove_later([Ref(one.key, one.place) for one in blocks if one.key in unwanted])
        self._let_go([Ref(one.key, one.place) for one in blocks if one.key not in unwanted])

    def _publish(self, blocks: Sequence[LevelWrite], results: Results) -> int:
        stored: list[BlockKey] = []
        metas = [one.meta for one in islice(self._writing.values(), len(blocks))]
        if all(results) and alike(metas) and metas[0].terms == NO_TERMS and not self._tombstones:
            stored = [block.key for block in reversed(blocks)]
            self.hold(stored, [block.place for block in reversed(blocks)], metas[0])
            blocks, results, metas = (), (), []
        # one by one, the tail first, where they could not be published at once
        for block, kept, meta in zip(blocks[::-1], results[::-1], metas[::-1], strict=True):
            ref = Ref(block.key, block.place)
            if not kept:
                self._free([ref])
                self._drop("refused", [block])
            elif ref.key in self._tombstones:
                self._tombstones.remove(ref.key)
                self.remove_later([ref])
            elif not meta.terms.last(self.shared.clock):
                self._let_go([ref])
            else:
                self.hold([ref.key], [ref.place], meta)
                stored.append(ref.key)
        for key in self._lost.keys() & stored:
            del self._lost[key]
        self.stats.stored += len(stored)
        self.shared.events.stored(self.name, stored[::-1])
        return len(stored)

    def _drop(self, reason: DropReason, blocks: Sequence[LevelWrite]) -> None:
        for block in blocks:
            self.stats.drop(reason, self._writing[block.key].meta.priority)

    def _full(self, blocks: Sequence[LevelWrite]) -> None:
        """Note that the medium is full: work within the places in use, and try for more later."""
        self._drop("full", blocks)
        places, now_s = [block.place for block in blocks], self.shared.clock.now()
        # a free place of a shared tier is no room that is kept for us
        if self.places.full(places, now_s, all_free=self.tier.shared):  # said once an hour
            held = f"full with {len(self.index)} of {self.capacity_blocks} blocks"
            what = f"its medium is {held}; older blocks give way from now on"
            self.shared.notices.say(f"{self.name} full", f"tier {self.name}: {what}")

    def read_ended(self, blocks: Sequence[LevelRead]) -> None:
        """End the reads of these blocks: places that were given up meanwhile are free."""
        self.places.end_reads([block.place for block in blocks])

    def came(self, blocks: Sequence[LevelRead], answer: CallOutcome) -> Sequence[bool]:
        """Return which blocks were read, and mark them used, tail first; drop the lost ones."""
        stats, results = self.stats, answer.results
        stats.loaded_s += answer.took_s
        if results is None:
            return [False] * len(blocks)
        both = zip(blocks, results, self.index.at([block.place for block in blocks]), strict=True)
        held = [(block, ok) for block, ok, key in both if key == block.key]
        held.reverse()
        lost = [block.key for block, ok in held if ok is False]  # None: it may be there later
        stats.misses += len(lost)
        self.forget(lost, "lost")
        self.index.touch([block.place for block, ok in held if ok])
        stats.errors += None in results
        stats.loaded += sum(map(bool, results))
        return [*map(bool, results)]

    def unrecovered(self, keys: Sequence[BlockKey]) -> None:
        """Forget recovered blocks that the tier will recover again."""
        self.index.drop(keys)
        self._removal_queue = RemovalQueue(self.capacity_blocks)

    def opened(self) -> None:
        """Let the level take part: its tier is open, at start or later."""
        self.client.opened()
        self.purges.missed.clear()
        self._above.wake()

    # ---- what is there

    @property
    def pending(self) -> bool:
        """True if there is something left to do."""
        return bool(self.queued or self._removal_queue.removing or self.purges.next)

    @property
    def due(self) -> bool:
        """True if there is something to do that may be done now."""
        if self.write_queue and self.writable:
            return True
        return bool(self._removal_queue.removing or self.purges.next) and self.client.open("remove")

    @property
    def is_writing(self) -> bool:
        """True if a write is under way."""
        return bool(self._writing)

    @property
    def queued(self) -> int:
        """Number of blocks queued or being written."""
        return len(self.write_queue) + len(self._writing)

    @property
    def queue_age_s(self) -> float:
        """Seconds that the oldest of them has waited; 0 without any."""
        oldest = [one for _, one in self.write_queue.oldest(1)]
        since_s = [one.since_s for one in (*self._writing.values(), *oldest)]
        return self.shared.clock.now() - min(since_s) if since_s else 0.0

    @property
    def removals(self) -> int:
        """Number of blocks that the tier still has to forget, and of purges that are not over."""
        return len(self._removal_queue) + len(self._tombstones) + len(self.purges)

    def check(self) -> None:
        """Assert capacity, places and claims; O(n), for tests."""
        self.index.check(self.capacity_blocks)
        self.write_queue.check()
        self.places.check()
        assert self._tombstones <= self._writing.keys()
        self._removal_queue.check()
        assert self._slots.keys() == self._writing.keys()
        assert all(map(self.shared.arena.claims, self._slots.values()))
        assert len(self.index) <= self.places.taken <= self.capacity_blocks
