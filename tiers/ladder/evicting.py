"""How blocks leave a level below host: eviction for newcomers, and removal from its tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

from kvladder.events import Reason
from kvladder.keys import BlockKey
from kvladder.lock import BATCH, STEP
from kvladder.metrics import DropReason, MissReason
from kvladder.tiers.base import NO_PLACE, Tier
from kvladder.tiers.label import Ref
from kvladder.tiers.ladder.base_level import BaseLevel, Shared, StackCallbacks
from kvladder.tiers.ladder.calling.calls import CallOutcome
from kvladder.tiers.ladder.calling.client import TierClient
from kvladder.tiers.ladder.definition import LevelDefinition
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.places import PlaceAllocator
from kvladder.tiers.ladder.writing.late import LateWrites
from kvladder.tiers.ladder.writing.purges import PurgeQueue
from kvladder.tiers.ladder.writing.queue import RemovalQueue, WriteQueue
from kvladder.tiers.ladder.writing.transit import WritesInFlight

LOST_MAX = 4096
"""Most blocks that are remembered as lost or damaged by a shared tier."""


class EvictingLevel(BaseLevel[int]):
    """The half of a ``Level`` by which blocks leave it, and its queues.

    A place is free again when the tier has forgotten its block. A shared tier keeps blocks for
    others, unless a user removed them: there, places mean nothing and are free at once.
    """

    def __init__(
        self, spec: LevelDefinition, shared: Shared, above: StackCallbacks, *, bit: int
    ) -> None:
        super().__init__(spec, shared, bit=bit, blocks_max=spec.capacity_blocks)
        self.tier: Tier = spec.tier
        self.capacity_blocks = spec.capacity_blocks
        self.client = TierClient(spec, shared, self.stats, on_calm=above.wake)
        self.batch_max = min(spec.tier.batch_max, BATCH)
        """The largest batch that is given to the tier, so that its bookkeeping stays short."""
        self.places = PlaceAllocator(spec.capacity_blocks)
        self._above = above
        self.write_queue = WriteQueue(shared.arena, blocks_max=spec.settings.queue_blocks)
        self._in_flight = WritesInFlight(shared.arena)
        self._late = LateWrites()
        self._removal_queue = RemovalQueue(spec.capacity_blocks)
        self.purges = PurgeQueue(self.client, self.stats, busy=lambda: bool(self._undone))
        self._lost: dict[BlockKey, None] = {}
        """Blocks that a shared tier did not deliver or damaged. The next write replaces them there.
        """

    # ---- blocks that leave the index

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

    def _let_go(self, blocks: Sequence[Ref]) -> None:
        """Give up blocks that left the index by no user's wish; a shared tier keeps them for
        others.
        """
        if self.tier.shared:
            self._free(blocks)
        else:
            self.remove_later(blocks)

    def _dropped(self, reason: DropReason, key: BlockKey, priority: int) -> None:
        """Count a block that could have been kept here and was not."""
        self.stats.drop(reason, priority)
        self.shared.ghosts.add([key], self.name, "refused")

    def _free(self, blocks: Sequence[Ref]) -> None:
        self.places.give([place for _, place in blocks if place != NO_PLACE])

    def _evict(self, keys: Sequence[BlockKey], why: MissReason = "evicted") -> list[int]:
        """Drop blocks to make room, and return their places.

        Host does not write them again, or they would move up and down for ever.
        """
        self.shared.ghosts.add(keys, self.name, why)
        places = self.index.drop(keys, evicted_s=self.shared.clock.now())
        self.stats.evicted += len(keys)
        if self.on_evicted is not None:
            self.on_evicted(keys)
        self.shared.events.removed(self.name, keys, "evicted")
        self._above.settled(self, keys, stored=False)
        return places

    # ---- removal by a user, and writes that are cancelled

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Forget the blocks and return how many were here. No earlier transfer brings one back.

        A shared tier forgets them for all engines.
        """
        self.condemn(*keys)
        recalled = self.recall(keys)
        if self.tier.shared:  # others may have put it there
            foreign = [key for key in keys if key not in self.index and key not in recalled]
            self.remove_later([Ref(key, NO_PLACE) for key in foreign])
        return super().remove(keys)

    def condemn(self, *removed: BlockKey | bytes | None) -> None:
        """Note what a user removes, for a tier that has to sync, or that is not open now."""
        self.purges.condemn(*removed)
        self._above.wake()

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Remove unusable blocks; a shared tier keeps them, as other engines may be able to use
        them.
        """
        if self.tier.shared:
            self.forget([key for key in keys if key in self.index], "lost")
        else:
            self.remove(keys)

    def recall(self, keys: Sequence[BlockKey], salt: bytes | None = None) -> set[BlockKey]:
        """Cancel writes of ``keys``, only those of ``salt`` if one is given.

        Queued blocks leave the queue. Blocks that are being written are removed after that. Returns
        the keys that may still come to be stored.
        """
        found: set[BlockKey] = set()
        queue, in_flight, removals = self.write_queue, self._in_flight, self._removal_queue
        self._late.recall(keys, salt)
        for key in keys if queue or in_flight or removals.abandoned else ():
            if (one := queue.get(key)) is not None:
                if one.is_of(salt):
                    self._give_up([key])
            # the salt of a block that is being removed is not known any more
            elif in_flight.recall(key, salt) or (salt is None and key in removals.abandoned):
                found.add(key)
        return found

    def _lose(self, reason: DropReason, keys: Sequence[BlockKey]) -> None:
        """Take blocks out of the write queue, which frees their slots, and count them as drops."""
        for key in keys:
            self._dropped(reason, key, self.write_queue[key].meta.priority)
        self.index.refused(keys, "room")
        self._give_up(keys)

    def _give_up(self, keys: Sequence[BlockKey]) -> None:
        if keys := self.write_queue.among(keys):
            self.write_queue.remove(keys)
            self._above.settled(self, keys, stored=False)

    def purge(self, salt: bytes | None) -> None:
        """Queue a purge of a salt, or of everything for None.

        A shared tier is purged before anything else is done with it, and is not asked until then.
        Blocks of the salt that are stored there meanwhile are removed again. Another tier erases
        step by step between writes, once all removals have ended.
        """
        self.purges.add(salt)
        if self.tier.shared:
            self._in_flight.purge(salt)
            self._late.purge(salt)
        self._above.wake()

    # ---- removal from the tier

    def remove_later(self, blocks: Sequence[Ref]) -> None:
        """Queue the removal of blocks that have left the index; it frees their places."""
        if blocks:
            self._removal_queue.add(blocks)
            self._above.wake()

    def take_removals(self) -> list[Ref]:
        """Begin the oldest removals, one batch, if the tier may be called for them now."""
        return self._removal_queue.take(self.batch_max) if self.client.open("remove") else []

    def forgotten(self, blocks: Sequence[Ref], answer: CallOutcome) -> None:
        """End a removal: its places are free, or it is tried again later.

        What the medium does not permit is counted, and is not tried again.
        """
        self._removal_queue.ended(blocks)
        self.stats.denied += len(blocks) if answer.denied else 0
        if answer.results is not None or answer.denied:
            self._free(blocks)
        elif answer.quiet:
            self.remove_later(blocks)
        else:  # the call may still remove a block offered meanwhile
            self._removal_queue.abandoned.update(key for key, _ in blocks)
            self._give_up([key for key, _ in blocks])

    @property
    def late_in_s(self) -> float | None:
        """Seconds until ``remove_late`` has something to do; None if it has nothing."""
        next_s = self._late.next_s
        return None if next_s is None else max(0.0, next_s - self.shared.clock.now())

    def remove_late(self) -> None:
        """Queue once more the removal of blocks whose failed writes can no longer come."""
        due = self._late.due(self.shared.clock.now())
        self.remove_later([Ref(key, NO_PLACE) for key in due])

    def forgotten_late(self, blocks: Sequence[Ref]) -> None:
        """End a removal that was an abandoned call, and queue it again."""
        self._removal_queue.abandoned.difference_update(key for key, _ in blocks)
        self.remove_later(blocks)

    def unrecovered(self, keys: Sequence[BlockKey]) -> None:
        """Forget recovered blocks that the tier will recover again."""
        self.index.drop(keys)
        self._removal_queue = RemovalQueue(self.capacity_blocks)

    def leaving(self, key: BlockKey) -> bool:
        """Return whether the tier has still to forget the block, or may still come to store it."""
        held = self._removal_queue, self._in_flight.abandoned, self._late
        return any(key in some for some in held)

    def owes(self, keys: Iterable[BlockKey], removals: int) -> bool:
        """Return whether the tier has still to forget one of these blocks, or to sync that.

        ``removals`` is ``purges.removals`` as it was after they were removed.
        """
        coming = self._in_flight.writing
        return self.purges.owes_sync(removals) or any(
            key in coming or self.leaving(key) for key in keys
        )

    @property
    def removals(self) -> int:
        """Number of blocks that the tier still has to forget, and of purges that are not over."""
        return self._undone + self._in_flight.tombstones + len(self.purges) + len(self._late)

    def owed(self) -> set[BlockKey | bytes | None]:
        """Return what the tier has still to forget: keys, salts, None for everything."""
        coming = {*self._in_flight.abandoned, *self._late.keys()}
        return {*self._removal_queue.keys(), *coming, *self.purges.salts()}

    @property
    def _owes_now(self) -> bool:
        """True if the tier has something to remove, to purge or to sync now."""
        purges = self.purges
        return bool(self._removal_queue.removing or purges.next or purges.sync_due)

    @property
    def _undone(self) -> int:
        return self._removal_queue.removing + self.abandoned

    @property
    def abandoned(self) -> int:
        """Number of blocks that abandoned calls may still store or remove."""
        return len(self._in_flight.abandoned) + len(self._removal_queue.abandoned)

    # ---- room for newcomers

    @property
    def _tells(self) -> bool:
        """True if the tier is told of evictions: a shared one only while its medium is full."""
        return not self.tier.shared or self.places.limited

    def _victims(
        self, priorities: Sequence[int], by_salt: Mapping[bytes, Sequence[int]]
    ) -> tuple[list[tuple[Ref, BlockMeta]], DropReason]:
        """Choose victims for newcomers; see ``Level.victims``.

        Salts at their quota, with priorities of their newcomers in ``by_salt``, give way first.
        """
        now_s = self.shared.clock.now()
        self.places.retry(now_s)
        self.index.revert(now_s)
        if self._tells and not self.client.open("remove"):
            return [], "breaker"
        reads = self.places.being_read
        asked = by_salt.items()
        own = [at for salt, said in asked for at in self.index.give_way(salt, said, reads)[0]]
        chosen, newcomers = list[int](), priorities[self.places.free + len(own) :]
        reason: DropReason = "busy"
        for place in self.index.victims():
            if len(chosen) == len(newcomers):
                break
            if reads(place) or place in own:
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

    def narrow(self, capacity_blocks: int) -> None:
        """Use only places below a smaller capacity from now on; see ``shed`` and ``above``."""
        self.places.resize(capacity_blocks)

    def shed(self) -> bool:
        """Evict a step of the next victims beyond the places' capacity; return whether any went.

        Blocks that are being read stay for now.
        """
        over = min(STEP, len(self.index) - self.places.capacity)
        if over <= 0:
            return False
        self.index.revert(self.shared.clock.now())
        busy, victims = self.places.being_read, self.index.victims()
        chosen = list(islice((place for place in victims if not busy(place)), over))
        keys = self.index.keys_at(chosen)
        self._let_go([*map(Ref, keys, self._evict(keys))])
        return bool(keys)

    def above(self, start: int) -> tuple[list[tuple[Ref, BlockMeta]], int]:
        """Return a step of held blocks at places from ``start`` on, and where the next one begins.

        Leaves out those that are being read.
        """
        end = min(start + self.batch_max, self.index.places)
        both = zip(self.index.at(range(start, end)), range(start, end), strict=True)
        refs = [Ref(k, at) for k, at in both if k is not None and not self.places.being_read(at)]
        metas = self.index.metas([ref.place for ref in refs])
        return [*zip(refs, metas, strict=True)], end

    def resized(self, capacity_blocks: int) -> None:
        """Have another capacity, for which the tier is ready."""
        if capacity_blocks > self.places.capacity:
            self.places.resize(capacity_blocks)
        self.capacity_blocks = capacity_blocks

    def renumber(self, blocks: Sequence[tuple[Ref, BlockMeta]]) -> None:
        """Give blocks of a shared tier other places, as far as there are any: only numbers here."""
        for (key, place), meta in blocks:
            expires_s = self.index.expires_s(place)
            for other in self.places.take(1):
                self.index.drop([key])
                self.index.insert([key], [other], meta, expires_s=expires_s)
                self.places.give([place])

    def lift(self, block: Ref) -> None:
        """Take a block out of its place; the caller has its bytes, and queues it again."""
        self.index.drop([block.key])
        self.shared.events.removed(self.name, [block.key], "evicted")
        self.remove_later([block])

    def trim(self) -> bool:
        """Evict a step of what salts hold beyond their quota, and return whether any block went."""
        if keys := self.index.excess(STEP, self.places.being_read):
            self._let_go([*map(Ref, keys, self._evict(keys, "quota"))])
        return bool(keys)

    def _room_for(
        self, wanted: int, priority: int, salt: bytes, spare: AbstractSet[BlockKey]
    ) -> list[int]:
        """Return up to ``wanted`` places for blocks of a salt that a shared tier has, at once.

        If places are short, the next victims are evicted, but none of ``spare``. They need not be
        removed from the tier: places are no addresses there, and a full medium has these blocks.
        """
        reads, at = self.places.being_read, self.index.key_at
        own, room = self.index.give_way(
            salt, [priority] * wanted, lambda place: reads(place) or at(place) in spare
        )
        self.places.give(self._evict(self.index.keys_at(own), "quota"))
        wanted, gone = min(wanted, int(room)), list[BlockKey]()
        for place in self.index.victims():
            if len(gone) >= wanted - self.places.untaken or self.index.priority(place) > priority:
                break
            (key,) = self.index.keys_at([place])
            if key not in spare and not reads(place):
                gone.append(key)
        self.places.give(self._evict(gone))
        return self.places.take_held(wanted)
