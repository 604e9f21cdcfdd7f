"""The children of one block, in the order of their tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from kvladder.gpu.tree.names import TOKEN_BYTES, NodeId
from kvladder.gpu.tree.nodes import Nodes
from kvladder.keys import KEY_BYTES

CANDIDATES_MAX = 64
"""Most children examined for a partial match; those that share most tokens come first."""


def common_tokens(left: bytes, right: bytes) -> int:
    """Return how many leading token ids two byte strings share; 4 bytes each, big-endian."""
    size = min(len(left), len(right))
    left, right = left[:size], right[:size]
    if left == right:
        return size // TOKEN_BYTES
    differs = int.from_bytes(left, "big") ^ int.from_bytes(right, "big")
    return (size * 8 - differs.bit_length()) // (TOKEN_BYTES * 8)


def label(rows: Nodes, node: NodeId) -> bytes:
    """Return a node's sort key among its siblings: its tokens, then its key."""
    return rows.tokens[node] + (rows.key[node] or b"")


class Siblings:
    """Children of one block, sorted by their tokens.

    Dropping a child takes constant time: it only lowers the count. The entries of dropped children
    are swept together, once they outnumber the children by ``CANDIDATES_MAX``.
    """

    __slots__ = ("_labels", "_nodes", "_rows", "alive")

    def __init__(self, rows: Nodes) -> None:
        self._rows = rows
        self._labels: list[bytes] = []
        self._nodes: list[NodeId] = []
        self.alive = 0
        """Number of children."""

    def add(self, node: NodeId) -> None:
        """Add a child; its row must be filled in already."""
        self._sweep()
        self.alive += 1
        name = label(self._rows, node)
        at = bisect_left(self._labels, name)
        if at < len(self._labels) and self._labels[at] == name:  # dropped before
            self._nodes[at] = node
        else:
            self._labels.insert(at, name)
            self._nodes.insert(at, node)

    def drop(self, count: int) -> int:
        """Lower the number of children by ``count`` and return it.

        The caller frees the rows of these children next, which makes their entries invalid.
        """
        self.alive -= count
        return self.alive

    def _valid(self, at: int) -> bool:
        key = self._rows.key[self._nodes[at]]
        return key is not None and self._labels[at].endswith(key)

    def _sweep(self) -> None:
        if len(self._nodes) > 2 * self.alive + CANDIDATES_MAX:
            valid = [at for at in range(len(self._nodes)) if self._valid(at)]
            self._labels = [self._labels[at] for at in valid]
            self._nodes = [self._nodes[at] for at in valid]

    def nodes(self) -> list[NodeId]:
        """Return all children, sorted."""
        return [node for at, node in enumerate(self._nodes) if self._valid(at)]

    def nearest(self, tokens: bytes) -> Iterator[tuple[NodeId, int]]:
        """Yield children that begin like ``tokens``, and how many tokens they share, most first."""
        self._sweep()
        labels = self._labels
        right = bisect_left(labels, tokens)
        left = right - 1
        for _ in range(CANDIDATES_MAX):
            low = common_tokens(labels[left][:-KEY_BYTES], tokens) if left >= 0 else 0
            high = 0
            if right < len(labels):
                high = common_tokens(labels[right][:-KEY_BYTES], tokens)
            if low == high == 0:
                return
            if low >= high:
                at, left = left, left - 1
            else:
                at, right = right, right + 1
            if self._valid(at):
                yield self._nodes[at], max(low, high)
