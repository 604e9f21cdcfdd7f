"""The adaptive policy: the suite, its loops in C beside those in Python, its bounds."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import sha256
from itertools import islice
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvladder.keys import BlockKey
from kvladder.policy import panel
from kvladder.policy.adaptive import Adaptive
from kvladder.policy.eviction import PRIORITY_DEFAULT, EvictionPolicy
from kvladder.policy.hazards import (
    CLASSES,
    EITHER,
    HAZARD,
    INTERVALS,
    LOOP,
    MULTI,
    PROMPT,
    RECENT,
    RULES,
    SESSION,
    Learner,
    Sampled,
    class_of,
    interval_of,
)
from kvladder.policy.panel import GENERATION, Ghosts, PythonPanel, SeenOnce, tag_of
from kvladder.testing.policies import PolicyTests
from tests.kit.native import built
from tests.kit.source import ROOT

SOURCE = ROOT / "policy" / "_panel.c"
HANDLES = 24
SIZES = st.sampled_from([1, 2, 5, 16, 40, 5000])
Some = st.integers(0, 1 << 30)


def key_of(number: int) -> BlockKey:
    return BlockKey(sha256(b"%d" % number).digest())


def with_rule(state: bytes, rule: int) -> bytes:
    """Return what a panel learned, with another rule."""
    return state[:-8] + struct.pack("<d", rule)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return built(SOURCE, tmp_path_factory.mktemp("native"), "-ffp-contract=off", "-lm")


class TestInPython(PolicyTests):
    prioritized_lru = False

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return Adaptive(make=PythonPanel)


class TestInC(PolicyTests):
    prioritized_lru = False

    @pytest.fixture
    def policy(self, native) -> EvictionPolicy:
        return Adaptive(make=native.Panel)


class Twins(RuleBasedStateMachine):
    """Makes the same calls of both, and compares the order and what was learned."""

    native: Any = None

    @initialize(size=SIZES)
    def begin(self, size: int) -> None:
        self.both = (PythonPanel(size), self.native(size))
        self.key: dict[int, BlockKey] = {}
        self.listed: set[int] = set()
        self.free = [*range(HANDLES)]

    def call(self, name: str, *given: object) -> None:
        for one in self.both:
            getattr(one, name)(*given)
        ours, theirs = map(list, self.both)
        assert ours == theirs
        assert sorted(ours) == sorted(self.listed)
        assert len(self.both[1]) == len(self.listed)
        assert self.both[0].state() == self.both[1].state()
        assert self.both[0].rule == self.both[1].rule

    @rule(first=st.integers(0, 40), count=st.integers(0, 30), again=st.integers(1, 8))
    def request(self, first: int, count: int, again: int) -> None:
        keys = [key_of(number) for number in range(first, first + count)]
        held = {key: handle for handle, key in self.key.items()}
        for _ in range(again):
            self.call("requested", keys, [held.get(key) for key in keys], again % 3 == 0)

    @rule(first=st.integers(0, 60), count=st.integers(1, 9), request=st.integers(0, 2), at=Some)
    def insert(self, first: int, count: int, request: int, at: int) -> None:
        held = {*self.key.values()}
        keys = [key for n in range(first, first + count) if (key := key_of(n)) not in held]
        handles = Random(at).sample(self.free, min(len(self.free), len(keys)))
        keys = keys[: len(handles)]
        self.free = [handle for handle in self.free if handle not in handles]
        self.key.update(zip(handles, keys, strict=True))
        self.call("inserted", handles, keys, request)

    def some(self, of: set[int], at: int) -> Sequence[int]:
        random = Random(at)
        chosen = random.sample(sorted(of), random.randint(0, len(of)))
        return random.choice([chosen, array("i", chosen)])

    @rule(at=Some, priority=st.sampled_from([0, 35, 35, 100]), front=st.booleans())
    def push(self, at: int, priority: int, front: bool) -> None:
        for handle in self.some(self.key.keys() - self.listed, at)[:3]:
            self.listed.add(handle)
            self.call("push", handle, priority, front)

    @rule(at=Some, priority=st.sampled_from([0, 35, 35, 100]))
    def push_all(self, at: int, priority: int) -> None:
        chosen = self.some(self.key.keys() - self.listed, at)
        self.listed.update(chosen)
        self.call("push_all", chosen, priority)

    @rule(at=Some)
    def touch(self, at: int) -> None:
        self.call("touch_all", self.some(self.listed, at))

    @rule(at=Some)
    def remove(self, at: int) -> None:
        chosen = self.some(self.listed, at)
        self.listed.difference_update(chosen)
        self.call("remove_all", chosen)

    @rule(count=st.integers(1, 12), evicted=st.booleans())
    def drop(self, count: int, evicted: bool) -> None:
        going = [*islice(self.both[0], count)]
        self.listed.difference_update(going)
        self.call("remove_all", going)
        for handle in going:
            del self.key[handle]
        self.free += going
        self.call("dropped", going, evicted)

    @rule(first=st.integers(0, 60), count=st.integers(1, 9))
    def refuse(self, first: int, count: int) -> None:
        held = {*self.key.values()}
        numbers = range(first, first + count)
        self.call("refused", [key for n in numbers if (key := key_of(n)) not in held])

    @rule(rule=st.sampled_from([HAZARD, MULTI, RECENT, EITHER, PROMPT, LOOP, PROMPT, LOOP]))
    def restore(self, rule: int) -> None:
        self.call("restore", with_rule(self.both[0].state(), rule))


@pytest.mark.slow
def test_both_loops_do_the_same(native):
    machine = type("Machine", (Twins,), {"native": native.Panel})
    run_state_machine_as_test(machine)


class Level:
    """A level of so many blocks, with one panel; requests pin what is there and save the rest."""

    def __init__(self, panel: Any, size: int) -> None:
        self.panel = panel
        self.at: dict[int, int] = {}
        self.number: dict[int, int] = {}
        self.free = [*range(size)]
        self.hits = 0

    def request(self, prompt: Sequence[int], in_session: bool = False) -> None:
        keys, places = [*map(key_of, prompt)], [*map(self.at.get, prompt)]
        self.panel.requested(keys, places, in_session)
        known = places.index(None) if None in places else len(places)
        self.hits += known
        for number in reversed(prompt):
            if number in self.at:
                self.panel.touch(self.at[number])
                continue
            if not self.free:
                victim = next(iter(self.panel))
                self.panel.remove(victim)
                self.panel.dropped([victim], True)
                del self.at[self.number[victim]]
                self.free.append(victim)
            handle = self.free.pop()
            self.at[number], self.number[handle] = handle, number
            self.panel.inserted([handle], [key_of(number)], 1)
            self.panel.push(handle, PRIORITY_DEFAULT, False)


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of three kinds: chats that grow, documents read again, and a loop over many."""
    random = Random(seed)
    found: list[list[int]] = []
    chats = [[10_000 * (1 + n)] for n in range(20)]
    for at in range(count):
        kind = random.random()
        if kind < 0.4:
            chat = random.choice(chats)
            chat.extend(range(chat[-1] + 1, chat[-1] + 1 + random.randint(1, 4)))
            found.append(chat[:])
        elif kind < 0.7:
            first = 1_000_000 + 100 * int(random.paretovariate(1))
            found.append([*range(first, first + 12)])
        else:
            first = 2_000_000 + 100 * (at % 40)
            found.append([*range(first, first + 10)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_both_serve_a_level_alike(native, size):
    """At sizes at which all keys are sampled, and at one where half are."""
    ours, theirs = Level(PythonPanel(size), size), Level(native.Panel(size), size)
    for prompt in prompts(size, 300):
        ours.request(prompt, prompt[0] % 20_000 == 0)
        theirs.request(prompt, prompt[0] % 20_000 == 0)
        assert ours.hits == theirs.hits
    assert ours.at == theirs.at
    assert ours.panel.state() == theirs.panel.state()
    assert list(ours.panel) == list(theirs.panel)


def test_what_was_learned_survives(native):
    for make in (PythonPanel, native.Panel):
        first = Level(Adaptive(50, make=make)._panel, 50)
        for prompt in prompts(3, 80):
            first.request(prompt)
        kept = Adaptive(50, make=make)
        kept._panel.restore(first.panel.state())
        assert kept._panel.state() == first.panel.state()
        assert kept.rule == first.panel.rule
        whole = kept.state()
        again = Adaptive(80, make=make)
        again.restore(whole)
        assert again.state() == whole
        assert len(whole) < 1 << 14


@pytest.mark.parametrize("cut", [0, 1, 7, 100, -1])
def test_a_damaged_state_is_refused(cut):
    policy = Adaptive(50)
    for prompt in prompts(3, 30):
        policy.requested([*map(key_of, prompt)], 1)
    state = policy.state()
    flipped = bytearray(state)
    flipped[cut] ^= 1
    for wrong in (bytes(flipped), state[:cut], state + b"1"):
        with pytest.raises(ValueError, match="damaged"):
            Adaptive(50).restore(wrong)


@pytest.mark.slow
def test_a_block_costs_forty_bytes_at_most(native):
    """For as many blocks as the level holds; every key that it is asked for is new."""
    size = 400_000
    policy = native.Panel(size)
    policy.reserve(size)
    for first in range(0, 3 * size, 400):
        keys = [n.to_bytes(32, "little") for n in (hash_of(first + k) for k in range(400))]
        policy.requested(keys, [None] * len(keys), False)
    assert policy.__sizeof__() < 40 * size + (3 << 20)


def hash_of(number: int) -> int:
    return number * 0x9E3779B97F4A7C15 % (1 << 64)


@pytest.mark.parametrize("make", ["python", "c"])
def test_a_front_block_goes_first_of_its_priority_whatever_was_learned(native, make):
    policy = Adaptive(40, make=PythonPanel if make == "python" else native.Panel)
    level = Level(policy._panel, 40)
    for prompt in prompts(5, 60):
        level.request(prompt)
    held = sorted(level.number)
    policy.remove(held[3])
    policy.push(held[3], PRIORITY_DEFAULT, front=True)
    policy.remove(held[5])
    policy.push(held[5], 0)
    policy.remove(held[7])
    policy.push(held[7], 90)
    order = list(policy)
    assert order[:2] == [held[5], held[3]]
    assert order[-1] == held[7]


def test_a_loop_that_does_not_fit_is_kept_in_part(native):
    """LRU has no hit of it, and Belady's bound is .67; that the newest block goes is learned."""
    policy = Adaptive(100, make=native.Panel)
    level = Level(policy._panel, 100)
    for round_ in range(30):
        for first in range(0, 150, 10):
            level.request([*range(first, first + 10)])
        if round_ == 19:
            level.hits = 0
    assert policy.rule in (EITHER, LOOP)
    assert level.hits > 10 * 150 * 0.5


def test_the_end_of_a_chat_outlasts_a_new_prompt(native):
    """Both were used once; only a prompt that continues another one is asked for again."""
    level = Level(native.Panel(120), 120)
    chats = [[100_000 * n, 100_000 * n + 1] for n in range(1, 5)]
    for at in range(800):
        chat = chats[at % 4]
        chat.append(chat[-1] + 1)
        if len(chat) > 18:
            chat[:] = [chat[0] + 50 * at, chat[0] + 50 * at + 1]
        level.request(chat)
        level.request([*range(9_000_000 + 100 * at, 9_000_000 + 100 * at + 12)])
    held = {level.number[handle] >= 9_000_000 for handle in [*level.panel][:24]}
    assert held == {True}
    assert all(chat[-1] in level.at for chat in chats)


@pytest.mark.parametrize("size", [5000, 200])
@pytest.mark.parametrize(
    ("is_named", "rule", "kinds"), [(True, PROMPT, 1), (False, HAZARD, 3), (True, HAZARD, 3)]
)
def test_the_blocks_of_a_named_session_are_of_one_class_by_prompt(size, is_named, rule, kinds):
    """They were used once, twice and three times; half of the keys are sampled, or all.

    By block, the same blocks are of three classes, named or not: so sessions can be given up.
    """
    policy, keys = Adaptive(size, make=PythonPanel), [*map(key_of, range(12))]
    policy._panel.restore(with_rule(policy._panel.state(), rule))
    tell = policy.requested_in_session if is_named else policy.requested
    for length in (4, 8, 12):
        tell(keys[:length], 1)
    policy.inserted([*range(12)], keys, 1)
    held = policy._panel._held
    assert len({held[handle].kind for handle in range(12)}) == kinds
    assert all((held[handle].kind >= SESSION) == (kinds == 1) for handle in range(12))


def test_a_rule_takes_over_only_if_it_is_clearly_ahead():
    """Five requests, each better by one block, are no proof; a rule gives way to less."""
    learner = Learner(6400)
    for ahead, spread, chosen in ((5, 5, HAZARD), (90, 900, HAZARD), (95, 900, RECENT)):
        learner.leader = HAZARD
        learner.ahead[RECENT][HAZARD], learner.spread[RECENT][HAZARD] = ahead, spread
        learner._choose()
        assert learner.rule == chosen
    learner.ahead[RECENT][HAZARD] = 0
    learner.ahead[HAZARD][RECENT], learner.spread[HAZARD][RECENT] = 31, 900
    learner._choose()
    assert learner.rule == HAZARD


@pytest.mark.parametrize(
    ("recent", "leading", "chosen"),
    [
        (60, 60, RECENT),
        (60, 60.5, RECENT),
        (60, 61, PROMPT),  # more than a hundredth less
        (50, 50, RECENT),
        (49, 49, PROMPT),  # less than half of what is asked for, as in the first round of a loop
        (90, 80, RECENT),
    ],
)
def test_recency_orders_where_it_serves_as_much_and_most(recent, leading, chosen):
    learner = Learner(6400)
    learner.leader, learner.wanted = PROMPT, 100
    learner.served[RECENT], learner.served[PROMPT] = recent, leading
    learner._choose()
    assert (learner.rule, learner.leader) == (chosen, PROMPT)
    other = Learner(6400)
    other.restore(learner.state())
    assert (other.rule, other.leader) == (chosen, PROMPT)
    other._fade_at = 0
    other.tick(1)
    assert (other.wanted, other.served[RECENT]) == (50, recent / 2)


def test_hits_of_each_rule_and_keys_asked_for_are_counted():
    learner = Learner(100)
    for tag, inside in enumerate([1 << RECENT | 1 << HAZARD, 1 << RECENT, 0]):
        learner.keys[tag] = Sampled()
        learner.keys[tag].inside = inside
    learner.asked([0, 1, 2, 100])
    assert (learner.wanted, learner.served[RECENT], learner.served[HAZARD]) == (4, 2, 1)


def test_what_is_known_of_absent_keys_is_at_most_one_size_off():
    size, ghosts = 200, Ghosts(200)
    for now in range(1, 2000):
        ghosts.tick(now)
        for age in (30, 150, 250, 399, 401, 650, 900, 1100) if now > 1500 else ():
            ghosts.put(age, now - age, 3, class_of(3, 2), awaited=False)
            known = ghosts.take(age)
            assert abs(known.age - age) <= size
            assert (known.count, known.interval, known.is_halved) == (3, 2, True)


def test_a_lost_key_of_a_prompt_is_known_by_those_behind_it():
    """A bucket was full; the counts of the keys around it say how often it was used."""
    panel = PythonPanel(6400)
    keys = [*map(key_of, range(40))]
    tags = [tag_of(key) for key in keys if not panel._learner.samples(tag_of(key))]
    for _ in range(3):
        panel.requested(keys, [None] * len(keys), False)
    lost = tags[len(tags) // 2]
    assert panel._ghosts.take(lost).count == 3
    panel._ghosts.seen = SeenOnce(6400)
    panel.requested(keys, [None] * len(keys), False)
    assert panel._ghosts.take(lost).count == 4


def test_shadows_know_no_more_of_an_absent_key_than_the_level():
    """What was known of the keys is lost; of sampled ones, which are kept, too."""
    panel, keys = PythonPanel(6400), [*map(key_of, range(40))]
    sampled = [tag for tag in map(tag_of, keys) if panel._learner.samples(tag)]
    for _ in range(3):
        panel.requested(keys, [None] * len(keys), False)
    kinds = {panel._learner.keys[tag].kind // INTERVALS for tag in sampled}
    assert (len(sampled) > 9, kinds) == (True, {2})
    panel._ghosts = Ghosts(6400)
    panel.requested(keys, [None] * len(keys), False)
    assert {panel._learner.keys[tag].kind for tag in sampled} == {0}


def test_few_new_keys_are_taken_for_keys_that_were_used_once():
    """The newer filter is full, the older one as full."""
    size, seen = 2000, SeenOnce(2000)
    for number in range(2 * GENERATION * size):
        seen.tick(number)
        seen.add(tag_of(key_of(number)), number)
    mistaken = sum(seen.age(tag_of(key_of(-1 - number))) > 0 for number in range(2000))
    assert 0 < mistaken < 0.2 * 2000


def test_classes_are_told_by_count_and_interval():
    assert class_of(1, 0) == 0
    assert class_of(2, 0) == INTERVALS
    assert class_of(15, INTERVALS - 1) == SESSION - 1 == CLASSES - 2 * INTERVALS - 1
    intervals = [interval_of(age, 100) for age in (1000, 400, 399, 100, 99, 25, 24, 0)]
    assert intervals == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [class_of(4, interval) for interval in range(INTERVALS)] == [12, 13, 14, 15]


def test_the_rules_are_six():
    assert [*range(RULES)] == [HAZARD, MULTI, RECENT, EITHER, PROMPT, LOOP]


@pytest.mark.parametrize("make", ["python", "c"])
@pytest.mark.parametrize(("rule", "cut"), [(HAZARD, 4), (PROMPT, 2)])
def test_by_prompt_whole_prompts_go_one_after_another(native, make, rule, cut):
    """Four chats of 12 blocks, each grown once; 24 must go. By block, the ends of all four go."""
    one = PythonPanel(48) if make == "python" else native.Panel(48)
    level = Level(one, 48)
    one.restore(with_rule(one.state(), rule))
    for length in (4, 8, 12):
        for first in (100, 200, 300, 400):
            level.request([*range(first, first + length)])
    gone = [level.number[handle] for handle in islice(one, 24)]
    assert len({number // 100 for number in gone}) == cut


def test_a_rule_that_breaks_fewer_prompts_is_ahead_with_as_many_hits():
    """Of two prompts of four keys, one rule has four and none of them, the other two and two."""
    learner = Learner(100)
    whole, parts = 1 << PROMPT, 1 << HAZARD
    for tag, inside in enumerate([whole | parts, whole | parts, whole, whole, parts, parts, 0, 0]):
        learner.keys[tag] = Sampled()
        learner.keys[tag].inside = inside
    learner.asked([0, 1, 2, 3])
    learner.asked([4, 5, 6, 7])
    assert learner.ahead[PROMPT][HAZARD] == -learner.ahead[HAZARD][PROMPT] == 1
    learner.asked([100, 101])
    assert learner.ahead[PROMPT][HAZARD] == 1


def test_the_loops_in_c_are_used_if_they_were_built():
    assert (panel.Panel is PythonPanel) != panel.NATIVE
