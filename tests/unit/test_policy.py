"""The shipped policy keeps the suite's rules, a state machine's, and the acceptance cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvladder.policy.eviction import (
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    EvictionPolicy,
    PrioritizedLRU,
)
from kvladder.policy.offload import OffloadRule
from kvladder.testing.policies import PolicyTests, SortedModel
from kvladder.tiers.ladder.records.moving import MovingPolicy

PRIORITIES = st.integers(PRIORITY_MIN, PRIORITY_MAX) | st.sampled_from([5, 35, 80])


class TestPrioritizedLRU(PolicyTests):
    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return PrioritizedLRU()


class Moving(MovingPolicy):
    """A replacement in progress, outside of an index: it remembers priorities itself."""

    def __init__(self) -> None:
        self.priorities: dict[int, int] = {}
        known = self.priorities.__getitem__
        super().__init__(
            PrioritizedLRU(), PrioritizedLRU(), None, priority=known, key=lambda _: None
        )

    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        self.priorities[handle] = priority
        super().push(handle, priority, front=front)

    def push_all(self, handles: Sequence[int], priority: int) -> None:
        self.priorities.update(dict.fromkeys(handles, priority))
        super().push_all(handles, priority)


class TestMovingPolicy(PolicyTests):
    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return Moving()


def test_blocks_move_in_their_order_and_the_lowest_priority_stays_first() -> None:
    moving = Moving()
    for handle in range(100):
        moving.priorities[handle] = 35 + handle % 3
        moving.old.push(handle, 35 + handle % 3)
    whole = [*moving.old]
    while moving.move(7):
        order = [*moving]
        assert sorted(order) == [*range(100)]
        assert [moving.priorities[handle] for handle in order] == sorted(moving.priorities.values())
    assert [*moving.new] == whole
    assert not len(moving.old)


class PolicyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = PrioritizedLRU()
        self.model = SortedModel()

    @rule(handle=st.integers(0, 40), priority=PRIORITIES, front=st.booleans())
    def push(self, handle: int, priority: int, front: bool) -> None:
        if handle not in self.policy:
            self.policy.push(handle, priority, front=front)
            self.model.push(handle, priority, front=front)

    @precondition(lambda self: len(self.policy) > 0)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.model.order()))
        self.policy.touch(handle)
        self.model.touch(handle)

    @precondition(lambda self: len(self.policy) > 0)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.model.order()))
        self.policy.remove(handle)
        self.model.remove(handle)

    @precondition(lambda self: len(self.policy) > 0)
    @rule(data=st.data())
    def remove_all(self, data: st.DataObject) -> None:
        order = self.model.order()
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(order))] * 2)))
        handles = order[start:end]
        handles = data.draw(st.sampled_from([handles, handles[::-1]]) | st.permutations(handles))
        self.policy.remove_all(handles)
        for handle in handles:
            self.model.remove(handle)

    @precondition(lambda self: len(self.policy) > 0)
    @rule(data=st.data())
    def touch_all(self, data: st.DataObject) -> None:
        order = self.model.order()
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(order))] * 2)))
        handles = order[start:end]
        handles = data.draw(st.sampled_from([handles, handles[::-1]]) | st.permutations(handles))
        self.policy.touch_all(handles)
        for handle in handles:
            self.model.touch(handle)

    @rule(handles=st.permutations(range(100, 180)), priority=PRIORITIES)
    def push_all(self, handles: list[int], priority: int) -> None:
        new = [handle for handle in handles if handle not in self.policy]
        self.policy.push_all(new, priority)
        for handle in new:
            self.model.push(handle, priority)

    @rule()
    def pop(self) -> None:
        order = self.model.order()
        if order:
            assert self.policy.pop() == order[0]
            self.model.remove(order[0])
        else:
            with pytest.raises(IndexError):
                self.policy.pop()

    @invariant()
    def agrees(self) -> None:
        self.policy.check()
        order = self.model.order()
        assert list(self.policy) == order
        assert len(self.policy) == len(order)
        assert all((handle in self.policy) == (handle in order) for handle in range(41))


TestMachine: Any = PolicyMachine.TestCase


def drained(policy: PrioritizedLRU) -> list[int]:
    return [policy.pop() for _ in range(len(policy))]


def test_a_handle_is_pushed_once_and_removed_once() -> None:
    """E-9 from the policy's view: a mistake is detected and changes nothing."""
    policy = PrioritizedLRU()
    policy.push(3, 35)
    with pytest.raises(AssertionError):
        policy.push(3, 80)
    with pytest.raises(AssertionError):
        policy.remove(4)
    assert list(policy) == [3]
    policy.remove(3)
    with pytest.raises(AssertionError):
        policy.remove(3)
    policy.check()


