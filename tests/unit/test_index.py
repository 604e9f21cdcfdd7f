"""The index of a level: order of eviction, pins, retention, and the memory it takes."""

from __future__ import annotations

import hashlib
import random
from math import inf

import pytest

from kvladder.keys import BlockKey
from kvladder.policy.eviction import PRIORITY_DEFAULT, PrioritizedLRU
from kvladder.tiers.label import Facts, RecoveredBlock
from kvladder.tiers.ladder.records.index import HITS_MAX, LevelIndex
from kvladder.tiers.ladder.records.meta import BlockMeta


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


def index_of(*priorities: int, ttl: bool = False) -> LevelIndex[int]:
    index = LevelIndex[int](PrioritizedLRU(), ttl=ttl)
    for place, priority in enumerate(priorities):
        index.insert([key(place)], [place], BlockMeta(priority, priority))
    return index


def test_the_index_finds_the_longest_prefix() -> None:
    index = index_of(35, 35, 35)
    assert index.prefix([key(0), key(1), key(9), key(2)]) == 2
    assert index.prefix([key(0), key(2)]) == 2
    assert index.prefix([]) == 0
    assert index.place(key(2)) == 2
    assert index.place(key(3)) is None
    assert index.key_at(1) == key(1)
    assert index.key_at(99) is None


def test_remembered_places_count_only_while_blocks_are_there() -> None:
    index, keys = index_of(35, 35), [key(0), key(1)]
    for known in ([], [0, 1], [1, 0], [10**6, 0]):
        assert [*(index.lasting(keys, known) or ())] == [0, 1]
    assert index.lasting([key(0)] * 2, [0, 0]) is None
    index.drop([key(0)])
    assert index.lasting(keys, [0, 1]) is None
    index.insert([key(0)], [7], BlockMeta())
    assert [*(index.lasting(keys, [0, 1]) or ())] == [7, 1]


@pytest.mark.parametrize("order", ["up", "down", "one twice as far", "shuffled"])
def test_many_blocks_are_indexed_at_their_given_places(order: str) -> None:
    places = {
        "up": [*range(100)],
        "down": [*range(99, -1, -1)],
        "one twice as far": [*range(50), *range(51, 101)],
        "shuffled": random.Random(1).sample(range(120), 100),
    }[order]
    index, keys = index_of(), [key(number) for number in range(100)]
    index.insert(keys, places, BlockMeta())
    assert index.at(places) == keys
    assert [index.place(one) for one in keys] == places
    assert list(index.victims()) == places
    index.check(100)
    with pytest.raises(AssertionError, match="is taken"):
        index.insert([key(number) for number in range(100, 200)], places, BlockMeta())


@pytest.mark.parametrize("places", [[0, 1, 2, 1], [*range(0, 80, 2), *range(0, 80, 2)]])
def test_no_place_takes_two_blocks_of_one_call(places: list[int]) -> None:
    with pytest.raises(AssertionError, match="is taken"):
        index_of().insert([key(number) for number in range(len(places))], places, BlockMeta())


def test_victims_are_the_lowest_priority_then_the_least_recent() -> None:
    index = index_of(80, 5, 35, 35)
    index.touch([2])
    assert list(index.victims()) == [1, 3, 2, 0]
    assert index.drop([key(1)]) == [1]
    assert list(index.victims()) == [3, 2, 0]
    index.check(3)


def test_a_pinned_block_is_no_victim_and_comes_back_as_the_most_recent() -> None:
    index = index_of(35, 35)
    index.pin([0])
    index.pin([0])
    index.touch([0, 1])
    assert list(index.victims()) == [1]
    index.unpin([0])
    assert index.pins(0) == 1
    assert list(index.victims()) == [1]
    index.unpin([0])
    assert list(index.victims()) == [1, 0]
    index.check(2)


def test_a_dropped_pinned_block_leaves_nothing_behind() -> None:
    index = index_of(35)
    index.pin([0])
    assert index.drop([key(0)]) == [0]
    index.insert([key(7)], [0], BlockMeta())
    assert list(index.victims()) == [0]
    index.check(1)


def test_e_7_a_priority_of_one_millisecond_reverts_to_the_default() -> None:
    index = LevelIndex[int](PrioritizedLRU())
    index.insert([key(0)], [0], BlockMeta(80, 80, until_s=0.001))
    index.revert(0.0)
    assert index.meta(0).priority == 80
    index.revert(0.002)
    assert index.meta(0).priority == PRIORITY_DEFAULT
    assert index.meta(0).until_s == inf


def test_r_18_expiry_never_promotes() -> None:
    index = LevelIndex[int](PrioritizedLRU())
    index.insert([key(0)], [0], BlockMeta(10, 10, until_s=0.005))
    index.revert(1.0)
    assert index.meta(0).priority == 10


