"""Data of each block, in flat columns indexed by node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvladder.gpu.tree.columns import fill
from kvladder.gpu.tree.names import NO_SLOT, NOWHERE, DeviceSlot, NodeId
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX


class Nodes:
    """One row per block that the index knows, wherever its bytes are.

    Rows are reused. Columns only grow, and are extended in place, so others may keep references to
    them. Row ``NOWHERE`` always exists. A row takes about 60 bytes besides the key.
    """

    __slots__ = (
        "floors", "free", "hits", "key", "kids", "parent", "priority", "slot", "special", "stamp",
        "tokens", "until",
    )  # fmt: skip

    def __init__(self) -> None:
        self.key: list[BlockKey | None] = []
        """Key of the block; None if the row is free."""
        self.parent: list[NodeId] = []
        """Node before it in its prefix; a root at the beginning."""
        self.slot: list[DeviceSlot] = []
        """Its device slot, or ``NO_SLOT``."""
        self.kids: list[int] = []
        """Number of its children that are on the device and not leaving."""
        self.stamp: list[int] = []
        """Stamp from when it became evictable, see ``EvictionOrder``; 0 or less if it is not."""
        self.tokens: list[bytes] = []
        """Its token ids, 4 bytes each, big-endian so that they sort; empty if not kept."""
        self.priority = bytearray()
        self.hits = bytearray()
        """Number of reuses; counted only if there are tiers."""
        self.special = False
        """True if any row ever had a priority other than the default, or a retention that ends."""
        self.floors: dict[NodeId, int] = {}
        """Cache of ``floor``: the lowest priority among a row and its ancestors.

        Used only while ``special``, and cleared when the priority of a row in it changes.
        """
        self.until: dict[NodeId, float] = {}
        """Time when a priority reverts to the default, for rows with a retention that ends."""
        self.free: list[NodeId] = []
        self._grow(1)
        self.free.remove(NOWHERE)

    def __len__(self) -> int:
        """Return the number of rows, including free ones."""
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
        """Return ``count`` free rows to fill; they have no children and are in no order."""
        if count > len(self.free):
            self._grow(count - len(self.free))
        if not count:
            return []
        taken = self.free[-count:]
        del self.free[-count:]
        return taken

    def give(self, nodes: Iterable[NodeId]) -> None:
        """Free rows without children that nothing refers to any more, including any order."""
        given = list(nodes)
        fill(self.key, given, None)
        if self.special:
            for node in given:
                self.priority[node] = PRIORITY_DEFAULT
                self.until.pop(node, None)
                self.floors.pop(node, None)
        self.free.extend(given)

    def set_priority(self, node: NodeId, priority: int) -> None:
        """Set the priority of a row."""
        self.special = self.special or priority != PRIORITY_DEFAULT
        self.priority[node] = priority
        if node in self.floors:
            self.floors.clear()

    def set_until(self, node: NodeId, until_s: float) -> None:
        """Set the time when the priority of a row reverts to the default."""
        self.special = True  # so that ``give`` removes it
        self.until[node] = until_s

    def floor(self, node: NodeId) -> int:
        """Return the lowest priority of a block and its ancestors; caches those it visits."""
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
