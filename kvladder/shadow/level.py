"""The shadow of one level: four small caches over a sample of keys, and what they count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from math import sqrt
from operator import add
from typing import Final, NamedTuple

from kvladder.keys import BlockKey
from kvladder.policy.belady import belady
from kvladder.policy.eviction import EvictionPolicy
from kvladder.shadow.caches import MiniCache, cache_for

FACTORS: Final = (0.5, 1.0, 2.0, 4.0)
"""Sizes of the caches, as factors of the level's."""
NOW: Final = FACTORS.index(1.0)
"""Number of the cache that has the level's own size."""
SAMPLE: Final = 2048
"""A cache of the level's size has this many sampled keys, or up to twice as many; all below."""
SAMPLE_MIN: Final = 512
"""Below this, the sample is not thinned further."""
KEY_COST_BYTES: Final = 1700
"""Memory that one sampled key of the level's own size takes, in all four caches together."""
WINDOW_S: Final = 600.0
"""Time after which a new window begins; figures are those of the last one and of the running one.
"""
LOG: Final = 8
"""Accesses for Belady's bound, as a multiple of the keys that the level has then; half warm it up.
"""
LOG_KEYS: Final = 1024
"""Most keys of the level's own size that are followed for it: computing it takes milliseconds."""
OPTIMUM_S: Final = 60.0
"""Shortest time between two computations of it."""
HASH_BITS: Final = 64
GROUPS: Final = 32
"""Groups of sampled keys, by the lowest bits of their hash."""
EXPLAINED: Final = 2.0
"""Standard deviations of the sample's uses that its groups explain."""

Sampled = Sequence[tuple[BlockKey, int]]
"""Sampled keys of a prompt, in order, with the hash by which each is sampled."""


@dataclass(frozen=True, slots=True)
class ShadowSpec:
    """What a shadow needs to know of a level."""

    name: str
    blocks: int
    """Blocks that the level has room for."""
    make_policy: Callable[[], EvictionPolicy]
    is_written_through: bool
    """True if the level gets every block as it is saved, False for those that leave the one above.
    """
    say: Callable[[str], object] = lambda _: None
    """Is told once if the policy failed in the shadow."""


def _zeros() -> list[int]:
    return [0] * GROUPS


@dataclass(slots=True)
class WindowCounts:
    """Counts of one window; those of sampled keys by a group of keys."""

    began_s: float = 0.0
    asked: int = 0
    """Blocks that requests used, sampled or not."""
    expected: float = 0.0
    """How many of them would be sampled on average."""
    sampled: list[int] = field(default_factory=_zeros)
    hits: list[list[int]] = field(default_factory=lambda: [_zeros() for _ in FACTORS])
    """By size."""

    def plus(self, other: WindowCounts) -> WindowCounts:
        """Return both together."""
        return WindowCounts(
            min(self.began_s, other.began_s),
            self.asked + other.asked,
            self.expected + other.expected,
            [*map(add, self.sampled, other.sampled)],
            [[*map(add, a, b)] for a, b in zip(self.hits, other.hits, strict=True)],
        )

    def ratio(self, number: int) -> float:
        """Return the hits at one size as a fraction of all blocks that were used.

        A sample has more or fewer uses than its share, mostly by keys that are used very often. How
        many of such uses are hits is seen from group to group of the keys: the slope of hits over
        uses. More uses missing than the groups explain are those of a key that the sample lacks,
        such as a system prompt's: all of them are hits, as in SHARDS-adj.
        """
        if not self.expected:
            return 0.0
        uses, hits = self.sampled, self.hits[number]
        mean_uses, mean_hits = sum(uses) / GROUPS, sum(hits) / GROUPS
        spread = sum((one - mean_uses) ** 2 for one in uses)
        both = sum((a - mean_uses) * (b - mean_hits) for a, b in zip(uses, hits, strict=True))
        slope = min(1.0, max(0.0, both / spread)) if spread else 0.0
        missing = self.expected - sum(uses)
        unseen = max(0.0, missing - EXPLAINED * sqrt(spread))
        found = sum(hits) + slope * (missing - unseen) + unseen
        return min(1.0, max(0.0, found / self.expected))


class OptimumFigures(NamedTuple):
    """Hits of Belady's optimum, and of the levels so far down, as fractions of the same blocks."""

    optimum: float
    reached: float


