"""What may be set, with its defaults: one frozen struct per section of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvladder.config import registry
from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.policy.eviction import PRIORITY_MAX, PRIORITY_MIN, EvictionPolicy
from kvladder.policy.offload import OffloadRule, When
from kvladder.schema import Settings, cleared
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.base import Codec
from kvladder.tiers.codecs.edge import scratch_blocks
from kvladder.units import Duration, Share, Size

Count = Annotated[int, msgspec.Meta(ge=0, description="a whole number, 0 or more")]
Positive = Annotated[int, msgspec.Meta(ge=1, description="a whole number, 1 or more")]
Fraction = Annotated[
    float, msgspec.Meta(gt=0, lt=1, description="a number above 0 and below 1, such as 0.9")
]
Part = Annotated[float, msgspec.Meta(gt=0, lt=1e18, description="a number above 0, below 1e18")]
Priority = Annotated[
    int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX, description="a priority, 0 to 100")
]


class ModelConfig(Settings, frozen=True, kw_only=True):
    """What tells one model's blocks from another's."""

    fingerprint: str = "auto"
    """``auto`` has the engine's adapter digest the weights; other text is used as it is."""

    def __post_init__(self) -> None:
        if not self.fingerprint.strip():  # of a variable that is empty: of no weights' name
            hint = "expected auto, or text that changes whenever the weights do"
            raise ConfigError(repr(self.fingerprint), path="fingerprint", hint=hint)


class BlockConfig(Settings, frozen=True, kw_only=True):
    """What a block is."""

    tokens: Positive | Literal["auto"] = "auto"
    """Tokens per block; ``auto`` takes the engine's."""
    salt: str = ""
    """The deployment's secret: two deployments with other salts share nothing."""


class GpuConfig(Settings, frozen=True, kw_only=True):
    """The device's block pools, for engines that bring none of their own."""

    policy: Literal["prioritized-lru"] = "prioritized-lru"
    memory_bytes: Size | None = msgspec.field(name="memory", default=None)
    """For all pools; None takes a fraction of what is free."""
    fraction: Fraction = 0.9
    """Of the device memory that weights, other caches and a forward pass leave free."""
    max_tokens: Positive | None = None
    """Not more than so many tokens, where a fraction is taken."""
    shares: tuple[Part, ...] = ()
    """What each group gets of the memory, in proportion; by default by need."""
    partial: Literal["auto", "off", "take", "copy"] = "auto"
    """What to do with a cached block of which a prompt shares only the beginning."""
    events: Count = 0
    """Events of the pools that are kept until somebody takes them."""


class ArenaConfig(Settings, frozen=True, kw_only=True):
    """The host slots that every byte below the GPU passes through."""

    size_bytes: Size = msgspec.field(name="size")
    reserve: Share = Share(percent=5)
    """Slots kept free or clean in the background, so that a save finds room at once."""


class FetchConfig(Settings, frozen=True, kw_only=True):
    """How blocks come up from below the host level."""

    deadline_s: Duration = msgspec.field(name="deadline", default=Duration(2))
    """After this the engine gets what has arrived."""
    budget: Share = Share(percent=50)
    """Share of the arena's slots that may be on their way up at once."""
    when: Literal["faster", "always"] = "faster"
    """``faster``: only what comes sooner than computing it, as far as the engine tells."""


class EventsConfig(Settings, frozen=True, kw_only=True):
    """What is kept of what happened."""

    max: Count = 10_000
    """Events kept until somebody takes them; 0 keeps none."""
    publish: str | None = None
    """The address at which they are published over ZeroMQ; without one no port is open."""
    replay: str | None = None
    """The address at which batches are sent again to whoever missed some."""
    topic: str = ""
    buffer: Positive = 10_000
    """Batches kept to be sent again."""


class ControlConfig(Settings, frozen=True, kw_only=True):
    """How a running cache is asked and told from outside; written as a path alone, too."""

    path: str | None = None
    """The Unix-domain socket at which it listens; without one there is none."""

    def __post_init__(self) -> None:
        if self.path is not None and (not Path(self.path).name or "\0" in self.path):
            hint = "expected the name of a socket, or leave it out"
            raise ConfigError(repr(self.path), path="path", hint=hint)


class BreakerConfig(Settings, frozen=True, kw_only=True):
    """When a failing tier is left alone."""

    failures: Positive = 3
    """Failures in a row after which it is."""
    retry_s: Duration = msgspec.field(name="retry", default=Duration(5))
    """Until the first trial; doubled after each trial that fails."""
    retry_max_s: Duration = msgspec.field(name="retry_max", default=Duration(60))


