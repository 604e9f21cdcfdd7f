"""Makes complete blocks reusable, and stores each content once."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from struct import iter_unpack
from typing import NamedTuple

from kvladder.errors import NotHeld, PoolError
from kvladder.gpu.pool.below import BlockBelow
from kvladder.gpu.pool.events import StoredBlock
from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.pool.moves import Moves
from kvladder.gpu.pool.retain import Retain, Retainer
from kvladder.gpu.tree.columns import gather
from kvladder.gpu.tree.index import Above
from kvladder.gpu.tree.names import (
    NO_NODE,
    NO_SLOT,
    TOKEN_BYTES,
    DeviceSlot,
    Extra,
    NodeId,
    Root,
)
from kvladder.keys import BlockKey
from kvladder.policy.retention import checked_duration, checked_priority


class Content(NamedTuple):
    """Consecutive blocks of one prefix, with complete bytes."""

    keys: Sequence[BlockKey]
    root: Root
    parent: BlockKey
    """Key of the block before the first one, or the root's key."""
    tokens: bytes = b""
    """Their token ids, 4 bytes each, big-endian; only the last block may be partly filled."""
    extras: Mapping[int, Extra] | None = None
    """Content of blocks beyond their tokens, by position in ``keys``; each sorted by offset."""

    def limit(self, at: int, tokens: int) -> int:
        """Return how many of the first ``tokens`` come before any extra of block ``at``."""
        extra = self.extras.get(at) if self.extras else None
        return min(tokens, extra[0][0]) if extra else tokens


def token_ids(tokens: bytes) -> tuple[int, ...]:
    """Return the token ids that are stored as 4 big-endian bytes each."""
    words = array("I", tokens)
    if sys.byteorder == "little":
        words.byteswap()
    return tuple(words)


