"""The books of a device pool: which slot is free, which is held, and what is cached in it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from kvladder.gpu.pool.slots import FreeSlots, References
from kvladder.gpu.tree.columns import gather, split
from kvladder.gpu.tree.index import PrefixIndex
from kvladder.gpu.tree.names import NO_NODE, NO_SLOT, DeviceSlot, NodeId
from kvladder.gpu.tree.nodes import Nodes
from kvladder.gpu.tree.order import EvictionOrder
from kvladder.keys import BlockKey


class Ledger:
    """Slots and what is in them. Every slot is free, held, or evictable, and nothing else.

    Free: nothing of use is in it. Held: somebody references it, whatever is in it. Evictable: a
    cached block is in it that nobody references.
    """

    def __init__(self, slots: int, *, chained: bool, family: bool, labels: bool) -> None:
        self.nodes = Nodes()
        self.index = PrefixIndex(
            self.nodes, slots=slots, chained=chained, family=family, labels=labels
        )
        self.order = EvictionOrder(self.nodes)
        self.slots = slots
        self.free = FreeSlots(slots)
        self.refs = References(slots)

    @property
    def available(self) -> int:
        """How many slots nobody references."""
        return len(self.free) + len(self.order)

    def take(self, count: int) -> list[DeviceSlot]:
        """Hand out ``count`` of the free slots, with one reference each."""
        slots = self.free.take(count)
        self.refs.first(slots)
        return slots

    def retain(self, slots: Sequence[DeviceSlot]) -> None:
        """Add a reference to each slot; those that nobody held were taken out of the order."""
        self.refs.add(slots)

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
        assert all(self.index.node_at[slot] == NO_NODE for slot in free)
