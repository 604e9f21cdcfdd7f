"""The ledger of a device pool: its settings, and its free slots, held slots and cached blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvladder.errors import BlocksBusy, ConfigError, OutOfBlocks
from kvladder.gpu.pool.events import Reports
from kvladder.gpu.pool.slots import FreeSlots, References
from kvladder.gpu.pool.stats import PoolStats, Uses
from kvladder.gpu.sizing.groups import SIZES, is_size
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
    """Settings of a pool.

    Parameters
    ----------
    blocks:
        Number of device slots.
    block_tokens:
        Tokens per block, a power of two above 1.
    partial:
        Use of a cached block that shares only its beginning with a prompt. ``off``: none. ``take``:
        take the block over if it is idle and no block follows it. ``copy``: copy the shared part
        into a block of the request's own.
    chained:
        True if a block is useful only with all blocks before it, so that leaves are evicted first.
        False for a sliding window.
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
    """Number of its first slot at the start."""
    places: int = 0
    """Upper bound of its slot numbers, see ``BlockPool.admit``; 0 for no more than at the start."""

    def __post_init__(self) -> None:
        settle(self, "blocks", "block_tokens", "group", "first", "places")
        if self.blocks < 1:
            hint = "expected 1 or more"
            raise ConfigError(f"{self.blocks} blocks", path="gpu.blocks", hint=hint)
        if not is_size(self.block_tokens):
            hint = f"expected {SIZES}"
            raise ConfigError(f"{self.block_tokens} tokens", path="block.tokens", hint=hint)
        if self.partial not in ("off", "take", "copy"):
            hint = "expected off, take or copy"
            raise ConfigError(f"{self.partial!r}", path="gpu.partial", hint=hint)


class Ledger:
    """Slots and their contents. Every slot is in exactly one state: free, held or evictable.

    Free: it contains nothing of use. Held: it has references, whatever it contains. Evictable: it
    contains a cached block and has no references.
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
        """Number of slots; it differs from ``settings`` while memory is given up."""
        self.short = 0
        """Number of slots asked for but not available, since its creation."""
        self.free = FreeSlots(range(settings.first, settings.first + settings.blocks))
        self.refs = References(max(settings.places, settings.blocks))
        self.copied = Counter[DeviceSlot]()
        """Number of references to each slot that copies in flight hold."""

    @property
    def available(self) -> int:
        """Number of slots without references."""
        return len(self.free) + len(self.order)

    def lacking(self, needed: int, available: int, kept: Sequence[DeviceSlot] = ()) -> OutOfBlocks:
        """Return the error for ``needed`` slots when only ``available`` exist besides ``kept``.

        It is BlocksBusy if only copies in flight hold the missing slots.
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
        """Add a reference to each slot. Idle ones must be out of the order of eviction already."""
        self.refs.add(slots)

    def copying(self, slots: Iterable[DeviceSlot]) -> None:
        """Count one reference to each of ``slots`` as that of a copy in flight."""
        self.copied.update(slots)

    def copies_ended(self, slots: Iterable[DeviceSlot]) -> None:
        """Undo ``copying``: the copies have ended, and their references are dropped next."""
        for slot in slots:
            self.copied[slot] -= 1
            if not self.copied[slot]:
                del self.copied[slot]

    def idle(self, nodes: Sequence[NodeId]) -> Sequence[NodeId]:
        """Return those of ``nodes``, all on the device, that have no references."""
        slots = gather(self.nodes.slot, nodes)
        if self.refs.none_held(slots):
            return nodes
        return [n for n, slot in zip(nodes, slots, strict=True) if slot not in self.refs]

    def release(self, slots: Sequence[DeviceSlot], *, front: bool = False) -> None:
        """Drop a reference to each of ``slots``; those without references may then be reused.

        ``slots`` are distinct and in the order of their prefix; the last one is reused first. With
        ``front`` they are the next to be reused, the first one first.

        Raises
        ------
        NotHeld
            A slot has no references, or is given twice; nothing was changed.
        """
        self.vacate(self.refs.drop(slots), front=front)

    def vacate(self, slots: Sequence[DeviceSlot], *, front: bool = False) -> None:
        """Make slots without references evictable if a block is cached in them, else free."""
        free, cached = split(self.index.node_at, slots, NO_NODE)
        if front:
            self.free.add_front(free)
            cached.reverse()
            self.order.push_front(cached)
        else:
            self.free.add(free)
            self.order.push(cached)

    def drop(self, tree: list[NodeId], *, uncounted: Container[NodeId]) -> list[BlockKey]:
        """Forget the blocks of ``tree``, which includes all followers; held slots stay held.

        ``uncounted`` are blocks on the device that their parents do not count. Return the keys, in
        the order of ``tree``.
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
        """Note that a child of ``above`` is not on the device any more."""
        self.nodes.kids[above] -= 1
        if not self.nodes.kids[above]:
            self.order.orphaned(above)

    def resize(self, slots: int) -> list[tuple[DeviceSlot, DeviceSlot]]:
        """Change the number of slots, to at least that of cached blocks; no slot may be held.

        Blocks in removed slots get other slots. Return these moves as ``(from, to)``.
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
        """Count slots that were asked for but missing; repeated requests count again."""
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
        """Assert that every slot is in exactly one state and that all parts agree; O(n)."""
        self.index.check()
        self.order.check()
        rows = self.nodes
        evictable = {rows.slot[node] for node in self.order.ordered()}
        free = set(self.free)
        assert len(free) == len(self.free), "a slot is free twice"
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
