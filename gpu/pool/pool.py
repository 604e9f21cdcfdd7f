"""The block pool: device slots, what is cached in them, and who holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvladder.errors import NotHeld, PoolError
from kvladder.gpu.pool.below import Below
from kvladder.gpu.pool.commit import Committer, Content, token_ids
from kvladder.gpu.pool.events import BELOW, PoolEvents, PoolStored, Reports, StoredBlock
from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.pool.ledger import Partial as Partial
from kvladder.gpu.pool.ledger import PoolSettings as PoolSettings
from kvladder.gpu.pool.moves import Moves
from kvladder.gpu.pool.retain import Retain, Retainer
from kvladder.gpu.pool.serving import PoolMatch, Serving
from kvladder.gpu.tree.columns import gather
from kvladder.gpu.tree.names import NO_NODE, NO_SLOT, DeviceSlot, NodeId, Root, Ticket
from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.policy.numbers import whole
from kvladder.policy.retention import checked_priority

ROOT = Root(BlockKey(bytes(KEY_BYTES)))
"""Where prefixes begin for callers who make their keys without a root."""


class BlockPool:
    """Device slots with references, a prefix index, and prioritized LRU among what is cached.

    Every slot is free, held or evictable. Whoever is given a slot holds a reference to it and
    releases it; the blocks of a prefix are held together and released tail first. What is evicted
    goes to the tiers as far as they take it. Calls come from one thread and never wait.

    Parameters
    ----------
    settings:
        What the pool is.
    now:
        The clock, in seconds; retentions end by it.
    below:
        The tiers, or None.
    events:
        Where to report; the buffer may be shared by the pools of a model. None reports nothing.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        now: Callable[[], float],
        below: Below | None = None,
        events: PoolEvents | None = None,
    ) -> None:
        self.settings = settings
        self.events = PoolEvents() if events is None else events
        reports = Reports(self.events, settings.group, settings.level)
        self._ledger = Ledger(settings, reports, now, tiers=below is not None)
        self.stats = self._ledger.stats
        self._retainer = Retainer(self._ledger, now)
        self._moves = Moves(self._ledger, below)
        self._committer = Committer(self._ledger, self._moves, self._retainer)
        self.serving = Serving(self._ledger, self._moves, self._retainer, self._committer)
        """What requests use of it."""
        self.epoch = (0, 0)
        """How often the cache was reset, and how often blocks were removed or purged.

        What began before a reset is not stored after it.
        """
        capacities = {settings.level: settings.blocks}
        capacities.update({} if below is None else below.capacities)
        reports.created(settings.block_tokens, capacities)

    # ---- how full it is

    @property
    def blocks(self) -> int:
        """All slots; others than ``settings`` say while memory is elsewhere.

        See ``resize``, and ``admit``.
        """
        return self._ledger.slots

    @property
    def free(self) -> int:
        """Slots that nobody holds, with or without a cached block in them."""
        return self._ledger.slots - len(self._ledger.refs)

    @property
    def used(self) -> int:
        """Slots that somebody holds, a copy under way included."""
        return len(self._ledger.refs)

    @property
    def cached(self) -> int:
        """Blocks on the device that can be reused, held or not."""
        node_at = self._ledger.index.node_at
        return len(node_at) - node_at.count(NO_NODE)

    def counts(self) -> dict[str, Any]:
        """Counters since it was made, blocks as they are now, and histograms; plain data.

        May be called from any thread; histograms are up to date as of the last ``mark``.
        """
        now = {"capacity": self.blocks, "used": self.used, "free": self.free, "cached": self.cached}
        return {**self.stats.as_dict(), **now, **self._ledger.uses.as_dict()}

    def mark(self) -> None:
        """Note the time, so that ages are known; an engine that runs calls it once a step."""
        self._ledger.uses.mark(self._ledger.order.next_stamp)

    # ---- slots

    def allocate(self, count: int) -> list[DeviceSlot]:
        """Hand out ``count`` slots, evicting exactly as many blocks as are needed.

        The caller owns one reference to each. What is in them is undefined.

        Raises
        ------
        OutOfBlocks
            There are not that many that nobody holds; nothing was changed.
        BlocksBusy
            There will be when the offloads that were begun have landed.
        """
        if type(count) is not int:
            count = whole(count, "blocks")
        if count < 0:
            raise ValueError(f"{count} blocks: expected 0 or more")
        ledger = self._ledger
        if count > len(ledger.free):
            return self.serving.room(count)
        self.stats.allocated += count
        return ledger.take(count)

    def release(self, slots: Sequence[DeviceSlot], *, front: bool = False) -> None:
        """Give a reference to each of ``slots`` back, which are in the order of their prefix.

        What nobody references any more may be reused, the last slot first; a cached block stays
        until then. With ``front`` these are the next to go, the first of them first.

        Raises
        ------
        NotHeld
            A slot is not held, or named twice; nothing was changed.
        """
        self._ledger.release(slots, front=front)

    def retain(self, slots: Sequence[DeviceSlot]) -> None:
        """Add a reference to each of ``slots``, which the caller holds.

        Raises
        ------
        NotHeld
            A slot is not held; nothing was changed.
        """
        if not self._ledger.refs.all_held(slots):
            raise NotHeld("a slot is not held")
        self._ledger.retain(slots)

    def copying(self, slots: Sequence[DeviceSlot]) -> None:
        """Say that one reference to each of ``slots`` ends with a copy under way.

        Until ``copies_ended`` those that nothing else holds are not there yet, which is BlocksBusy,
        and no reason to let somebody make way.
        """
        self._ledger.copying(slots)

    def copies_ended(self, slots: Sequence[DeviceSlot]) -> None:
        """Undo ``copying``, before the references are dropped."""
        self._ledger.copies_ended(slots)

    def evict(self, count: int) -> int:
        """Have up to ``count`` cached blocks leave the device; how many did, or began to."""
        count = whole(count, "blocks")
        if count < 0:
            raise ValueError(f"{count} blocks: expected 0 or more")
        self._retainer.expire()
        victims = self._ledger.order.select(count)
        self._moves.evict(victims)
        return len(victims)

    def resize(self, blocks: int) -> list[tuple[DeviceSlot, DeviceSlot]]:
        """Have so many slots from now on, which are the first ones.

        Blocks that lie in others are elsewhere now: the caller copies what is in the first slot of
        each pair to the second before it does anything else.

        Raises
        ------
        PoolError
            Somebody holds blocks, or more are cached than would have slots; nothing was changed.
        """
        blocks = whole(blocks, "blocks")
        if self.used or self.cached > blocks or blocks < 1:
            what = f"{blocks} blocks, while {self.used} are held and {self.cached} cached"
            raise PoolError(f"{what}: expected 1 or more, as many as are cached, and none held")
        return self._ledger.resize(blocks)

    @property
    def short(self) -> int:
        """Slots that were asked for and that there were not, since it was made."""
        return self._ledger.short

    def held(self, slots: Sequence[DeviceSlot]) -> int:
        """How many of these somebody holds."""
        return sum(slot in self._ledger.refs for slot in slots)

    def in_use(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Those of ``keys`` that are on the device and held by somebody."""
        find, slot = self._ledger.index.find, self._ledger.nodes.slot
        refs, nodes = self._ledger.refs, ((key, find(key)) for key in keys)
        return {key for key, node in nodes if node is not None and slot[node] in refs}

    def vacate(
        self, slots: Sequence[DeviceSlot]
    ) -> tuple[list[DeviceSlot], list[tuple[DeviceSlot, DeviceSlot]]]:
        """Give those of ``slots`` up that nobody holds: they are not the pool's any more.

        Cached blocks in them move to free slots, as many as there are others: the caller copies
        what is in the first slot of each pair to the second before it does anything else. What is
        held, and what there is no room for, stays.
        """
        return self._ledger.vacate_idle(slots)

    def admit(self, slots: Sequence[DeviceSlot]) -> None:
        """Have these slots too, which are less than ``places`` and no pool's, all free."""
        self._ledger.admit(slots)

    # ---- blocks

    @property
    def idle(self) -> int:
        """Blocks on the device that nobody holds."""
        return len(self._ledger.order)

    @property
    def leaving(self) -> int:
        """Blocks that are being copied off the device."""
        return len(self._moves.leaving)

    def match(self, keys: Sequence[BlockKey]) -> list[DeviceSlot]:
        """The longest leading run of ``keys`` that is on the device; changes nothing.

        Blocks that are still on their way there do not count.
        """
        ledger, arriving = self._ledger, self._moves.arriving
        slots = gather(ledger.nodes.slot, ledger.index.match(keys))
        if arriving:
            del slots[next((at for at, slot in enumerate(slots) if slot in arriving), len(slots)) :]
        return slots

    def knows(self, key: BlockKey) -> bool:
        """Whether the block is on the device or was in a tier when it was heard of last."""
        return key in self._ledger.index

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each of ``keys`` is on the device or in a tier; changes nothing."""
        find, slot = self._ledger.index.find, self._ledger.nodes.slot
        found = [(node := find(key)) is not None and slot[node] != NO_SLOT for key in keys]
        below = self._moves.below
        if below is not None and not all(found):
            absent = [at for at, here in enumerate(found) if not here]
            for at, held in zip(absent, below.holds([keys[at] for at in absent]), strict=True):
                found[at] = held
        return found

    def acquire(self, keys: Sequence[BlockKey]) -> list[DeviceSlot]:
        """``match``, and one reference to each slot for the caller."""
        if self._moves.arriving:
            keys = keys[: len(self.match(keys))]
        nodes = self._ledger.index.match(keys)
        self.serving.settle(self.serving.hold(PoolMatch(nodes), len(nodes)))
        return gather(self._ledger.nodes.slot, nodes)

    def commit(
        self,
        slots: Sequence[DeviceSlot],
        content: Content,
        *,
        retain: Sequence[Retain | None] | None = None,
    ) -> list[DeviceSlot] | None:
        """The bytes of these blocks are complete: from now on others may reuse them.

        The caller holds ``slots``, one per key, and all blocks before them. A content is cached
        once: where it was already, the caller's reference moves to the slot that has it, and its
        own slot is given back; but not while that slot is still being filled. The slots to use from
        now on are returned. If the block before them is not known (any more), nothing is stored,
        and None is returned.

        Raises
        ------
        NotHeld, PoolError, ValueError
            A slot is not held, or holds another block, or the arguments do not fit together;
            nothing was changed.
        """
        return self._committer.commit(slots, content, retain)

    def reprioritize(self, keys: Sequence[BlockKey], priority: int) -> None:
        """Give those of ``keys`` that are known this priority, for good."""
        find = self._ledger.index.find
        nodes = [node for key in keys if (node := find(key)) is not None]
        self._retainer.apply(nodes, [Retain(checked_priority(priority))] * len(nodes), new=())

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forget these blocks here and in the tiers, and all that follow them.

        Who holds them keeps them, but nobody else finds them.
        """
        find = self._ledger.index.find
        self._forget([node for key in keys if (node := find(key)) is not None])
        if self._moves.below is not None:
            self._moves.below.remove(keys)

    def purge(self, salt: str) -> None:
        """Forget every block that was made for a request with this salt, which is not empty."""
        salts = self._ledger.index.salts
        self._forget([node for node, held in salts.items() if held == salt])

    def _forget(self, nodes: Sequence[NodeId]) -> None:
        resets, removals = self.epoch
        self.epoch = (resets, removals + 1)
        self._moves.drop(nodes, "removed")

    def reset(self, *, tiers: bool = True) -> None:
        """Forget everything that is cached here, and in the ``tiers``.

        Nothing of what was begun before will be stored, whoever holds it.
        """
        resets, removals = self.epoch
        self.epoch = (resets + 1, removals)
        self._moves.drop(self._ledger.index.known(), "removed", tiers=tiers)
        if tiers and self._moves.below is not None:
            self._moves.below.clear()

    # ---- what the tiers report, on the pool's thread

    def landed(self, ticket: Ticket, *, ok: bool = True) -> None:
        """A copy to or from the device is over; without ``ok`` its bytes did not arrive.

        Raises
        ------
        NotHeld
            No such copy is under way.
        """
        self._moves.landed(ticket, ok=ok)

    def forgotten(self, keys: Sequence[BlockKey]) -> None:
        """No tier holds these any more."""
        self._moves.forgotten(keys)

    # ---- for people and tests

    def in_tiers(self) -> list[BlockKey]:
        """The blocks that a tier holds, on the device or not; O(n), for tests."""
        index = self._ledger.index
        return [index.key_of(node) for node in index.colder]

    def snapshot(self) -> list[PoolStored]:
        """The index as it is now, as events that make it from nothing, numbered like the last one.

        Parents come before their children. Tokens are empty where they are not kept.
        """
        index, rows, settings = self._ledger.index, self._ledger.nodes, self.settings
        made: list[PoolStored] = []
        for parent, root, siblings in index.families():
            for node in siblings:
                on_device = rows.slot[node] != NO_SLOT
                tokens, extra = token_ids(rows.tokens[node]), index.extras.get(node, ())
                block = StoredBlock(index.key_of(node), tokens, rows.priority[node], extra)
                made.append(
                    PoolStored(
                        self.events.last_id,
                        settings.group,
                        settings.level if on_device else BELOW,
                        parent,
                        (block,),
                        root.salt,
                        root.lora,
                    )
                )
        return made

    def check(self) -> None:
        """Assert every invariant; O(n), for tests."""
        self._ledger.check()
        self._retainer.check()
        self._moves.check()
        assert self.free + self.used == self.blocks
        rows, leaving = self._ledger.nodes, self._moves.leaving
        kids = [0] * len(rows)
        for node in self._ledger.index.known():
            if rows.slot[node] != NO_SLOT and node not in leaving:
                kids[rows.parent[node]] += 1
        assert not self.settings.chained or kids[1:] == rows.kids[1:]
