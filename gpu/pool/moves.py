"""Moves blocks off the device and back: to and from the tiers below, or drops them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from kvladder.errors import NotHeld
from kvladder.gpu.pool.below import Below, BlockBelow, Victim
from kvladder.gpu.pool.events import Why
from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.tree.columns import gather
from kvladder.gpu.tree.names import NO_NODE, NO_SLOT, TOKEN_BYTES, DeviceSlot, NodeId, Ticket
from kvladder.keys import BlockKey


class _Copied(NamedTuple):
    """A slot that a copy still reads or writes; without a key it belongs to a single request."""

    key: BlockKey | None
    slot: DeviceSlot


class Moves:
    """Evicts, offloads and onboards the blocks of one pool.

    A slot with a copy in flight is held, so it is never handed out. A block that is leaving can
    still be matched, and then stays.
    """

    def __init__(self, ledger: Ledger, below: Below | None) -> None:
        self.below = below
        self.leaving: set[NodeId] = set()
        """Blocks that are being copied off the device; their parents do not count them."""
        self.arriving: dict[DeviceSlot, Ticket] = {}
        """Copy that writes each slot that is being filled."""
        self.supplanted: set[DeviceSlot] = set()
        """Slots of ``arriving`` with a block that was complete in another slot before."""
        self.observers: list[Callable[[Ticket, bool], None]] = []
        """Called with each copy to the device that ended, and whether its bytes arrived."""
        self._out: dict[Ticket, list[_Copied]] = {}
        self._in: dict[Ticket, list[_Copied]] = {}
        self._ledger = ledger

    # ---- out

    def evict(self, victims: Sequence[NodeId]) -> None:
        """Make room: drop or offload the blocks that ``EvictionOrder.select`` returned.

        Slots that no copy reads are free afterwards; others become free when their copy ends.
        """
        ledger = self._ledger
        ledger.stats.evicted += len(victims)
        ledger.uses.evicted(gather(ledger.nodes.stamp, victims))
        if self.below is None:
            keys, slots = ledger.index.evict(victims)
            ledger.free.add(slots)
            ledger.reports.removed(keys, "evicted")
        elif victims:
            self._offload(self.below, victims[::-1])

    def _offload(self, below: Below, nodes: Sequence[NodeId]) -> None:
        ledger = self._ledger
        victims = [self._victim(node) for node in nodes]
        refused: list[NodeId] = []
        answers = below.offload(ledger.settings.group, victims)
        for node, victim, taken in zip(nodes, victims, answers, strict=True):
            if taken is None:
                refused.append(node)
            elif taken.ticket is None:
                self._gone(node)
            else:
                ledger.refs.first([victim.slot])
                ledger.copying([victim.slot])
                self.leaving.add(node)
                self._out.setdefault(taken.ticket, []).append(_Copied(victim.key, victim.slot))
        if refused:
            self.drop(refused, "evicted", uncounted=refused)

    def _victim(self, node: NodeId) -> Victim:
        rows = self._ledger.nodes
        key = rows.key[node]
        assert key is not None
        held = rows.tokens[node]
        return Victim(
            key,
            rows.slot[node],
            len(held) // TOKEN_BYTES if held else self._ledger.settings.block_tokens,
            rows.priority[node],
            rows.floor(node),
            rows.hits[node],
            rows.until.get(node, inf),
            self._ledger.index.salts.get(node, ""),
        )

    def _gone(self, node: NodeId) -> None:
        """Note that a block is in a tier now and no longer on the device."""
        ledger = self._ledger
        ledger.index.colder.add(node)
        ledger.free.add([ledger.index.displace(node)])
        ledger.reports.moved(ledger.index.key_of(node), off=True)
        ledger.stats.offloaded += 1

    def drop(
        self,
        tops: Iterable[NodeId],
        why: Why,
        *,
        uncounted: Iterable[NodeId] = (),
        tiers: bool = True,
    ) -> None:
        """Forget blocks and all that follow them, here and with ``tiers`` also in the tiers.

        ``uncounted`` are blocks besides ``leaving`` that their parents do not count.
        """
        index = self._ledger.index
        tree = index.subtree(tops)
        colder = [index.key_of(n) for n in tree if n in index.colder or n in self.leaving]
        keys = self._ledger.drop(tree, uncounted=self.leaving.union(uncounted))
        self.leaving.difference_update(tree)
        self._ledger.reports.removed(keys, why)
        if tiers and self.below is not None and colder:
            self.below.remove(colder)

    def keep(self, nodes: Sequence[NodeId]) -> None:
        """Let matched and held blocks that are leaving stay on the device."""
        rows = self._ledger.nodes
        for node in self.leaving.intersection(nodes) if self.leaving else ():
            self.leaving.discard(node)
            rows.kids[rows.parent[node]] += 1
            self._ledger.stats.evicted -= 1

    # ---- in

    def claim(self, keys: Sequence[BlockKey], salt: str = "") -> int:
        """Claim the leading ``keys`` that a tier holds; return how many."""
        return self.below.claim(keys, salt) if self.below is not None and keys else 0

    def known(self, keys: Sequence[BlockKey]) -> Sequence[BlockBelow]:
        """Return what the tiers know of blocks that they hold and the pool does not know."""
        return self.below.known(keys) if self.below is not None and keys else []

    def disclaim(self, nodes: Sequence[NodeId]) -> None:
        """Release claimed blocks that are not onboarded."""
        if self.below is not None and nodes:
            self.below.disclaim([self._ledger.index.key_of(node) for node in nodes])

    def onboard(
        self, nodes: Sequence[NodeId], slots: Sequence[DeviceSlot], *, private: bool = False
    ) -> None:
        """Begin to load known blocks, which ``Below.claim`` claimed, into held slots.

        With ``private`` the index does not change, and the slots belong to one request.
        """
        ledger, index = self._ledger, self._ledger.index
        assert self.below is not None
        keys = [index.key_of(node) for node in nodes]
        ticket = self.below.onboard(ledger.settings.group, keys, slots)
        ledger.stats.onboarded += len(keys)
        for node, key, slot in zip(nodes, keys, slots, strict=True) if not private else ():
            ledger.reports.moved(key, off=False)
            index.place(node, slot)
        if ticket is not None:
            ledger.retain(slots)
            ledger.copying(slots)
            names = [None] * len(keys) if private else keys
            self._in[ticket] = list(map(_Copied, names, slots))
            self.arriving.update(dict.fromkeys(slots, ticket))

    # ---- reports of the tiers

    def landed(self, ticket: Ticket, *, ok: bool) -> None:
        """Process the end of a copy; see ``BlockPool.landed``."""
        if ticket in self._out:
            self._left(self._out.pop(ticket), ok=ok)
        elif ticket in self._in:
            self._arrived(ticket, self._in.pop(ticket), ok=ok)
        else:
            raise NotHeld(f"no copy {ticket} is in flight")

    def _left(self, blocks: Sequence[_Copied], *, ok: bool) -> None:
        """Process slots that were read: their blocks leave, unless requests matched them again."""
        ledger, index = self._ledger, self._ledger.index
        ledger.stats.lost += 0 if ok else len(blocks)
        ledger.copies_ended([slot for _, slot in blocks])
        for key, slot in blocks:
            node = index.node_at[slot]
            if node == NO_NODE or index.key_of(node) != key:  # the block was forgotten
                ledger.release([slot])
            elif node not in self.leaving:  # the block stays; if the copy went well, also in a tier
                if ok:
                    index.colder.add(node)
                ledger.release([slot])
            else:
                self.leaving.discard(node)
                ledger.refs.drop([slot])
                if ok:
                    self._gone(node)
                else:
                    self.drop([node], "lost", uncounted=[node])

    def _arrived(self, ticket: Ticket, blocks: Sequence[_Copied], *, ok: bool) -> None:
        """Process slots that were written. If the copy failed, their blocks leave the device.

        Such a block stays known only if a tier still has it.
        """
        ledger, index = self._ledger, self._ledger.index
        if not ok:
            ledger.stats.lost += len(blocks)
        ledger.copies_ended([slot for _, slot in blocks])
        lost: list[NodeId] = []
        for key, slot in blocks:
            del self.arriving[slot]
            node = index.node_at[slot]
            if ok or node == NO_NODE or index.key_of(node) != key:
                continue
            if node in index.colder:
                index.displace(node)
                ledger.uncount(ledger.nodes.parent[node])
                ledger.reports.moved(index.key_of(node), off=True)
            else:
                lost.append(node)
        if lost:
            self.drop(lost, "lost")
        ledger.release([slot for _, slot in blocks])
        for observer in self.observers:
            observer(ticket, ok)
        self.supplanted.difference_update([slot for _, slot in blocks])

    def forgotten(self, keys: Sequence[BlockKey]) -> None:
        """Note that tiers no longer hold these blocks; see ``BlockPool.forgotten``."""
        index, gone = self._ledger.index, list[NodeId]()
        for key in keys:
            node = index.find(key)
            if node is not None and node in index.colder:
                index.colder.discard(node)
                if self._ledger.nodes.slot[node] == NO_SLOT:
                    gone.append(node)
        if gone:
            self.drop(gone, "evicted")

    def check(self) -> None:
        """Assert that every slot with a copy in flight is held; for tests."""
        refs, rows = self._ledger.refs, self._ledger.nodes
        out = [block.slot for blocks in self._out.values() for block in blocks]
        assert len(set(out)) == len(out)
        assert all(slot in refs for slot in (*out, *self.arriving))
        assert sorted(self.arriving) == sorted(b.slot for held in self._in.values() for b in held)
        assert {rows.slot[node] for node in self.leaving} <= set(out)
        assert self.supplanted <= self.arriving.keys()
        assert all(self._ledger.index.node_at[slot] == NO_NODE for slot in self.supplanted)
