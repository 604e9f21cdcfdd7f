"""What a request is about to get, in steps that can be undone: reach, hold, settle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvladder.errors import BlocksBusy, OutOfBlocks
from kvladder.gpu.pool.commit import Committer, Content
from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.pool.moves import Moves
from kvladder.gpu.pool.retain import Retainer
from kvladder.gpu.pool.stats import PoolStats
from kvladder.gpu.tree.columns import gather
from kvladder.gpu.tree.names import NO_SLOT, DeviceSlot, NodeId


class Match(NamedTuple):
    """Blocks that a request found cached. Those that only tiers hold are claimed there."""

    nodes: list[NodeId]
    claimed: list[NodeId]
    """Those of ``nodes`` that are not on the device, in order."""


class Hold(NamedTuple):
    """What a request is about to get: held and chosen, but nothing evicted yet."""

    match: Match
    kept: list[NodeId]
    """What of it is on the device, and now held."""
    idle: Sequence[NodeId]
    """Those that nobody held before, and their places in the order of eviction."""
    stamps: list[int]
    victims: list[NodeId]
    fresh: int
    """Slots to hand out, those for what is claimed included."""


class Reservations:
    """Finds, holds and hands out blocks of one pool, so that several pools can serve one request.

    ``reach`` comes first and claims; ``hold`` of every pool comes next and raises if there is not
    enough; ``settle`` of every pool evicts. Until then ``cancel`` puts everything back, down to
    the order of eviction.
    """

    def __init__(
        self,
        ledger: Ledger,
        moves: Moves,
        retainer: Retainer,
        committer: Committer,
        stats: PoolStats,
    ) -> None:
        self._ledger = ledger
        self._moves = moves
        self._retainer = retainer
        self._committer = committer
        self._stats = stats

    def reach(self, content: Content) -> Match:
        """The longest prefix of the content's blocks that is on the device or in a tier.

        What only tiers hold is claimed: the match must be given to ``hold`` or ``forgo``.
        """
        keys, index, slot = content.keys, self._ledger.index, self._ledger.nodes.slot
        nodes, claimed, salt = index.match(keys), list[NodeId](), content.root.salt
        while len(nodes) < len(keys) and (levels := self._moves.claim(keys[len(nodes) :], salt)):
            surplus: list[NodeId] = []
            found = keys[len(nodes) : len(nodes) + len(levels)]
            known = iter(self._moves.known([key for key in found if key not in index]))
            for level in levels:
                at = len(nodes)
                node = index.find(keys[at])
                if node is None:
                    node = self._committer.know(content, at, level, next(known))
                (claimed if slot[node] == NO_SLOT else surplus).append(node)
                nodes.append(node)
            self._moves.disclaim(surplus)
            nodes += index.match(keys[len(nodes) :])
        return Match(nodes, claimed)

    def forgo(self, match: Match) -> None:
        """Nothing will come of this match."""
        self._moves.disclaim(match.claimed)

    def fits(self, kept: Sequence[NodeId], fresh: int) -> bool:
        """Whether there are so many slots, now or soon, beside what is kept on the device."""
        available = self._ledger.available - len(self._ledger.idle(kept))
        return fresh <= available + len(self._moves.leaving.difference(kept))

    def hold(self, match: Match, fresh: int, *, also: Sequence[NodeId] = ()) -> Hold:
        """Hold what a match found, ``also`` other blocks on the device, and choose who gives way.

        ``fresh`` is how many slots are needed, those for what is claimed included. Nothing is
        evicted before ``settle``.

        Raises
        ------
        OutOfBlocks
            There are not that many; nothing was changed, and the match was forgone.
        """
        self._retainer.expire()
        ledger, slot = self._ledger, self._ledger.nodes.slot
        kept = [node for node in match.nodes if slot[node] != NO_SLOT]
        kept += also
        idle = ledger.idle(kept)
        available = ledger.available - len(idle)
        leaving = len(self._moves.leaving.difference(kept)) if self._moves.leaving else 0
        if fresh > available + leaving:
            self.forgo(match)
            raise OutOfBlocks(fresh, available)
        stamps = ledger.order.remove(idle)
        ledger.retain(gather(slot, kept))
        short = max(0, fresh - len(ledger.free) - leaving)
        victims = ledger.order.select(short)
        hold = Hold(match, kept, idle, stamps, victims, fresh)
        if len(victims) < short:  # something that is held keeps others from being leaves
            self.cancel(hold)
            raise OutOfBlocks(fresh, fresh - short + len(victims))
        return hold

    def room(self, fresh: int) -> list[DeviceSlot]:
        """``hold`` and ``settle`` where nothing was matched.

        Raises
        ------
        OutOfBlocks, BlocksBusy
            See there.
        """
        self._retainer.expire()
        ledger, leaving = self._ledger, len(self._moves.leaving)
        available = ledger.available
        if fresh > available + leaving:
            raise OutOfBlocks(fresh, available)
        short = max(0, fresh - len(ledger.free) - leaving)
        victims = ledger.order.select(short)
        if len(victims) < short:
            ledger.order.unselect(victims)
            raise OutOfBlocks(fresh, fresh - short + len(victims))
        if victims:
            self._moves.evict(victims)
        if fresh > len(ledger.free):
            raise BlocksBusy(fresh, len(ledger.free))
        self._stats.allocated += fresh
        return ledger.take(fresh)

    def cancel(self, hold: Hold) -> None:
        """Undo ``hold``: every block is where it was in the order, and the match is forgone."""
        ledger = self._ledger
        ledger.order.unselect(hold.victims)
        for node in hold.kept:  # one by one, since a block may be held twice
            ledger.refs.drop([ledger.nodes.slot[node]])
        ledger.order.restore(hold.idle, hold.stamps)
        self.forgo(hold.match)

    def settle(self, hold: Hold) -> list[DeviceSlot]:
        """Evict whom ``hold`` chose and hand the fresh slots out, one reference each.

        The caller owns a reference to each block that was held, and onboards what is claimed.

        Raises
        ------
        BlocksBusy
            Some slots are still being read; nothing is held, ask again when that has landed.
        """
        if hold.victims:
            self._moves.evict(hold.victims)
        free = len(self._ledger.free)
        if hold.fresh > free:
            self.cancel(hold._replace(victims=[]))
            raise BlocksBusy(hold.fresh, free)
        self._moves.keep(hold.kept)
        self._stats.allocated += hold.fresh
        return self._ledger.take(hold.fresh)

    def undo(self, hold: Hold, slots: Sequence[DeviceSlot]) -> None:
        """Give back what ``settle`` gave, which was not used: the match is forgone."""
        self._stats.allocated -= hold.fresh
        self._ledger.release(slots)
        self._ledger.release(gather(self._ledger.nodes.slot, hold.kept))
        self.forgo(hold.match)
