"""Finds the cached prefix of a prompt in one pool, and claims what only tiers hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvladder.gpu.pool.commit import Committer, Content
from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.pool.moves import Moves
from kvladder.gpu.tree.columns import gather
from kvladder.gpu.tree.names import NO_SLOT, TOKEN_BYTES, DeviceSlot, NodeId, Root
from kvladder.keys import BlockKey


class PartialBlock(NamedTuple):
    """A cached block that shares its first ``tokens`` tokens with a prompt."""

    node: NodeId
    tokens: int
    taken: bool
    """True if the prompt continues in its slot, instead of in a copy."""


class PoolMatch(NamedTuple):
    """Cached blocks that a request found. Those that only tiers hold are claimed there."""

    nodes: Sequence[NodeId] = ()
    claimed: Sequence[NodeId] = ()
    """Blocks of ``nodes`` that are not on the device, in order; the part is last if it is not."""
    part: PartialBlock | None = None
    """Partial match of the block behind ``nodes``."""
    first: int = 0
    """Number of blocks before ``nodes``, which the request does not need."""

    def tokens(self, block_tokens: int) -> int:
        """Return how many tokens of the prompt this serves."""
        part = 0 if self.part is None else self.part.tokens
        return (self.first + len(self.nodes)) * block_tokens + part


class PrefixFinder:
    """Searches the index of one pool. A search holds no block on the device, and evicts none.

    It may claim blocks that only tiers hold, which makes them known here: each match of ``reach``
    is passed to ``Serving.hold``, or to ``forgo``.
    """

    def __init__(self, ledger: Ledger, moves: Moves, committer: Committer) -> None:
        self._ledger = ledger
        self._moves = moves
        self._committer = committer
        self._partial = ledger.settings.partial
        self.labels = ledger.index.labels
        """True if ``Content.tokens`` are used."""

    def match(self, keys: Sequence[BlockKey]) -> PoolMatch:
        """Return the longest leading run of ``keys`` that is on the device or being loaded."""
        return PoolMatch(self._ledger.index.match(keys))

    def slots(self, match: PoolMatch) -> list[DeviceSlot]:
        """Return the device slots of its blocks."""
        return gather(self._ledger.nodes.slot, match.nodes)

    def reach(self, content: Content, first: int = 0) -> PoolMatch:
        """Return the longest prefix of the content's blocks that is on the device or in a tier.

        ``content`` may have tokens and extras of the block behind its keys, which is matched in
        part. Blocks that only tiers hold are claimed: pass the match to ``hold`` or ``forgo``.
        """
        keys, index, slot = content.keys, self._ledger.index, self._ledger.nodes.slot
        nodes, claimed, salt = index.match(keys), list[NodeId](), content.root.salt
        while len(nodes) < len(keys) and (count := self._moves.claim(keys[len(nodes) :], salt)):
            surplus: list[NodeId] = []
            found = keys[len(nodes) : len(nodes) + count]
            known = iter(self._moves.known([key for key in found if key not in index]))
            for at, key in enumerate(found, len(nodes)):
                node = index.find(key)
                if node is None:
                    node = self._committer.know(content, at, next(known))
                (claimed if slot[node] == NO_SLOT else surplus).append(node)
                nodes.append(node)
            self._moves.disclaim(surplus)
            nodes += index.match(keys[len(nodes) :])
        part = self._part(content, len(nodes)) if self._partial != "off" else None
        if part is not None and slot[part.node] == NO_SLOT:
            claimed.append(part.node)
        return PoolMatch(nodes, claimed, part, first)

    def _part(self, content: Content, blocks: int) -> PartialBlock | None:
        """Return the block that shares most behind the first ``blocks``, claimed if in a tier."""
        best = self._nearest(content, blocks)
        if best is None or self._ledger.nodes.slot[best.node] != NO_SLOT:
            return best
        key = self._ledger.index.key_of(best.node)
        return best if self._moves.claim([key], content.root.salt) else None

    def _nearest(self, content: Content, blocks: int) -> PartialBlock | None:
        """Return the usable known block that shares most tokens behind the first ``blocks``."""
        index, size = self._ledger.index, self._ledger.settings.block_tokens
        begin, tokens = blocks * size, content.limit(blocks, size)
        query = content.tokens[begin * TOKEN_BYTES : (begin + tokens) * TOKEN_BYTES]
        parent = content.keys[blocks - 1] if blocks else content.parent
        above = index.above(parent, content.root, create=False)
        if above is None or not query:
            return None
        best: PartialBlock | None = None
        for node, shared, tokens in index.partial(above, query):
            if best is not None and shared <= best.tokens:
                break
            if tokens > (0 if best is None else best.tokens) and self._usable(node):
                best = PartialBlock(node, tokens, self._partial == "take")
        return best

    def followed(self, parents: Sequence[BlockKey], root: Root) -> list[bool]:
        """Return for each key whether known blocks behind it may be matched in part."""
        if self._partial == "off":
            return [False] * len(parents)
        return self._ledger.index.followed(parents, root)

    def shares(self, content: Content) -> int:
        """Return how many leading tokens of a single block without a key a usable block shares."""
        best = self._nearest(content, 0)
        return 0 if best is None else best.tokens

    def _usable(self, node: NodeId) -> bool:
        copied = self._ledger.nodes.slot[node] == NO_SLOT or self._partial == "copy"
        return node not in self._moves.leaving and (copied or self.is_takeable(node))

    def is_takeable(self, node: NodeId) -> bool:
        """Return whether a block on the device is idle and no block follows it."""
        return node in self._ledger.order and not self._ledger.index.has_children(node)

    def covers(self, content: Content) -> bool:
        """Return whether a known block begins with all usable tokens of this single block."""
        index = self._ledger.index
        above = index.above(content.parent, content.root, create=False)
        useful = content.limit(0, len(content.tokens) // TOKEN_BYTES)
        if above is None or not useful:
            return not useful
        for _, _, tokens in index.partial(above, content.tokens[: useful * TOKEN_BYTES]):
            if tokens >= useful:
                return True
        return False

    def forgo(self, match: PoolMatch) -> None:
        """Give up a match that will not be used."""
        self._moves.disclaim(match.claimed)
