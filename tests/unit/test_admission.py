"""``admit: adaptive`` against a model of it that counts exactly and keeps whole shadows."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from random import Random

import numpy as np
import pytest

from benchmarks.policies.admission import two_levels
from benchmarks.policies.traces import Prompt, chats, documents, renumbered, scans
from kvladder.keys import BlockKey
from kvladder.policy.admission import (
    FADING,
    LOSS,
    RULES,
    SAMPLE,
    SAVING,
    SPAN,
    Above,
    AdaptiveAdmission,
)
from kvladder.policy.offload import OffloadRule


def keys_of(count: int) -> list[BlockKey]:
    return [BlockKey(sha256(b"%d" % number).digest()) for number in range(count)]


class Model:
    """The same rule with exact counts, and shadows of every key."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.rule = 0
        self.now, self.old = Counter[BlockKey](), Counter[BlockKey]()
        self.added = self.seen = 0
        self.shadows = [OrderedDict[BlockKey, None]() for _ in range(RULES)]
        self.hits, self.writes = [0.0] * RULES, [0.0] * RULES

    def count(self, key: BlockKey) -> int:
        return min(self.now[key], RULES) + min(self.old[key], RULES)

    def requested(self, keys: Sequence[BlockKey], above: Above) -> None:
        near = dict(zip(keys, above(keys), strict=True))
        for rule, shadow in enumerate(self.shadows):
            ends = (at for at, key in enumerate(keys) if not near[key] and key not in shadow)
            self.hits[rule] += next(ends, len(keys))
            for key in reversed(keys):
                if not near[key] and key in shadow:
                    shadow.move_to_end(key)
        self.now.update(keys)
        self.added += len(keys)
        if self.added >= max(64, SPAN * self.blocks):
            self.added, self.now, self.old = 0, Counter(), self.now
        self.seen += len(keys)
        if self.seen >= max(256, self.blocks // 8):
            self.seen = 0
            good = [rule for rule in range(RULES) if self.hits[rule] >= (1 - LOSS) * max(self.hits)]
            best = min(good, key=lambda rule: (self.writes[rule], rule))
            if 0 in good and self.writes[best] > (1 - SAVING) * self.writes[0]:
                best = 0
            self.rule = best if len(self.shadows[0]) >= self.blocks else 0
            self.hits = [one * FADING for one in self.hits]
            self.writes = [one * FADING for one in self.writes]

    def wants(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [not self.rule or self.count(key) > self.rule for key in keys]

    def left(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            for rule, shadow in enumerate(self.shadows):
                if key in shadow:
                    shadow.move_to_end(key)
                elif not rule or self.count(key) > rule:
                    if len(shadow) >= self.blocks:
                        shadow.popitem(last=False)
                    shadow[key] = None
                    self.writes[rule] += 1


def prompts_of(name: str) -> list[Prompt]:
    made = {
        "scans": lambda: scans(Random(5), 4000),
        "chats": lambda: chats(Random(5), 700, 6000),
        "documents": lambda: documents(Random(5), 3000, 500),
    }
    return renumbered(made[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scans", "chats", "documents"])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_hits_and_writes_are_those_of_a_full_simulation(name: str, share: float) -> None:
    """The sample and the filters cost little: 1 % of the hits, 3 % of the writes."""
    prompts = prompts_of(name)
    unique = 1 + max(map(max, prompts))
    keys, host, files = keys_of(unique), unique // 40, int(unique * share)
    every = two_levels(prompts, keys, host, files, None)
    exact = two_levels(prompts, keys, host, files, Model(files))
    ours = two_levels(prompts, keys, host, files, AdaptiveAdmission(files))
    assert ours.hits == pytest.approx(exact.hits, rel=0.01)
    assert abs(ours.writes - exact.writes) <= 0.03 * every.writes
    assert ours.hits >= 0.985 * every.hits
    assert ours.writes <= every.writes


@pytest.mark.slow
def test_a_large_level_follows_a_sample() -> None:
    """Prompts that never come again are left out, and the tools' own ones are served longer."""
    prompts = renumbered(scans(Random(6), 3000))
    unique = 1 + max(map(max, prompts))
    keys, files = keys_of(unique), 3 * SAMPLE
    every = two_levels(prompts, keys, 500, files, None)
    ours = two_levels(prompts, keys, 500, files, AdaptiveAdmission(files))
    assert ours.hits >= every.hits
    assert ours.writes < 0.8 * every.writes


def test_counts_are_never_too_low_and_seldom_too_high() -> None:
    random, blocks = Random(3), 500
    admission, exact, keys = AdaptiveAdmission(blocks), Counter[BlockKey](), keys_of(2000)
    for _ in range(40):
        prompt = random.sample(keys, 50)
        admission.requested(prompt, lambda some: [False] * len(some))
        exact.update(prompt)
    admission.rule = 1
    wanted = admission.wants(keys)
    twice = [exact[key] > 1 for key in keys]
    wrong = sum(one and not other for one, other in zip(wanted, twice, strict=True))
    assert all(one or not other for one, other in zip(wanted, twice, strict=True))
    assert wrong <= 0.03 * len(keys)


def test_counts_end_after_two_spans() -> None:
    blocks = 20
    admission, keys = AdaptiveAdmission(blocks), keys_of(100_000)
    admission.requested(keys[:1] * 1, lambda some: [False] * len(some))
    admission.requested(keys[:1], lambda some: [False] * len(some))
    admission.rule = 1
    assert admission.wants(keys[:1]) == [True]
    span = max(64, SPAN * blocks)
    for first in range(1, 2 * span + 1, 10):
        admission.requested(keys[first : first + 10], lambda some: [False] * len(some))
        admission.rule = 1
    assert admission.wants(keys[:1]) == [False]


def test_a_computed_block_counts_once_until_it_is_asked_for() -> None:
    admission, keys = AdaptiveAdmission(1000), keys_of(4)
    admission.saved(keys)
    admission.saved(keys)
    admission.rule = 1
    assert admission.wants(keys) == [False] * 4
    admission.requested(keys[:2], lambda some: [False] * len(some))
    assert admission.wants(keys) == [True, True, False, False]
    admission.saved([])
    assert admission.wants([]) == []


def test_it_takes_a_bounded_part_of_the_index() -> None:
    """An index takes about 190 bytes a block."""
    blocks = 1_000_000
    assert AdaptiveAdmission(blocks).__sizeof__() <= 20 * blocks


def test_keys_that_differ_in_one_bit_are_told_apart() -> None:
    base = np.zeros((257, 32), np.uint8)
    for bit in range(256):
        base[bit + 1, bit // 8] = 1 << bit % 8
    keys = [BlockKey(row.tobytes()) for row in base]
    admission = AdaptiveAdmission(1000)
    admission.requested(keys[:1], lambda some: [False] * len(some))
    admission.requested(keys[:1], lambda some: [False] * len(some))
    admission.rule = 1
    assert sum(admission.wants(keys)) <= 2


def test_a_rule_with_admission_writes_what_leaves_the_level_above() -> None:
    with pytest.raises(AssertionError):
        OffloadRule(when="commit", admit="adaptive")
