"""The books of a device pool: what it is, which slot is free, which is held, what is cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvladder.errors import BlocksBusy, ConfigError, OutOfBlocks
from kvladder.gpu.pool.events import Reports
from kvladder.gpu.pool.slots import FreeSlots, References
from kvladder.gpu.pool.stats import PoolStats, Uses
from kvladder.gpu.requests.groups import SIZES, is_size
from kvladder.gpu.tree.columns import gather, split
from kvladder.gpu.tree.index import PrefixIndex
from kvladder.gpu.tree.names import NO_NODE, NO_SLOT, DeviceSlot, NodeId
from kvladder.gpu.tree.nodes import Nodes
from kvladder.gpu.tree.order import EvictionOrder
from kvladder.keys import BlockKey
from kvladder.policy.numbers import settle

Partial = Literal["off", "take", "copy"]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What a pool is.

    Parameters
    ----------
    blocks:
        Device slots.
    block_tokens:
        Tokens per block, a power of two above 1.
    partial:
        What to do with a cached block of which a prompt shares only the beginning: nothing;
        ``take`` it over, if nobody uses it and nothing follows it; or ``copy`` what is shared into
        a block of its own.
    chained:
        Whether a block is only of use with all blocks before it, so that leaves are evicted
        first. False behind a sliding window.
    level:
        Name of the device in events.
    group:
        Number of the pool among those of a model, for events.
    """

    blocks: int
    block_tokens: int
    partial: Partial = "take"
    chained: bool = True
    level: str = "gpu"
    group: int = 0
    first: int = 0
    """The number of the first slot that it has at its start."""
    places: int = 0
    """Slots that it may ever have, see ``BlockPool.admit``; 0: no more than it has at its start."""

    def __post_init__(self) -> None:
        settle(self, "blocks", "block_tokens", "group", "first", "places")
        if self.blocks < 1:
            raise ConfigError(f"{self.blocks} blocks", path="gpu.blocks", hint="1 or more")
        if not is_size(self.block_tokens):
            raise ConfigError(f"{self.block_tokens} tokens", path="block.tokens", hint=SIZES)
        if self.partial not in ("off", "take", "copy"):
            raise ConfigError(f"{self.partial!r}", path="gpu.partial", hint="off, take or copy")


