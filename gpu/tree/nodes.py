"""What is known of each block, in flat columns indexed by node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvladder.gpu.tree.columns import fill
from kvladder.gpu.tree.names import NO_SLOT, NOWHERE, DeviceSlot, NodeId
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX


class Nodes:
    """One row per block that the index knows, wherever its bytes are.

    Rows are reused; columns only grow and are extended in place, so that others may keep hold of
    them. Row ``NOWHERE`` always exists. About 60 bytes a row, beside the key.
    """

    __slots__ = (
        "floors", "free", "hits", "key", "kids", "parent", "priority", "slot", "special", "stamp",
        "tokens", "until",
    )  # fmt: skip

    def __init__(self) -> None:
        self.key: list[BlockKey | None] = []
        """The block's name; None if the row is free."""
        self.parent: list[NodeId] = []
        """The node before it in its prefix, a root at the beginning."""
        self.slot: list[DeviceSlot] = []
        """Where it is on the device, or ``NO_SLOT``."""
        self.kids: list[int] = []
        """How many of its children are on the device and not on their way out."""
        self.stamp: list[int] = []
        """When it became evictable, see ``EvictionOrder``; 0 or less if it is not."""
        self.tokens: list[bytes] = []
        """Its token ids, 4 bytes each, big-endian so that they sort; empty if not kept."""
        self.priority = bytearray()
        self.hits = bytearray()
        """How often it was reused, counted where there are tiers to tell."""
        self.special = False
        """Whether any row ever had another priority than the default."""
        self.floors: dict[NodeId, int] = {}
        """The lowest priority among a row and its ancestors, where it was asked for; and of these.

        Only while rows are ``special``, and until the priority of one of them changes.
        """
        self.until: dict[NodeId, float] = {}
        """When the priority of those reverts to the default whose retention ends."""
        self.free: list[NodeId] = []
        self._grow(1)
        self.free.remove(NOWHERE)

    def __len__(self) -> int:
        """How many rows there are, free ones included."""
        return len(self.key)

    def _grow(self, count: int) -> None:
        first = len(self.key)
        more = max(count, 64)
        self.key.extend([None] * more)
        self.parent.extend([NOWHERE] * more)
        self.slot.extend([NO_SLOT] * more)
        self.kids.extend([0] * more)
        self.stamp.extend([0] * more)
        self.tokens.extend([b""] * more)
        self.priority.extend(bytes([PRIORITY_DEFAULT]) * more)
        self.hits.extend(bytes(more))
        self.free.extend(cast("Iterable[NodeId]", range(first + more - 1, first - 1, -1)))

    def take(self, count: int) -> list[NodeId]:
        """``count`` free rows; the taker fills them, they count no children and are in no order."""
        if count > len(self.free):
            self._grow(count - len(self.free))
        if not count:
            return []
        taken = self.free[-count:]
        del self.free[-count:]
        return taken

    def give(self, nodes: Iterable[NodeId]) -> None:
        """Free rows that have no children, and that nothing refers to any more, no order either."""
        given = list(nodes)
        fill(self.key, given, None)
        if self.special:
            for node in given:
                self.priority[node] = PRIORITY_DEFAULT
                self.until.pop(node, None)
                self.floors.pop(node, None)
        self.free.extend(given)

    def set_priority(self, node: NodeId, priority: int) -> None:
        """Give a row a priority."""
        self.special = self.special or priority != PRIORITY_DEFAULT
        self.priority[node] = priority
        if node in self.floors:
            self.floors.clear()

    def set_until(self, node: NodeId, until_s: float) -> None:
        """Note when the priority of a row reverts to the default."""
        self.special = True  # whoever frees the row has to look for it
        self.until[node] = until_s

    def floor(self, node: NodeId) -> int:
        """The lowest priority among the block and its ancestors; a step per ancestor at first."""
        if not self.special:
            return PRIORITY_DEFAULT
        floors, chain = self.floors, list[NodeId]()
        while node != NOWHERE and node not in floors:
            chain.append(node)
            node = self.parent[node]
        floor = floors.get(node, PRIORITY_MAX)
        for below in reversed(chain):
            floors[below] = floor = min(floor, self.priority[below])
        return floor
