"""The conformance suite for eviction policies, as tests to inherit."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, EvictionPolicy

STEPS = 400


class SortedModel:
    """The simplest prioritized LRU: a dict, sorted at each request for the order."""

    def __init__(self) -> None:
        self._rank: dict[int, tuple[int, int]] = {}
        self._clock = count()

    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        """See ``EvictionPolicy.push``."""
        assert handle not in self._rank
        now = next(self._clock)
        self._rank[handle] = (priority, -now if front else now)

    def touch(self, handle: int) -> None:
        """See ``EvictionPolicy.touch``."""
        self._rank[handle] = (self._rank[handle][0], next(self._clock))

    def remove(self, handle: int) -> None:
        """See ``EvictionPolicy.remove``."""
        del self._rank[handle]

    def order(self) -> list[int]:
        """Return all handles, the next to be evicted first."""
        return sorted(self._rank, key=self._rank.__getitem__)


class PolicyTests:
    """Conformance tests. Inherit, name the class ``Test...`` and define a fixture ``policy``.

    The fixture returns a new, empty policy.
    """

    prioritized_lru = True
    """True if the policy evicts the lowest priority first, then the least recently used. Set it to
    False for a policy with another order; the tests then only require that it is consistent."""

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        """Return a new, empty policy; must be overridden."""
        raise NotImplementedError("give the class a fixture `policy`")

    def drain(self, policy: EvictionPolicy) -> list[int]:
        """Pop and return all handles."""
        return [policy.pop() for _ in range(len(policy))]

    def only_prioritized_lru(self) -> None:
        """Skip the rest of a test unless ``prioritized_lru``."""
        if not self.prioritized_lru:
            pytest.skip("it has an order of its own")

    def test_is_empty_at_first(self, policy: EvictionPolicy) -> None:
        assert len(policy) == 0
        assert list(policy) == []
        assert 0 not in policy
        with pytest.raises(IndexError):
            policy.pop()

    def test_can_be_emptied_and_used_again(self, policy: EvictionPolicy) -> None:
        for _ in range(3):
            for handle in range(5):
                policy.push(handle, PRIORITY_DEFAULT)
            assert sorted(self.drain(policy)) == list(range(5))
            with pytest.raises(IndexError):
                policy.pop()

    @pytest.mark.parametrize("count", [0, 1, 5, 100])
    def test_takes_many_at_once_as_one_after_the_other(
        self, policy: EvictionPolicy, count: int
    ) -> None:
        order = Random(count).sample(range(1000, 1000 + 3 * count), count)
        policy.push(7, PRIORITY_DEFAULT)
        policy.push_all(order, PRIORITY_DEFAULT)
        policy.push(9, PRIORITY_DEFAULT)
        assert len(policy) == count + 2
        assert set(policy) == {7, 9, *order}
        policy.touch_all(order)
        assert set(policy) == {7, 9, *order}
        policy.touch(9)
        policy.remove_all(order[::2])
        left = [7, *order[1::2], 9]
        assert sorted(policy) == sorted(left)
        if self.prioritized_lru:
            assert self.drain(policy) == left

    def test_takes_every_priority_and_large_handles(self, policy: EvictionPolicy) -> None:
        for priority in range(PRIORITY_MIN, PRIORITY_MAX + 1):
            policy.push(priority * 1000, priority)
        assert len(policy) == PRIORITY_MAX + 1
        assert 1000 in policy
        assert 999 not in policy
        assert sorted(self.drain(policy)) == [1000 * n for n in range(PRIORITY_MAX + 1)]

    def test_what_is_removed_is_not_popped(self, policy: EvictionPolicy) -> None:
        for handle in range(4):
            policy.push(handle, handle)
        policy.remove(2)
        policy.remove(0)
        assert 2 not in policy
        policy.push(2, 0)
        assert sorted(self.drain(policy)) == [1, 2, 3]

    def test_iterates_in_the_order_of_pop(self, policy: EvictionPolicy) -> None:
        random = Random(1)
        for handle in range(50):
            policy.push(handle, random.randrange(PRIORITY_MAX + 1), front=random.random() < 0.2)
        for handle in random.sample(range(50), 20):
            policy.touch(handle)
        order = list(policy)
        assert len(order) == len(policy)
        assert self.drain(policy) == order

    def test_lowest_priority_goes_first(self, policy: EvictionPolicy) -> None:
        self.only_prioritized_lru()
        for handle, priority in enumerate((80, 5, 35, 0, 100)):
            policy.push(handle, priority)
        assert self.drain(policy) == [3, 1, 2, 0, 4]

    def test_then_the_least_recently_used(self, policy: EvictionPolicy) -> None:
        self.only_prioritized_lru()
        for handle in range(4):
            policy.push(handle, PRIORITY_DEFAULT)
        policy.touch(0)
        policy.touch(2)
        assert self.drain(policy) == [1, 3, 0, 2]

    def test_the_front_is_the_next_to_go_at_its_priority(self, policy: EvictionPolicy) -> None:
        self.only_prioritized_lru()
        policy.push(0, 35)
        policy.push(1, 35)
        policy.push(2, 35, front=True)
        policy.push(3, 34)
        assert self.drain(policy) == [3, 2, 0, 1]

    @pytest.mark.parametrize("seed", range(8))
    def test_agrees_with_a_sorted_list(self, policy: EvictionPolicy, seed: int) -> None:
        random = Random(seed)
        model = SortedModel()
        priorities = random.sample(range(PRIORITY_MAX + 1), random.choice([1, 2, 5, 101]))
        for _ in range(STEPS):
            held = model.order()
            action = random.choice(["push", "push", "touch", "remove", "pop"])
            if action == "push":
                handle = next(n for n in iter(lambda: random.randrange(300), -1) if n not in held)
                priority, front = random.choice(priorities), random.random() < 0.2
                policy.push(handle, priority, front=front)
                model.push(handle, priority, front=front)
            elif held:
                handle = random.choice(held)
                if action == "touch":
                    policy.touch(handle)
                    model.touch(handle)
                elif action == "remove":
                    policy.remove(handle)
                    model.remove(handle)
                else:
                    handle = policy.pop()
                    assert handle == held[0] or not self.prioritized_lru
                    model.remove(handle)
            assert sorted(policy) == sorted(model.order())
            assert list(policy) == model.order() or not self.prioritized_lru
            assert len(policy) == len(model.order())