def test_a_new_retention_replaces_the_one_before() -> None:
    index = LevelIndex[int](PrioritizedLRU())
    index.insert([key(0)], [0], BlockMeta(80, 80, until_s=1.0))
    index.note(key(0), BlockMeta(90, 90, until_s=5.0))
    index.revert(2.0)
    assert index.meta(0).priority == 90
    index.revert(5.0)
    assert index.meta(0).priority == PRIORITY_DEFAULT
    index.note(key(0), BlockMeta(60, 60))
    index.revert(100.0)
    assert index.meta(0).priority == 60
    index.check(1)


def test_a_retention_of_a_place_does_not_reach_its_next_block() -> None:
    index = LevelIndex[int](PrioritizedLRU())
    index.insert([key(0)], [0], BlockMeta(80, 80, until_s=1.0))
    index.drop([key(0)])
    index.insert([key(1)], [0], BlockMeta(80, 80))
    index.revert(2.0)
    assert index.meta(0).priority == 80


def test_a_pinned_block_reverts_too() -> None:
    index = LevelIndex[int](PrioritizedLRU())
    index.insert([key(0)], [0], BlockMeta(80, 80, until_s=1.0), pins=1)
    index.revert(1.0)
    index.unpin([0])
    index.insert([key(1)], [1], BlockMeta(40, 40))
    assert list(index.victims()) == [0, 1]


def test_hits_are_counted_up_to_their_maximum() -> None:
    index = index_of(35)
    index.hit([0, 0, 0])
    assert index.meta(0).hits == 3
    for _ in range(HITS_MAX):
        index.hit([0])
    assert index.meta(0).hits == HITS_MAX


def test_expiry_times_are_kept_only_where_there_is_a_ttl() -> None:
    with_ttl, without = index_of(ttl=True), index_of()
    for index in (with_ttl, without):
        index.insert([key(0)], [0], BlockMeta(), expires_s=4.0)
    assert with_ttl.expires_s(0) == 4.0
    assert without.expires_s(0) == inf


def test_recovered_blocks_are_held_like_inserted_ones() -> None:
    items = [
        RecoveredBlock(key(0), 5, Facts(80, 40)),
        RecoveredBlock(key(1), 0, Facts(35, 35, 1010.0)),
    ]
    index = LevelIndex[int](PrioritizedLRU(), ttl=True)
    index.fill(items, behind_s=-1000.0, here=2)
    index.fill([], behind_s=0.0, here=2)
    assert [index.place(key(n)) for n in range(2)] == [5, 0]
    assert index.meta(5) == BlockMeta(80, 40)
    assert [index.expires_s(place) for place in (5, 0)] == [inf, 10.0]
    assert list(index.victims()) == [0, 5]
    with pytest.raises(AssertionError, match="twice"):
        index.fill([RecoveredBlock(key(1), 3)], behind_s=0.0, here=2)
    with pytest.raises(AssertionError, match="taken"):
        index.fill([RecoveredBlock(key(2), 5)], behind_s=0.0, here=2)


def test_the_index_equals_a_sorted_list() -> None:
    rng = random.Random(7)
    index, model = LevelIndex[int](PrioritizedLRU()), dict[int, tuple[int, int]]()
    for step in range(3000):
        number = rng.randrange(40)
        if number in model:
            if rng.random() < 0.5:
                index.touch([number])
                model[number] = (model[number][0], step)
            else:
                assert index.drop([key(number)]) == [number]
                del model[number]
        else:
            priority = rng.choice([0, 35, 35, 100])
            index.insert([key(number)], [number], BlockMeta(priority, priority))
            model[number] = (priority, step)
        assert list(index.victims()) == sorted(model, key=model.__getitem__)
    index.check(40)


def test_age_and_reuse_distance_are_observed() -> None:
    now = 100.0
    index = LevelIndex[int](PrioritizedLRU(), now=lambda: now)
    for place in range(20):
        index.insert([key(place)], [place], BlockMeta())
    index.hit([0])  # 20 uses after its insertion, itself included
    index.hit([0])
    assert index.distances.as_dict()["counts"][:3] == [1, 1, 0]
    assert index.distances.sum == 21
    now = 107.0
    index.touch([1])
    assert index.drop([key(0)], evicted_s=110.0) == [0]
    assert index.drop([key(1)], evicted_s=110.0) == [1]
    index.drop([key(2)])
    assert index.ages.as_dict()["counts"][:3] == [0, 1, 1]
    assert index.ages.sum == pytest.approx(10 + 3)
    assert index.as_dict()["blocks"] == 17


@pytest.mark.slow
def test_a_block_costs_at_most_200_bytes() -> None:
    import tracemalloc

    count = 1 << 17
    tracemalloc.start()
    index = index_of(*[35] * count)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == count
    assert used / count <= 200