class TierSettings(Settings, frozen=True, kw_only=True):
    """What every level has, the host level too."""

    name: str
    type: str
    min_priority: Priority = PRIORITY_MIN
    min_hits: Count = 0
    ttl_s: Duration | None = msgspec.field(name="ttl", default=None)
    policy: str = "prioritized-lru"

    @property
    def rule(self) -> OffloadRule:
        """What the level takes and for how long."""
        return OffloadRule(self.min_priority, "evict", self.min_hits, self.ttl_s)

    def make_policy(self) -> EvictionPolicy:
        """A new eviction policy for this level."""
        policy: EvictionPolicy = registry.load("policies", self.policy)()
        return policy


class HostConfig(TierSettings, frozen=True, kw_only=True):
    """Level 0: blocks in the arena's slots; its capacity is the arena's size."""


class CodecConfig(Settings, frozen=True, kw_only=True):
    """A codec of a level, and what is set of it."""

    name: str
    allow_lossy: bool = False
    """Of lossy codecs only, which are refused without it."""
    options: msgspec.Struct | None = None
    """The codec's own settings, of its class's ``Options``."""

    def __str__(self) -> str:
        """For people: without secrets."""
        return self._with(lambda key, value: str(cleared(key, value)))

    @property
    def identity(self) -> str:
        """All that tells what it makes of blocks from what another makes, secrets too."""
        return self._with(lambda _, value: str(value))

    def _with(self, write: Callable[[str, object], str]) -> str:
        if self.options is None:
            return self.name
        values = msgspec.structs.asdict(self.options).items()
        return f"{self.name} ({', '.join(f'{key} {write(key, value)}' for key, value in values)})"

    def make(self) -> Codec:
        """A new codec, not yet opened."""
        make = registry.load("codecs", self.name)
        codec: Codec = make() if self.options is None else make(self.options)
        return codec


class LevelConfig(TierSettings, frozen=True, kw_only=True):
    """A level below host."""

    capacity_bytes: Size = msgspec.field(name="capacity")
    when: When = "evict"
    codecs: tuple[CodecConfig, ...] = ()
    timeout_s: Duration = msgspec.field(name="timeout", default=Duration(5))
    queue: Share = Share(percent=25)
    """Blocks that may wait to be written; each keeps an arena slot busy."""
    breaker: BreakerConfig = BreakerConfig()
    options: msgspec.Struct | None = None
    """The tier's own settings, of its class's ``Options``."""

    @property
    def rule(self) -> OffloadRule:
        return OffloadRule(self.min_priority, self.when, self.min_hits, self.ttl_s)

    @property
    def outlives(self) -> bool:
        """Whether what is written there outlives the engine."""
        make = registry.load("tiers", self.type)
        return bool(make.durable or make.shared)

    def make_tier(self) -> Tier:
        """A new tier for this level, not yet opened."""
        make = registry.load("tiers", self.type)
        tier: Tier = make() if self.options is None else make(self.options)
        return tier

    def make_codecs(self) -> tuple[Codec, ...]:
        """New codecs for this level, not yet opened, in the order in which they are applied."""
        return tuple(codec.make() for codec in self.codecs)

    def scratch_blocks(self, layout: Layout) -> int:
        """How many slots beside the arena's own the codecs encode into."""
        return scratch_blocks(self.make_codecs(), layout.slot_bytes)

    def batch_max(self) -> int:
        """The largest batch of the tier; it is what a capacity must hold at least."""
        batch: int = registry.load("tiers", self.type).batch_max
        return batch

    def block_bytes(self, layout: Layout) -> int:
        """What one block takes of the capacity: its slot, and what the tier adds."""
        overhead: int = registry.load("tiers", self.type).overhead_bytes
        return layout.slot_bytes + overhead

    @property
    def engines(self) -> int:
        """How many engines a capacity is divided among; a tier's option, where it has it."""
        return getattr(self.options, "engines", 1)

    def capacity_blocks(self, layout: Layout) -> int:
        """How many blocks of one engine fit."""
        return self.capacity_bytes // self.engines // self.block_bytes(layout)


class Sections(Settings, frozen=True, kw_only=True):
    """The sections of a file, but for its list of tiers."""

    model: ModelConfig
    block: BlockConfig
    gpu: GpuConfig
    arena: ArenaConfig
    fetch: FetchConfig
    events: EventsConfig
    control: ControlConfig
