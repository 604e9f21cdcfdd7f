"""A policy that misbehaves is left for a prioritized LRU, which is said once."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import PRIORITY_DEFAULT, KeyedPolicy, PrioritizedLRU
from kvladder.testing.stacks import SimCache
from kvladder.tiers.ladder.records.guard import SLOW_MAX, SLOW_S, SLOW_WITHIN_S, GuardedPolicy
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.records.meta import BlockMeta

pytestmark = pytest.mark.slow

CALLS = [
    "push", "push_all", "touch", "touch_all", "remove", "remove_all", "reserve",
    "inserted", "dropped", "requested", "refused", "attached", "__iter__",
]  # fmt: skip
ACTIONS = ["hit", "touch", "evict", "unpin", "note", "ask"]


class Unruly(PrioritizedLRU, KeyedPolicy):
    """A prioritized LRU of which one call raises an error from some call on."""

    def __init__(self, call: str = "", after: int = 0) -> None:
        super().__init__()
        self.call, self.left = call, after

    def _check(self, name: str) -> None:
        if name == self.call:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError(f"no {name}")

    def inserted(self, handles: Sequence[int], keys: Sequence[BlockKey], request: int) -> None:
        """Note nothing."""

    def dropped(self, handles: Sequence[int], *, evicted: bool) -> None:
        """Note nothing."""


def _checked(name: str) -> Any:
    before = getattr(Unruly, name)

    def call(self: Unruly, *given: Any, **named: Any) -> Any:
        self._check(name)
        return before(self, *given, **named)

    return call


for _name in CALLS:
    setattr(Unruly, _name, _checked(_name))


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


META = BlockMeta(PRIORITY_DEFAULT, PRIORITY_DEFAULT)


class Pair:
    """An index with a policy that fails, beside one with a prioritized LRU."""

    def __init__(self, policy: Any) -> None:
        self.said: list[str] = []
        self.one: LevelIndex[int] = LevelIndex(policy, blocks_max=200, say=self.said.append)
        self.other: LevelIndex[int] = LevelIndex(PrioritizedLRU(), blocks_max=200)
        self.next = 0

    def steps(self, count: int, seed: int) -> None:
        random = Random(seed)
        for _ in range(count):
            held = [n for n in range(200) if self.other.key_at(n) is not None]
            pinned = [n for n in held if self.other.pins(n)]
            idle = [n for n in held if not self.other.pins(n)]
            free = [n for n in range(200) if n not in held]
            some = random.sample(idle, min(len(idle), random.choice([1, 3, 40])))
            action = random.choice(["insert", "insert", *ACTIONS])
            if action == "insert":
                places = random.sample(free, min(len(free), random.choice([1, 3, 40])))
                keys = [key(self.next + n) for n in range(len(places))]
                self.next += len(places)
                self.each("insert", keys, places, META) if places else None
            elif action == "hit" and some:
                self.each("pin", some)
                self.each("hit", some)
            elif action == "touch" and some:
                self.each("touch", some)
            elif action == "unpin":
                self.each("unpin", pinned)
            elif action == "note" and some:
                kind = BlockMeta(random.choice([5, 35, 80]), 5)
                self.each("note", self.other.keys_at(some[:1])[0], kind)
            elif action == "ask":
                self.each("requested", [key(n) for n in range(8)], 1)
                self.each("refused", [key(10_000)], "room")
            elif action == "evict" and idle:
                going = list(self.one.victims())[: random.choice([1, 40])]
                self.each("drop", self.one.keys_at(going), evicted_s=0.0)
            self.check()

    def each(self, name: str, *given: Any, **named: Any) -> None:
        for index in (self.one, self.other):
            getattr(index, name)(*given, **named)

    def check(self) -> None:
        self.one.check(200)
        self.other.check(200)
        assert sorted(self.one.victims()) == sorted(self.other.victims())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_policy_that_raises_is_left(call: str, after: int) -> None:
    policy = Unruly(call, after)
    pair = Pair(policy)
    pair.steps(400, seed=after)
    once = call in {"attached", "reserve"} and after > 0
    assert len(pair.said) == (0 if once else 1)
    if not once:
        assert f"no {call}" in pair.said[0]
        assert "Unruly" in pair.said[0]


class Stranger(PrioritizedLRU):
    """Walks in an order with a fault at the third handle."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        strange: dict[str, list[Any]] = {
            "strange": [150], "beyond": [1 << 20], "twice": order[:1], "text": ["7"], "short": [],
        }  # fmt: skip
        yield from order[:2]
        yield from strange[self.fault]


