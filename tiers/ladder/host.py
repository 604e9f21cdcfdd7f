"""The host level: blocks that lie in arena slots, one copy away from the GPU."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import compress, islice
from math import inf
from typing import NamedTuple

from kvladder.arena import Slot
from kvladder.events import Reason
from kvladder.keys import BlockKey
from kvladder.lock import BATCH, STEP
from kvladder.metrics import DropReason, MissReason
from kvladder.policy.admission import AdaptiveAdmission
from kvladder.policy.eviction import EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_SHARES, Shares
from kvladder.tiers.ladder.base_level import BaseLevel, Shared
from kvladder.tiers.ladder.level import Level
from kvladder.tiers.ladder.records.meta import BlockMeta, alike, runs
from kvladder.tiers.ladder.records.terms import HOST, Terms

CLEAN_MAX = 4 * BATCH
"""Most of the next victims that are written below while loads wait for their slots."""
SCAN_MAX = BATCH
"""Most blocks that may not go yet and that a search for victims passes over."""

Admitting = dict[tuple[int, int, Terms], Level | None]
"""The hottest level that admits blocks of a floor, a number of hits and terms; None if none does.
"""


class HostSettings(NamedTuple):
    """Settings of the host level of a stack."""

    name: str
    rule: OffloadRule
    policy: EvictionPolicy
    reserve_blocks: int
    """Slots kept free or clean in the background, so that a save finds room at once."""
    shares: Shares = NO_SHARES
    """Limits to the blocks that each salt may have there."""


class HostLevel(BaseLevel[Slot]):
    """Level 0. Its places are arena slots, so nothing moves when a block comes or goes.

    Every call has the stack's lock held. The level holds one claim on the slot of each block. A
    fetch holds another one and pins the block. ``below`` are the other levels, hottest first.
    """

    medium = "CPU"

    def __init__(self, settings: HostSettings, shared: Shared, below: Sequence[Level]) -> None:
        blocks_max = shared.arena.slots
        super().__init__(settings, shared, bit=HOST, blocks_max=blocks_max)
        self.reserve_blocks = settings.reserve_blocks
        self.has_looked = False
        """True once ``clean`` has searched anew, without relying on its last result."""
        self._below = below
        self.admissions: list[AdaptiveAdmission] = []
        """Those of levels below, which are told of what is saved."""
        self._demand_blocks = 0
        self._may_go = inf
        """Upper bound of the blocks that may go now, as known since room was short."""
        self._ahead = 0
        """Number of the next victims that were found to need no write, or to be on their way."""
        self._save_blocks = 0
        self._refused: dict[BlockKey, int] = {}
        """Bits of the levels that did not take a block of this one, or gave it up again."""
        self._backlog: dict[Level, OrderedDict[BlockKey, None]] = {}
        """Per write-through level, blocks of this one that its queue had no room for."""
        self.writes_through = False
        self._wanted: Counter[bytes] = Counter()
        """Number of blocks, by salt at its quota, that have to be written below before they may go.
        """
        self.short_of: DropReason = "room"
        """Reason why ``room`` gave fewer slots than asked for the last time."""
        self._open: list[bool] = []
        """Per level below, whether it was writable when ``clean`` last looked."""
        self.arrange()

    def arrange(self) -> None:
        """Look at the levels below and their rules anew."""
        self._backlog = {
            level: self._backlog.get(level) or OrderedDict()
            for level in self._below
            if level.rule.when == "commit"
        }
        self.writes_through = bool(self._backlog)
        self.doubt()

    # ---- blocks that come and go

    def _freed(self, keys: Sequence[BlockKey], places: Sequence[Slot], reason: Reason) -> None:
        self.on_drop(keys)
        self._ahead -= len(keys)
        self.shared.arena.release(places)

    def on_drop(self, keys: Sequence[BlockKey]) -> None:
        """Forget what is noted of blocks that left the level."""
        for key in keys if self._refused else ():
            self._refused.pop(key, None)
        for waiting in self._backlog.values():
            for key in keys if waiting else ():
                waiting.pop(key, None)

    def pin(self, slots: Sequence[Slot]) -> None:
        """Pin the blocks at these slots, and claim the slots once more."""
        self.shared.arena.share(slots)
        self._ahead -= len(slots)
        self.index.pin(slots)

    def unpin(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> None:
        """Undo ``pin``, tail first, so that a prefix outlives what follows it.

        A block that was removed meanwhile, or now lies in another slot, is not pinned any more.
        """
        self._may_go += len(slots)
        both = zip(slots[::-1], keys[::-1], self.index.at(slots[::-1]), strict=True)
        self.index.unpin([slot for slot, key, there in both if key == there])
        self.shared.arena.release(slots)

    def room(self, count: int, priority: int, salt: bytes = b"") -> list[Slot]:
        """Lease up to ``count`` slots for blocks of this priority, evicting exactly as many as
        needed.

        Blocks of a ``salt`` at its quota get room from its own blocks alone.

        Never waits. Never evicts a block that is worth more than the newcomers, or that is still to
        be written to a level below; it then leases fewer slots than asked for.
        """
        arena = self.shared.arena
        now = self.shared.clock.now()
        self.index.revert(now)
        self.short_of = "room"
        has_quota = salt and self.index.has_quota
        if has_quota:
            count = self._within_quota(count, priority, salt)
        missing = count - arena.free
        if missing > 0:
            gone = self._evictable(missing, priority)
            self._may_go = 0.0 if len(gone) < missing else max(0.0, self._may_go - missing)
            self._evict(gone)
        slots = arena.lease(min(count, arena.free)) or []
        if has_quota or self.index.lent:
            self.index.lend(slots, salt if has_quota else b"")
        return slots

    def _evict(self, gone: Sequence[BlockKey], why: MissReason = "evicted") -> None:
        self.shared.ghosts.add(gone, self.name, why)
        self._ahead -= len(gone)
        self.on_drop(gone)
        self.shared.arena.release(self.index.drop(gone, evicted_s=self.shared.clock.now()))
        self.stats.evicted += len(gone)
        if self.on_evicted is not None:
            self.on_evicted(gone)
        self.shared.events.removed(self.name, gone, "evicted")

    def _within_quota(self, count: int, priority: int, salt: bytes) -> int:
        """Return how many slots blocks of a salt may get; evict some of its own for them."""
        if self.index.spare(salt) - self.index.coming(salt) < count:
            self.index.regain(self.shared.arena.claims)
        room = int(min(count, self.index.spare(salt) - self.index.coming(salt)))
        if room == count:
            return count
        short = count - room
        own = list(islice(self.index.own_victims(salt), short + SCAN_MAX))
        own = [place for place in own if self.index.priority(place) <= priority]
        own = self.shared.arena.unshared(own)
        targets = self.targets(self.index.keys_at(own), self.index.metas(own), {})
        free = [place for place, to in zip(own, targets, strict=True) if to is None][:short]
        self._evict(self.index.keys_at(free), "quota")
        if len(free) < short:
            self.short_of = "quota"
            self._wanted[salt] = short - len(free)
        return max(0, room + len(free))

    def _clean_own(self) -> None:
        """Have blocks of salts at their quota written below, so that newer ones replace them."""
        wanted, self._wanted = self._wanted, Counter()
        for salt, count in wanted.items():
            own = list(islice(self.index.own_victims(salt), min(BATCH, count)))
            self._offer(self.shared.arena.unshared(own))

    def excess(self) -> list[tuple[BlockKey, Slot, BlockMeta]]:
        """Return a step of blocks that salts hold beyond their quota."""
        shared = self.shared.arena.unshared
        keys = self.index.excess(STEP, lambda place: not shared([Slot(place)]))
        slots = [slot for slot in self.index.places_of(keys) if slot is not None]
        return [*zip(keys, slots, self.index.metas(slots), strict=True)]

    @property
    def short_of_slots(self) -> MissReason:
        """Reason of misses of blocks for which ``room`` had no slot the last time."""
        return "quota" if self.short_of == "quota" else "room"

    @property
    def room_max(self) -> float:
        """Most slots that ``room`` could give now; asking for more is of no use."""
        return self.shared.arena.free + max(0.0, self._may_go)

    # ---- where its blocks still have to be written

    def targets(
        self, keys: Sequence[BlockKey], metas: Sequence[BlockMeta], admitting: Admitting
    ) -> list[Level | None]:
        """Return the level to which each block has to be written before it may go.

        None if the hottest level that admits the block has it or did not take it, or if no level
        admits it. ``admitting`` is a cache, empty at first; it is valid until the lock is released.
        """
        found: list[Level | None] = []
        refused = self._refused
        for meta, run in runs(metas):
            part = keys[run]
            kind = (meta.floor, meta.hits, meta.terms)
            if kind not in admitting:
                admitting[kind] = next((lv for lv in self._below if lv.admits(meta)), None)
            level = admitting[kind]
            if level is None:
                found += [None] * len(part)
                continue
            lacks = [level if place is None else None for place in level.index.places_of(part)]
            if refused:
                both = zip(part, lacks, strict=True)
                lacks = [None if refused.get(key, 0) & level.bit else to for key, to in both]
            found += lacks
        return found

    def settled(self, level: BaseLevel[int], keys: Sequence[BlockKey], *, stored: bool) -> None:
        """Note that a level stored these blocks or gave them up: those that are here may go."""
        for key in keys if self._refused or not stored else ():
            refused = self._refused.pop(key, 0) & ~level.bit
            if not stored and key in self.index:
                refused |= level.bit
            if refused:
                self._refused[key] = refused
        self._may_go += len(keys)
        if not stored:
            self.doubt()

    def offer_again(self, keys: Sequence[BlockKey], bit: int) -> None:
        """Offer these blocks to the level of ``bit`` once more, though it did not take them."""
        for key in keys if self._refused else ():
            if (refused := self._refused.get(key, 0)) & bit:
                self._refused[key] = refused & ~bit
                if refused == bit:
                    del self._refused[key]
                self.doubt()

    def write_through(self, keys: Sequence[BlockKey]) -> bool:
        """Queue new blocks, head first, at write-through levels; return whether some must wait."""
        for waiting in self._backlog.values():
            for key in keys:
                waiting[key] = None
        return self.catch_up()

    def catch_up(self) -> bool:
        """Offer write-through levels their backlog, oldest first, one step for each level.

        Returns whether a level has both a backlog and room in its queue.
        """
        is_behind = False
        for level, waiting in self._backlog.items():
            count = min(len(waiting), BATCH, level.write_queue.room)
            if count and level.writable:
                keys: list[BlockKey] = []
                slots: list[Slot] = []
                for _ in range(count):
                    key, _ = waiting.popitem(last=False)
                    slot = self.find(key)
                    if slot is not None:
                        keys.append(key)
                        slots.append(slot)
                level.offer(keys, slots, self.index.metas(slots))
                is_behind |= bool(waiting) and not level.write_queue.full
        return is_behind

    @property
    def waits(self) -> bool:
        """True if a write-through level that is writable has a backlog."""
        return any(waiting and level.writable for level, waiting in self._backlog.items())

    def demand(self, blocks: int) -> None:
        """Note how many slots loads wait for, beyond the reserve."""
        self._demand_blocks = blocks

    def wait_for(self, blocks: int) -> None:
        """Note how many slots a save waits for, and have the next victims looked at anew."""
        self._save_blocks = blocks
        if blocks:
            self.doubt()
            self.has_looked = False

    def _evictable(self, count: int, priority: int) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        passed = seen = 0
        index, admitting = self.index, Admitting()
        victims = index.victims()
        while len(chosen) < count and passed < SCAN_MAX:
            places = list(islice(victims, count - len(chosen)))
            if not places:
                break
            before = len(chosen)
            passed += len(places)
            # a shared slot is being written, or is read by an abandoned call
            places = self.shared.arena.unshared(places)
            keys, metas = index.keys_at(places), index.metas(places)
            targets = self.targets(keys, metas, admitting)
            end = len(keys)
            if not alike(metas) or metas[0].priority > priority:
                end = next((at for at, meta in enumerate(metas) if meta.priority > priority), end)
            needless = [target is None for target in targets[:end]]
            chosen += compress(keys, needless)
            if not all(needless):  # the order is not as ``clean`` found it
                self._ahead = min(self._ahead, seen)
            if end < len(keys):
                return chosen
            seen = passed + before
            passed -= len(chosen) - before
        return chosen

    def clean(self) -> None:
        """Have the next victims written below, so that a save finds room without waiting.

        In a wide window, blocks that needed nothing are not looked at again until most of them have
        gone.
        """
        if self._wanted:
            self._clean_own()
        takes = [level.writable for level in self._below]
        if takes != self._open:
            self._open = takes
            self.doubt()
        wanted = self.reserve_blocks + self._demand_blocks + self._save_blocks
        short = wanted - self.shared.arena.free
        window = min(short, CLEAN_MAX)
        self.has_looked = self._ahead <= max(window // 4, min(window, BATCH) - 1)
        if short <= 0 or not self.has_looked:
            return
        index = self.index
        # ``_evictable`` lowers ``_ahead`` if the first victims have changed since
        passed = self._ahead = max(0, self._ahead) if window > BATCH else 0
        staying: list[Slot] = []
        victims = islice(index.victims(), passed, window)
        while len(staying) < BATCH and (places := list(islice(victims, BATCH - len(staying)))):
            passed += len(places)
            staying += self.shared.arena.unshared(places)  # shared slots are on their way below
        if self._offer(staying):
            self._ahead = passed

    def _offer(self, slots: Sequence[Slot]) -> bool:
        """Offer these blocks to the levels that should have them; return False if a queue fills."""
        keys, metas = self.index.keys_at(slots), self.index.metas(slots)
        targets = self.targets(keys, metas, {})
        for target in dict.fromkeys(targets):
            if target is None:
                continue
            going = [other is target for other in targets]
            named, some = [*compress(keys, going)], [*compress(slots, going)]
            if not target.offer(named, some, [*compress(metas, going)], stay=True, new=True):
                return False  # offered again when the queue has room
        return True

    def doubt(self) -> None:
        """Forget search results: the next victims, or where they should go, may have changed."""
        self._ahead = 0
        self._may_go = inf

    def check(self) -> None:
        """Assert that the index is sound and holds claims on its slots; O(n), for tests."""
        self.index.check(self.shared.arena.slots)
        for key in self.index:
            place = self.index.place(key)
            assert place is not None
            assert self.shared.arena.claims(place) >= 1 + self.index.pins(place)
        assert all(key in self.index for key in self._refused)