@pytest.mark.parametrize("priority", [PRIORITY_MIN - 1, PRIORITY_MAX + 1])
def test_priorities_are_in_range(priority: int) -> None:
    with pytest.raises(AssertionError):
        PrioritizedLRU().push(0, priority)


def test_e3_a_block_released_to_the_front_is_next_and_others_are_not() -> None:
    policy = PrioritizedLRU()
    for block in range(2, 8):
        policy.push(block, PRIORITY_DEFAULT)
    policy.push(0, PRIORITY_DEFAULT, front=True)
    policy.push(1, PRIORITY_DEFAULT)
    assert policy.pop() == 0
    assert policy.pop() != 1


def test_e4_blocks_released_as_b2_then_b1_leave_in_this_order_after_the_others() -> None:
    policy = PrioritizedLRU()
    for block in range(8):
        policy.push(block, PRIORITY_DEFAULT)
    b1, b2 = policy.pop(), policy.pop()
    policy.push(b2, PRIORITY_DEFAULT)
    policy.push(b1, PRIORITY_DEFAULT)
    assert drained(policy)[6:] == [b2, b1]


def test_e6_priority_5_goes_before_priority_80() -> None:
    policy = PrioritizedLRU()
    policy.push(1, 80)
    policy.push(2, 5)
    assert drained(policy) == [2, 1]


def test_e14_after_the_lower_priority_is_empty_the_higher_one_gives() -> None:
    policy = PrioritizedLRU()
    for block, priority in enumerate((10, 10, 60, 60)):
        policy.push(block, priority)
    assert drained(policy) == [0, 1, 2, 3]


def test_q8_with_capacity_3_the_least_recently_used_block_is_the_victim() -> None:
    policy = PrioritizedLRU()
    for block in range(3):
        policy.push(block, PRIORITY_DEFAULT)
    policy.touch(0)
    assert policy.pop() == 1
    policy.push(3, PRIORITY_DEFAULT)
    assert drained(policy) == [2, 0, 3]


def test_r15_a_request_at_20_loses_to_the_blocks_of_90_and_35_but_not_to_10() -> None:
    """Pool of 4, blocks of 4 tokens: requests of two blocks each at [90, 10], 35 and 20."""
    policy = PrioritizedLRU()
    (a0, a1), (b0, b1) = (0, 1), (2, 3)
    policy.push(a1, 10)  # a request is released from its tail to its head
    policy.push(a0, 90)
    policy.push(b1, PRIORITY_DEFAULT)
    policy.push(b0, PRIORITY_DEFAULT)
    assert (policy.pop(), policy.pop()) == (a1, b1)
    policy.push(a1, 20)
    policy.push(b1, 20)
    assert b0 in policy, "prompt 8..15 still has its first block: ctx 4"
    policy.touch(b0)
    assert policy.pop() == a1, "its second block takes the place of one of 16..23"
    policy.push(a1, PRIORITY_DEFAULT)
    assert a0 in policy, "prompt 0..7 still has its first block: ctx 4"
    policy.touch(a0)
    assert policy.pop() == b1
    policy.push(b1, PRIORITY_DEFAULT)
    assert drained(policy)[-1] == a0, "nothing of 16..23 is left: ctx 0"


def test_e5_and_e12_a_threshold_is_inclusive() -> None:
    rule_ = OffloadRule(min_priority=35)
    assert rule_.admits(PRIORITY_DEFAULT, 0), "E-5: a victim at default priority"
    assert not rule_.admits(5, 0), "E-5: released again at priority 5"
    assert rule_.admits(35, 0), "E-12: equal to the threshold"
    assert not rule_.admits(34, 0), "E-12: one less"


def test_a_rule_requires_its_hits() -> None:
    rule_ = OffloadRule(min_hits=2)
    assert [rule_.admits(100, hits) for hits in range(4)] == [False, False, True, True]


def test_a_rule_of_never_admits_no_block() -> None:
    assert not OffloadRule(when="never").admits(100, 5)


@pytest.mark.parametrize("wrong", [{"min_priority": 101}, {"min_hits": -1}, {"ttl_s": 0.0}])
def test_an_impossible_rule_is_a_bug(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        OffloadRule(**wrong)
