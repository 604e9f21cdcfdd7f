"""Blocks that leave the device and come back: to and from the tiers below, or for good."""

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
    """A slot that a copy still reads or writes; without a key it belongs to one request alone."""

    key: BlockKey | None
    slot: DeviceSlot


class Moves:
    """Evicts, offloads and onboards the blocks of one pool.

    A slot with a copy under way is held, so nobody is given it; a block on its way out can still
    be matched, and then stays.
    """

    def __init__(self, ledger: Ledger, below: Below | None) -> None:
        self.below = below
        self.leaving: set[NodeId] = set()
        """On the device while they are copied, and not counted by their parents."""
        self.arriving: dict[DeviceSlot, Ticket] = {}
        self.supplanted: set[DeviceSlot] = set()
        """Those of ``arriving`` whose block was complete in another slot before."""
        self.observers: list[Callable[[Ticket, bool], None]] = []
        """Told of each copy to the device that is over, and whether the bytes are there."""
        self._out: dict[Ticket, list[_Copied]] = {}
        self._in: dict[Ticket, list[_Copied]] = {}
        self._ledger = ledger

    # ---- out

    def evict(self, victims: Sequence[NodeId]) -> None:
        """Make room: what ``EvictionOrder.select`` gave leaves the device, or begins to.

        Slots that nothing reads any more are free afterwards.
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
        """A block is in a tier now, and not on the device any more."""
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
        """Forget blocks here, and in the ``tiers``, with all that follow them.

        ``uncounted`` are those that are not counted by their parents, beside ``leaving``.
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
        """These were matched and are held: those on their way out stay."""
        rows = self._ledger.nodes
        for node in self.leaving.intersection(nodes) if self.leaving else ():
            self.leaving.discard(node)
            rows.kids[rows.parent[node]] += 1
            self._ledger.stats.evicted -= 1

    # ---- in

    def claim(self, keys: Sequence[BlockKey], salt: str = "") -> int:
        """How many leading ``keys`` a tier holds; they stay until further notice."""
        return self.below.claim(keys, salt) if self.below is not None and keys else 0

    def known(self, keys: Sequence[BlockKey]) -> Sequence[BlockBelow]:
        """What the tiers know of these, which they hold and the pool does not know."""
        return self.below.known(keys) if self.below is not None and keys else []

    def disclaim(self, nodes: Sequence[NodeId]) -> None:
        """These were claimed, and are not onboarded."""
        if self.below is not None and nodes:
            self.below.disclaim([self._ledger.index.key_of(node) for node in nodes])

    def onboard(
        self, nodes: Sequence[NodeId], slots: Sequence[DeviceSlot], *, private: bool = False
    ) -> None:
        """Bring known blocks, which ``Below.claim`` claimed, to held slots.

        With ``private`` the blocks stay where they are, and the slots belong to one request.
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

    # ---- what the tiers report

    def landed(self, ticket: Ticket, *, ok: bool) -> None:
        """A copy is over; see ``BlockPool.landed``."""
        if ticket in self._out:
            self._left(self._out.pop(ticket), ok=ok)
        elif ticket in self._in:
            self._arrived(ticket, self._in.pop(ticket), ok=ok)
        else:
            raise NotHeld(f"no copy {ticket} is under way")

    def _left(self, blocks: Sequence[_Copied], *, ok: bool) -> None:
        """Slots were read: their blocks are gone, unless somebody matched them meanwhile."""
        ledger, index = self._ledger, self._ledger.index
        ledger.stats.lost += 0 if ok else len(blocks)
        ledger.copies_ended([slot for _, slot in blocks])
        for key, slot in blocks:
            node = index.node_at[slot]
            if node == NO_NODE or index.key_of(node) != key:  # it was forgotten
                ledger.release([slot])
            elif node not in self.leaving:  # it stays, and a tier has it too
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
        """Slots were written, or hold garbage: then a block is where it was, or nowhere."""
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
        """The tiers hold these no more; see ``BlockPool.forgotten``."""
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
        """Assert that every slot with a copy under way is held; for tests."""
        refs, rows = self._ledger.refs, self._ledger.nodes
        out = [block.slot for blocks in self._out.values() for block in blocks]
        assert len(set(out)) == len(out)
        assert all(slot in refs for slot in (*out, *self.arriving))
        assert sorted(self.arriving) == sorted(b.slot for held in self._in.values() for b in held)
        assert {rows.slot[node] for node in self.leaving} <= set(out)
        assert self.supplanted <= self.arriving.keys()
        assert all(self._ledger.index.node_at[slot] == NO_NODE for slot in self.supplanted)
