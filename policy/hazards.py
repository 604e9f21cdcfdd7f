"""What the adaptive policy learns: when blocks of a class are asked for again, and which rule hits.

The loops stand twice: here, to be read, and in ``_panel.c``, with the same results.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from itertools import takewhile
from math import sqrt
from typing import Final

LEVELS: Final = (1, 2, 3, 4, 6, 9, 15)
"""Least counts of uses of the levels of frequency."""
INTERVALS: Final = 4
"""Intervals between the last two uses: up to a quarter of the size, the size, four times, more.

A block that was used once has the interval of its prompt: since the last use of the deepest block
that was known. So the end of a prompt that continues a chat differs from a new prompt.
"""
SESSION: Final = len(LEVELS) * INTERVALS
"""First class by prompt, if a named session asked for it; all blocks of a prompt have its interval,
however often each was used."""
PROMPTS: Final = SESSION + INTERVALS
"""The same, for prompts of no named session."""
CLASSES: Final = PROMPTS + INTERVALS
"""Classes by level of frequency, then by interval, the longest first; then those by prompt."""
GROUPS: Final = tuple(group for group in (0, 1, 1, 1, 2, 2, 3, 0, 0) for _ in range(INTERVALS))
"""Levels of KVBM's MultiLRU, by class: used once, and from 2, 6 and 15 times on."""
COUNT_MAX: Final = 15
SAMPLE: Final = 2048
"""A shadow has this many keys, or up to twice as many; at smaller sizes all."""
SURE: Final = 2.0
"""Standard deviations by which a rule has to be ahead to take over from the learned worth."""
AHEAD: Final = 64.0
"""A rule has to be ahead by this part of the keys of a shadow, too."""
BINS: Final = 18
"""Bins of age: the first ends at a sixteenth of the size, the last begins at 16 times the size."""
FORGET: Final = 24
"""Times of the size, or of ``SAMPLE`` if that is more, after which a sampled key is forgotten."""
HALVE: Final = 14
"""Counts are halved each time that this many times the size were used."""
PSEUDO: Final = 4.0
"""Weight of the average of all classes, in uses, where a class has few of its own."""
WHOLE: Final = 1.0
"""Hits that it counts for a rule that a prompt has all of its known keys."""
EVEN: Final = 0.99
"""Recency orders the blocks if it has at least this part of the leading rule's hits, as it cuts the
fewest prompts short."""
MOST: Final = 0.5
"""But only if it has this part of the keys that are asked for, too. In the first round of a loop,
recency has as many hits as any rule, and most keys are new."""
HAZARD, MULTI, RECENT, EITHER, PROMPT, LOOP = range(6)
"""The rules: least learned worth first, of the oldest block of each class; least frequent level
first; least recently used first; least learned worth first, of the oldest and the newest block; the
first and the fourth with classes by prompt, so that prompts go one after another as a whole."""
RULES: Final = 6
STATE: Final = struct.Struct(f"<{2 * CLASSES * BINS + 2 * RULES * RULES + RULES + 2}d")
"""What is kept over a restart: tables of both kinds, the comparisons of rules, the hits of
each and the keys asked for, and the leading rule."""

Rank = tuple[float, int, int]


def interval_of(age: int, size: int) -> int:
    """Return the number of the interval between two uses, ``age`` uses apart."""
    return (4 * age < size) + (age < size) + (age < 4 * size)


def class_of(count: int, interval: int) -> int:
    """Return the class of a block with at least one use, and the interval of the last two."""
    level = sum(count >= least for least in LEVELS) - 1
    return level * INTERVALS + interval


