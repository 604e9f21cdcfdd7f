"""The order of eviction against a sorted list, with entries swept as early as possible."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvladder.gpu.tree import order as module
from kvladder.gpu.tree.names import NO_SLOT, NOWHERE, NodeId
from kvladder.gpu.tree.nodes import Nodes
from kvladder.gpu.tree.order import EvictionOrder

PRIORITIES = st.sampled_from([0, 35, 35, 35, 80, 100])


class OrderMachine(RuleBasedStateMachine):
    """Twelve nodes, each the child of a lower one; the model is a dict of stamps."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [patch.object(module, "SLACK_MAX", 0), patch.object(module, "RUN_MAX", 2)]
        for each in self.patches:
            each.start()
        self.rows = Nodes()
        self.nodes = self.rows.take(12)
        self.order = EvictionOrder(self.rows)
        self.present: set[NodeId] = set()
        """On the device: held, or in the order."""
        self.used: dict[NodeId, int] = {}
        self.turn = 0

    def teardown(self) -> None:
        assert self.order.select(12) == self.victims()
        for each in self.patches:
            each.stop()

    def kids(self, node: NodeId) -> int:
        return sum(self.rows.parent[n] == node for n in self.present)

    def victims(self) -> list[NodeId]:
        """Return the order of eviction if every evictable node is evicted."""
        left, present, gone = dict(self.used), set(self.present), list[NodeId]()
        while True:
            leaves = [n for n in left if not any(self.rows.parent[m] == n for m in present)]
            if not leaves:
                return gone
            first = min(leaves, key=lambda n: (self.rows.priority[n], left[n]))
            gone.append(first)
            present.discard(first)
            del left[first]

    def draw(self, data: st.DataObject, pool: set[NodeId] | dict[NodeId, int]) -> list[NodeId]:
        return data.draw(st.lists(st.sampled_from(sorted(pool)), unique=True, max_size=4))

    # ---- rules

    @precondition(lambda self: len(self.present) < 12)
    @rule(data=st.data(), priority=PRIORITIES)
    def arrive(self, data: st.DataObject, priority: int) -> None:
        """Add a held block to the device."""
        node = data.draw(st.sampled_from(sorted(set(self.nodes) - self.present)))
        above = data.draw(st.sampled_from([NOWHERE, *sorted(self.present)]))
        self.rows.parent[node] = above
        self.rows.kids[above] += 1
        self.rows.kids[node] = 0
        self.rows.set_priority(node, priority)
        self.present.add(node)

    @rule(data=st.data(), front=st.booleans())
    def push(self, data: st.DataObject, front: bool) -> None:
        held = self.present - self.used.keys()
        if not held:
            return
        nodes = self.draw(data, held)
        if front:
            self.order.push_front(nodes)
            least = min(self.used.values(), default=0)
            self.used.update({node: least - len(nodes) + i for i, node in enumerate(nodes)})
        else:
            self.order.push(list(nodes))
            for node in nodes:
                self.turn += 1
                self.used[node] = self.turn

    @precondition(lambda self: self.used)
    @rule(data=st.data(), back=st.booleans())
    def remove(self, data: st.DataObject, back: bool) -> None:
        nodes = self.draw(data, self.used)
        stamps = self.order.remove(nodes)
        if back:
            self.order.restore(nodes, stamps)
        else:
            for node in nodes:
                del self.used[node]

    @precondition(lambda self: self.used)
    @rule(data=st.data(), priority=PRIORITIES)
    def reprioritize(self, data: st.DataObject, priority: int) -> None:
        node = data.draw(st.sampled_from(sorted(self.used)))
        self.rows.set_priority(node, priority)
        self.order.reprioritized(node)

    @rule(count=st.integers(0, 5), back=st.booleans())
    def select(self, count: int, back: bool) -> None:
        expected = self.victims()[:count]
        victims = self.order.select(count)
        assert victims == expected
        if back:
            self.order.unselect(victims)
        else:
            for node in victims:
                del self.used[node]
                self.present.discard(node)
                self.rows.stamp[node] = 0

    @precondition(lambda self: self.present - self.used.keys())
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        """A held leaf leaves the device."""
        leaves = [n for n in sorted(self.present - self.used.keys()) if not self.kids(n)]
        if leaves:
            node = data.draw(st.sampled_from(leaves))
            above = self.rows.parent[node]
            self.present.discard(node)
            self.rows.kids[above] -= 1
            if not self.rows.kids[above]:
                self.order.orphaned(above)

    # ---- invariants

    @invariant()
    def sound(self) -> None:
        self.order.check()
        assert len(self.order) == len(self.used)
        assert {node for node in self.nodes if node in self.order} == self.used.keys()


TestOrderMachine: Any = pytest.mark.slow(OrderMachine.TestCase)
TestOrderMachine.settings = profile(max_examples=200, stateful_step_count=40, deadline=None)


def family() -> tuple[Nodes, NodeId, NodeId, EvictionOrder]:
    """Return rows with a block and one that follows it, and an order of eviction."""
    rows = Nodes()
    first, second = rows.take(2)
    rows.parent[first], rows.parent[second] = NOWHERE, first
    rows.kids[NOWHERE] += 1
    rows.kids[first] = 1
    return rows, first, second, EvictionOrder(rows)


def test_a_block_at_the_front_waits_for_the_one_that_follows_it() -> None:
    _, first, second, order = family()
    order.push([second])
    order.push_front([first])
    assert order.select(2) == [second, first]


def test_a_selection_that_is_undone_counts_followers_again() -> None:
    rows, first, second, order = family()
    order.push([first, second])
    for count in (1, 2):
        victims = order.select(count)
        assert victims == [second, first][:count]
        order.unselect(victims)
        assert rows.kids[first] == 1
    assert order.select(2) == [second, first]


def test_entries_that_are_out_of_date_stay_few() -> None:
    rows = Nodes()
    nodes, order, random = rows.take(300), EvictionOrder(rows), Random(7)
    order.push(list(nodes))
    worst = 0
    with patch.object(module, "SLACK_MAX", 50):
        for turn in range(4000):
            used = random.sample(nodes, random.randint(1, 9))
            order.remove(used)
            if turn % 5:
                order.push(used)
            else:
                order.push_front(used)
            worst = max(worst, order.entries)
    order.check()
    assert worst < 6 * 300
    assert sorted(order.select(300)) == sorted(nodes)


def test_rows_are_reused_at_their_defaults() -> None:
    rows = Nodes()
    assert rows.take(0) == []
    [node] = rows.take(1)
    rows.set_priority(node, 80)
    rows.until[node] = 1.0
    assert rows.floor(node) == 80
    rows.give([node])
    assert rows.take(1) == [node]
    assert rows.priority[node] == rows.floor(node) == 35
    assert rows.slot[node] == NO_SLOT
    assert not rows.until
