"""The definition of a level below host: what the stack needs to make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvladder.arena import Slot
from kvladder.policy.eviction import EvictionPolicy
from kvladder.policy.offload import OffloadRule
from kvladder.policy.tenants import NO_SHARES, Shares
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.pipeline import PipelineSettings
from kvladder.tiers.ladder.calling.breaker import CallSettings


@dataclass(frozen=True, slots=True)
class LevelSettings:
    """Settings for the calls of a level's tier."""

    calls: CallSettings = field(default_factory=CallSettings)
    queue_blocks: int = 256
    """Blocks that may wait to be written; each keeps an arena slot busy."""
    reads_max: int = 4
    """Reads in flight at once."""
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelDefinition:
    """A level below host, before the stack makes it."""

    name: str
    tier: Tier
    rule: OffloadRule
    capacity_blocks: int
    policy: EvictionPolicy
    settings: LevelSettings
    required: bool = False
    """True if the cache does not start without it."""
    verify: bool = True
    """True if stored bytes have a checksum and are compared with it."""
    scratch: Sequence[Slot] = ()
    """Slots of the arena that only its codecs use."""
    shares: Shares = NO_SHARES
    """Limits to the blocks that each salt may have there."""
    endurance_bytes: int | None = None
    """Bytes that the medium may be written in its life, if that is known."""
