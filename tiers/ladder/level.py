"""One level below host: what is known of its blocks, and each step that a block takes there.

The table of a block's states is in ``tiers/ladder/README.md``: who holds the claim on its slot, and
who holds its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import compress, islice, repeat
from math import inf
from operator import not_

from kvladder.arena import Slot
from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.metrics import DropReason
from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.fetch_cost import Pace
from kvladder.tiers.answers import Results
from kvladder.tiers.base import NO_PLACE
from kvladder.tiers.label import LevelRead, Ref, Write
from kvladder.tiers.ladder.base_level import Shared, StackCallbacks
from kvladder.tiers.ladder.calling.calls import CallOutcome
from kvladder.tiers.ladder.definition import LevelDefinition
from kvladder.tiers.ladder.evicting import EvictingLevel
from kvladder.tiers.ladder.records.ghosts import OF_VERDICT
from kvladder.tiers.ladder.records.meta import BlockMeta, alike, runs
from kvladder.tiers.ladder.records.terms import NO_TERMS, Terms
from kvladder.tiers.ladder.writing.transit import facts_of, ranks


class Level(EvictingLevel):
    """Keeps a tier's place in the stack: rule, index, exact capacity, queues, statistics.

    Every call has the stack's lock held and never waits; ``client`` makes the calls that await the
    tier. Whatever the tier does, the level answers with a miss or a drop.
    """

    def __init__(
        self, spec: LevelDefinition, shared: Shared, above: StackCallbacks, *, bit: int
    ) -> None:
        super().__init__(spec, shared, above, bit=bit)
        self.settings = spec.settings
        self.endurance_bytes = spec.endurance_bytes
        self.pace = Pace()
        """Measured time of reads."""
        self.is_detached = False
        """True if it takes no blocks any more, because it left the stack."""

    def depart(self) -> None:
        """Take no blocks from now on: the level leaves the stack."""
        self.is_detached = True

    # ---- what may be done now

    def admits(self, meta: BlockMeta) -> bool:
        return super().admits(meta) and self.writable and not self.is_detached

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
        return key in self.index or key in self.write_queue or key in self._in_flight.writing

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

        Returns False if some were not taken, beside those that the admission leaves out. The level
        has them already (it has none of ``new`` blocks), does not admit them, or has an abandoned
        call about them. Or its queue is full and
        holds nothing less valuable: that counts as a drop, unless blocks ``stay`` in host and are
        offered again.
        """
        if self.gate is not None and any(out := self.left_out(self.gate, keys, metas)):
            self._above.settled(self, [*compress(keys, out)], stored=False)
            rest = [*map(not_, out)]
            keys, slots = [*compress(keys, rest)], [*compress(slots, rest)]
            metas = [*compress(metas, rest)]
            if not keys:
                return True
        now_s, queue = self.shared.clock.now(), self.write_queue
        kinds = metas[:1] if alike(metas) else {id(meta): meta for meta in metas}.values()
        is_uniform = (
            queue.fits(keys)
            and (new or self.index.disjoint(keys))
            and self._in_flight.disjoint(keys)
            and self._removal_queue.abandoned.isdisjoint(keys)
            and self._late.disjoint(keys)
            and all(map(self.admits, kinds))
        )
        taken = 0
        if is_uniform:  # as mostly; one by one, 128 blocks take 15 times as long
            queue.add(keys, slots, metas, now_s)
            taken = len(keys)
        else:
            for key, slot, meta in zip(keys, slots, metas, strict=True):
                if self.holds(key):
                    continue
                if not self.admits(meta):
                    self.index.refused([key], "rule")
                    continue
                loser = queue.loser(meta.priority)
                if self._abandoned(key):  # the call could undo the write
                    self._above.settled(self, [key], stored=False)
                elif loser is not None or not queue.full:
                    self._lose("queue", [] if loser is None else [loser])
                    queue.add([key], [slot], [meta], now_s)
                    taken += 1
                elif not stay:
                    self._dropped("queue", key, meta.priority)
                    self.index.refused([key], "room")
        self._above.wake()
        return taken == len(keys)

    def _abandoned(self, key: BlockKey) -> bool:
        """Return whether an abandoned call may still store the block, or forget it.

        So may a failed one, if the block was removed since.
        """
        abandoned = self._in_flight.abandoned, self._removal_queue.abandoned, self._late
        return any(key in some for some in abandoned)

    def coming(self) -> list[BlockKey]:
        """Return every block that is queued or being written."""
        return [*self.write_queue, *self._in_flight.writing]

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
        places = self._room_for(len(wanted), lowest, salt, spare)
        adopted, meta = wanted[: len(places)], BlockMeta(lowest, lowest, terms=Terms(salt=salt))
        self.hold(adopted[::-1], places[::-1], meta)
        self.stats.found += len(adopted)
        self.shared.events.stored(self.name, adopted)

    def is_written(self, key: BlockKey) -> bool:
        """Return whether the block is being written here."""
        return key in self._in_flight.writing

    def queue_again(self, block: Ref, slot: Slot, meta: BlockMeta) -> None:
        """Queue a block that was lifted from its place, with a claim of the level's own."""
        queue = self.write_queue
        if queue.full or self.holds(block.key) or self._abandoned(block.key):
            self._dropped("queue", block.key, meta.priority)
        else:
            queue.add([block.key], [slot], [meta], self.shared.clock.now())
            self._above.wake()

    def limit_queue(self, blocks_max: int) -> None:
        """Let at most so many blocks wait to be written; drop the youngest above that."""
        self._lose("queue", self.write_queue.resize(blocks_max))

    def lose_some(self) -> bool:
        """Drop a step of queued blocks, and return whether more are queued."""
        self._lose("breaker", list(islice(self.write_queue, STEP)))
        return bool(self.write_queue)

    # ---- what its writer and its readers do, step by step

    def next_batch(self) -> dict[BlockKey, bytes]:
        """Return the oldest queued blocks, one batch, with their salts."""
        return {one.key: one.meta.terms.salt for one in self.write_queue.oldest(self.batch_max)}

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
        self._in_flight.begin(queue.take(queue.among(oldest)))
        return [one.meta.priority for one in self._in_flight.writing.values()]

    def victims(self, priorities: Sequence[int]) -> tuple[list[tuple[Ref, BlockMeta]], DropReason]:
        """Choose victims for blocks of these priorities, the highest first, in the order of
        eviction.

        Chooses as many as are needed. No victim is being read or has a higher priority than its
        newcomer. Also returns why newcomers without a place get none.
        """
        has_quota = self.index.has_quota
        return self._victims(
            priorities, ranks(self._in_flight.writing.values()) if has_quota else {}
        )

    def placed(self, reason: DropReason) -> list[Write]:
        """Return the writes with their places, and drop blocks without a place for this reason."""
        blocks = [*self._in_flight.writing.values()]
        places = self.places.take(len(blocks))
        for one in blocks[len(places) :]:
            why: DropReason = "full" if self.places.limited else reason
            self._dropped(why, one.key, one.meta.priority)
            self.index.refused([one.key], "room")
        keys, slots = [one.key for one in blocks], [one.slot for one in blocks]
        placed, (labels, view) = list[Write](), self.client.pipeline.side
        for meta, run in runs([one.meta for one in blocks[: len(places)]]):
            facts = facts_of(meta, ttl_s=self.rule.ttl_s, clock=self.shared.clock)
            lost = map(self._lost.__contains__, keys[run])
            slot = repeat(labels), keys[run], places[run], slots[run], map(view, slots[run])
            same = repeat(facts), repeat(None), lost, repeat(meta.terms.kind)
            placed += map(Write, *slot, *same)
        return placed

    def settle(self, blocks: Sequence[Write], answer: CallOutcome) -> None:
        """End the write under way: publish what was stored, free the rest, tell the stack."""
        answer.add_to(self.stats.stored_call_s)
        keys, stored = [*self._in_flight.writing], 0
        if answer.full:
            self._full(blocks)
        elif answer.results is None:
            self._drop("failed", blocks)
            # an abandoned call may still store blocks, which ``stored_late`` then removes
            if answer.quiet:
                recalled = [self._in_flight.settle(block.key) for block in blocks]
                self._unstored(blocks, recalled, began=answer.error != "unavailable")
            else:
                self._in_flight.abandon(block.key for block in blocks)
        else:
            stored = self._publish(blocks, answer.results)
        removed = self._in_flight.end()
        if answer.results is not None and not all(answer.results):
            refused = [*compress(blocks, map(not_, answer.results))]
            self._may_come(refused, [block.key in removed for block in refused])
        gone = [key for key in keys if key not in self.index] if stored < len(keys) else []
        there = [key for key in keys if key in self.index] if gone else keys
        self._above.settled(self, there, stored=True)
        self._above.settled(self, gone, stored=False)
        if self.tier.shared:  # others may have stored a block that we did not
            self.remove_later([Ref(key, NO_PLACE) for key in removed])
        self.trim()

    def stored_late(self, blocks: Sequence[Write]) -> None:
        """End a write that was an abandoned call."""
        self._unstored(blocks, [self._in_flight.come_back(block.key) for block in blocks])
        self._above.wake()

    def _unstored(
        self, blocks: Sequence[Write], removed: Sequence[bool], *, began: bool = True
    ) -> None:
        """Clean up after a write that failed or ended late: some of its blocks may be stored.

        A private tier has to forget them all. A shared one forgets only those that a user removed
        or purged meanwhile; the others are as good as any.
        """
        refs = [Ref(block.key, block.place) for block in blocks]
        self.remove_later([*compress(refs, removed)])
        self._let_go([*compress(refs, map(not_, removed))])
        if began:
            self._may_come(blocks, removed)

    def _may_come(self, blocks: Sequence[Write], removed: Sequence[bool]) -> None:
        """Note blocks of a failed write that the tier may still store, if it is such a tier."""
        if self.tier.late_s:
            until_s = self.shared.clock.now() + self.tier.late_s
            for block, is_removed in zip(blocks, removed, strict=True):
                self._late.add(block.key, block.facts.salt, until_s, removed=is_removed)

    def _publish(self, blocks: Sequence[Write], results: Results) -> int:
        stored: list[BlockKey] = []
        in_flight = self._in_flight
        metas = [one.meta for one in islice(in_flight.writing.values(), len(blocks))]
        least = self.rule.min_priority  # it may have risen since the write began
        is_uniform = all(results) and alike(metas) and metas[0].terms == NO_TERMS
        if (
            is_uniform and metas[0].floor >= least and not in_flight.tombstones
        ):  # as mostly, and in far less time
            stored = [block.key for block in reversed(blocks)]
            self.hold(stored, [block.place for block in reversed(blocks)], metas[0])
        else:  # the tail first
            for block, kept, meta in zip(blocks[::-1], results[::-1], metas[::-1], strict=True):
                ref = Ref(block.key, block.place)
                if not kept:
                    self._free([ref])
                    self._drop("refused", [block])
                elif in_flight.settle(ref.key):  # a user removed it meanwhile
                    self.remove_later([ref])
                elif meta.floor < least or not meta.terms.last(self.shared.clock):
                    self._let_go([ref])
                else:
                    self.hold([ref.key], [ref.place], meta)
                    stored.append(ref.key)
        for key in self._lost.keys() & stored:
            del self._lost[key]
        self.stats.stored += len(stored)
        self.shared.events.stored(self.name, stored[::-1])
        return len(stored)

    def _drop(self, reason: DropReason, blocks: Sequence[Write]) -> None:
        for block in blocks:
            self._dropped(reason, block.key, self._in_flight.writing[block.key].meta.priority)

    def _full(self, blocks: Sequence[Write]) -> None:
        """Note that the medium is full: work within the places in use, and try for more later."""
        self._drop("full", blocks)
        self.index.refused([block.key for block in blocks], "room")
        places, now_s = [block.place for block in blocks], self.shared.clock.now()
        # a free place of a shared tier is no room that is kept for us
        if self.places.full(places, now_s, all_free=self.tier.shared):  # said once an hour
            held = f"full with {len(self.index)} of {self.capacity_blocks} blocks"
            what = f"its medium is {held}; from now on older blocks are evicted for new ones"
            self.shared.notices.say(f"{self.name} full", f"tier {self.name}: {what}")

    def read_ended(self, blocks: Sequence[LevelRead]) -> None:
        """End the reads of these blocks: places that were given up meanwhile are free."""
        self.places.end_reads([block.place for block in blocks])

    def came(self, blocks: Sequence[LevelRead], answer: CallOutcome) -> Sequence[bool]:
        """Return which blocks were read, and mark them used, tail first; drop the lost ones."""
        stats, results = self.stats, answer.results
        answer.add_to(stats.loaded_call_s)
        if results is None:
            return [False] * len(blocks)
        both = zip(blocks, results, self.index.at([block.place for block in blocks]), strict=True)
        held = [(block, ok) for block, ok, key in both if key == block.key]
        held.reverse()
        lost = [block for block, ok in held if ok is False]  # None: it may be there later
        stats.misses += len(lost)
        self.forget([block.key for block in lost], "lost")
        for block in lost:
            self.shared.ghosts.add([block.key], self.name, OF_VERDICT[block.verdict[0]])
        self.index.touch([block.place for block, ok in held if ok])
        stats.errors += None in results
        stats.loaded += sum(map(bool, results))
        return [*map(bool, results)]

    def opened(self) -> None:
        """Let the level take part: its tier is open, at start or later."""
        self.client.opened()
        self.purges.opened()
        self._above.wake()

    # ---- what is there

    @property
    def pending(self) -> bool:
        """True if there is something left to do."""
        return bool(self.queued or self._owes_now)

    @property
    def due(self) -> bool:
        """True if there is something to do that may be done now."""
        if self.write_queue and self.writable:
            return True
        return self._owes_now and self.client.open("remove")

    @property
    def is_writing(self) -> bool:
        """True if a write is under way."""
        return bool(self._in_flight.writing)

    @property
    def queued(self) -> int:
        """Number of blocks queued or being written."""
        return len(self.write_queue) + len(self._in_flight.writing)

    @property
    def queue_age_s(self) -> float:
        """Seconds that the oldest of them has waited; 0 without any."""
        blocks = *self._in_flight.writing.values(), *self.write_queue.oldest(1)
        since_s = [one.since_s for one in blocks]
        return self.shared.clock.now() - min(since_s) if since_s else 0.0

    def check(self) -> None:
        """Assert capacity, places and claims; O(n), for tests."""
        self.index.check(self.capacity_blocks + self.places.above)
        self.write_queue.check()
        self._in_flight.check({key: self.write_queue[key] for key in self.write_queue})
        self.places.check()
        self._removal_queue.check()
        places = self.places
        assert len(self.index) <= places.taken
        assert places.taken - places.above <= places.capacity <= self.capacity_blocks