class Hazards:
    """Learns from sampled keys how likely each class is asked for at each age.

    ``hits[k][b]`` counts uses of a block of class k at an age in bin b; ``reached[k][b]`` blocks
    that were not used up to there. ``worth`` is the largest expected number of hits for each block
    and use that it stays (Gittins index), over all times to wait.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.edges = [0.0]
        edge = size / 16
        for _ in range(BINS - 1):
            self.edges.append(edge)
            edge *= 1.4142135623730951
        self.hits = [[0.0] * BINS for _ in range(CLASSES)]
        self.reached = [[0.0] * BINS for _ in range(CLASSES)]
        self.worth: list[list[float]] | None = None

    def bin(self, age: int) -> int:
        """Return the bin of an age."""
        found = 0
        while found + 1 < BINS and age >= self.edges[found + 1]:
            found += 1
        return found

    def halve(self) -> None:
        """Let what was learned long ago count half."""
        for table in (self.hits, self.reached):
            for row in table:
                row[:] = [value * 0.5 for value in row]

    def learn(self) -> None:
        """Compute ``worth`` anew."""
        every = [0.0] * BINS
        for age in range(BINS):
            hits = reached = 0.0
            for one in range(SESSION):  # those by prompt are the same uses once more
                hits += self.hits[one][age]
                reached += self.reached[one][age]
            every[age] = min(1.0, hits / reached) if reached > 0 else 0.0
        edges = self.edges
        widths = [edges[age + 1] - edges[age] for age in range(BINS - 1)] + [edges[-1] * 0.4]
        self.worth = [self._worth(one, every, widths) for one in range(CLASSES)]
        # a block that was used more often, or again after a shorter time, is worth no less
        for level in range(len(LEVELS)):
            for shorter in range(INTERVALS):
                at = level * INTERVALS + shorter
                if shorter and level:
                    self._raise(at, at - 1)
                if level:
                    self._raise(at, at - INTERVALS)

    def _worth(self, one: int, every: list[float], widths: list[float]) -> list[float]:
        rates: list[float] = []
        for age in range(BINS):
            hits, reached = self.hits[one][age], self.reached[one][age]
            rate = (hits + PSEUDO * every[age]) / (max(reached, hits) + PSEUDO)
            rates.append(min(0.999, rate))
        found: list[float] = []
        for start in range(BINS):
            left, hits, time, best = 1.0, 0.0, 0.0, 0.0
            for age in range(start, BINS):
                hits += left * rates[age]
                time += left * widths[age] * (1.0 - rates[age] * 0.5)
                left *= 1.0 - rates[age]
                best = max(best, hits / time)
            found.append(best)
        return found

    def _raise(self, at: int, least: int) -> None:
        assert self.worth is not None
        self.worth[at] = [*map(max, self.worth[at], self.worth[least])]

    def score(self, one: int, age: int) -> float:
        """Return the worth of a block of a class at an age, between the edges of its bin."""
        if self.worth is None:
            return 1.0 / (age + 1)
        low, worth, edges = self.bin(age), self.worth[one], self.edges
        if low + 1 >= BINS:
            return worth[low] * edges[low] / max(float(age), edges[low])
        step = (age - edges[low]) / max(1.0, edges[low + 1] - edges[low])
        return worth[low] + (worth[low + 1] - worth[low]) * step

    def rank(self, rule: int, one: int, age: int) -> Rank:
        """Return what orders blocks by a rule: the least goes first."""
        if rule == MULTI:
            return float(GROUPS[one]), -age, one
        return 0.0 if rule == RECENT else self.score(one, age), -age, one


class Sampled:
    """A key that is sampled: count, time of the last use, both classes, shadows that hold it."""

    __slots__ = ("count", "inside", "kind", "last", "prompt")

    def __init__(self) -> None:
        self.count = self.last = self.kind = self.prompt = self.inside = 0

    def ordered(self, rule: int) -> int:
        """Return the class by which a rule orders it."""
        return self.prompt if rule >= PROMPT else self.kind


class Learner:
    """Keeps sampled keys, one shadow cache for each rule, and compares the rules.

    A shadow has the size of the level divided by the rate of sampling. All calls are told ``now``,
    the number of uses so far. A key has the class that the level gives it, so a shadow knows no
    more of an absent key than the level does.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rate = max(1, size // SAMPLE)
        self.shadow_size = max(1, size // self.rate)
        self.period = HALVE * size
        """Uses after which counts are halved."""
        self._forget = FORGET * max(size, SAMPLE)
        self.hazards = Hazards(size)
        self.keys: dict[int, Sampled] = {}
        self.shadows = [[OrderedDict[int, None]() for _ in range(CLASSES)] for _ in range(RULES)]
        self.held = [0] * RULES
        self.log: deque[tuple[int, int, tuple[int, int]]] = deque()
        """Time, key and classes of each sampled use, the oldest first."""
        self._gone = 0
        self._passed = [0] * (BINS + 1)  # how far the log has reached the age of each bin; forgets
        self.ahead = [[0.0] * RULES for _ in range(RULES)]
        """By how many hits a rule was ahead of another one."""
        self.spread = [[0.0] * RULES for _ in range(RULES)]
        self.served = [0.0] * RULES
        """Hits of each rule."""
        self.wanted = 0.0
        """Number of sampled keys that were asked for."""
        self.leader = HAZARD
        """The rule that is ahead of the others."""
        self.rule = HAZARD
        """The rule that orders the blocks."""
        self._learn_at = size // 2 + 1
        self._halve_at = 256 * size
        self._choose_at = size // 2
        self._fade_at = 64 * size

    def samples(self, tag: int) -> bool:
        """Return whether a key is sampled."""
        return (((tag & 0xFFFFFFFF) * 2654435761 & 0xFFFFFFFF) >> 8) % self.rate == 0

    def known(self, tag: int, now: int) -> tuple[int, int, int]:
        """Return count and class as of its last use, and age, of a sampled key; 0 if unknown.

        The level asks only if all keys are sampled: else it would know more of some than of others.
        """
        one = self.keys.get(tag)
        if one is None:
            return 0, PROMPTS if self.rule >= PROMPT else 0, 0
        return one.count, one.ordered(self.rule), now - one.last

    def asked(self, tags: list[int]) -> None:
        """Compare the rules by a prompt's sampled keys: how many leading ones each shadow has.

        A shadow that has all that are known spares the prompt a break, which counts as well.
        """
        known = [*takewhile(lambda one: one is not None, map(self.keys.get, tags))]
        hits = [0] * RULES
        for rule in range(RULES):
            for one in known:
                if one is None or not one.inside >> rule & 1:
                    break
                hits[rule] += 1
        self.wanted += len(tags)
        self.served = [total + more for total, more in zip(self.served, hits, strict=True)]
        for first in range(RULES):
            for second in range(RULES):
                ahead = float(hits[first] - hits[second])
                if known:
                    ahead += WHOLE * ((hits[first] == len(known)) - (hits[second] == len(known)))
                self.ahead[first][second] += ahead
                self.spread[first][second] += ahead * ahead

    def use(self, tag: int, now: int, kind: int, prompt: int) -> None:
        """Count a use of a sampled key, in the shadows, too; both are its classes from now on."""
        one = self.keys.get(tag)
        if one is None:
            one = self.keys[tag] = Sampled()
        was_inside, age = one.inside, now - one.last
        for rule in range(RULES):
            if was_inside >> rule & 1:
                del self.shadows[rule][one.ordered(rule)][tag]
            elif self.held[rule] >= self.shadow_size:
                self._evict(rule, now)
            else:
                self.held[rule] += 1
        hazards = self.hazards
        if one.count and age < FORGET * self.size:
            for before in (one.kind, one.prompt):
                hazards.hits[before][hazards.bin(age)] += 1.0
        one.count >>= min(COUNT_MAX, now // self.period - one.last // self.period)
        one.count = min(COUNT_MAX, one.count + 1)
        one.kind, one.prompt, one.last = kind, prompt, now
        for after in (kind, prompt):
            hazards.reached[after][0] += 1.0
        one.inside = (1 << RULES) - 1
        for rule in range(RULES):
            self.shadows[rule][one.ordered(rule)][tag] = None
        self.log.append((now, tag, (kind, prompt)))
        self._reach(now)

    def _evict(self, rule: int, now: int) -> None:
        lists = [order for order in self.shadows[rule] if order]
        victims = [next(iter(order)) for order in lists]
        if rule in (EITHER, LOOP):
            victims += [next(reversed(order)) for order in lists]

        def rank(tag: int) -> Rank:
            one = self.keys[tag]
            return self.hazards.rank(rule, one.ordered(rule), now - one.last)

        self._leave(min(victims, key=rank), rule, now)

    def _leave(self, tag: int, rule: int, now: int) -> None:
        """Take a key out of a shadow."""
        one = self.keys[tag]
        del self.shadows[rule][one.ordered(rule)][tag]
        one.inside &= ~(1 << rule)
        if not one.inside and now - one.last >= self._forget:
            del self.keys[tag]

    def _reach(self, now: int) -> None:
        """Note which lives reach the age of a bin now, and forget the oldest."""
        for age in range(1, BINS + 1):
            edge = self.hazards.edges[age] if age < BINS else float(self._forget)
            while self._passed[age] < self._gone + len(self.log):
                then, tag, kinds = self.log[self._passed[age] - self._gone]
                if now - then < edge:
                    break
                self._passed[age] += 1
                one = self.keys.get(tag)
                if one is None or one.last != then:
                    continue
                if age < BINS:
                    for kind in kinds:
                        self.hazards.reached[kind][age] += 1.0
                elif not one.inside:
                    del self.keys[tag]
        while self._passed[BINS] > self._gone:
            self.log.popleft()
            self._gone += 1

    def leave(self, tag: int, now: int) -> None:
        """Take a key out of all shadows: the level lost it, or did not take it."""
        one = self.keys.get(tag)
        for rule in range(RULES):
            if one is not None and one.inside >> rule & 1:
                self._leave(tag, rule, now)
                self.held[rule] -= 1

    def tick(self, now: int) -> None:
        """Learn, and choose the rule, each from time to time."""
        if now >= self._learn_at:
            self._learn_at = now + max(64, self.size // 16)
            self.hazards.learn()
        if now >= self._halve_at:
            self._halve_at = now + 256 * self.size
            self.hazards.halve()
        if now >= self._choose_at:
            self._choose_at = now + max(200, self.size // 20)
            self._choose()
        if now >= self._fade_at:
            self._fade_at = now + 64 * self.size
            self.wanted *= 0.5
            self.served = [total * 0.5 for total in self.served]
            for table in (self.ahead, self.spread):
                for row in table:
                    row[:] = [value * 0.5 for value in row]

    def _choose(self) -> None:
        current, best = self.leader, 0.0
        for rule in range(RULES):
            ahead, spread = self.ahead[rule][current], self.spread[rule][current]
            least = sqrt(spread)
            if rule != HAZARD:
                least = SURE * least + self.shadow_size / AHEAD
            if spread > 0 and ahead > least and ahead > best:
                best, self.leader = ahead, rule
        self._settle()

    def _settle(self) -> None:
        """Order by the leader, or by recency where that serves as much."""
        served, leader = self.served[RECENT], self.served[self.leader]
        is_even = served >= MOST * self.wanted and served >= EVEN * leader
        self.rule = RECENT if is_even and self.wanted > 0 else self.leader

    def state(self) -> bytes:
        """Return what was learned."""
        tables = *self.hazards.hits, *self.hazards.reached, *self.ahead, *self.spread
        values = *(value for row in tables for value in row), *self.served, self.wanted
        return STATE.pack(*values, float(self.leader))

    def restore(self, state: bytes) -> None:
        """Continue from what ``state`` returned."""
        values = STATE.unpack(state)
        at = 0
        for table in (self.hazards.hits, self.hazards.reached, self.ahead, self.spread):
            for row in table:
                row[:] = values[at : at + len(row)]
                at += len(row)
        *self.served, self.wanted, leader = values[at:]
        self.leader = int(leader) if 0 <= leader < RULES else HAZARD
        self._settle()
        self.hazards.learn()
