"""Blocks that leave the device and come back: to and from the tiers below, or for good."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple, TypeVar

from kvladder.errors import NotHeld
from kvladder.gpu.pool.below import Below, Known, Victim
from kvladder.gpu.pool.events import PoolEvents, Why
from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.pool.stats import PoolStats
from kvladder.gpu.tree.names import NO_NODE, NO_SLOT, TOKEN_BYTES, DeviceSlot, NodeId, Ticket
from kvladder.keys import BlockKey

T = TypeVar("T")


class _Leaving(NamedTuple):
    """A block whose offload still reads its slot."""

    key: BlockKey
    slot: DeviceSlot
    level: str


class _Arriving(NamedTuple):
    """A slot that is still being written; without a key it belongs to one request alone."""

    key: BlockKey | None
    slot: DeviceSlot


class Moves:
    """Evicts, offloads and onboards the blocks of one pool.

    A slot with a copy under way is held, so nobody is given it; a block on its way out can still
    be matched, and then stays. What the tiers report while they are being called is dealt with
    when the call is over.
    """

    def __init__(
        self,
        ledger: Ledger,
        below: Below | None,
        events: PoolEvents,
        stats: PoolStats,
        *,
        group: int,
        level: str,
        block_tokens: int,
    ) -> None:
        self.below = below
        self.leaving: set[NodeId] = set()
        """On the device while they are copied, and not counted by their parents."""
        self.arriving: dict[DeviceSlot, Ticket] = {}
        self.supplanted: set[DeviceSlot] = set()
        """Those of ``arriving`` whose block was complete in another slot before."""
        self.observers: list[Callable[[Ticket, bool], None]] = []
        """Told of each copy to the device that is over, and whether the bytes are there."""
        self.purges = 0
        """How often blocks were removed or purged; see ``Sequences.outdated``."""
        self._out: dict[Ticket, list[_Leaving]] = {}
        self._in: dict[Ticket, list[_Arriving]] = {}
        self._ledger = ledger
        self._events = events
        self._stats = stats
        self._group = group
        self._level = level
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._block_tokens = block_tokens
        self._reports: deque[Callable[[], None]] = deque()
        self._calling = False

    # ---- out

    def evict(self, victims: Sequence[NodeId]) -> None:
        """Make room: what ``EvictionOrder.select`` gave leaves the device, or begins to.

        Slots that nothing reads any more are free afterwards.
        """
        ledger = self._ledger
        self._stats.evicted += len(victims)
        if self.below is None:
            keys, slots = ledger.index.evict(victims)
            ledger.free.add(slots)
            self._events.removed(self._group, keys, "evicted")
            return
        if victims:
            self._offload(self.below, victims[::-1])
        self.settle()

    def _offload(self, below: Below, nodes: Sequence[NodeId]) -> None:
        ledger = self._ledger
        victims = [self._victim(node) for node in nodes]
        taken = self._ask(lambda: below.offload(victims))
        refused: list[NodeId] = []
        for node, victim, answer in zip(nodes, victims, taken, strict=True):
            if answer is None:
                refused.append(node)
            elif answer.ticket is None:
                self._gone(node, answer.level)
            else:
                ledger.refs.first([victim.slot])
                self.leaving.add(node)
                block = _Leaving(victim.key, victim.slot, answer.level)
                self._out.setdefault(answer.ticket, []).append(block)
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
            len(held) // TOKEN_BYTES if held else self._block_tokens,
            rows.priority[node],
            rows.floor(node),
            rows.hits[node],
            rows.until.get(node, inf),
            self._ledger.index.salts.get(node, ""),
        )

    def _gone(self, node: NodeId, level: str) -> None:
        """A block is in a tier now, and not on the device any more."""
        ledger = self._ledger
        ledger.index.colder[node] = level
        ledger.free.add([ledger.index.displace(node)])
        key = ledger.nodes.key[node]
        assert key is not None
        self._events.moved(self._group, key, self._level, level)
        self._stats.offloaded += 1

    def drop(self, tops: Iterable[NodeId], why: Why, *, uncounted: Iterable[NodeId] = ()) -> None:
        """Forget blocks everywhere, with all that follow them.

        ``uncounted`` are those that are not counted by their parents, beside ``leaving``.
        """
        index, rows, below = self._ledger.index, self._ledger.nodes, self.below
        tree = index.subtree(tops)
        colder = [
            key
            for node in tree
            if node in index.colder or node in self.leaving
            if (key := rows.key[node]) is not None
        ]
        keys = self._ledger.drop(tree, uncounted=self.leaving.union(uncounted))
        self.leaving.difference_update(tree)
        self._events.removed(self._group, keys, why)
        if below is not None and colder:
            self._ask(lambda: below.remove(colder))

    def purge(self, salt: str) -> None:
        """Forget every block that was made for a request with this salt, which is not empty."""
        self.purges += 1
        salts = self._ledger.index.salts
        self.drop([node for node, held in salts.items() if held == salt], "removed")
        self.settle()

    def keep(self, nodes: Sequence[NodeId]) -> None:
        """These were matched and are held: those on their way out stay."""
        rows = self._ledger.nodes
        for node in nodes if self.leaving else ():
            if node in self.leaving:
                self.leaving.discard(node)
                rows.kids[rows.parent[node]] += 1
                self._stats.evicted -= 1

    # ---- in

    def claim(self, keys: Sequence[BlockKey], salt: str = "") -> Sequence[str]:
        """The levels of the leading ``keys`` that a tier holds; they stay until further notice."""
        below = self.below
        return [] if below is None or not keys else self._ask(lambda: below.claim(keys, salt))

    def known(self, keys: Sequence[BlockKey]) -> Sequence[Known]:
        """What the tiers know of these, which they hold and the pool does not know."""
        below = self.below
        return [] if below is None or not keys else self._ask(lambda: below.known(keys))

    def disclaim(self, nodes: Sequence[NodeId]) -> None:
        """These were claimed, and are not onboarded."""
        below, rows = self.below, self._ledger.nodes
        keys = [key for node in nodes if (key := rows.key[node]) is not None]
        if below is not None and keys:
            self._ask(lambda: below.disclaim(keys))
        self.settle()

    def onboard(
        self, nodes: Sequence[NodeId], slots: Sequence[DeviceSlot], *, private: bool = False
    ) -> Ticket | None:
        """Bring known blocks, which ``Below.claim`` claimed, to held slots; the copy's ticket.

        With ``private`` the blocks stay where they are, and the slots belong to one request.
        """
        ledger, index, rows = self._ledger, self._ledger.index, self._ledger.nodes
        below = self.below
        keys = [key for node in nodes if (key := rows.key[node]) is not None]
        assert below is not None
        assert len(keys) == len(nodes) == len(slots)
        arrival = self._ask(lambda: below.onboard(keys, slots, keep=private))
        self._stats.onboarded += len(keys)
        for node, key, slot in zip(nodes, keys, slots, strict=True) if not private else ():
            self._events.moved(self._group, key, index.colder[node], self._level)
            if not arrival.kept:
                del index.colder[node]
            index.place(node, slot)
        if arrival.ticket is not None:
            ledger.retain(slots)
            names = [None] * len(keys) if private else keys
            self._in[arrival.ticket] = list(map(_Arriving, names, slots))
            self.arriving.update(dict.fromkeys(slots, arrival.ticket))
        self.settle()
        return arrival.ticket

    # ---- what the tiers report

    def landed(self, ticket: Ticket, *, ok: bool) -> None:
        """A copy is over; see ``BlockPool.landed``."""
        if ticket in self._out:
            self._report(lambda: self._left(self._out.pop(ticket), ok=ok))
        elif ticket in self._in:
            self._report(lambda: self._arrived(ticket, self._in.pop(ticket), ok=ok))
        else:
            raise NotHeld(f"no copy {ticket} is under way")

    def _ask(self, call: Callable[[], T]) -> T:
        """Call the tiers; what they report meanwhile waits."""
        before, self._calling = self._calling, True
        try:
            return call()
        finally:
            self._calling = before

    def _report(self, report: Callable[[], None]) -> None:
        self._reports.append(report)
        if not self._calling:
            self.settle()

    def settle(self) -> None:
        """Deal with what the tiers reported while they were called."""
        while self._reports:
            self._reports.popleft()()

    def _left(self, blocks: Sequence[_Leaving], *, ok: bool) -> None:
        """Slots were read: their blocks are gone, unless somebody matched them meanwhile."""
        ledger, index = self._ledger, self._ledger.index
        self._stats.lost += 0 if ok else len(blocks)
        for key, slot, level in blocks:
            node = index.find(key)
            known = node is not None and index.node_at[slot] == node
            if node is None or not known:
                ledger.release([slot])
            elif node not in self.leaving:
                if ok:
                    index.colder[node] = level
                ledger.release([slot])
            else:
                self.leaving.discard(node)
                ledger.refs.drop([slot])
                if ok:
                    self._gone(node, level)
                else:
                    self.drop([node], "lost", uncounted=[node])

    def _arrived(self, ticket: Ticket, blocks: Sequence[_Arriving], *, ok: bool) -> None:
        """Slots were written, or hold garbage: then a block is where it was, or nowhere."""
        ledger, index = self._ledger, self._ledger.index
        if not ok:
            self._stats.lost += len(blocks)
        lost: list[NodeId] = []
        for key, slot in blocks:
            del self.arriving[slot]
            node = None if key is None or ok else index.find(key)
            if key is None or node is None or index.node_at[slot] != node:
                continue
            if node in index.colder:
                index.displace(node)
                ledger.uncount(ledger.nodes.parent[node])
                self._events.moved(self._group, key, self._level, index.colder[node])
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
        self._report(lambda: self._forgot(keys))

    def _forgot(self, keys: Sequence[BlockKey]) -> None:
        index, gone = self._ledger.index, list[NodeId]()
        for key in keys:
            node = index.find(key)
            if node is None or index.colder.pop(node, None) is None:
                continue
            if self._ledger.nodes.slot[node] == NO_SLOT:
                gone.append(node)
        if gone:
            self.drop(gone, "evicted")

    def moved(self, keys: Sequence[BlockKey], level: str) -> None:
        """The tiers moved these to another level; see ``BlockPool.moved``."""
        self._report(lambda: self._shift(keys, level))

    def _shift(self, keys: Sequence[BlockKey], level: str) -> None:
        index = self._ledger.index
        for key in keys:
            node = index.find(key)
            if node is not None and node in index.colder:
                old, index.colder[node] = index.colder[node], level
                if self._ledger.nodes.slot[node] == NO_SLOT:
                    self._events.moved(self._group, key, old, level)

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
        assert not self._reports
        assert not self._calling
