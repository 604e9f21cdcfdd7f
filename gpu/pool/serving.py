"""Serves requests from a pool, in steps that can be undone: hold, settle, then place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvladder.errors import BlocksBusy, NotHeld, OutOfBlocks, PoolError
from kvladder.gpu.pool.commit import Committer
from kvladder.gpu.pool.finder import PoolMatch, PrefixFinder
from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.pool.moves import Moves
from kvladder.gpu.pool.retain import Retain, Retainer
from kvladder.gpu.pool.stats import RequestStats
from kvladder.gpu.tree.columns import gather
from kvladder.gpu.tree.names import (
    NO_NODE,
    NO_SLOT,
    DeviceSlot,
    NodeId,
    Ticket,
)
from kvladder.keys import BlockKey

HITS_MAX = 255


class Reservation(NamedTuple):
    """Resources reserved for a request: blocks held and victims chosen, but none evicted yet."""

    match: PoolMatch
    kept: list[NodeId]
    """Matched blocks on the device, which are now held."""
    idle: Sequence[NodeId]
    """Blocks of ``kept`` that were not held before; ``stamps`` are their eviction stamps."""
    stamps: list[int]
    victims: list[NodeId]
    fresh: int
    """Number of slots to hand out, including those for claimed blocks."""


class BlockCopy(NamedTuple):
    """A copy that the engine must make before it runs the sequence again.

    Both slots are held until ``KVSequence.copied`` is called.
    """

    source: DeviceSlot
    target: DeviceSlot
    tokens: int
    """Number of leading tokens of the block to copy; the rest of the target is not used."""
    after: Ticket | None = None
    """Copy that must land first, because it writes the source."""


class ServedPrompt(NamedTuple):
    """Blocks that a prompt got."""

    table: list[DeviceSlot]
    """Slot of each block; ``NO_SLOT`` for blocks that it does not need."""
    copies: list[BlockCopy]
    stored: int
    """Number of leading blocks that were matched or are not needed."""
    tokens: int
    """Number of its tokens that are in place, or will be."""
    stats: RequestStats


class Serving:
    """Holds and hands out blocks of one pool, so that several pools can serve one request.

    First ``PrefixFinder.reach`` finds and claims blocks, and ``fitting`` decides which part of them
    to use. Then ``hold`` of every pool reserves, or raises if there is not enough. Last ``settle``
    of every pool evicts: see ``reserve``. Before that, ``cancel`` puts everything back, including
    the order of eviction. ``place`` uses what was reserved.
    """

    def __init__(
        self,
        ledger: Ledger,
        moves: Moves,
        retainer: Retainer,
        committer: Committer,
        finder: PrefixFinder,
    ) -> None:
        self._ledger = ledger
        self._moves = moves
        self._retainer = retainer
        self._committer = committer
        self.finder = finder
        """Found the matches that are passed to this part, and gives up those without use."""
        self._partial = ledger.settings.partial

    # ---- hold and settle

    def _fits(self, kept: Sequence[NodeId], fresh: int) -> bool:
        """Return whether ``fresh`` slots are available, now or soon, besides the kept blocks."""
        available = self._ledger.available - len(self._ledger.idle(kept))
        return fresh <= available + len(self._moves.leaving.difference(kept))

    def fitting(self, match: PoolMatch, blocks: int) -> PoolMatch:
        """Return the match as far as there is room: copying a part needs a slot besides its source.

        Without that slot, the source is taken over, or the part is not used.
        """
        part, slot = match.part, self._ledger.nodes.slot
        if part is None or part.taken or slot[part.node] == NO_SLOT:
            return match
        kept = [node for node in match.nodes if slot[node] != NO_SLOT]
        if self._fits([*kept, part.node], blocks - match.first - len(kept)):
            return match
        takeable = self.finder.is_takeable(part.node)
        return match._replace(part=part._replace(taken=True) if takeable else None)

    def hold(self, match: PoolMatch, blocks: int) -> Reservation:
        """Hold the matched blocks, and choose victims to make room for the others of ``blocks``.

        ``fitting`` must have checked the match. Nothing is evicted before ``settle``.

        Raises
        ------
        OutOfBlocks, BlocksBusy
            There are not enough slots, or not before copies in flight have ended. Nothing was
            changed, and the match was given up.
        """
        self._retainer.expire()
        ledger, slot = self._ledger, self._ledger.nodes.slot
        ledger.uses.mark(ledger.order.next_stamp)
        kept = [node for node in match.nodes if slot[node] != NO_SLOT]
        fresh = blocks - match.first - len(kept)
        if match.part is not None and slot[match.part.node] != NO_SLOT:
            kept.append(match.part.node)
            fresh -= match.part.taken
        idle = ledger.idle(kept)
        available = ledger.available - len(idle)
        leaving = len(self._moves.leaving.difference(kept)) if self._moves.leaving else 0
        if fresh > available + leaving:
            self.finder.forgo(match)
            ledger.lacks(fresh - available)
            raise ledger.lacking(fresh, available, gather(slot, kept))
        stamps = ledger.order.remove(idle)
        ledger.retain(gather(slot, kept))
        short = max(0, fresh - len(ledger.free) - leaving)
        victims = ledger.order.select(short) if short else []
        hold = Reservation(match, kept, idle, stamps, victims, fresh)
        if len(victims) < short:  # a held block keeps its idle ancestors from being leaves
            self.cancel(hold)
            raise ledger.lacking(fresh, fresh - short + len(victims), gather(slot, kept))
        return hold

    def room(self, fresh: int) -> list[DeviceSlot]:
        """Do ``hold`` and ``settle`` in one call, without a match; return ``fresh`` slots.

        Raises
        ------
        OutOfBlocks, BlocksBusy
            See ``hold`` and ``settle``.
        """
        self._retainer.expire()
        ledger, leaving = self._ledger, len(self._moves.leaving)
        ledger.uses.mark(ledger.order.next_stamp)
        available = ledger.available
        if fresh > available + leaving:
            ledger.lacks(fresh - available)
            raise ledger.lacking(fresh, available)
        short = max(0, fresh - len(ledger.free) - leaving)
        victims = ledger.order.select(short)
        if len(victims) < short:
            ledger.order.unselect(victims)
            raise ledger.lacking(fresh, fresh - short + len(victims))
        if victims:
            self._moves.evict(victims)
        if fresh > len(ledger.free):
            raise BlocksBusy(fresh, len(ledger.free))
        ledger.stats.allocated += fresh
        return ledger.take(fresh)

    def hold_cached(self, nodes: Sequence[NodeId]) -> list[DeviceSlot]:
        """Do ``hold`` and ``settle`` in one call, for blocks on the device alone.

        Return their slots, with one reference each.
        """
        self._retainer.expire()
        ledger = self._ledger
        ledger.uses.mark(ledger.order.next_stamp)
        idle = ledger.idle(nodes)
        if idle:
            ledger.uses.reused(ledger.order.next_stamp, ledger.order.remove(idle))
        slots = gather(ledger.nodes.slot, nodes)
        ledger.retain(slots)
        self._moves.keep(nodes)
        return slots

    def cancel(self, hold: Reservation) -> None:
        """Undo ``hold``: put all blocks back into the order of eviction, and give up the match."""
        ledger = self._ledger
        ledger.order.unselect(hold.victims)
        for node in hold.kept:  # one by one, since a block may be held twice
            ledger.refs.drop([ledger.nodes.slot[node]])
        ledger.order.restore(hold.idle, hold.stamps)
        self.finder.forgo(hold.match)

    def settle(self, hold: Reservation) -> list[DeviceSlot]:
        """Evict the victims that ``hold`` chose; return the fresh slots, one reference each.

        The caller also owns a reference to each block that ``hold`` held.

        Raises
        ------
        BlocksBusy
            Some slots are still being read. Nothing is held; try again when these copies have
            landed.
        """
        if hold.victims:
            self._moves.evict(hold.victims)
        free = len(self._ledger.free)
        if hold.fresh > free:
            self.cancel(hold._replace(victims=[]))
            raise BlocksBusy(hold.fresh, free)
        self._moves.keep(hold.kept)
        if hold.stamps:
            self._ledger.uses.reused(self._ledger.order.next_stamp, hold.stamps)
        self._ledger.stats.allocated += hold.fresh
        return self._ledger.take(hold.fresh) if hold.fresh else []

    def undo(self, hold: Reservation, slots: Sequence[DeviceSlot]) -> None:
        """Give back the unused slots and blocks of ``settle``, and give up the match."""
        self._ledger.stats.allocated -= hold.fresh
        self._ledger.release(slots)
        self._ledger.release(gather(self._ledger.nodes.slot, hold.kept))
        self.finder.forgo(hold.match)

    # ---- use

    def place(
        self,
        match: PoolMatch,
        slots: Sequence[DeviceSlot],
        blocks: int,
        wanted: Callable[[int, int], Sequence[Retain | None] | None],
    ) -> ServedPrompt:
        """Begin the loads and copies for a prompt of ``blocks`` blocks, which got ``slots``.

        ``wanted(first, end)`` returns the retention that it asks for these blocks.
        """
        rows, moves, fresh = self._ledger.nodes, self._moves, iter(slots)
        table = gather(rows.slot, match.nodes)
        claimed = [at for at, slot in enumerate(table) if slot == NO_SLOT] if match.claimed else []
        for at in claimed:
            table[at] = next(fresh)
        if claimed:
            moves.onboard([match.nodes[at] for at in claimed], [table[at] for at in claimed])
        if moves.below is not None:
            for node in match.nodes:
                rows.hits[node] = min(rows.hits[node] + 1, HITS_MAX)
        stored = match.first + len(match.nodes)
        retained = wanted(match.first, stored) if match.nodes else None
        if retained is not None:
            self._retainer.apply(match.nodes, retained, new=())
        copies: list[BlockCopy] = []
        if match.part is not None:
            node, tokens, taken = match.part
            source = rows.slot[node]
            if source == NO_SLOT:
                table.append(next(fresh))
                moves.onboard([node], table[-1:], private=True)
            elif taken:
                table.append(self.take_over(self._ledger.index.key_of(node)))
            else:
                table.append(next(fresh))
                copies.append(self.copy(source, table[-1], tokens))
        table.extend(fresh)
        stats = RequestStats(
            len(match.nodes), blocks - stored, len(claimed), match.part.tokens if match.part else 0
        )
        self._ledger.stats.served(stats)
        return ServedPrompt(
            [NO_SLOT] * match.first + table,
            copies,
            stored,
            match.tokens(self._ledger.settings.block_tokens),
            stats,
        )

    def copy(self, source: DeviceSlot, target: DeviceSlot, tokens: int) -> BlockCopy:
        """Return a copy for the engine to make; it takes over the caller's source reference."""
        self._ledger.retain([target])
        return BlockCopy(source, target, tokens, self._moves.arriving.get(source))

    def writable(self, slot: DeviceSlot) -> bool:
        """Return whether a held slot may be written: it has one reference and is not cached."""
        ledger = self._ledger
        return ledger.refs[slot] == 1 and ledger.index.node_at[slot] == NO_NODE

    def takeable(self, slots: Sequence[DeviceSlot], fresh: int) -> list[BlockKey | None]:
        """Return, for each slot, the key of its block if the only holder should take it over.

        Else the entry is None. ``fresh`` is the number of slots needed, including those for copies.
        If there are so many, a block is taken over only under three conditions: it is the only one
        of ``slots``, no block follows it, and the pool does not copy partial blocks. All others
        stay cached.
        """
        ledger, rows = self._ledger, self._ledger.nodes
        has_room = bool(slots) and self._fits((), fresh)
        keys: list[BlockKey | None] = []
        for slot in slots:
            node = ledger.index.node_at[slot]
            is_own = node != NO_NODE and ledger.refs[slot] == 1
            if is_own and has_room:
                copied = self._partial == "copy" or ledger.index.has_children(node)
                is_own = len(slots) == 1 and not copied
            keys.append(rows.key[node] if is_own else None)
        return keys

    def take_over(self, key: BlockKey, *, force: bool = False) -> DeviceSlot:
        """Remove a leaf from the device's cache, so that the holder of its slot can write to it.

        Return the slot, which then belongs to the caller alone. With ``force`` the block need not
        be a leaf: unless a tier has it, all blocks that follow it are forgotten.

        Raises
        ------
        NotHeld
            The block is not on the device, or does not have exactly one reference.
        PoolError
            Other blocks follow it.
        """
        ledger, index = self._ledger, self._ledger.index
        node = index.find(key)
        slot = NO_SLOT if node is None else ledger.nodes.slot[node]
        if node is None or ledger.refs[slot] != 1:
            raise NotHeld("expected a block on the device with exactly one reference")
        if index.has_children(node) and not force:
            raise PoolError("the block has successors: expected the last block of a prefix")
        if node in index.colder:
            ledger.uncount(ledger.nodes.parent[node])
            index.displace(node)
            ledger.reports.moved(key, off=True)
        else:
            self._moves.drop([node], "taken")
        return slot

    # ---- blocks that are being loaded

    def observe(self, observer: Callable[[Ticket, bool], None]) -> None:
        """Call ``observer`` when a copy to the device ends, with whether the bytes arrived."""
        self._moves.observers.append(observer)

    def arriving(self, slots: Iterable[DeviceSlot]) -> list[Ticket]:
        """Return the copies that still write any of these slots."""
        arriving = self._moves.arriving
        return [*{arriving[slot]: None for slot in slots if slot in arriving}] if arriving else []

    def united(self, keys: Sequence[BlockKey], slots: Sequence[DeviceSlot]) -> list[DeviceSlot]:
        """Return the slots to use: those of equal blocks that were complete before them."""
        moves, result = self._moves, list(slots)
        for at, slot in enumerate(slots) if moves.supplanted else ():
            found = self._ledger.index.match(keys[at : at + 1]) if slot in moves.supplanted else []
            if found and self._ledger.nodes.slot[found[0]] not in moves.arriving:
                result[at] = self._committer.share(found[0], slot)
        return result


def reserve(
    pools: Sequence[Serving], matches: Sequence[PoolMatch], blocks: Sequence[int]
) -> list[tuple[PoolMatch, list[DeviceSlot]]]:
    """Reserve ``blocks`` in every pool, then evict in every pool; or change nothing in any.

    Return the match and the fresh slots of each pool.

    Raises
    ------
    OutOfBlocks, BlocksBusy
        See ``Serving``. Nothing is held, and all matches were given up.
    """
    holds: list[Reservation] = []
    slots: list[list[DeviceSlot]] = []
    try:
        holds.extend(map(Serving.hold, pools, matches, blocks))
        slots.extend(map(Serving.settle, pools, holds))
    except OutOfBlocks as error:
        failed = len(slots) if isinstance(error, BlocksBusy) else len(holds)
        for at, (pool, match) in enumerate(zip(pools, matches, strict=True)):
            if at < len(slots):
                pool.undo(holds[at], slots[at])
            elif at < len(holds) and at != failed:
                pool.cancel(holds[at])
            elif at > failed:
                pool.finder.forgo(match)
        raise
    return [(hold.match, given) for hold, given in zip(holds, slots, strict=True)]
