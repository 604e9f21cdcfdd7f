"""The data of each known block, in flat columns indexed by node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvladder.gpu.tree.columns import fill
from kvladder.gpu.tree.names import NO_SLOT, NOWHERE, DeviceSlot, NodeId
from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX


class Nodes:
    """One row per block that the index knows, wherever its bytes are.

    Rows are reused. Columns only grow, and they grow in place, so other code may keep references
    to them. Row ``NOWHERE`` always exists. A row takes about 60 bytes, without the key.
    """

    __slots__ = (
        "floors", "free", "hits", "key", "kids", "parent", "priority", "slot", "special", "stamp",
        "tokens", "until",
    )  # fmt: skip

    def __init__(self) -> None:
        self.key: list[BlockKey | None] = []
        """The block's key; None if the row is free."""
        self.parent: list[NodeId] = []
        """The node before it in its prefix; a root for the first block."""
        self.slot: list[DeviceSlot] = []
        """Its slot on the device, or ``NO_SLOT``."""
        self.kids: list[int] = []
        """Number of its children on the device, without those selected for eviction."""
        self.stamp: list[int] = []
        """Its stamp in the ``EvictionOrder``; 0 or less if it is not evictable."""
        self.tokens: list[bytes] = []
        """Its token ids, 4 bytes each, big-endian so that they sort; empty if not kept."""
        self.priority = bytearray()
        self.hits = bytearray()
        """Number of times it was reused; counted only if there are tiers to report it to."""
        self.special = False
        """True once any row had a priority other than the default, or a time when it reverts."""
        self.floors: dict[NodeId, int] = {}
        """Floors already computed: the lowest priority among a row and its ancestors.

        Filled by ``floor``, only if ``special``. Cleared when the priority of a row in it changes.
        """
        self.until: dict[NodeId, float] = {}
        """Time at which a row's priority reverts to the default, if its retention ends."""
        self.free: list[NodeId] = []
        self._grow(1)
        self.free.remove(NOWHERE)

    def __len__(self) -> int:
        """Return the number of rows, free ones included."""
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
        """Return ``count`` free rows for the caller to fill; no children, in no eviction order."""
        if count > len(self.free):
            self._grow(count - len(self.free))
        if not count:
            return []
        taken = self.free[-count:]
        del self.free[-count:]
        return taken

    def give(self, nodes: Iterable[NodeId]) -> None:
        """Free rows that have no children and no references, not even from an eviction order."""
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
        """Note when the priority of a row reverts to the default."""
        self.special = True  # so that ``give`` removes the entry
        self.until[node] = until_s

    def floor(self, node: NodeId) -> int:
        """Return the lowest priority among the block and its ancestors.

        The first call takes a step per ancestor; later calls use ``floors``.
        """
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
