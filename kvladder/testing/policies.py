"""The conformance suite for eviction policies, as tests to inherit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count
from random import Random

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.eviction import (
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    EvictionPolicy,
    KeyedPolicy,
)

STEPS = 400
KEYS = 200
"""Number of different blocks that a level stores in a test, so that evicted ones come back."""


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


class PolicyCaller:
    """Calls a policy as a level does: a ``KeyedPolicy`` is told what comes and what is evicted."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._keyed = policy if isinstance(policy, KeyedPolicy) else None
        self._held: dict[int, BlockKey] = {}
        self._keys = (BlockKey(sha256(b"%d" % (n % KEYS)).digest()) for n in count())
        self._requests = count(1)

    def insert(self, handles: Sequence[int]) -> None:
        """Hold new blocks; ``push`` does so for a handle without a block."""
        absent = [handle for handle in handles if handle not in self._held]
        held = {*self._held.values()}
        fresh = (key for key in self._keys if key not in held)
        keys = [next(fresh) for _ in absent]
        self._held.update(zip(absent, keys, strict=True))
        if self._keyed is not None and absent:
            self._keyed.inserted(absent, keys, next(self._requests))

    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        """See ``EvictionPolicy.push``."""
        self.insert([handle])
        self.policy.push(handle, priority, front=front)

    def push_all(self, handles: Sequence[int], priority: int) -> None:
        """See ``EvictionPolicy.push_all``."""
        self.insert(handles)
        self.policy.push_all(handles, priority)

    def touch(self, handle: int) -> None:
        """See ``EvictionPolicy.touch``."""
        self.policy.touch(handle)

    def touch_all(self, handles: Sequence[int]) -> None:
        """See ``EvictionPolicy.touch_all``."""
        self.policy.touch_all(handles)

    def pin(self, handles: Sequence[int]) -> None:
        """Take blocks out of eviction; the level holds them still."""
        if len(handles) == 1:
            self.policy.remove(handles[0])
        else:
            self.policy.remove_all(handles)

    def drop(self, handles: Sequence[int], *, evicted: bool = False) -> None:
        """Hold blocks no longer that are not in the policy any more."""
        for handle in handles:
            del self._held[handle]
        if self._keyed is not None:
            self._keyed.dropped(handles, evicted=evicted)

    def remove(self, handle: int, *, evicted: bool = False) -> None:
        """See ``EvictionPolicy.remove``."""
        self.remove_all([handle], evicted=evicted)

    def remove_all(self, handles: Sequence[int], *, evicted: bool = False) -> None:
        """See ``EvictionPolicy.remove_all``."""
        self.pin(handles)
        self.drop(handles, evicted=evicted)

    def pop(self) -> int:
        """See ``EvictionPolicy.pop``."""
        handle = self.policy.pop()
        self.drop([handle], evicted=True)
        return handle

    def __len__(self) -> int:
        return len(self.policy)

    def __contains__(self, handle: int) -> bool:
        return handle in self.policy

    def __iter__(self) -> Iterator[int]:
        return iter(self.policy)


