"""The save path of a stack: reserve slots, publish what was copied into them, or abandon it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf

from kvladder.arena import Slot
from kvladder.errors import ClosedError
from kvladder.keys import BlockKey
from kvladder.lock import STEP
from kvladder.metrics import MissReason
from kvladder.tiers.ladder.host import HostLevel
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.loading.loader import Loader
from kvladder.tiers.ladder.loading.unreleased import Unreleased
from kvladder.tiers.ladder.queries import StackQueries
from kvladder.tiers.ladder.records.meta import BlockMeta, alike
from kvladder.tiers.ladder.records.terms import NO_TERMS
from kvladder.tiers.ladder.saving import Saving


class StackSaves(StackQueries, ABC):
    """Saves blocks into a stack. Every block is reserved, filled and then published once."""

    loader: Loader
    _saving: Saving
    """Blocks that are reserved and not yet published."""
    _told: Sequence[HostLevel | Level]
    """Levels with policies that are told of refusals."""
    _closed: bool
    _unreleased: Unreleased
    draining: bool = False
    """True while nothing new is saved, because the engine is about to end."""

    @abstractmethod
    def wake(self) -> None:
        """Have the loop thread look after the levels soon."""

    def reserve(
        self,
        keys: Sequence[BlockKey],
        metas: Sequence[BlockMeta],
        *,
        explicit: bool,
        patient: bool = False,
    ) -> tuple[list[int], list[Slot], int]:
        """Lease slots for those ``keys``, consecutive blocks of a prefix, that are to be saved.

        Leaves out blocks that are here already, and the first block that no level takes with all
        that follow it. Returns positions in ``keys``, their slots, and the position of the first
        block without room, ``len(keys)`` if there is none. ``explicit`` metas replace those of
        blocks that are here. A block without room counts as a drop, unless the caller is
        ``patient`` and tries again. Each key returned must be given to ``publish`` or ``abandon``.
        """
        self._require_open()
        if self._unreleased.lost:
            self._unreleased.settle()
        if self.draining:
            return [], [], len(keys)
        wanted: list[int] = []
        slots: list[Slot] = []
        start = 0
        while start < len(keys):
            with self.lock:
                is_short = self._closed or len(slots) < len(wanted)
                found, end, refused = self._missing(keys, metas, start, explicit=explicit)
                leased = [] if is_short or not found else self._lease(found, metas)
                if len(leased) == end - start:
                    self._saving.put(keys[start:end], leased, metas[start:end])
                elif leased:
                    kept = found[: len(leased)]
                    said = [metas[index] for index in kept]
                    self._saving.put([keys[index] for index in kept], leased, said)
                for index in () if patient else found[len(leased) :]:
                    self.host.stats.drop(self.host.short_of, metas[index].priority)
                if len(leased) < len(found) and not patient:
                    left_out = [keys[index] for index in found[len(leased) :]]
                    self.shared.ghosts.add(left_out, self.host.name, "refused")
                    if self._told:
                        self.host.index.refused(left_out, "room")
            wanted += found
            slots += leased
            start = end
            if refused is not None:
                self._leave_out(keys[refused:], metas[refused])
        short = wanted[len(slots)] if len(slots) < len(wanted) else len(keys)
        del wanted[len(slots) :]
        return wanted, slots, short

    def _missing(
        self, keys: Sequence[BlockKey], metas: Sequence[BlockMeta], start: int, *, explicit: bool
    ) -> tuple[Sequence[int], int, int | None]:
        """Return positions from ``start`` on that are to be saved, and up to where this is decided.

        If the positions are a ``range``, their metas are alike. Also returns the position of the
        block that no level takes; None if there is none before that end.
        """
        first = metas[start]
        is_plain = first.terms == NO_TERMS and first.until_s == inf
        end, part, said = len(keys), keys, metas
        if end > STEP:
            bulk_step = self.shared.bulk_step
            has_room = self.shared.arena.free >= bulk_step  # otherwise blocks have to be evicted
            step = bulk_step if has_room else bulk_step // 4
            end = min(end, start + (step if is_plain else STEP))
            part, said = keys[start:end], metas[start:end]
        if self._are_new(part) and alike(said) and self._admitted(first):
            return range(start, end), end, None
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
            elif key not in self._saving and key not in self.loader.arrivals:
                if not self._admitted(meta):
                    return wanted, len(keys), index
                wanted.append(index)
        return wanted, end, None

    def _are_new(self, keys: Sequence[BlockKey]) -> bool:
        """Return whether none of these is in host, or on its way there."""
        is_new = self.host.index.disjoint(keys) and self._saving.disjoint(keys)
        return is_new and not self._any_coming(keys)

    def _leave_out(self, keys: Sequence[BlockKey], meta: BlockMeta) -> None:
        """Tell policies that no level takes the first block, nor those after it that are new."""
        start = 0
        while start < len(keys):
            part = keys[start : start + self.shared.bulk_step]
            with self.lock:
                known = [level.index for level in self.levels if not level.index.disjoint(part)]
                if known or not self._are_new(part):
                    part = part[:STEP]
                    left = [key for key in part if self._are_new([key]) and not self.where(key)]
                else:
                    left = [*part]
                self._refuse(left, self._told)
                self._note_refused(left, meta)
            start += len(part)

    def _lease(self, wanted: Sequence[int], metas: Sequence[BlockMeta]) -> list[Slot]:
        """Lease slots for blocks at these positions, fewer if room is short."""
        some = wanted[:1] if isinstance(wanted, range) else wanted
        lowest = min(metas[index].priority for index in some)
        slots = self.host.room(len(wanted), lowest, metas[wanted[0]].terms.salt)
        if len(slots) < len(wanted):
            self.wake()
        return slots

    def _any_coming(self, keys: Sequence[BlockKey]) -> bool:
        """Return whether a read of one of these is pending."""
        arrivals = self.loader.arrivals
        return bool(arrivals) and not arrivals.isdisjoint(keys)

    def _refuse(self, keys: Sequence[BlockKey], levels: Sequence[HostLevel | Level]) -> None:
        """Tell the policies of these levels that their rules refuse the blocks."""
        for level in levels:
            level.index.refused(keys, "rule")

    def _admitted(self, meta: BlockMeta) -> bool:
        return self.host.admits(meta) or any(level.admits(meta) for level in self.levels)

    def _note_refused(self, keys: Sequence[BlockKey], meta: BlockMeta) -> None:
        """Note why no level takes these blocks: the rules of all, or another reason."""
        is_low = not any(lv.rule.admits(meta.floor, meta.hits) for lv in self._all_levels)
        self.shared.ghosts.add(keys, "", "threshold" if is_low else "refused")

    def publish(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Make these reserved blocks hits: their bytes are complete."""
        if self.shared.listener is not None:
            self.shared.listener.stored(keys)
        parts: list[Sequence[BlockKey]] = []
        end = len(keys)
        request = next(self.shared.requests) if self._told else 0  # only such policies use it
        while end:  # the tail first, so that a prefix outlives what follows it
            with self.lock:
                stored, end = self._publish(keys, slots, end, request)
                self.host.stats.stored += len(stored)
                for admission in self.host.admissions:
                    admission.saved(stored)
                self.shared.events.stored(self.host.name, stored)
                self.wake()
            parts.append(stored)
        for stored in reversed(parts) if self.host.writes_through else ():
            with self.lock:
                if self.host.write_through(stored):
                    self.wake()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the cache is closed")

    def _publish(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], end: int, request: int
    ) -> tuple[Sequence[BlockKey], int]:
        """Publish a step of blocks that ends before position ``end``.

        Returns its blocks that are in host now, and the position where it begins.
        """
        start = 0
        if len(keys) > STEP:
            start = max(0, end - self._saving.together(keys[end - 1], STEP))
            keys, slots = keys[start:end], slots[start:end]
        host, arrivals = self.host, self.loader.arrivals
        # none if one of them changed since ``reserve``
        metas = self._saving.metas(keys, slots) or list[BlockMeta]()
        is_uniform = (
            alike(metas)
            and host.admits(metas[0])
            and host.index.disjoint(keys)
            and not self._any_coming(keys)
        )
        if is_uniform:  # as mostly; one by one, 2048 blocks take eight times as long
            self._saving.done(keys)
            host.hold(keys[::-1], slots[::-1], metas[0], request=request)
            if self._told:
                self._refuse(keys, [lv for lv in self._told if not lv.admits(metas[0])])
            return keys, start
        start += max(0, len(keys) - STEP)
        stored: list[BlockKey] = []
        for key, slot in zip(keys[: -STEP - 1 : -1], slots[: -STEP - 1 : -1], strict=True):
            meta = self._saving.pop(key, slot)
            if meta is None or key in arrivals or key in host.index:
                # it was removed or saved anew meanwhile, or is being read from a level below
                self.shared.arena.release([slot])
            elif host.admits(meta):
                host.hold([key], [slot], meta, request=request)
                stored.append(key)
            else:
                self._send_down(key, slot, meta)
                self.shared.arena.release([slot])
            if meta is not None and self._told:
                self._refuse([key], [lv for lv in self._told if not lv.admits(meta)])
        return stored[::-1], start

    def _send_down(self, key: BlockKey, slot: Slot, meta: BlockMeta) -> None:
        """Offer a block that host does not hold to the level that should get it, if any."""
        (target,) = self.host.targets([key], [meta], {})
        if target is not None:
            target.offer([key], [slot], [meta])

    def leave_host(self, keys: Sequence[BlockKey], why: MissReason = "threshold") -> bool:
        """Have blocks leave host, for the levels below that should get them; with the lock held.

        Returns whether there were any.
        """
        for key in keys:
            slot = self.host.find(key)
            if slot is not None:
                self._send_down(key, slot, self.host.index.meta(slot))
                self.host.forget([key], "evicted", why)
        self.host.doubt()
        return bool(keys)

    def abandon(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Free the slots of these reserved blocks, which will not be filled."""
        for start in range(0, len(keys), STEP):
            part = slots[start : start + STEP]
            with self.lock:
                for key, slot in zip(keys[start : start + STEP], part, strict=True):
                    self._saving.pop(key, slot)
                self.shared.arena.release(part)

    def used(self, key: BlockKey, meta: BlockMeta) -> str | None:
        """Update what a block that was used elsewhere is worth; with the lock held.

        The block leaves the levels with thresholds that it no longer reaches. Returns the hottest
        level that still holds it or is about to, None if there is none.
        """
        slot = self.host.find(key)
        if slot is not None:
            self.host.index.note(key, meta)
            self.host.doubt()
            if meta.floor < self.host.rule.min_priority:
                self._send_down(key, slot, meta)
                self.host.forget([key], "evicted", "threshold")
        for level in self.levels:
            if level.find(key) is not None:
                level.index.note(key, meta)
                if meta.floor < level.rule.min_priority:
                    level.forget([key], "evicted", "threshold")
        return self.where(key)
