"""Priorities of cached blocks, and the end of retentions."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from kvladder.gpu.pool.ledger import Ledger
from kvladder.gpu.tree.names import NodeId
from kvladder.policy.eviction import PRIORITY_DEFAULT


class Retain(NamedTuple):
    """Retention that a request asks for one of its blocks."""

    priority: int
    duration_s: float | None = None
    """Duration, counted from the time when the block can be reused; None for no end."""


class Retainer:
    """Gives blocks priorities, and ends them when their time is over.

    After its retention a block has the default priority. Expiry never raises a lower priority.
    """

    def __init__(self, ledger: Ledger, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._now = now
        self._ends: list[tuple[float, NodeId]] = []

    def apply(
        self, nodes: Sequence[NodeId], wanted: Sequence[Retain | None], *, new: Container[NodeId]
    ) -> None:
        """Give blocks the wanted retentions; None leaves a block unchanged.

        A new retention replaces the old one, including its duration. For ``new`` blocks no change
        of priority is reported, since they were not reported before.
        """
        until, now = self._ledger.nodes.until, self._now()
        for node, retain in zip(nodes, wanted, strict=True):
            if retain is not None:
                priority, duration_s = retain
                until.pop(node, None)
                if duration_s is not None:
                    self._until(node, now + duration_s)
                self._set(node, priority, tell=node not in new)

    def recall(self, node: NodeId, priority: int, until_s: float) -> None:
        """Restore the retention that the tiers remember for a block that is new here."""
        if until_s <= self._now():
            priority, until_s = min(priority, PRIORITY_DEFAULT), inf
        self._set(node, priority, tell=False)
        if until_s != inf:
            self._until(node, until_s)

    def _until(self, node: NodeId, until_s: float) -> None:
        rows = self._ledger.nodes
        rows.set_until(node, until_s)
        heappush(self._ends, (until_s, node))
        if len(self._ends) > 2 * len(rows.until) + 64:
            held = rows.until
            self._ends = sorted(end for end in self._ends if held.get(end[1]) == end[0])

    def _set(self, node: NodeId, priority: int, *, tell: bool = True) -> None:
        rows = self._ledger.nodes
        old = rows.priority[node]
        rows.set_priority(node, priority)
        if priority != old:
            if node in self._ledger.order:
                self._ledger.order.reprioritized(node)
            key = rows.key[node] if tell else None
            if key is not None:
                self._ledger.reports.reprioritized(key, old, priority)

    def expire(self) -> None:
        """End the retentions that are over."""
        if not self._ends:
            return
        rows, now = self._ledger.nodes, self._now()
        while self._ends and self._ends[0][0] <= now:
            until_s, node = heappop(self._ends)
            if rows.until.get(node) == until_s:
                del rows.until[node]
                priority = min(rows.priority[node], PRIORITY_DEFAULT)
                self._set(node, priority)

    def check(self) -> None:
        """Assert that ``expire`` will find every retention that ends; for tests."""
        rows = self._ledger.nodes
        ends = set(self._ends)
        assert all((until_s, node) in ends for node, until_s in rows.until.items())
        assert len(self._ends) <= 2 * len(rows.until) + 128