@pytest.mark.parametrize("fault", ["strange", "beyond", "twice", "text", "short"])
def test_a_policy_that_gives_what_it_does_not_hold_is_left(fault: str) -> None:
    said: list[str] = []
    index: LevelIndex[int] = LevelIndex(Stranger(fault), blocks_max=200, say=said.append)
    index.insert([key(n) for n in range(6)], range(6), META)
    assert list(index.victims()) == [0, 1, 2, 3, 4, 5]  # of that walk, too
    assert len(said) == 1
    assert list(index.victims()) == [0, 1, 2, 3, 4, 5]
    assert len(said) == 1


class Slow(PrioritizedLRU):
    """Takes a second of an injected clock for each touch."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.took_s = 0.0

    def touch(self, handle: int) -> None:
        self.now_s += self.took_s
        super().touch(handle)

    def __iter__(self) -> Iterator[int]:
        for handle in super().__iter__():
            self.now_s += self.took_s
            yield handle


def slow() -> tuple[Slow, LevelIndex[int], list[str]]:
    policy, said = Slow(), list[str]()
    index: LevelIndex[int] = LevelIndex(policy, now=lambda: policy.now_s, say=said.append)
    index.insert([key(n) for n in range(6)], range(6), META)
    return policy, index, said


def test_a_policy_that_takes_too_long_is_left() -> None:
    policy, index, said = slow()
    policy.took_s = SLOW_S
    for at in range(SLOW_MAX):
        assert said == []
        index.touch([at])
    assert len(said) == 1
    assert "took long" in said[0]
    assert list(index.victims()) == [3, 4, 5, 2, 1, 0]  # four were used at one time
    assert len(said) == 1


def test_a_walk_that_takes_too_long_is_slow() -> None:
    policy, index, said = slow()
    policy.took_s = SLOW_S
    assert len(list(index.victims())) == 6
    assert len(said) == 1


def test_a_slow_call_now_and_then_is_forgiven() -> None:
    policy, index, said = slow()
    for _ in range(3 * SLOW_MAX):
        policy.took_s = SLOW_S
        index.touch([1])
        policy.took_s = 0.0
        policy.now_s += SLOW_WITHIN_S / (SLOW_MAX - 1)
    assert said == []


def test_it_orders_by_priority_and_last_use_from_then_on() -> None:
    said: list[str] = []
    policy = Unruly("refused")
    index: LevelIndex[int] = LevelIndex(policy, blocks_max=200, say=said.append)
    index.insert([key(n) for n in range(50)], range(50), META)
    index.insert([key(n) for n in range(50, 60)], range(50, 60), BlockMeta(80, 80))
    index.insert([key(n) for n in range(60, 70)], range(60, 70), BlockMeta(5, 5))
    index.hit([7, 3])
    index.pin([9, 10])
    index.refused([key(1000)], "room")
    assert len(said) == 1
    rest = [n for n in range(50) if n not in {3, 7, 9, 10}]
    assert list(index.victims()) == [*range(60, 70), *rest, 7, 3, *range(50, 60)]
    index.unpin([9, 10])
    assert list(index.victims())[-12:-10] == [9, 10]
    assert isinstance(index.policy, GuardedPolicy)
    assert index.policy.left


async def test_the_level_says_so_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvladder"):
        cache = await SimCache.open(slots=8, policy=Unruly("push"))
        for first in range(5):
            keys = cache.keys(first, *range(4))
            assert cache.save(keys) == 5
            assert {*await cache.load(keys)} == {"host"}
        await cache.settle()
        await cache.aclose()
    (said,) = [record.getMessage() for record in caplog.records if "policy" in record.getMessage()]
    assert "tier host: policy Unruly failed" in said
    assert "evicting the least recently used from now on" in said


def test_the_adaptive_policy_is_not_left() -> None:
    pair = Pair(Adaptive())
    pair.steps(300, seed=5)
    assert pair.said == []
    assert list(pair.one.victims()) != []
    assert array("i", pair.one.victims())
