"""The policy of docs/how-to/write-a-policy.md: the suite, whole caches, and the calls of policies.

A recorder shows the calls that a level makes; the example shows that they suffice for S3-FIFO.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import (
    EvictionPolicy,
    KeyedPolicy,
    Places,
    PrioritizedLRU,
    RefusalReason,
)
from kvladder.policy.offload import OffloadRule
from kvladder.policy.panel import PythonPanel
from kvladder.policy.sessions import LATER
from kvladder.testing import FakeTier
from kvladder.testing.policies import PolicyTests
from kvladder.testing.stacks import LevelSpec, SimCache
from kvladder.tiers.ladder.records.guard import GuardedPolicy
from tests.kit import soak
from tests.kit.world import World
from tests.stack.caches import cache_of
from tests.tiers.test_custom_tier import loaded

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_policy.py"
PAGE = ROOT / "docs" / "how-to" / "write-a-policy.md"
SMALL_SAVE, LARGE_SAVE = 3, 200


example: Any = loaded("custom_policy")


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a policy asserts fails the test; a level would leave the policy and go on."""

    def fail(_guard: GuardedPolicy, why: str) -> None:
        raise AssertionError(why)

    monkeypatch.setattr(GuardedPolicy, "_leave", fail)


class TestS3Fifo(PolicyTests):
    prioritized_lru = False

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return example.S3Fifo()  # type: ignore[no-any-return]


