"""The index of the engines' blocks, against a dictionary; and its memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvladder.routing import Index, Match
from kvladder.routing.index import names

ENGINES = st.sampled_from(["a", "b", "c"])
LEVELS = st.sampled_from(["GPU", "CPU", "STORAGE/disk"])
PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=6)  # a block each, so that they share
SIZE = 2


def tokens(prompt: list[int]) -> list[int]:
    return [token for block in prompt for token in (block, 7)]


def hashes(engine: str, prompt: list[int]) -> list[bytes]:
    """Return the hash of each block; engines hash in different ways."""
    return [f"{engine}{prompt[: n + 1]}".encode() for n in range(len(prompt))]


class IndexMachine(RuleBasedStateMachine):
    """Engines report their blocks to the index and to a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.held: dict[str, dict[tuple[int, ...], set[str]]] = {}

    @rule(engine=ENGINES, level=LEVELS, prompt=PROMPTS, first=st.integers(0, 5))
    def stored(self, engine: str, level: str, prompt: list[int], first: int) -> None:
        mine = self.held.setdefault(engine, {})
        first = min(first, len(prompt))
        if first and tuple(prompt[:first]) not in mine:
            first = 0
        own = hashes(engine, prompt)
        self.index.stored(
            engine,
            level,
            own[first:],
            parent=own[first - 1] if first else None,
            tokens=tokens(prompt[first:]),
            block_size=SIZE,
        )
        for n in range(first, len(prompt)):
            mine.setdefault(tuple(prompt[: n + 1]), set()).add(level)

    @rule(engine=ENGINES, level=LEVELS, prompt=PROMPTS, first=st.integers(0, 5))
    def removed(self, engine: str, level: str, prompt: list[int], first: int) -> None:
        self.index.removed(engine, level, hashes(engine, prompt)[first:])
        mine = self.held.get(engine, {})
        for n in range(first, len(prompt)):
            there = mine.get(tuple(prompt[: n + 1]), set())
            there.discard(level)
            if not there:
                mine.pop(tuple(prompt[: n + 1]), None)

    @rule(engine=ENGINES)
    def forgotten(self, engine: str) -> None:
        self.index.forget(engine)
        self.held.pop(engine, None)

    @rule(prompt=PROMPTS)
    def asked(self, prompt: list[int]) -> None:
        expected: dict[str, Match] = {}
        for engine, mine in self.held.items():
            levels: dict[str, int] = {}
            length = 0
            while length < len(prompt) and tuple(prompt[: length + 1]) in mine:
                there = mine[tuple(prompt[: length + 1])]
                hottest = min(there, key=["GPU", "CPU", "STORAGE/disk"].index)
                levels[hottest] = levels.get(hottest, 0) + 1
                length += 1
            if length:
                expected[engine] = Match(engine, length * SIZE, levels)
        found = self.index.match(tokens(prompt))
        assert {match.engine: match for match in found} == expected
        assert [m.tokens for m in found] == sorted((m.tokens for m in found), reverse=True)

    @invariant()
    def adds_up(self) -> None:
        self.index.check()
        assert self.index.rows == sum(map(len, self.held.values()))


TestIndex = IndexMachine.TestCase


def fill(index: Index, engine: str, count: int, level: str = "GPU") -> None:
    for number in range(count):
        index.stored(engine, level, [number], tokens=[number, 1], block_size=2)


def test_the_index_stays_consistent_while_many_rows_change() -> None:
    index = Index()
    fill(index, "a", 3000)
    fill(index, "b", 3000)
    index.check()
    index.removed("a", "GPU", range(0, 3000, 2))
    index.check()
    assert [match.engine for match in index.match([5, 1])] == ["a", "b"]
    assert [match.engine for match in index.match([4, 1])] == ["b"]
    index.forget("b")
    index.check()
    assert index.rows == 1500
    assert index.match([4, 1]) == []
    assert index.match([5, 1]) == [Match("a", 2, {"GPU": 1})]


def test_longer_matches_come_first_and_then_hotter_ones() -> None:
    index = Index()
    fill(index, "cold", 1, "STORAGE")
    fill(index, "hot", 1)
    index.stored("long", "STORAGE", ["x"[0].encode(), b"y"], tokens=[0, 1, 2, 3], block_size=2)
    assert [m.engine for m in index.match([0, 1, 2, 3])] == ["long", "hot", "cold"]


def test_engines_with_other_block_sizes_are_compared_by_tokens() -> None:
    index = Index()
    index.stored("small", "GPU", [1, 2, 3], tokens=range(6), block_size=2)
    index.stored("large", "GPU", [1], tokens=range(4), block_size=4)
    found = index.match(list(range(6)))
    assert [(m.engine, m.tokens) for m in found] == [("small", 6), ("large", 4)]


@pytest.mark.parametrize(
    "other", [{"salt": "s"}, {"lora": "l"}, {"extra": {0: [["image", 3]]}}, {"extra": {1: ["x"]}}]
)
def test_salts_adapters_and_images_change_the_content(other: dict[str, Any]) -> None:
    index = Index()
    index.stored("plain", "GPU", [1, 2], tokens=range(4), block_size=2)
    more = dict(other)
    if (salt := more.pop("salt", None)) is not None:
        more["extra"] = {0: [salt]}
    index.stored("other", "GPU", [1, 2], tokens=range(4), block_size=2, **more)
    begin = 2 if other == {"extra": {1: ["x"]}} else 0
    expected = {"plain": begin, "other": 4}
    found = {m.engine: m.tokens for m in index.match(list(range(4)), **other)}
    assert found == {engine: length for engine, length in expected.items() if length}
    assert {m.engine for m in index.match(list(range(4)))} >= {"plain"}