class LevelShadow:
    """Follows the keys with a small hash; all sizes are scaled by the fraction of keys it follows.

    That is SHARDS (Waldspurger et al., FAST 2015), with simulations in miniature in place of stack
    distances (Waldspurger et al., ATC 2017), as policies other than LRU have no distances. A block
    is sampled by its own key. A block of a prompt that is evicted before those in front of it is
    then found as often in the sample as outside.

    Parameters
    ----------
    above:
        The shadows of the hotter levels, hottest first. A level samples no key that they do not.
    budget_bytes:
        Memory that its caches may take.
    """

    def __init__(
        self, spec: ShadowSpec, above: Sequence[LevelShadow], *, budget_bytes: float, now_s: float
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self._above = above
        most = max(2 * SAMPLE_MIN, min(2 * SAMPLE - 1, int(budget_bytes / KEY_COST_BYTES)))
        self.shift: int = max((one.shift for one in above), default=0)
        """The level follows 1 of 2 to the power of this many keys."""
        while spec.blocks >> self.shift > most:
            self.shift += 1
        self.caches: list[MiniCache] = [
            cache_for(spec.make_policy, self._scaled(factor), spec.say) for factor in FACTORS
        ]
        self.window, self.before = WindowCounts(now_s), WindowCounts(now_s)
        self._log: deque[tuple[list[BlockKey], int]] = deque()
        self._logged = 0
        self._optimum: OptimumFigures | None = None
        self._optimum_s = now_s

    @property
    def rate(self) -> float:
        """Fraction of the keys that it follows."""
        return 0.5**self.shift

    @property
    def actual(self) -> MiniCache:
        """The cache that has the level's own size."""
        return self.caches[NOW]

    def _scaled(self, factor: float) -> int:
        return max(1, round(self.spec.blocks * factor) >> self.shift)

    def follows(self, mark: int) -> bool:
        """Return whether keys with this hash are followed."""
        return not mark >> (HASH_BITS - self.shift)

    def own(self, prompt: Sampled) -> Sampled:
        """Return the keys that this level follows."""
        limit = HASH_BITS - self.shift
        return [one for one in prompt if not one[1] >> limit]

    # ---- what happens

    def asked(self, blocks: int) -> None:
        """Count uses of blocks, sampled or not."""
        self.window.asked += blocks
        self.window.expected += blocks * self.rate

    def count(self, own: Sampled, *, is_last: bool) -> None:
        """Count the hits of a prompt's own keys at each size, before they are used."""
        window, hotter = self.window, [one.actual.held for one in self._above]
        sampled = window.sampled
        for _, mark in own:
            sampled[mark % GROUPS] += 1
        left = own
        if hotter:
            left = [one for one in own if not any(one[0] in held for held in hotter)]
        for cache, hits in zip(self.caches, window.hits, strict=True):
            held = cache.held
            for key, mark in left:
                if key in held:
                    hits[mark % GROUPS] += 1
                elif is_last:  # the prefix ends there; else a colder level may have the block
                    break
        limit = HASH_BITS - self._log_shift
        if keys := [key for key, mark in own if not mark >> limit]:
            self._note(keys, [*hotter, self.actual.held])

    @property
    def _log_shift(self) -> int:
        """The log follows 1 of 2 to the power of this many keys."""
        return self.shift + max(0, (self._scaled(1.0) // LOG_KEYS).bit_length())

    def _note(self, keys: list[BlockKey], holders: Sequence[Container[BlockKey]]) -> None:
        """Log a use of some keys, and how many of them these caches have."""
        reached = sum(any(key in held for held in holders) for key in keys)
        self._log.append((keys, reached))
        self._logged += len(keys)
        while self._logged > LOG * LOG_KEYS:
            self._logged -= len(self._log.popleft()[0])

    def use(self, own: Sampled, offered: Sampled) -> Sequence[BlockKey]:
        """Use a prompt's own keys, and take what the level above evicted; return what leaves."""
        keys, gifts = [key for key, _ in own], [key for key, _ in self.own(offered)]
        gone: Sequence[BlockKey] = ()
        for cache in self.caches:
            left: list[BlockKey] = []
            if keys and (self.spec.is_written_through or not self._above):
                left += cache.use(keys)
            elif keys:
                cache.touch(keys)
            if gifts:
                left += cache.offer(gifts)
            if cache is self.actual:
                gone = left
        return gone

    def fill(self, keys: Sequence[BlockKey]) -> None:
        """Hold sampled keys that the level had at the start, the oldest first."""
        for cache in self.caches:
            cache.offer(keys)

    def thin(self, mark_of: Callable[[BlockKey], int], least: int) -> None:
        """Follow half of the keys from now on, unless they are too few; at most 1 of 2**least."""
        before = self.shift
        enough = self._scaled(1.0) >= 2 * SAMPLE_MIN
        self.shift = max(before + enough, least)
        if self.shift == before:
            return
        for factor, cache in zip(FACTORS, self.caches, strict=True):
            cache.thin(lambda key: self.follows(mark_of(key)), self._scaled(factor))
        self._log.clear()
        self._logged, self._optimum = 0, None
        self.window, self.before = (
            WindowCounts(self.window.began_s),
            WindowCounts(self.window.began_s),
        )

    def roll(self, now_s: float) -> None:
        """Begin a new window if it is time."""
        if now_s - self.window.began_s >= WINDOW_S:
            self.before, self.window = self.window, WindowCounts(now_s)

    # ---- what is known

    def counts(self) -> WindowCounts:
        """Return the counts of the last window and the running one."""
        return self.window.plus(self.before)

    def ratios(self) -> list[float]:
        """Return the hits at each size, as fractions of all blocks that requests used."""
        found = self.counts()
        return [found.ratio(number) for number in range(len(FACTORS))]

    def optimum(self, blocks: int, now_s: float, *, anew: bool) -> OptimumFigures | None:
        """Return Belady's optimum for ``blocks`` blocks over the last accesses; None without any.

        The first half of them warms the optimum up, and does not count. It takes some milliseconds,
        so it is computed ``anew`` only if that was long ago.
        """
        is_due = anew and now_s - self._optimum_s >= OPTIMUM_S
        if (is_due or self._optimum is None) and self._logged:
            self._optimum_s = now_s
            passed, start = 0, 0
            while start < len(self._log) - 1 and 2 * passed < self._logged:
                passed += len(self._log[start][0])
                start += 1
            numbers: dict[BlockKey, int] = {}
            requests = [
                [numbers.setdefault(key, len(numbers)) for key in keys] for keys, _ in self._log
            ]
            asked = sum(map(len, requests[start:]))
            size = max(1, blocks >> self._log_shift)
            reached = sum(hits for _, hits in [*self._log][start:])
            # the caches have been warm for longer
            best = max(reached, belady(requests, len(numbers), size, counted_from=start))
            self._optimum = OptimumFigures(best / asked, reached / asked)
        return self._optimum