class Recorder(PrioritizedLRU, KeyedPolicy):
    """A prioritized LRU that records its calls, and asserts that none is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, BlockKey] = {}
        self.came: list[tuple[int, BlockKey]] = []
        """The number of the request, and the key, of each block."""
        self.left: list[tuple[BlockKey, bool]] = []
        self.asked: list[tuple[int, list[BlockKey]]] = []
        self.in_session: list[list[BlockKey]] = []
        self.lacking: list[tuple[str, list[BlockKey]]] = []
        self.blocks = 0

    def attached(self, blocks: int, places: Places) -> None:
        self.blocks, self.places = blocks, places

    def requested(self, keys: Sequence[BlockKey], request: int) -> None:
        for key, handle in zip(keys, self.places(keys), strict=True):
            assert handle is None or self.held[handle] == key
        self.asked.append((request, [*keys]))

    def requested_in_session(self, keys: Sequence[BlockKey], request: int) -> None:
        self.in_session.append([*keys])
        super().requested_in_session(keys, request)

    def refused(self, keys: Sequence[BlockKey], reason: RefusalReason) -> None:
        assert {*self.held.values()}.isdisjoint(keys)
        self.lacking.append((reason, [*keys]))

    def inserted(self, handles: Sequence[int], keys: Sequence[BlockKey], request: int) -> None:
        assert len({*handles}) == len(handles) == len(keys)
        assert self.held.keys().isdisjoint(handles)
        assert not {*self.held.values()}.intersection(keys)
        self.held.update(zip(handles, keys, strict=True))
        self.came += [(request, key) for key in keys]

    def dropped(self, handles: Sequence[int], *, evicted: bool) -> None:
        assert not any(handle in self for handle in handles)
        self.left += [(self.held.pop(handle), evicted) for handle in handles]

    def push(self, handle: int, priority: int, *, front: bool = False) -> None:
        assert handle in self.held
        super().push(handle, priority, front=front)

    def take(self) -> tuple[list[tuple[int, BlockKey]], list[tuple[BlockKey, bool]]]:
        """Return the calls since the last time."""
        told, self.came, self.left = (self.came, self.left), [], []
        return told


class TestRecorder(PolicyTests):
    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return Recorder()


@pytest.mark.parametrize("count", [SMALL_SAVE, LARGE_SAVE])
async def test_a_policy_learns_which_save_brought_a_block(count: int) -> None:
    order = Recorder()
    cache = await SimCache.open(slots=2 * LARGE_SAVE, policy=order)
    one, other = cache.keys(*range(count)), cache.keys(*range(1000, 1000 + count))
    for keys in (one, other):
        assert cache.save(keys) == count
    came, left = order.take()
    requests = {key: request for request, key in came}
    assert sorted(requests) == sorted([*one, *other])
    first, second = {requests[key] for key in one}, {requests[key] for key in other}
    assert len(first) == len(second) == 1
    assert first != second
    assert 0 not in first | second
    assert left == []
    await cache.aclose()


async def test_a_policy_learns_which_requests_are_of_a_named_session() -> None:
    order = Recorder()
    cache = await SimCache.open(slots=8, policy=order)
    chat, other, later = cache.keys(1, 2, 3), cache.keys(7, 8), cache.keys(9)
    cache.save(chat)
    for keys, session in ((chat, "chat-17"), (other, None), (later, LATER), (chat[:2], "chat-17")):
        cache.manager.fetch(keys, session=session).release()
    assert order.in_session == [[*chat], [*chat[:2]]]
    assert [keys for _, keys in order.asked] == [[*chat], [*other], [*later], [*chat[:2]]]
    await cache.aclose()


async def test_a_policy_can_distinguish_evictions_from_removals() -> None:
    order = Recorder()
    cache = await SimCache.open(slots=4, policy=order)
    old = cache.keys(1, 2, 3)
    cache.save(old)
    order.take()
    await cache.load(old)  # pins them, and lets them go
    assert order.take() == ([], [])
    cache.manager.remove(old[2:])
    assert order.take()[1] == [(old[2], False)]
    cache.save(cache.keys(7, 8, 9))
    came, left = order.take()
    assert left == [(old[1], True)]
    assert len(came) == 3
    await cache.aclose()
    assert {evicted for _, evicted in order.left} == {False}
    assert order.held == {}


@pytest.mark.parametrize("count", [SMALL_SAVE, LARGE_SAVE])
async def test_a_level_below_informs_its_policy_too(count: int) -> None:
    order, tier = Recorder(), FakeTier(durable=True)
    rule = OffloadRule(when="commit")
    below = LevelSpec(tier, rule, count, policy=order)
    cache = await SimCache.open(below, slots=2 * count)
    one = cache.keys(*range(count))
    cache.save(one)
    await cache.settle()
    assert sorted(order.take()[0]) == sorted((0, key) for key in one)
    other = cache.keys(*range(1000, 1000 + count))
    cache.save(other)
    await cache.settle()
    assert sorted(order.take()[1]) == sorted((key, True) for key in one)
    assert {*order.held.values()} == {*other}
    await cache.aclose()


async def test_a_fetch_that_reads_blocks_has_a_number_of_its_own() -> None:
    host, tier = Recorder(), FakeTier(durable=True)
    below = LevelSpec(tier, OffloadRule(when="commit"), 2 * LARGE_SAVE)
    cache = await SimCache.open(below, slots=LARGE_SAVE, policy=host)
    for count in (SMALL_SAVE, LARGE_SAVE // 2):
        keys = cache.keys(count, *range(count))
        cache.save(keys)
        await cache.settle()
        saved = {request for request, _ in host.take()[0]}
        cache.save(cache.keys(count + 1, *range(LARGE_SAVE - 1)))  # all other blocks are evicted
        await cache.settle()
        host.take()
        assert {*await cache.load(keys)} == {"level1"}
        came, _ = host.take()
        fetched = {request for request, _ in came}
        assert sorted(key for _, key in came) == sorted(keys)
        assert len(fetched) == 1
        assert 0 not in fetched
        assert fetched.isdisjoint(saved)
    await cache.aclose()


async def test_every_policy_is_told_what_requests_ask_for() -> None:
    host, lower, tier = Recorder(), Recorder(), FakeTier(durable=True)
    below = LevelSpec(tier, OffloadRule(when="commit"), 64, policy=lower)
    cache = await SimCache.open(below, slots=32, policy=host)
    assert (host.blocks, lower.blocks) == (32, 64)
    keys = cache.keys(*range(5))
    cache.save(keys[:3])
    await cache.settle()
    assert host.asked == lower.asked == []
    fetch = cache.manager.fetch(keys)  # the last two are nowhere
    assert not host.came[3:]
    again = cache.manager.fetch(keys)  # of the same request, which waits
    while not fetch.done:
        await cache.settle()
    for one in (fetch, again):
        one.release()
    ((number, asked),) = host.asked
    assert asked == keys
    assert number
    assert lower.asked == host.asked
    cache.manager.fetch(keys).release()  # the next request
    assert [asked for _, asked in host.asked] == [keys, keys]
    assert host.asked[1][0] != number
    await cache.aclose()


async def test_a_fetch_brings_blocks_with_the_number_of_its_request() -> None:
    host, tier = Recorder(), FakeTier(durable=True)
    below = LevelSpec(tier, OffloadRule(when="commit"), 64)
    cache = await SimCache.open(below, slots=8, policy=host)
    keys = cache.keys(*range(4))
    cache.save(keys)
    await cache.settle()
    cache.save(cache.keys(*range(100, 108)))
    await cache.settle()
    host.take()
    assert {*await cache.load(keys)} == {"level1"}
    ((number, _),) = host.asked
    assert {request for request, _ in host.take()[0]} == {number}
    await cache.aclose()


async def test_a_prefetch_is_no_use() -> None:
    host, tier = Recorder(), FakeTier(durable=True)
    below = LevelSpec(tier, OffloadRule(when="commit"), 64)
    cache = await SimCache.open(below, slots=8, policy=host)
    keys = cache.keys(*range(4))
    cache.save(keys)
    await cache.settle()
    cache.manager.sessions.use("one", [keys])
    cache.save(cache.keys(*range(100, 108)))
    await cache.settle()
    host.take()
    host.asked.clear()
    (fetch,) = cache.manager.prefetch("one")
    while not fetch.done:
        await cache.settle()
    fetch.release()
    assert host.asked == []
    assert {*host.take()[0]} == {(0, key) for key in keys}
    await cache.aclose()


async def test_a_policy_is_told_what_its_level_refuses() -> None:
    host, lower, tier = Recorder(), Recorder(), FakeTier(durable=True)
    below = LevelSpec(tier, OffloadRule(80, "commit"), 64, policy=lower)
    cache = await SimCache.open(below, slots=4, policy=host)
    keys = cache.keys(*range(4))
    cache.save(keys)
    await cache.settle()
    assert host.lacking == []
    assert {(why, key) for why, some in lower.lacking for key in some} == {
        ("rule", key) for key in keys
    }
    fetch = cache.manager.fetch(keys)
    more = cache.keys(*range(100, 102))
    assert cache.save(more) == 0  # all slots are pinned
    assert host.lacking == [("room", more)]
    fetch.release()
    await cache.aclose()


@pytest.mark.parametrize("count", [SMALL_SAVE, LARGE_SAVE])
async def test_what_is_held_is_not_refused_with_the_block_before_it(count: int) -> None:
    host, lower = Recorder(), Recorder()
    below = LevelSpec(FakeTier(), OffloadRule(50), 2 * LARGE_SAVE, policy=lower)
    rule = OffloadRule(50)
    async with cache_of(below, slots=2 * LARGE_SAVE, policy=host, host=rule) as cache:
        keys = cache.keys(*range(count))
        cache.save(keys[:-1], priorities=[80] * (count - 1))
        cache.stack.remove(keys[:1])
        assert cache.save(keys, priorities=[10] * count) == 0
        for policy in (host, lower):
            told = [(why, key) for why, some in policy.lacking for key in some]
            assert told == [("rule", keys[0]), ("rule", keys[-1])]


async def test_recovered_blocks_belong_to_no_request() -> None:
    order, tier = Recorder(), FakeTier(durable=True)
    first = await SimCache.open(LevelSpec(tier, OffloadRule(when="commit")))
    keys = first.keys(1, 2, 3)
    first.save(keys)
    await first.aclose()
    again = FakeTier(store=tier.store, durable=True)
    second = await SimCache.open(LevelSpec(again, OffloadRule(when="commit"), policy=order))
    await second.settle()
    assert sorted(order.take()[0]) == sorted((0, key) for key in keys)
    await second.aclose()


async def hits_of_hot_blocks(policy: EvictionPolicy) -> int:
    """Return how many of 8 hot blocks a host of 20 slots still has after a scan of 64 blocks."""
    cache = await SimCache.open(slots=20, policy=policy)
    hot = cache.keys(*range(8))
    cache.save(hot)
    await cache.load(hot)
    for number in range(64):
        cache.save(cache.keys(1000 + number))
    hits = cache.manager.lookup(hot).total
    await cache.aclose()
    return hits


async def test_a_policy_with_keys_resists_a_scan() -> None:
    assert await hits_of_hot_blocks(PrioritizedLRU()) == 0
    assert await hits_of_hot_blocks(example.S3Fifo()) == 8


async def test_a_block_that_comes_back_after_its_eviction_is_kept() -> None:
    cache = await SimCache.open(slots=10, policy=example.S3Fifo())
    (early,) = cache.keys(1)
    cache.save([early])
    for number in range(10):
        cache.save(cache.keys(100 + number))
    assert cache.manager.lookup([early]).total == 0
    cache.save([early])  # its key is remembered
    for number in range(30):
        cache.save(cache.keys(200 + number))
    assert cache.manager.lookup([early]).total == 1
    cache.manager.remove([early])
    cache.save([early])  # a removed block is not remembered
    for number in range(30):
        cache.save(cache.keys(300 + number))
    assert cache.manager.lookup([early]).total == 0
    await cache.aclose()


class InPython(Adaptive):
    """The adaptive policy without its loops in C."""

    def __init__(self) -> None:
        super().__init__(make=PythonPanel)


@pytest.mark.product("seed", "make")
@pytest.mark.parametrize("seed", [37, 145, 200192, *range(40_000, 40_008)])
@pytest.mark.parametrize("make", [example.S3Fifo, Recorder, Adaptive, InPython])
def test_whole_caches_work_with_a_custom_policy(
    seed: int, make: type[EvictionPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "make_policy", staticmethod(make))
    world = soak.run_world(seed)
    policy: Any = world.cache.stack.host.index.policy
    assert type(policy.inner) is make


def test_the_page_shows_the_example() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    shown = ("NEW_SHARE" + blocks[0].partition("NEW_SHARE")[2]).strip()
    assert len(shown) > 1000
    assert shown in EXAMPLE.read_text()
