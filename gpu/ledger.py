"""The books of a device pool: which slot is free, which is held, and what is cached in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from operator import itemgetter
from typing import TypeVar

from kvladder.errors import NotHeld
from kvladder.gpu.index import PrefixIndex
from kvladder.gpu.names import NO_NODE, NO_SLOT, DeviceSlot, NodeId
from kvladder.gpu.nodes import Nodes
from kvladder.gpu.order import EvictionOrder
from kvladder.keys import BlockKey

T = TypeVar("T")


def pick(column: Sequence[T], rows: Sequence[int]) -> Sequence[T]:
    """``column[row]`` for each of ``rows``, at the speed of C where there are several."""
    if len(rows) > 1:
        picked: tuple[T, ...] = itemgetter(*rows)(column)
        return picked
    return [column[row] for row in rows]


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
        self.free: deque[DeviceSlot] = deque(map(DeviceSlot, range(slots)))
        self.refs: dict[DeviceSlot, int] = {}
        """How often each held slot is referenced."""

    @property
    def available(self) -> int:
        """How many slots nobody references."""
        return len(self.free) + len(self.order)

    def take(self, count: int) -> list[DeviceSlot]:
        """Hand out ``count`` of the free slots, with one reference each."""
        take = self.free.popleft
        slots = [take() for _ in range(count)]
        self.refs.update(dict.fromkeys(slots, 1))
        return slots

    def retain(self, slots: Sequence[DeviceSlot]) -> None:
        """Add a reference to each slot; those that nobody held were taken out of the order."""
        refs = self.refs
        if refs.keys().isdisjoint(slots):
            refs.update(dict.fromkeys(slots, 1))
        else:
            for slot in slots:
                refs[slot] = refs.get(slot, 0) + 1

    def idle(self, nodes: Sequence[NodeId]) -> Sequence[NodeId]:
        """Those of ``nodes``, which are on the device, that nobody references."""
        slots = pick(self.nodes.slot, nodes)
        if self.refs.keys().isdisjoint(slots):
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
        refs = self.refs
        counts: list[int] = []
        try:
            counts.extend(map(refs.pop, slots))
        except KeyError as error:
            refs.update(zip(slots, counts, strict=False))
            raise NotHeld(f"slot {error.args[0]} is not held, or released twice at once") from None
        if counts.count(1) == len(counts):
            self.vacate(slots, front=front)
            return
        last = [slot for slot, count in zip(slots, counts, strict=True) if count == 1]
        for slot, count in zip(slots, counts, strict=True):
            if count > 1:
                refs[slot] = count - 1
        self.vacate(last, front=front)

    def vacate(self, slots: Sequence[DeviceSlot], *, front: bool = False) -> None:
        """Nobody references these slots any more: cached ones may be evicted, others are free."""
        nodes = pick(self.index.node_at, slots)
        empty = nodes.count(NO_NODE)
        if empty == len(slots):
            free, cached = slots, []
        elif empty:
            both = list(zip(slots, nodes, strict=True))
            free = [slot for slot, node in both if node == NO_NODE]
            cached = [node for _, node in both if node != NO_NODE]
        else:
            free, cached = [], list(nodes)
        if front:
            self.free.extendleft(reversed(free))
            self.order.push_front(cached)
        else:
            self.free.extend(free)
            cached.reverse()
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
                    self.free.append(slot)
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
        assert not free & self.refs.keys()
        assert not free & evictable
        assert not evictable & self.refs.keys()
        assert len(free) + len(self.refs) + len(evictable) == self.slots
        assert all(count > 0 for count in self.refs.values())
        assert all(self.index.node_at[slot] == NO_NODE for slot in free)