class LevelModel:
    """Random steps of a level over one policy, and which blocks may be evicted after each."""

    def __init__(self, policy: EvictionPolicy, seed: int) -> None:
        self.random = Random(seed)
        self.caller = PolicyCaller(policy)
        self.order = SortedModel()
        """The blocks that may be evicted, as a prioritized LRU orders them."""
        self.priority: dict[int, int] = {}
        self.pinned: set[int] = set()
        self._priorities = self.random.choice([[PRIORITY_DEFAULT], [5, 35, 80]])

    def step(self) -> None:
        """Take one step, drawn at random."""
        steps = [self.insert, self.insert, self.touch, self.pin, self.unpin]
        self.random.choice([*steps, self.rerank, self.evict, self.remove])()

    def insert(self) -> None:
        """Hold up to 40 new blocks of one priority, perhaps pinned at first."""
        free = [handle for handle in range(120) if handle not in self.priority]
        handles = self.random.sample(free, min(len(free), self.random.choice([1, 3, 40])))
        priority = self.random.choice(self._priorities)
        self.priority |= dict.fromkeys(handles, priority)
        self.caller.insert(handles)
        if self.random.random() < 0.2:
            self.pinned.update(handles)
            return
        self._push(handles, priority)

    def _push(self, handles: Sequence[int], priority: int) -> None:
        if len(handles) > 2:
            self.caller.push_all(handles, priority)
        for handle in handles:
            self.order.push(handle, priority)
            if len(handles) <= 2:
                self.caller.push(handle, priority)

    def _some(self) -> list[int]:
        held = self.order.order()
        return self.random.sample(held, min(len(held), self.random.choice([1, 2, 34])))

    def touch(self) -> None:
        """Use blocks again."""
        some = self._some()
        self.caller.touch_all(some)
        for handle in some:
            self.order.touch(handle)

    def pin(self) -> None:
        """Pin blocks for a request."""
        self.caller.pin(some := self._some())
        self.pinned.update(some)
        for handle in some:
            self.order.remove(handle)

    def unpin(self) -> None:
        """Let a request go that had pinned blocks."""
        for handle in self.random.sample(sorted(self.pinned), len(self.pinned) // 2):
            self.pinned.remove(handle)
            self._push([handle], self.priority[handle])

    def rerank(self) -> None:
        """Change the priority of a block."""
        for handle in self._some()[:1]:
            self.caller.pin([handle])
            self.order.remove(handle)
            self.priority[handle] = self.random.choice(self._priorities)
            self._push([handle], self.priority[handle])

    def evict(self) -> None:
        """Evict the first blocks of the order that may go."""
        going = [handle for handle in self.caller if self.random.random() < 0.8]
        self._gone(going[: self.random.choice([1, 8, 40])], evicted=True)

    def remove(self) -> None:
        """Drop blocks for another reason, pinned ones too."""
        lost = self.random.sample(sorted(self.pinned), min(1, len(self.pinned)))
        self.pinned.difference_update(lost)
        self.caller.drop(lost)
        for handle in lost:
            del self.priority[handle]
        self._gone(self._some(), evicted=False)

    def _gone(self, handles: Sequence[int], *, evicted: bool) -> None:
        self.caller.remove_all(handles, evicted=evicted)
        for handle in handles:
            self.order.remove(handle)
            del self.priority[handle]


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

    @pytest.fixture
    def level(self, policy: EvictionPolicy) -> PolicyCaller:
        """Return the policy as a level calls it."""
        return PolicyCaller(policy)

    def drain(self, level: PolicyCaller) -> list[int]:
        """Pop and return all handles."""
        return [level.pop() for _ in range(len(level))]

    def only_prioritized_lru(self) -> None:
        """Skip the rest of a test unless ``prioritized_lru``."""
        if not self.prioritized_lru:
            pytest.skip("the policy has its own order")

    def test_is_empty_at_first(self, level: PolicyCaller) -> None:
        assert len(level) == 0
        assert list(level) == []
        assert 0 not in level
        with pytest.raises(IndexError):
            level.pop()

    def test_can_be_emptied_and_used_again(self, level: PolicyCaller) -> None:
        for _ in range(3):
            for handle in range(5):
                level.push(handle, PRIORITY_DEFAULT)
            assert sorted(self.drain(level)) == list(range(5))
            with pytest.raises(IndexError):
                level.pop()

    @pytest.mark.parametrize("count", [0, 1, 5, 100])
    def test_takes_many_at_once_as_one_after_the_other(
        self, level: PolicyCaller, count: int
    ) -> None:
        order = Random(count).sample(range(1000, 1000 + 3 * count), count)
        level.push(7, PRIORITY_DEFAULT)
        level.push_all(order, PRIORITY_DEFAULT)
        level.push(9, PRIORITY_DEFAULT)
        assert len(level) == count + 2
        assert set(level) == {7, 9, *order}
        level.touch_all(order)
        assert set(level) == {7, 9, *order}
        level.touch(9)
        level.remove_all(order[::2])
        left = [7, *order[1::2], 9]
        assert sorted(level) == sorted(left)
        if self.prioritized_lru:
            assert self.drain(level) == left

    def test_takes_every_priority_and_large_handles(self, level: PolicyCaller) -> None:
        for priority in range(PRIORITY_MIN, PRIORITY_MAX + 1):
            level.push(priority * 1000, priority)
        assert len(level) == PRIORITY_MAX + 1
        assert 1000 in level
        assert 999 not in level
        assert sorted(self.drain(level)) == [1000 * n for n in range(PRIORITY_MAX + 1)]

    def test_what_is_removed_is_not_popped(self, level: PolicyCaller) -> None:
        for handle in range(4):
            level.push(handle, handle)
        level.remove(2)
        level.remove(0)
        assert 2 not in level
        level.push(2, 0)
        assert sorted(self.drain(level)) == [1, 2, 3]

    def test_iterates_in_the_order_of_pop(self, level: PolicyCaller) -> None:
        random = Random(1)
        for handle in range(50):
            level.push(handle, random.randrange(PRIORITY_MAX + 1), front=random.random() < 0.2)
        for handle in random.sample(range(50), 20):
            level.touch(handle)
        order = list(level)
        assert len(order) == len(level)
        assert self.drain(level) == order

    def test_lowest_priority_goes_first(self, level: PolicyCaller) -> None:
        self.only_prioritized_lru()
        for handle, priority in enumerate((80, 5, 35, 0, 100)):
            level.push(handle, priority)
        assert self.drain(level) == [3, 1, 2, 0, 4]

    def test_then_the_least_recently_used(self, level: PolicyCaller) -> None:
        self.only_prioritized_lru()
        for handle in range(4):
            level.push(handle, PRIORITY_DEFAULT)
        level.touch(0)
        level.touch(2)
        assert self.drain(level) == [1, 3, 0, 2]

    def test_the_front_is_the_next_to_go_at_its_priority(self, level: PolicyCaller) -> None:
        self.only_prioritized_lru()
        level.push(0, 35)
        level.push(1, 35)
        level.push(2, 35, front=True)
        level.push(3, 34)
        assert self.drain(level) == [3, 2, 0, 1]

    @pytest.mark.parametrize("seed", range(8))
    def test_agrees_with_a_sorted_list(self, level: PolicyCaller, seed: int) -> None:
        random = Random(seed)
        model = SortedModel()
        priorities = random.sample(range(PRIORITY_MAX + 1), random.choice([1, 2, 5, 101]))
        for _ in range(STEPS):
            held = model.order()
            action = random.choice(["push", "push", "touch", "remove", "pop"])
            if action == "push":
                handle = next(n for n in iter(lambda: random.randrange(300), -1) if n not in held)
                priority, front = random.choice(priorities), random.random() < 0.2
                level.push(handle, priority, front=front)
                model.push(handle, priority, front=front)
            elif held:
                handle = random.choice(held)
                if action == "touch":
                    level.touch(handle)
                    model.touch(handle)
                elif action == "remove":
                    level.remove(handle)
                    model.remove(handle)
                else:
                    handle = level.pop()
                    assert handle == held[0] or not self.prioritized_lru
                    model.remove(handle)
            assert sorted(level) == sorted(model.order())
            assert list(level) == model.order() or not self.prioritized_lru
            assert len(level) == len(model.order())

    @pytest.mark.parametrize("seed", range(8))
    def test_serves_a_level(self, policy: EvictionPolicy, seed: int) -> None:
        model = LevelModel(policy, seed)
        for _ in range(STEPS):
            model.step()
            held = model.order.order()
            order = list(policy)
            assert sorted(order) == sorted(held)
            assert order == held or not self.prioritized_lru
            assert list(policy) == order, "iterating changed the order"
            assert len(policy) == len(held)
            assert [one for one in model.priority if one in policy] == [
                one for one in model.priority if one not in model.pinned
            ]