def test_blocks_without_tokens_match_once_their_tokens_are_known() -> None:
    index = Index()
    index.stored("a", "STORAGE/disk", [b"1", b"2"])
    assert (index.unplaced, index.match([0, 1])) == (2, [])
    index.stored("a", "GPU", [b"1", b"2"], tokens=range(4), block_size=2)
    index.removed("a", "GPU", [b"1", b"2"])
    assert index.match([0, 1, 2, 3]) == [Match("a", 4, {"STORAGE/disk": 2})]
    index.check()


def test_equal_hashes_of_two_engines_stay_two_rows() -> None:
    """With the engine's number as the digest's seed these two collided."""
    index = Index()
    index.stored("another", "GPU", [])
    index.stored("c", "GPU", [b"c[0, 0, 0, 1, 1]"])
    index.stored("b", "GPU", [b"b[0, 0, 1, 1, 1]"])
    assert index.rows == 2
    for engine in ("b", "c"):
        index.stored(engine, "GPU", [b"same"], tokens=[1, 2], block_size=2)
    both = [Match("b", 2, {"GPU": 1}), Match("c", 2, {"GPU": 1})]
    assert sorted(index.match([1, 2]), key=str) == both


def test_a_block_reported_again_with_less_detail_keeps_its_place() -> None:
    index = Index()
    index.stored("a", "GPU", [b"1"], tokens=[0, 1], block_size=2, extra={0: ["salt"]})
    index.stored("a", "CPU", [b"1"], tokens=[0, 1], block_size=2)
    assert index.match([0, 1], salt="salt") == [Match("a", 2, {"GPU": 1})]
    assert index.match([0, 1]) == []


def test_a_block_with_an_unknown_parent_is_not_matched() -> None:
    index = Index()
    index.stored("a", "GPU", [b"2"], parent=b"1", tokens=[2, 3], block_size=2)
    assert (index.match([2, 3]), index.unplaced) == ([], 1)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"tokens": [1, 2, 3], "block_size": 2}, "3 tokens for 1 blocks of 2, expected 2"),
        ({"tokens": [1, -2], "block_size": 2}, "token ids are integers in 0 .. 2"),
    ],
)
def test_inconsistent_blocks_are_refused(told: dict[str, Any], said: str) -> None:
    index = Index()
    with pytest.raises(ValueError, match=said.replace("*", ".")):
        index.stored("a", "GPU", [b"1"], **told)
    assert index.rows == 0


def test_one_engine_cannot_exhaust_the_room_of_the_others() -> None:
    index = Index(blocks_max=20)
    for number in range(10):  # in addition to the known levels
        index.stored("a", f"level {number}", [1])
    with pytest.raises(ValueError, match="one more: a already has 16 levels"):
        index.stored("a", "one more", [1])
    for size in range(1, 9):
        index.stored("b", "GPU", [size], tokens=range(size), block_size=size)
    with pytest.raises(ValueError, match="block_size 9: b already has blocks of 8 sizes"):
        index.stored("b", "GPU", [9], tokens=range(9), block_size=9)
    fill(index, "c", 20)
    fill(index, "c", 20)  # again: these are no more
    with pytest.raises(ValueError, match="c holds 20 blocks, and it reports 1 more: expected 20"):
        fill(index, "c", 21)
    index.stored("good", "CPU/host", [1], tokens=range(9), block_size=9)
    assert index.match(list(range(9)))[0] == Match("good", 9, {"CPU/host": 1})
    index.check()
    index.removed("c", "GPU", [3])
    fill(index, "c", 3)
    index.stored("c", "GPU", [20], tokens=[20, 1], block_size=2)
    for engine in ("a", "b", "c"):
        index.forget(engine)
    index.check()
    index.stored("a", "one more", [1], tokens=[8, 9], block_size=2)
    assert index.match([8, 9]) == [Match("a", 2, {"one more": 1})]


def test_the_number_of_a_forgotten_engine_is_reused() -> None:
    index = Index()
    for number in range(3):
        fill(index, f"engine {number}", 1)
        index.forget(f"engine {number}")
    fill(index, "another", 1)
    assert index._engines["another"].number == 0


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 5))
def test_names_chain_from_their_parent(prompt: list[int], size: int) -> None:
    whole = names(prompt, size)
    cut = len(whole) // 2
    assert whole[:cut] == names(prompt[: cut * size], size)
    if cut:
        assert whole[cut:] == names(prompt[cut * size :], size, parent=whole[cut - 1])


def test_the_index_takes_36_bytes_a_block() -> None:
    index = Index()
    fill(index, "a", 1 << 14)
    chains = (index._by_name, index._by_hash)
    columns = [*index._columns, *(c.heads for c in chains), *(c.after for c in chains)]
    assert sum(column.nbytes for column in columns) == 36 * (1 << 14)


def test_a_follower_of_a_block_without_tokens_matches_once_reported_again() -> None:
    index = Index()
    index.stored("one", "CPU", [b"a"])
    index.stored("one", "GPU", [b"b"], parent=b"a", tokens=[2, 3], block_size=2)
    index.stored("one", "GPU", [b"a"], tokens=[0, 1], block_size=2)
    assert index.match([0, 1, 2, 3])[0].tokens == 2
    index.stored("one", "GPU", [b"b"], parent=b"a", tokens=[2, 3], block_size=2)
    assert index.match([0, 1, 2, 3])[0].tokens == 4
    index.check()
