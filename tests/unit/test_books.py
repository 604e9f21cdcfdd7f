"""Records of a million blocks: none is copied whole, and no garbage collection visits them."""

from __future__ import annotations

import gc
import sys
from collections import deque
from math import inf
from random import Random

import pytest

from kvladder.keys import (
    PART_KEYS,
    SMALL,
    BlockKey,
    Book,
    FlatKeyMap,
    ShardedKeyMap,
    by_key,
    unseen,
)
from kvladder.policy.eviction import PrioritizedLRU
from kvladder.tiers.label import Ref
from kvladder.tiers.ladder.records.index import LevelIndex
from kvladder.tiers.ladder.records.meta import BlockMeta
from kvladder.tiers.ladder.records.terms import Deadlines, Terms
from kvladder.tiers.ladder.writing.queue import RemovalQueue

MILLION = 10**6


def keys_of(count: int, seed: int = 1) -> list[BlockKey]:
    random = Random(seed)
    return [BlockKey(random.randbytes(32)) for _ in range(count)]


def test_a_sharded_map_behaves_as_a_mapping() -> None:
    random = Random(2)
    held: dict[BlockKey, int] = {}
    spread = ShardedKeyMap[int](MILLION)
    known = keys_of(300)
    for step in range(3000):
        key = random.choice(known)
        if random.random() < 0.6:
            held[key] = spread[key] = step
        else:
            assert spread.pop(key, None) == held.pop(key, None)
        assert (key in spread) == (key in held)
        assert spread.get(key) == held.get(key)
    assert dict(spread) == held
    assert len(spread) == len(held)
    gone = next(iter(held))
    del spread[gone], held[gone]
    with pytest.raises(KeyError):
        spread[gone]


@pytest.mark.parametrize(
    "book", [FlatKeyMap[int](), ShardedKeyMap[int](MILLION)], ids=["whole", "spread"]
)
def test_a_key_map_looks_up_many_keys_at_once(book: Book[int]) -> None:
    keys, others = keys_of(10), keys_of(10, seed=3)
    assert book.add(keys, range(10))
    assert book.get_all([*others, keys[3]]) == [None] * 10 + [3]
    assert [*book.all_of(keys[2:5])] == [2, 3, 4]
    with pytest.raises(KeyError):
        book.all_of([keys[0], others[0]])
    assert book.isdisjoint(others)
    assert not book.isdisjoint([*others, keys[9]])
    assert book.pop_all(keys[1::-1]) == [1, 0]
    assert len(book) == 8
    with pytest.raises(KeyError):
        book.pop_all(keys[:1])
    assert not book.add([others[0], keys[2]], [10, 11]), "one was there"
    assert not book.add([others[1], others[1]], [12, 13]), "one is named twice"
    book.put_all({others[1]: 14, others[2]: 15})
    assert book.get_all(others[1:4]) == [14, 15, None]


def test_no_dictionary_of_a_large_sharded_map_is_large() -> None:
    assert by_key(SMALL) == {}
    spread = by_key(MILLION)
    assert isinstance(spread, ShardedKeyMap)
    for number, key in enumerate(keys_of(MILLION // 4)):
        spread[key] = number
    assert 4 * max(map(len, spread._parts)) < 2 * PART_KEYS


def test_the_garbage_collector_does_not_visit_unseen_containers() -> None:
    column, queue = unseen(["a"]), unseen(deque(["a"]))
    for some in (column, queue):
        assert not gc.is_tracked(some)
        some.extend(["b"] * 1000)
        assert not gc.is_tracked(some)
    gc.collect()


def test_an_index_moves_nothing_while_it_fills_up() -> None:
    policy = PrioritizedLRU()
    index = LevelIndex[int](policy, blocks_max=100_000)
    columns = [index._key, index._terms.of, index._used, policy._next]
    before = [*map(sys.getsizeof, columns)]
    for start in range(0, 100_000, 1000):
        index.insert(keys_of(1000, seed=start), range(start, start + 1000), BlockMeta())
    assert [*map(sys.getsizeof, columns)] == before
    assert index.places == 100_000


def gone_through() -> int:
    """Return how many references a garbage collection follows."""
    gc.collect()
    return sum(len(gc.get_referents(one)) for one in gc.get_objects())


@pytest.mark.slow
def test_a_garbage_collection_does_not_visit_the_records_of_a_level() -> None:
    blocks = 20_000
    keys = tuple(keys_of(blocks))  # as keys in tiers, which other objects hold
    before = gone_through()
    index = LevelIndex[int](PrioritizedLRU(), blocks_max=MILLION)
    for place, key in enumerate(keys):
        terms = Terms(expires_s=9.0 + place // 100, salt=b"%08d" % (place // 1000))
        index.insert([key], [place], BlockMeta(terms=terms))
    assert gone_through() - before < blocks / 4, "only through each request's terms"
    leaving = RemovalQueue(MILLION)
    index.drop(keys)
    for place, key in enumerate(keys):
        leaving.add([Ref(key, place)])
    assert gone_through() - before < blocks / 4
    assert leaving.take(2) == [Ref(keys[0], 0), Ref(keys[1], 1)]


def test_deadlines_of_removed_blocks_are_dropped_a_few_at_a_time(monkeypatch) -> None:
    ends = Deadlines()
    for place in range(10_000):
        ends.put(place, 1e6 + place)
    for place in range(9_000):
        ends.drop(place)
    looked: list[int] = []
    get = ends.get

    def watched(place: int) -> float:
        looked.append(place)
        return get(place)

    monkeypatch.setattr(ends, "get", watched)
    for number in range(4_000):
        looked.clear()
        ends.put(9_000 + number % 1_000, 10.0 + number)
        assert len(looked) <= 4
    held = range(9_000, 10_000)
    ends.check(held)
    assert ends.next_s <= 10.0 + 3_000
    assert ends.due(1e5) == [*held]
    ends.check(())


def test_times_that_are_put_off_add_no_entries_and_come_once() -> None:
    ends, draw = Deadlines(), Random(5)
    model: dict[int, float] = {}
    for number in range(5_000):
        place, now_s = draw.randrange(50), number / 10
        if place in model and draw.random() < 0.7:
            at_s = model[place] + draw.choice([0.0, 1.0, 40.0])  # put off, or as before
        else:
            at_s = now_s + draw.choice([5.0, 60.0, inf])
        ends.put(place, at_s)
        model[place] = at_s
        if draw.random() < 0.1:
            ends.drop(place)
            del model[place]
        due = ends.due(now_s)
        assert sorted(due) == sorted(place for place, at_s in model.items() if at_s <= now_s)
        for place in due:
            del model[place]
        assert ends.next_s <= min(model.values(), default=inf)
        assert [ends.get(place) for place in range(50)] == [model.get(p, inf) for p in range(50)]
        ends.check(range(50))
    pinned = Deadlines()
    for number in range(10_000):
        pinned.put(number % 10, 10.0 + number)
    assert len(pinned._heap) == 10
