"""The block pool: device slots, their cached blocks, and references to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvladder.errors import NotHeld, PoolError
from kvladder.gpu.pool.below import Below
from kvladder.gpu.pool.commit import Committer, Content, token_ids
from kvladder.gpu.pool.events import BELOW, PoolEvents, PoolStored, Reports, StoredBlock
from kvladder.gpu.pool.finder import PrefixFinder
from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.pool.ledger import Partial as Partial
from kvladder.gpu.pool.ledger import PoolSettings as PoolSettings
from kvladder.gpu.pool.moves import Moves
from kvladder.gpu.pool.retain import Retain, Retainer
from kvladder.gpu.pool.serving import Serving
from kvladder.gpu.tree.columns import gather
from kvladder.gpu.tree.names import NO_NODE, NO_SLOT, DeviceSlot, NodeId, Root, Ticket
from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.policy.numbers import whole
from kvladder.policy.retention import checked_priority

ROOT = Root(BlockKey(bytes(KEY_BYTES)))
"""Root of prefixes for callers that make their keys without one."""


class BlockPool:
    """Device slots with references, a prefix index, and prioritized LRU among cached blocks.

    Every slot is free, held or evictable. A caller that is given a slot owns a reference to it and
    must release it. The blocks of a prefix are held together and released tail first. Evicted
    blocks go to the tiers as far as these take them. Calls come from one thread and never wait.

    Parameters
    ----------
    settings:
        Size and kind of the pool.
    now:
        The clock, in seconds; it decides when retentions end.
    below:
        The tiers, or None.
    events:
        Buffer for events; the pools of a model may share it. None reports nothing.
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
        self.finder = PrefixFinder(self._ledger, self._moves, self._committer)
        """The part by which requests find cached blocks."""
        self.serving = Serving(
            self._ledger, self._moves, self._retainer, self._committer, self.finder
        )
        """The part by which requests get blocks."""
        self.epoch = (0, 0)
        """Number of resets, and number of removals and purges.

        Blocks of sequences that began before a reset are not stored after it.
        """
        capacities = {settings.level: settings.blocks}
        capacities.update({} if below is None else below.capacities)
        reports.created(settings.block_tokens, capacities)

    # ---- fill level

    @property
    def blocks(self) -> int:
        """Number of all slots; it differs from ``settings`` while memory is given up.

        See ``resize`` and ``admit``.
        """
        return self._ledger.slots

    @property
    def free(self) -> int:
        """Number of slots that are not held, with or without a cached block in them."""
        return self._ledger.slots - len(self._ledger.refs)

    @property
    def used(self) -> int:
        """Number of slots that are held, by a request or by a copy in flight."""
        return len(self._ledger.refs)

    @property
    def cached(self) -> int:
        """Number of blocks on the device that can be reused, held or not."""
        node_at = self._ledger.index.node_at
        return len(node_at) - node_at.count(NO_NODE)

    def counts(self) -> dict[str, Any]:
        """Return counters since its creation, the current fill level and histograms; plain data.

        Any thread may call it. Histograms are as of the last ``mark``.
        """
        now = {"capacity": self.blocks, "used": self.used, "free": self.free, "cached": self.cached}
        return {**self.stats.as_dict(), **now, **self._ledger.uses.as_dict()}

    def mark(self) -> None:
        """Note the time, so that ages are known. A running engine calls it once a step."""
        self._ledger.uses.mark(self._ledger.order.next_stamp)

    # ---- slots

    def allocate(self, count: int) -> list[DeviceSlot]:
        """Hand out ``count`` slots, and evict exactly as many blocks as are needed.

        The caller owns one reference to each. Their content is undefined.

        Raises
        ------
        OutOfBlocks
            Fewer slots are available; nothing was changed.
        BlocksBusy
            There will be enough when copies in flight have landed.
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
        """Drop a reference to each of ``slots``, which are in the order of their prefix.

        Slots without references may be reused, the last one first. Until then, cached blocks stay
        in them. With ``front`` these slots are the next to be reused, the first one first.

        Raises
        ------
        NotHeld
            A slot is not held, or given twice; nothing was changed.
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
        """Mark one reference to each of ``slots`` as one that ends with a copy in flight.

        Until ``copies_ended``, a lack of slots that only such copies hold raises BlocksBusy, so the
        engine waits and preempts no request.
        """
        self._ledger.copying(slots)

    def copies_ended(self, slots: Sequence[DeviceSlot]) -> None:
        """Undo ``copying``; call it before the references are dropped."""
        self._ledger.copies_ended(slots)

    def evict(self, count: int) -> int:
        """Evict up to ``count`` cached blocks; return how many left the device or began to."""
        count = whole(count, "blocks")
        if count < 0:
            raise ValueError(f"{count} blocks: expected 0 or more")
        self._retainer.expire()
        victims = self._ledger.order.select(count)
        self._moves.evict(victims)
        return len(victims)

    def resize(self, blocks: int) -> list[tuple[DeviceSlot, DeviceSlot]]:
        """Change the pool to its first ``blocks`` slots; return the moves of cached blocks.

        Blocks in other slots now belong to other places: the caller copies the content of the first
        slot of each pair to the second before it does anything else.

        Raises
        ------
        PoolError
            Some blocks are held, or more are cached than there would be slots; nothing was changed.
        """
        blocks = whole(blocks, "blocks")
        if self.used or self.cached > blocks or blocks < 1:
            what = f"resize to {blocks} blocks, {self.used} held, {self.cached} cached"
            raise PoolError(f"{what}: expected 1 or more, all cached blocks to fit, none held")
        return self._ledger.resize(blocks)

    @property
    def short(self) -> int:
        """Number of slots asked for but not available, since its creation."""
        return self._ledger.short

    def held(self, slots: Sequence[DeviceSlot]) -> int:
        """Return how many of these slots are held."""
        return sum(slot in self._ledger.refs for slot in slots)

    def in_use(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Return those of ``keys`` that are on the device and held."""
        find, slot = self._ledger.index.find, self._ledger.nodes.slot
        refs, nodes = self._ledger.refs, ((key, find(key)) for key in keys)
        return {key for key, node in nodes if node is not None and slot[node] in refs}

    def vacate(
        self, slots: Sequence[DeviceSlot]
    ) -> tuple[list[DeviceSlot], list[tuple[DeviceSlot, DeviceSlot]]]:
        """Give up those of ``slots`` that are not held; return them, and the moves of blocks.

        Cached blocks in them move to other free slots, as far as there are enough. The caller
        copies the content of the first slot of each pair to the second before it does anything
        else. Held slots, and cached blocks without a new place, stay in the pool.
        """
        return self._ledger.vacate_idle(slots)

    def admit(self, slots: Sequence[DeviceSlot]) -> None:
        """Add these slots, all free. Each must be below ``places`` and belong to no pool."""
        self._ledger.admit(slots)

    # ---- blocks

    @property
    def idle(self) -> int:
        """Number of cached blocks on the device that are not held."""
        return len(self._ledger.order)

    @property
    def leaving(self) -> int:
        """Number of blocks that are being copied off the device."""
        return len(self._moves.leaving)

    def match(self, keys: Sequence[BlockKey]) -> list[DeviceSlot]:
        """Return the slots of the longest leading run of ``keys`` on the device; changes nothing.

        Blocks that are still being loaded do not count.
        """
        ledger, arriving = self._ledger, self._moves.arriving
        slots = gather(ledger.nodes.slot, ledger.index.match(keys))
        if arriving:
            del slots[next((at for at, slot in enumerate(slots) if slot in arriving), len(slots)) :]
        return slots

    def knows(self, key: BlockKey) -> bool:
        """Return whether the block is on the device or, as far as the pool knows, in a tier."""
        return key in self._ledger.index

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return whether each of ``keys`` is on the device or in a tier; changes nothing."""
        find, slot = self._ledger.index.find, self._ledger.nodes.slot
        found = [(node := find(key)) is not None and slot[node] != NO_SLOT for key in keys]
        below = self._moves.below
        if below is not None and not all(found):
            absent = [at for at, here in enumerate(found) if not here]
            for at, held in zip(absent, below.holds([keys[at] for at in absent]), strict=True):
                found[at] = held
        return found

    def acquire(self, keys: Sequence[BlockKey]) -> list[DeviceSlot]:
        """Do as ``match``, and give the caller one reference to each slot."""
        if self._moves.arriving:
            keys = keys[: len(self.match(keys))]
        return self.serving.hold_cached(self._ledger.index.match(keys))

    def commit(
        self,
        slots: Sequence[DeviceSlot],
        content: Content,
        *,
        retain: Sequence[Retain | None] | None = None,
    ) -> list[DeviceSlot] | None:
        """Publish complete blocks for reuse; return the slots to use from now on.

        The caller holds ``slots``, one per key, and all blocks before them. Each content is cached
        once. If it was cached already, the caller's reference moves to that slot, and its own slot
        is released. But if that slot is still being filled, the caller's slot becomes the cached
        one. If the block before them is not known any more, nothing is stored, and None is
        returned.

        Raises
        ------
        NotHeld, PoolError, ValueError
            A slot is not held, or holds another block, or the arguments do not match; nothing was
            changed.
        """
        return self._committer.commit(slots, content, retain)

    def reprioritize(self, keys: Sequence[BlockKey], priority: int) -> None:
        """Give the known blocks among ``keys`` this priority, without expiry."""
        find = self._ledger.index.find
        nodes = [node for key in keys if (node := find(key)) is not None]
        self._retainer.apply(nodes, [Retain(checked_priority(priority))] * len(nodes), new=())

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove these blocks and all that follow them, here and in the tiers.

        Requests that hold them keep them, but no other request finds them.
        """
        find = self._ledger.index.find
        self._forget([node for key in keys if (node := find(key)) is not None])
        if self._moves.below is not None:
            self._moves.below.remove(keys)

    def purge(self, salt: str) -> None:
        """Remove every block of requests with this salt, which must not be empty."""
        salts = self._ledger.index.salts
        self._forget([node for node, held in salts.items() if held == salt])

    def _forget(self, nodes: Sequence[NodeId]) -> None:
        resets, removals = self.epoch
        self.epoch = (resets, removals + 1)
        self._moves.drop(nodes, "removed")

    def reset(self, *, tiers: bool = True) -> None:
        """Remove all cached blocks, here and with ``tiers`` also in the tiers.

        Sequences that began before will not store any block.
        """
        resets, removals = self.epoch
        self.epoch = (resets + 1, removals)
        self._moves.drop(self._ledger.index.known(), "removed", tiers=tiers)
        if tiers and self._moves.below is not None:
            self._moves.below.clear()

    # ---- reports of the tiers, on the pool's thread

    def landed(self, ticket: Ticket, *, ok: bool = True) -> None:
        """Process the end of a copy to or from the device; without ``ok`` its bytes did not arrive.

        Raises
        ------
        NotHeld
            No such copy is in flight.
        """
        self._moves.landed(ticket, ok=ok)

    def forgotten(self, keys: Sequence[BlockKey]) -> None:
        """Note that no tier holds these blocks any more."""
        self._moves.forgotten(keys)

    # ---- for people and tests

    def in_tiers(self) -> list[BlockKey]:
        """Return the blocks that a tier holds, on the device or not; O(n), for tests."""
        index = self._ledger.index
        return [index.key_of(node) for node in index.colder]

    def snapshot(self) -> list[PoolStored]:
        """Return the current index as events that rebuild it, numbered like the last event.

        Parents come before their children. Tokens are empty if they are not kept.
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
