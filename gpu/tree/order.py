"""The order of eviction on the device: leaves only, lowest priority first, then least recent."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from kvladder.gpu.tree.columns import drain, fill, gather, number
from kvladder.gpu.tree.names import NodeId
from kvladder.gpu.tree.nodes import Nodes
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX

STEP: Final = 2
_FIRST: Final = 1 << 40
"""The first stamp; the stamps below it are for nodes added by ``push_front``."""
RUN_MAX: Final = 1024
SLACK_MAX: Final = 1024
"""Invalid entries allowed, beyond the number of valid ones, before a sweep begins."""


class _Run:
    """Nodes that became evictable one after the other, with their stamps, ascending."""

    __slots__ = ("at", "nodes", "stamps")

    def __init__(self, nodes: list[NodeId], stamps: Sequence[int]) -> None:
        self.nodes = nodes
        self.stamps = stamps
        self.at = 0

    def extend(self, nodes: list[NodeId], stamps: Sequence[int]) -> bool:
        """Append nodes if their stamps follow without a gap and the run has room for them.

        Return whether they were appended.
        """
        mine = self.stamps
        if not (isinstance(mine, range) and isinstance(stamps, range)):
            return False
        if mine.stop != stamps.start or len(self.nodes) + len(nodes) > RUN_MAX:
            return False
        self.nodes += nodes
        self.stamps = range(mine.start, stamps.stop, STEP)
        return True


class _Queue:
    """The evictable nodes of one priority.

    ``swept`` is older than ``runs``. An entry is valid while its node still has its stamp. Runs
    hold even stamps. Entries that were added out of sequence have odd stamps, in the heap ``late``.
    """

    __slots__ = ("late", "runs", "swept")

    def __init__(self) -> None:
        self.swept: deque[_Run] = deque()
        self.runs: deque[_Run] = deque()
        self.late: list[tuple[int, NodeId]] = []

    def __bool__(self) -> bool:
        return bool(self.swept or self.runs or self.late)


class EvictionOrder:
    """Keeps unreferenced nodes in the order in which they should be evicted.

    Pure and synchronous. Push and removal take a few operations per batch and two per node. An
    entry that became invalid is skipped when its turn comes, or swept before there are too many.
    A node with children on the device is parked until its last child is gone. Then it returns to
    the place that its stamp gives it.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._queues = [_Queue() for _ in range(PRIORITY_MAX + 1)]
        self._used = 0
        """A bit per priority, set if its queue may hold entries."""
        self._parked: set[NodeId] = set()
        """Nodes that had children when their turn came; some may have left the order since."""
        self._len = 0
        self.entries = 0
        """Number of entries kept, invalid ones included."""
        self.next_stamp = _FIRST
        """Stamp of the next node that is pushed; grows by ``STEP`` with each node."""
        self._front = _FIRST - 1
        self._sweeping = 0

    def __len__(self) -> int:
        """Return the number of nodes in the order, those with children included."""
        return self._len

    def __contains__(self, node: NodeId) -> bool:
        return self._nodes.stamp[node] > 0

    def push(self, nodes: list[NodeId]) -> None:
        """Add ``nodes``, which are not in the order, as most recently used, the last one newest.

        Takes ownership of the list.
        """
        first = self.next_stamp
        self.next_stamp = end = first + STEP * len(nodes)
        stamps = range(first, end, STEP)
        number(self._nodes.stamp, nodes, first, STEP)
        self._len += len(nodes)
        self.entries += len(nodes)
        if not self._nodes.special:
            self._append(PRIORITY_DEFAULT, nodes, stamps)
        else:
            priority = self._nodes.priority
            by_priority: dict[int, tuple[list[NodeId], list[int]]] = {}
            for node, at in zip(nodes, stamps, strict=True):
                held = by_priority.setdefault(priority[node], ([], []))
                held[0].append(node)
                held[1].append(at)
            for level, held in by_priority.items():
                self._append(level, *held)
        self._tidy(len(nodes))

    def _append(self, priority: int, nodes: list[NodeId], stamps: Sequence[int]) -> None:
        if not nodes:
            return
        self._used |= 1 << priority
        runs = self._queues[priority].runs
        last = runs[-1] if runs else None
        if last is not None and last.extend(nodes, stamps):
            return
        if len(nodes) <= RUN_MAX:
            runs.append(_Run(nodes, stamps))
            return
        for start in range(0, len(nodes), RUN_MAX):
            runs.append(_Run(nodes[start : start + RUN_MAX], stamps[start : start + RUN_MAX]))

    def push_front(self, nodes: Sequence[NodeId]) -> None:
        """Add ``nodes``, which are not in the order, as the next to evict at their priority.

        The first node is evicted first.
        """
        for node in reversed(nodes):
            self._front -= STEP
            self._place(node, self._front)
        self._len += len(nodes)
        self._tidy(len(nodes))

    def _place(self, node: NodeId, stamp: int) -> None:
        """Add an entry for a node out of sequence; ``stamp`` is odd."""
        priority = self._nodes.priority[node]
        self._nodes.stamp[node] = stamp
        heappush(self._queues[priority].late, (stamp, node))
        self.entries += 1
        self._used |= 1 << priority

    def remove(self, nodes: Sequence[NodeId]) -> list[int]:
        """Take ``nodes``, which are in the order, out of it; return the stamps for ``restore``."""
        stamp = self._nodes.stamp
        stamps = gather(stamp, nodes)
        fill(stamp, nodes, 0)
        self._len -= len(nodes)
        return stamps

    def restore(self, nodes: Sequence[NodeId], stamps: Sequence[int]) -> None:
        """Undo ``remove``: put every node back in its old place."""
        for node, at in zip(nodes, stamps, strict=True):
            self._place(node, at | 1)
        self._len += len(nodes)

    def reprioritized(self, node: NodeId) -> None:
        """Move ``node``, which is in the order, to the queue of its changed priority."""
        self._place(node, self._nodes.stamp[node] | 1)

    def orphaned(self, node: NodeId) -> None:
        """Make ``node`` evictable if it was parked; its last child has left the device."""
        if node in self._parked:
            self._parked.discard(node)
            at = self._nodes.stamp[node]
            if at > 0:
                self._place(node, at | 1)

    def select(self, count: int) -> list[NodeId]:
        """Take out the ``count`` nodes to evict first and return them in that order.

        Each node is a leaf when it is taken, and its parent's ``kids`` falls by one. Returns fewer
        if too many nodes have children that are not in the order.
        """
        victims: list[NodeId] = []
        while len(victims) < count:
            used = self._used
            if not used:
                break
            queue = self._queues[(used & -used).bit_length() - 1]
            if queue:
                self._drain(queue, victims, count)
            else:
                self._used = used & (used - 1)
        self._len -= len(victims)
        return victims

    def unselect(self, victims: Sequence[NodeId]) -> None:
        """Undo ``select``: put every node back in its old place."""
        nodes = self._nodes
        for node in victims:
            nodes.kids[nodes.parent[node]] += 1
            self._place(node, -nodes.stamp[node] | 1)
        self._len += len(victims)

    def _drain(self, queue: _Queue, victims: list[NodeId], count: int) -> None:
        """Select from one priority until there are enough, or another queue may come first."""
        nodes, late, parked = self._nodes, queue.late, self._parked
        while len(victims) < count and (runs := queue.swept or queue.runs):
            run = runs[0]
            at = begin = run.at
            end = min(len(run.nodes), at + count - len(victims))
            if late:
                end = min(end, bisect_left(run.stamps, late[0][0], at))
                if end == at:
                    break
            at, above = drain(
                run.nodes,
                run.stamps,
                at,
                end,
                nodes.stamp,
                nodes.kids,
                nodes.parent,
                parked,
                victims,
            )
            run.at = at
            self.entries -= at - begin
            if at == len(run.nodes):
                runs.popleft()
            if above >= 0:
                self.orphaned(NodeId(above))
                return
        if late and len(victims) < count:
            self._take_late(queue, victims)

    def _take_late(self, queue: _Queue, victims: list[NodeId]) -> None:
        """Select the first entry of ``late``, if it is valid and a leaf."""
        nodes = self._nodes
        mark, node = heappop(queue.late)
        self.entries -= 1
        if nodes.stamp[node] != mark or self._queues[nodes.priority[node]] is not queue:
            return
        if nodes.kids[node]:
            self._parked.add(node)
            return
        nodes.stamp[node] = -mark
        victims.append(node)
        above = nodes.parent[node]
        nodes.kids[above] -= 1
        if not nodes.kids[above]:
            self.orphaned(above)

    def _tidy(self, pushed: int) -> None:
        """Sweep some invalid entries if there are too many, in proportion to what was pushed."""
        if self.entries > 2 * self._len + SLACK_MAX:
            self._sweep(2 * pushed)

    def _sweep(self, budget: int) -> None:
        """Drop the invalid ones among about ``budget`` entries; the longest unswept come first."""
        idle = 0
        while budget > 0 and idle <= PRIORITY_MAX:
            queue = self._queues[self._sweeping]
            if queue.runs:
                budget -= self._sweep_run(queue)
                idle = 0
                continue
            queue.runs, queue.swept = queue.swept, queue.runs
            self._sweep_late(queue, self._sweeping)
            self._sweeping = (self._sweeping + 1) % len(self._queues)
            idle += 1

    def _sweep_run(self, queue: _Queue) -> int:
        """Move the oldest unswept run, without its invalid entries, to ``swept``.

        Return the cost: the number of its entries and one.
        """
        run, stamp = queue.runs.popleft(), self._nodes.stamp
        entries = zip(run.nodes[run.at :], run.stamps[run.at :], strict=True)
        valid = [(node, mark) for node, mark in entries if stamp[node] == mark]
        before = len(run.nodes) - run.at
        self.entries -= before - len(valid)
        if valid:
            kept, marks = [node for node, _ in valid], [mark for _, mark in valid]
            last = queue.swept[-1] if queue.swept else None
            if last is not None and len(last.nodes) + len(kept) <= RUN_MAX:
                last.nodes.extend(kept)
                last.stamps = [*last.stamps, *marks]
            else:
                queue.swept.append(_Run(kept, marks))
        return before + 1

    def _sweep_late(self, queue: _Queue, priority: int) -> None:
        nodes, before = self._nodes, len(queue.late)
        queue.late = [
            (mark, node)
            for mark, node in queue.late
            if nodes.stamp[node] == mark and nodes.priority[node] == priority
        ]
        heapify(queue.late)
        self.entries -= before - len(queue.late)

    def ordered(self) -> list[NodeId]:
        """Return all nodes, next to evict first, as if each were a leaf; O(n log n)."""
        nodes = self._nodes
        held = [node for node in range(len(nodes)) if nodes.stamp[node] > 0]
        held.sort(key=lambda node: (nodes.priority[node], nodes.stamp[node] | 1))
        return [NodeId(node) for node in held]

    def check(self) -> None:
        """Assert that every node has one valid entry or is parked for its children; O(n)."""
        nodes = self._nodes
        found: dict[NodeId, int] = {}
        entries = 0
        for priority, queue in enumerate(self._queues):
            assert not queue or self._used >> priority & 1
            marks: list[int] = []
            for run in (*queue.swept, *queue.runs):
                assert run.at < len(run.nodes) == len(run.stamps)
                marks.extend(run.stamps[run.at :])
                for node, mark in zip(run.nodes[run.at :], run.stamps[run.at :], strict=True):
                    if nodes.stamp[node] == mark:
                        assert nodes.priority[node] == priority
                        found[node] = found.get(node, 0) + 1
            assert marks == sorted(marks)
            entries += len(marks) + len(queue.late)
            for mark, node in set(queue.late):
                if nodes.stamp[node] == mark and nodes.priority[node] == priority:
                    found[node] = found.get(node, 0) + 1
        assert entries == self.entries, (entries, self.entries)
        held = self.ordered()
        assert len(held) == self._len, (len(held), self._len)
        for node in held:
            waits = node in self._parked and nodes.kids[node] > 0
            assert found.get(node, 0) == 1 or (waits and node not in found), node
