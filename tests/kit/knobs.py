"""The settings of a simulated run's cache: small, with every limit within reach."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from kvladder.policy.eviction import PRIORITY_DEFAULT
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_SHARES, Shares
from kvladder.tiers.codecs.base import ChecksumCodec
from kvladder.tiers.codecs.pipeline import PipelineSettings
from kvladder.tiers.ladder.calling.breaker import BreakerSettings, CallSettings
from kvladder.tiers.ladder.definition import LevelSettings
from tests.kit.mirror import MirrorCodec

Kind = Literal["plain", "coded", "shared", "wishing", "unruly", "tenants"]
"""The special feature of the levels, the requests or the tiers."""
PRIORITIES = (0, 20, 35, 50, 80, 100)


@dataclass(frozen=True)
class LevelKnobs:
    """A level below host and its fake tier."""

    durable: bool
    batch_max: int
    capacity_blocks: int
    mean_s: float
    """Mean of the random part of its latency."""
    rule: OffloadRule
    settings: LevelSettings
    shared: bool = False
    """Whether others put into its tier and remove from it."""
    shares: Shares = NO_SHARES
    """The shares of the level that salts may use."""
    coded: bool = False
    """Whether codecs change its blocks, and the level checks them instead of the tier."""

    @property
    def edged(self) -> LevelSettings:
        """The settings with new codecs, if there are any."""
        codecs = (MirrorCodec(), ChecksumCodec()) if self.coded else ()
        return replace(self.settings, pipeline=PipelineSettings(codecs))

    @classmethod
    def draw(cls, random: Random) -> LevelKnobs:
        """A level drawn at random."""
        batch_max = random.choice((1, 2, 4))
        rule = OffloadRule(
            min_priority=random.choice((0, 0, 35, 50)),
            when=random.choice(("evict", "commit")),
            min_hits=random.choice((0, 0, 0, 1)),
            ttl_s=random.choice((None, None, None, 30.0)),
        )
        settings = LevelSettings(
            calls=CallSettings(
                timeout_s=random.choice((0.5, 5.0)),
                breaker=BreakerSettings(
                    failures=random.choice((1, 3)), retry_s=random.choice((1.0, 5.0))
                ),
            ),
            queue_blocks=random.choice((1, 2, 8)),
            reads_max=random.choice((1, 4)),
        )
        return cls(
            durable=random.random() < 0.5,
            batch_max=batch_max,
            capacity_blocks=batch_max * random.choice((1, 2, 5, 50)),
            mean_s=random.choice((0.0, 0.01, 0.1)),
            rule=_admitting(rule, random),
            settings=settings,
        )


def _admitting(rule: OffloadRule, random: Random) -> OffloadRule:
    """Return the rule, with an admission in half of the levels that may have one."""
    has_one = rule.when == "evict" and random.random() < 0.5
    return replace(rule, admit="adaptive") if has_one else rule


def _shares(blocks: int) -> Shares:
    """Return shares: half of these blocks for each salt and for raised ones, a quarter for both."""
    return Shares(max(1, blocks // 2), max(1, blocks // 2), max(1, blocks // 4))


@dataclass(frozen=True)
class Knobs:
    """A whole cache."""

    slots: int
    host: OffloadRule
    reserve_blocks: int
    fetch_blocks_max: int
    levels: tuple[LevelKnobs, ...]
    shares: Shares = NO_SHARES
    """The shares of host that salts may use."""
    unruly: bool = False
    """Whether tiers also break their rules."""

    @property
    def guessed(self) -> set[int]:
        """Floors of blocks that are found without it being known how they were put."""
        return {max(PRIORITY_DEFAULT, v.rule.min_priority) for v in self.levels if v.shared}

    def of(self, kind: Kind) -> Knobs:
        """Return the same with codecs at each level, or with the coldest level on a shared tier."""
        levels = list(self.levels)
        if kind == "unruly":  # codecs check answers, too
            levels = [replace(level, coded=number > 0) for number, level in enumerate(levels)]
        elif kind == "coded":
            levels = [replace(level, coded=True) for level in levels]
        elif kind == "shared" and levels:
            levels[-1] = replace(levels[-1], durable=False, shared=True)
        elif kind == "tenants":
            levels = [replace(one, shares=_shares(one.capacity_blocks)) for one in levels]
            return replace(self, levels=tuple(levels), shares=_shares(self.slots))
        return replace(self, levels=tuple(levels), unruly=kind == "unruly")

    @classmethod
    def draw(cls, random: Random) -> Knobs:
        """Draw the settings of a cache at random, extremes more often than by chance."""
        slots = random.choice((1, 2, 3, 5, 8, 16))
        return cls(
            slots=slots,
            host=OffloadRule(
                min_priority=random.choice((0, 0, 0, 35)),
                ttl_s=random.choice((None, None, None, 20.0)),
            ),
            reserve_blocks=random.choice((0, 1, slots // 2)),
            fetch_blocks_max=random.choice((1, max(1, slots // 2), slots)),
            levels=tuple(LevelKnobs.draw(random) for _ in range(random.choice((0, 1, 1, 2, 2, 3)))),
        )
