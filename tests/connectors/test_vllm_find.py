"""A search finds the longest prefix that every group can serve; compared with trying them all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.arena import Slot
from kvladder.connectors.vllm.groups import Kind, VllmGroup, VllmGroups
from kvladder.connectors.vllm.requests.find import ROUNDS_MAX, Find
from kvladder.keys import BlockKey
from kvladder.policy.fetch_cost import AvoidedCompute

TOKENS_MAX = 96
Block = tuple[int, int]
"""Group and position."""


def key(group: int, block: int) -> BlockKey:
    return BlockKey(hashlib.sha256(f"{group} {block}".encode()).digest())


NAMED = {key(group, block): (group, block) for group in range(4) for block in range(TOKENS_MAX)}


class FakeMatch:
    """The blocks found by a lookup; some of them turn out to be lost."""

    missed = ()

    def __init__(self, cache: FakeCache, keys: Sequence[BlockKey]) -> None:
        self._cache = cache
        blocks = [NAMED[one] for one in keys]
        self.slots = [Slot(100 * group + block) for group, block in blocks[: cache.lead(blocks)]]
        self.sources = ["host"] * len(self.slots)
        for block in blocks:  # the tier has lost these blocks
            if cache.random.random() < cache.losing:
                cache.blocks.discard(block)
        self._kept = cache.lead(blocks)
        self._asked = cache.random.randrange(3)
        self.done = False
        self.released = False
        cache.matches.append(self)

    @property
    def blocks(self) -> int:
        return self._kept if self.done else 0

    def wait(self, timeout_s: float | None = None) -> bool:
        raise AssertionError("nothing waits here")

    def release(self) -> None:
        self.released = True

    def forget(self) -> None:
        raise AssertionError("nothing failed")


class FakeCache:
    """A set of blocks."""

    def __init__(self, blocks: set[Block], *, losing: float = 0.0, seed: int = 0) -> None:
        self.blocks = blocks
        self.losing = losing
        self.random = Random(seed)
        self.matches: list[FakeMatch] = []

    def lead(self, blocks: Sequence[Block]) -> int:
        return next((i for i, one in enumerate(blocks) if one not in self.blocks), len(blocks))

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        return self.lead([NAMED[one] for one in keys])

    def match(self, keys: Sequence[BlockKey], saves: AvoidedCompute) -> FakeMatch:
        del saves
        return FakeMatch(self, keys)

    def find(self, groups: VllmGroups, own: int, limit: int) -> Find:
        def keys(group: VllmGroup, start: int, end: int) -> list[BlockKey]:
            return [key(group.index, block) for block in range(start, end)]

        match: Any = self.match  # the part of a Fetch that it uses
        return Find(groups, keys, match=match, lookup=self.lookup, own=own, limit=limit)

    def answered(self, find: Find) -> int:
        for _ in range(100):
            for match in self.matches:
                match.done = True
            if find.done:
                return find.end
        raise AssertionError("it is never done")


def needed(group: VllmGroup, own: int, end: int) -> list[Block]:
    """Return the blocks that a group reads of a prefix with this end, except vLLM's own."""
    first = {
        "full": 0,
        "window": max(0, end - group.reach) // group.tokens,
        "local": end // max(1, group.reach) * group.reach // group.tokens,
        "state": end // group.tokens - 1,
    }[group.kind]
    blocks = range(max(first, own // group.tokens), end // group.tokens)
    return [(group.index, block) for block in blocks]


def longest(groups: VllmGroups, blocks: set[Block], own: int, limit: int) -> int:
    ends = range(own, limit + 1, groups.step)
    served = [e for e in ends if all(blocks.issuperset(needed(g, own, e)) for g in groups)]
    return max(served)


kinds: st.SearchStrategy[Kind] = st.sampled_from(["full", "full", "window", "local", "state"])


@st.composite
def models(draw: st.DrawFn) -> VllmGroups:
    found: list[VllmGroup] = []
    for index in range(draw(st.integers(1, 4))):
        kind, tokens = draw(kinds), draw(st.sampled_from([2, 4, 8]))
        reach = draw(st.integers(1, 30)) if kind in ("window", "local") else 0
        found.append(VllmGroup(index, kind, tokens, tokens // 2, reach))
    return VllmGroups(found)


@st.composite
def cases(draw: st.DrawFn) -> tuple[VllmGroups, set[Block], int, int]:
    """Draw a model, the cached blocks, vLLM's own blocks, and the last possible end of a prefix."""
    groups = draw(models())
    steps = TOKENS_MAX // groups.step
    own = draw(st.integers(0, steps - 1)) * groups.step
    limit = draw(st.integers(own // groups.step, steps)) * groups.step
    every = [(g.index, block) for g in groups for block in range(TOKENS_MAX // g.tokens)]
    holes = draw(st.sets(st.sampled_from(every), max_size=draw(st.sampled_from([2, 8, 60]))))
    return groups, set(every) - holes, own, limit


@given(cases())
def test_a_search_finds_the_longest_prefix_that_every_group_can_serve(
    case: tuple[VllmGroups, set[Block], int, int],
) -> None:
    groups, blocks, own, limit = case
    cache = FakeCache(set(blocks))
    find = cache.find(groups, own, limit)
    end = cache.answered(find)
    assert end == longest(groups, blocks, own, limit)
    pinned = find.pins
    held = find.take()
    assert pinned == sum(one.match.blocks for one in held.values())
    for group in groups:
        wanted = needed(group, own, end)
        if end > own and wanted:
            mine = held[group.index]
            slots = mine.match.slots[wanted[0][1] - mine.first : wanted[-1][1] + 1 - mine.first]
            assert slots == [Slot(100 * index + block) for index, block in wanted]
    released = {id(one.match) for one in held.values()}
    assert all(match.released or id(match) in released for match in cache.matches)


@given(cases(), st.integers(0, 2**32), st.sampled_from([0.02, 0.2, 1.0]))
def test_when_a_tier_does_not_deliver_the_prefix_is_shorter_and_complete(
    case: tuple[VllmGroups, set[Block], int, int], seed: int, losing: float
) -> None:
    groups, blocks, own, limit = case
    cache = FakeCache(set(blocks), losing=losing, seed=seed)
    find = cache.find(groups, own, limit)
    end = cache.answered(find)
    assert own <= end <= longest(groups, blocks, own, limit)
    assert (end - own) % groups.step == 0
    held = find.take()
    for group in groups:
        wanted = needed(group, own, end)
        if wanted and end > own:
            mine = held[group.index]
            assert mine.first <= wanted[0][1]
            assert mine.first + mine.match.blocks >= wanted[-1][1] + 1
    taken = {id(one.match) for one in held.values()}
    assert all(match.released != (id(match) in taken) for match in cache.matches)
    partial = len(groups.partial)
    assert len(cache.matches) <= len(groups) + ROUNDS_MAX * partial


def test_a_released_search_holds_nothing() -> None:
    groups = VllmGroups([VllmGroup(0, "full", 4, 1), VllmGroup(1, "window", 4, 1, 6)])
    cache = FakeCache({(g, block) for g in range(2) for block in range(8)})
    find = cache.find(groups, 0, 32)
    assert find.pins == 8 + 2
    find.release()
    find.release()
    assert (find.end, find.pins, find.done) == (0, 0, True)
    assert all(match.released for match in cache.matches)


def test_only_blocks_that_will_be_read_are_fetched() -> None:
    """A window reads a few blocks of a long prefix, and a state one."""
    groups = VllmGroups(
        [VllmGroup(0, "full", 4, 1), VllmGroup(1, "window", 4, 1, 6), VllmGroup(2, "state", 4, 1)]
    )
    cache = FakeCache({(g, block) for g in range(3) for block in range(24)})
    find = cache.find(groups, 8, 64)
    assert cache.answered(find) == 64
    assert [len(match.slots) for match in cache.matches] == [14, 2, 1]


@pytest.mark.parametrize("kind", ["window", "state"])
def test_a_model_without_full_attention_is_served(kind: Kind) -> None:
    groups = VllmGroups([VllmGroup(0, kind, 4, 1, 6)])
    cache = FakeCache({(0, 5), (0, 4), (0, 9)})
    assert cache.answered(cache.find(groups, 0, 40)) == (40 if kind == "state" else 24)