class Committer:
    """Enters complete blocks into the index of one pool."""

    def __init__(self, ledger: Ledger, moves: Moves, retainer: Retainer) -> None:
        self._ledger = ledger
        self._moves = moves
        self._retainer = retainer
        self._block_bytes = ledger.settings.block_tokens * TOKEN_BYTES

    def commit(
        self,
        slots: Sequence[DeviceSlot],
        content: Content,
        wanted: Sequence[Retain | None] | None,
    ) -> list[DeviceSlot] | None:
        """See ``BlockPool.commit``."""
        keys, index = content.keys, self._ledger.index
        named = self._check(slots, content, wanted)
        above = index.above(content.parent, content.root)
        if above is None:
            return None
        labels = self._labels(content)
        if not named and index.all_new(keys):
            nodes = index.add(above, keys, slots, labels)
            self._begin(nodes, content, 0)
            result, new = list(slots), nodes
        else:
            result, nodes, new = self._one_by_one(above, slots, content, labels)
        self._ledger.stats.stored += len(new)
        if wanted is not None:
            self._retainer.apply(nodes, wanted, new=set(new))
        if self._ledger.reports.enabled:
            self._tell(nodes, new, content)
        return result

    def _check(
        self,
        slots: Sequence[DeviceSlot],
        content: Content,
        wanted: Sequence[Retain | None] | None,
    ) -> bool:
        """Raise if the call is wrong; return whether a slot already holds a known block."""
        keys, ledger = content.keys, self._ledger
        if len(keys) != len(slots) or (wanted is not None and len(wanted) != len(keys)):
            raise ValueError(f"{len(slots)} slots for {len(keys)} keys")
        for retain in wanted or ():
            if retain is not None:
                checked_priority(retain.priority)
                checked_duration(retain.duration_s)
        if not ledger.refs.all_held(slots):
            raise NotHeld("a slot is not held")
        if len(set(slots)) < len(slots) or len(set(keys)) < len(keys):
            raise PoolError("a slot or a key is named twice")
        nodes = gather(ledger.index.node_at, slots)
        if nodes.count(NO_NODE) == len(nodes):
            return False
        for node, key in zip(nodes, keys, strict=True):
            if node != NO_NODE and ledger.nodes.key[node] != key:
                raise PoolError("a slot holds another block")
        return True

    def _labels(self, content: Content) -> list[bytes]:
        """Return the tokens of each block, or an empty list if tokens are not kept."""
        if not self._ledger.index.labels:
            return []
        size, tokens, count = self._block_bytes, content.tokens, len(content.keys)
        if count == 1:
            return [tokens[:size]]
        whole = min(count, len(tokens) // size)
        labels: list[bytes] = [one for (one,) in iter_unpack(f"{size}s", tokens[: whole * size])]
        return labels + [tokens[at * size : (at + 1) * size] for at in range(whole, count)]

    def _begin(self, nodes: Sequence[NodeId], content: Content, first: int) -> None:
        """Fill in the data of new blocks besides their keys; ``first`` is their position."""
        index = self._ledger.index
        if self._moves.below is not None:
            for node in nodes:
                index.nodes.hits[node] = 0
        if content.root.salt:
            index.salts.update(dict.fromkeys(nodes, content.root.salt))
        if content.extras:
            for at, node in enumerate(nodes, first):
                if at in content.extras:
                    index.extras[node] = content.extras[at]
        if not index.chained and self._ledger.reports.enabled:
            keys = (content.parent, *content.keys)
            for at, node in enumerate(nodes, first):
                parent = None if keys[at] == content.root.key else keys[at]
                index.origin[node] = (parent, content.root)

    def _one_by_one(
        self,
        above: Above,
        slots: Sequence[DeviceSlot],
        content: Content,
        labels: Sequence[bytes],
    ) -> tuple[list[DeviceSlot], list[NodeId], list[NodeId]]:
        """Commit blocks when some are known; return ``(slots to use, all nodes, new nodes)``."""
        ledger, index = self._ledger, self._ledger.index
        result: list[DeviceSlot] = []
        nodes: list[NodeId] = []
        new: list[NodeId] = []
        for at, (slot, key) in enumerate(zip(slots, content.keys, strict=True)):
            node = index.find(key)
            if node is None:
                [node] = index.add(above, [key], [slot], labels[at : at + 1])
                self._begin([node], content, at)
                new.append(node)
            elif ledger.nodes.slot[node] == NO_SLOT:
                index.place(node, slot)
                ledger.reports.moved(key, off=False)
            elif ledger.nodes.slot[node] != slot:
                slot = self._same(node, slot)
            result.append(slot)
            nodes.append(node)
            above = node if index.chained else key
        return result, nodes, new

    def know(self, content: Content, at: int, known: BlockBelow) -> NodeId:
        """Enter the block at position ``at``, which only a tier holds, behind a known block."""
        index = self._ledger.index
        parent = content.keys[at - 1] if at else content.parent
        above = index.above(parent, content.root)
        assert above is not None
        labels = self._labels(content)
        node = index.know(above, content.keys[at], labels[at] if labels else b"")
        self._begin([node], content, at)
        index.nodes.hits[node] = known.hits
        self._retainer.recall(node, known.priority, known.until_s)
        if labels:
            block = self._stored_block(node, content.keys[at], labels[at])
            self._ledger.reports.stored(parent, [block], content.root, below=True)
        return node

    def _stored_block(self, node: NodeId, key: BlockKey, tokens: bytes) -> StoredBlock:
        """Return the event data of a new block."""
        extra = self._ledger.index.extras.get(node, ())
        return StoredBlock(key, token_ids(tokens), self._ledger.nodes.priority[node], extra)

    def _same(self, node: NodeId, slot: DeviceSlot) -> DeviceSlot:
        """Return the slot to use for a known block that is also complete in ``slot``.

        It is the block's earlier slot. But if that one is still being filled, the block moves to
        ``slot``.
        """
        self._ledger.stats.duplicates += 1
        first = self._ledger.nodes.slot[node]
        if first in self._moves.arriving:
            self._moves.supplanted.add(first)
            self._ledger.index.replace(node, slot)
            return slot
        return self.share(node, slot)

    def share(self, node: NodeId, slot: DeviceSlot) -> DeviceSlot:
        """Exchange a reference to ``slot`` for one to the slot of the equal block ``node``."""
        ledger = self._ledger
        first = ledger.nodes.slot[node]
        ledger.order.remove(ledger.idle([node]))
        ledger.retain([first])
        self._moves.keep([node])
        ledger.release([slot])
        return first

    def _tell(self, nodes: Sequence[NodeId], new: Sequence[NodeId], content: Content) -> None:
        """Report new blocks; consecutive ones share an event."""
        size, reports = self._block_bytes, self._ledger.reports
        fresh, run = set(new), list[StoredBlock]()
        parent = content.parent
        for at, (node, key) in enumerate(zip(nodes, content.keys, strict=True)):
            if node in fresh:
                tokens = content.tokens[at * size : (at + 1) * size]
                run.append(self._stored_block(node, key, tokens))
            else:
                reports.stored(parent, run, content.root)
                run, parent = [], key
        reports.stored(parent, run, content.root)