class Ledger:
    """Slots and what is in them. Every slot is free, held, or evictable, and nothing else.

    Free: nothing of use is in it. Held: somebody references it, whatever is in it. Evictable: a
    cached block is in it that nobody references.
    """

    def __init__(
        self,
        settings: PoolSettings,
        reports: Reports,
        now: Callable[[], float],
        *,
        tiers: bool,
    ) -> None:
        matches = settings.partial != "off"
        self.settings = settings
        self.reports = reports
        self.stats = PoolStats()
        self.nodes = Nodes()
        self.index = PrefixIndex(
            self.nodes,
            slots=max(settings.places, settings.blocks),
            chained=settings.chained,
            family=matches or (settings.chained and tiers),
            labels=matches or reports.enabled,
        )
        self.order = EvictionOrder(self.nodes)
        self.uses = Uses(now, self.order.next_stamp)
        self.slots = settings.blocks
        """How many there are; others than ``settings`` say while memory is elsewhere."""
        self.short = 0
        """Slots that were asked for and that there were not, since it was made."""
        self.free = FreeSlots(range(settings.first, settings.first + settings.blocks))
        self.refs = References(max(settings.places, settings.blocks))
        self.copied = Counter[DeviceSlot]()
        """References that copies under way hold, and drop when they have ended."""

    @property
    def available(self) -> int:
        """How many slots nobody references."""
        return len(self.free) + len(self.order)

    def lacking(self, needed: int, available: int, kept: Sequence[DeviceSlot] = ()) -> OutOfBlocks:
        """Return the error for ``needed`` slots where there are ``available`` beside ``kept``.

        It is BlocksBusy where copies under way are all that holds the slots that are missing.
        """
        own = set(kept)
        copied = self.copied.items()
        coming = sum(self.refs[slot] == count and slot not in own for slot, count in copied)
        kind = BlocksBusy if needed <= available + coming else OutOfBlocks
        return kind(needed, available)

    def take(self, count: int) -> list[DeviceSlot]:
        """Hand out ``count`` of the free slots, with one reference each."""
        slots = self.free.take(count)
        self.refs.first(slots)
        return slots

    def retain(self, slots: Sequence[DeviceSlot]) -> None:
        """Add a reference to each slot; those that nobody held were taken out of the order."""
        self.refs.add(slots)

    def copying(self, slots: Iterable[DeviceSlot]) -> None:
        """Count a reference to each of ``slots`` as that of a copy under way."""
        self.copied.update(slots)

    def copies_ended(self, slots: Iterable[DeviceSlot]) -> None:
        """Undo ``copying``: the copies have ended, and their references are about to be dropped."""
        for slot in slots:
            self.copied[slot] -= 1
            if not self.copied[slot]:
                del self.copied[slot]

    def idle(self, nodes: Sequence[NodeId]) -> Sequence[NodeId]:
        """Those of ``nodes``, which are on the device, that nobody references."""
        slots = gather(self.nodes.slot, nodes)
        if self.refs.none_held(slots):
            return nodes
        return [n for n, slot in zip(nodes, slots, strict=True) if slot not in self.refs]

    def release(self, slots: Sequence[DeviceSlot], *, front: bool = False) -> None:
        """Drop a reference to each of ``slots``; those that nobody references then may be reused.

        ``slots`` are distinct and in the order of their prefix: the last goes first. With
        ``front`` they are the next to go, the first of them first.

        Raises
        ------
        NotHeld
            A slot is not referenced, or named twice; nothing was changed.
        """
        self.vacate(self.refs.drop(slots), front=front)

    def vacate(self, slots: Sequence[DeviceSlot], *, front: bool = False) -> None:
        """Nobody references these slots any more: cached ones may be evicted, others are free."""
        free, cached = split(self.index.node_at, slots, NO_NODE)
        if front:
            self.free.add_front(free)
            cached.reverse()
            self.order.push_front(cached)
        else:
            self.free.add(free)
            self.order.push(cached)

    def drop(self, tree: list[NodeId], *, uncounted: Container[NodeId]) -> list[BlockKey]:
        """Forget blocks and all that follow them; what is held stays so, without a name.

        ``uncounted`` are those that their parents do not count though they are on the device.
        Returns the keys, in the order of ``tree``.
        """
        index, rows = self.index, self.nodes
        self.order.remove([node for node in tree if node in self.order])
        for node in tree:
            if rows.slot[node] != NO_SLOT:
                if node not in uncounted:
                    self.uncount(rows.parent[node])
                slot = index.displace(node)
                if slot not in self.refs:
                    self.free.add([slot])
        return index.drop(tree)

    def uncount(self, above: NodeId) -> None:
        """A child of ``above`` is not on the device any more."""
        self.nodes.kids[above] -= 1
        if not self.nodes.kids[above]:
            self.order.orphaned(above)

    def resize(self, slots: int) -> list[tuple[DeviceSlot, DeviceSlot]]:
        """Have so many slots, at least as many as there are blocks; nobody holds any.

        Blocks in slots that go are in others from now on: from where, and where to.
        """
        assert not self.refs
        low = [slot for slot in self.free if slot < slots]
        node_at = self.index.node_at
        moves: list[tuple[DeviceSlot, DeviceSlot]] = []
        for number in range(slots, self.slots):
            if (node := node_at[number]) != NO_NODE:
                moves.append((DeviceSlot(number), low.pop()))
                self.index.replace(node, moves[-1][1])
        node_at[slots:] = [NO_NODE] * (slots - self.slots)
        self.free = FreeSlots([*low, *range(self.slots, slots)])
        self.refs = References(slots)
        self.slots = slots
        return moves

    def lacks(self, count: int) -> None:
        """So many slots were asked for beyond those that there were, also by who asked before."""
        self.short += count

    def admit(self, slots: Sequence[DeviceSlot]) -> None:
        """See ``BlockPool.admit``."""
        self.free.add(slots)
        self.slots += len(slots)

    def vacate_idle(
        self, slots: Sequence[DeviceSlot]
    ) -> tuple[list[DeviceSlot], list[tuple[DeviceSlot, DeviceSlot]]]:
        """See ``BlockPool.vacate``."""
        left, own, node_at = set(slots), list[DeviceSlot](), self.index.node_at
        free: list[DeviceSlot] = []
        for slot in self.free:
            (own if slot in left else free).append(slot)
        moves: list[tuple[DeviceSlot, DeviceSlot]] = []
        for slot in slots:
            if free and node_at[slot] != NO_NODE and slot not in self.refs:
                moves.append((slot, free.pop()))
                self.index.replace(node_at[slot], moves[-1][1])
                own.append(slot)
        self.free = FreeSlots(free)
        self.slots -= len(own)
        return own, moves

    def check(self) -> None:
        """Assert that every slot is in exactly one state, and that all parts agree; O(n)."""
        self.index.check()
        self.order.check()
        rows = self.nodes
        evictable = {rows.slot[node] for node in self.order.ordered()}
        free = set(self.free)
        assert len(free) == len(self.free), "free twice"
        assert NO_SLOT not in evictable
        assert len(evictable) == len(self.order)
        held = self.refs.held()
        assert len(held) == len(self.refs)
        assert not free & held.keys()
        assert not free & evictable
        assert not evictable & held.keys()
        assert len(free) + len(held) + len(evictable) == self.slots
        assert all(count > 0 for count in held.values())
        assert all(0 < count <= self.refs[slot] for slot, count in self.copied.items())
        assert all(self.index.node_at[slot] == NO_NODE for slot in free)
