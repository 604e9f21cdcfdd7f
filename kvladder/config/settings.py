"""What may be set, with its defaults: one frozen struct per section of a configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import msgspec

from kvladder.config import registry
from kvladder.errors import ConfigError
from kvladder.layout import Kind, Layout
from kvladder.policy.eviction import (
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    EvictionPolicy,
)
from kvladder.policy.offload import OffloadRule, When
from kvladder.policy.tenants import Limits
from kvladder.schema import HOST, Address, Settings, cleared
from kvladder.tiers.base import Tier
from kvladder.tiers.codecs.base import ChecksumCodec, Codec, Stage
from kvladder.tiers.codecs.pipeline import scratch_blocks
from kvladder.tiers.isolated.tier import IsolatedTier
from kvladder.tiers.label import STEPS_MAX
from kvladder.tiers.nixl.roster import NAME, require_url
from kvladder.units import Duration, Portion, Share, Size

Count = Annotated[int, msgspec.Meta(ge=0, description="a whole number, 0 or more")]
Positive = Annotated[int, msgspec.Meta(ge=1, description="a whole number, 1 or more")]
Fraction = Annotated[
    float, msgspec.Meta(gt=0, lt=1, description="a number above 0 and below 1, such as 0.9")
]
Part = Annotated[float, msgspec.Meta(gt=0, lt=1e18, description="a number above 0, below 1e18")]
Priority = Annotated[
    int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX, description="a priority, 0 to 100")
]
Name = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9_-]*\Z",
        description="letters, digits, - and _, beginning with a letter or digit",
    ),
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
    size_bytes: Size | None = msgspec.field(name="size", default=None)
    """Of a server: the largest block that it keeps, as it is stored; written alone, too."""
    salt: str = ""
    """The deployment's secret: two deployments with other salts share nothing."""


class GpuConfig(Settings, frozen=True, kw_only=True):
    """The device's block pools, for engines that bring none of their own."""

    memory_bytes: Size | None = msgspec.field(name="memory", default=None)
    """For all pools; None takes a fraction of what is free."""
    fraction: Fraction = 0.9
    """Of the device memory that weights, other caches and a forward pass leave free."""
    max_tokens: Positive | None = None
    """Not more than so many tokens, where a fraction is taken."""
    shares: tuple[Part, ...] = ()
    """What each group gets of the memory, in proportion; by default by need."""
    dtype: Literal[
        "auto", "bfloat16", "float16", "float32", "fp8", "float8_e4m3fn", "float8_e5m2"
    ] = "auto"
    """The type of keys and values in the pools; ``auto`` is the model's."""
    windows: tuple[Count, ...] = ()
    """How many tokens each layer sees, repeated over the layers; 0: as many as the model says."""
    reuse: bool = True
    """Whether blocks are kept for later requests."""
    partial: Literal["auto", "off", "take", "copy"] = "auto"
    """What to do with a cached block of which a prompt shares only the beginning."""
    rebalance: bool = False
    """Whether memory goes from pools of a model that do not need it to those that do."""
    events: Count = 0
    """Events of the pools that are kept until somebody takes them."""

    def __post_init__(self) -> None:
        if not self.reuse and self.partial in ("take", "copy"):
            hint = "auto or off: without reuse nothing is served"
            raise ConfigError(self.partial, path="partial", hint=hint)


class ArenaConfig(Settings, frozen=True, kw_only=True):
    """The host slots that every byte below the GPU passes through."""

    size_bytes: Size | None = msgspec.field(name="size", default=None)
    """None, with no tiers either: the device's pools alone."""
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

    def __post_init__(self) -> None:
        if not self.budget:
            raise ConfigError(str(self.budget), path="budget", hint="expected more than 0")


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

    def __post_init__(self) -> None:
        if self.replay is not None and self.publish is None:
            raise ConfigError(self.replay, path="replay", hint="needs events.publish, too")
        if self.publish is not None and not self.max:
            hint = "events are published: expected 1 or more"
            raise ConfigError("0", path="max", hint=hint)


class ControlConfig(Settings, frozen=True, kw_only=True):
    """How a running cache is asked and told from outside; written as a path alone, too."""

    path: str | None = None
    """The Unix-domain socket at which it listens; without one there is none."""

    def __post_init__(self) -> None:
        if self.path is not None and (not Path(self.path).name or "\0" in self.path):
            hint = "expected the name of a socket, or leave it out"
            raise ConfigError(repr(self.path), path="path", hint=hint)


WILDCARDS = {"0.0.0.0", "*", "[::]"}  # noqa: S104 - what is refused as an address of clients
PORT_MAX = 65535


class ExportConfig(Settings, frozen=True, kw_only=True):
    """Whether other caches read blocks from this one, over NIXL."""

    listen: Address | None = None
    """Host and port for clients; further engines of one configuration take the next ports."""
    keys: str = ""
    """The file with the keys of this end, as ``kvladder serve --new-keys`` makes it."""
    transports: str = "tcp"
    """How bytes travel, as UCX names it: ``tcp``, or ``rc,tcp`` with RDMA."""
    interfaces: Annotated[str, msgspec.Meta(min_length=1)] = "all"
    """The network devices, as UCX names them; ``all``: those of UCX_NET_DEVICES, if it is set."""
    roster: str = ""
    """The URL of a Redis where it announces itself, for clients that are given no addresses."""
    host: str = ""
    """Under which clients reach it; by default that of ``listen``."""
    name: Annotated[
        str,
        msgspec.Meta(
            pattern=rf"\A({NAME})?\Z", description="letters, digits, - _ . and :, at most 200"
        ),
    ] = ""
    """What it is called there, also at another address; by default its address."""

    def __post_init__(self) -> None:
        others = self.keys, self.roster, self.host, self.name
        how = self.transports, self.interfaces
        if self.listen is None and (any(others) or how != ("tcp", "all")):
            hint = "expected host:port, or leave the section out"
            raise ConfigError("missing", path="listen", hint=hint)
        if self.listen is not None and not self.keys:
            hint = "expected the file server.keys, which kvladder serve --new-keys DIR makes"
            raise ConfigError("missing", path="keys", hint=hint)
        if self.roster:
            require_url(self.roster)
            if not self.host and self.at in WILDCARDS:
                hint = "expected the host under which clients reach it, such as 10.0.0.7"
                raise ConfigError("missing", path="host", hint=hint)
            if self.host and not re.fullmatch(HOST, self.host):
                hint = "expected a host without a port, such as 10.0.0.7 or [fd00::7]"
                raise ConfigError(repr(self.host), path="host", hint=hint)
        elif named := [name for name in ("host", "name") if getattr(self, name)]:
            hint = "it is for a server that announces itself: set export.roster"
            raise ConfigError("has no effect", path=named[0], hint=hint)

    @property
    def at(self) -> str:
        """The host under which clients reach it."""
        return self.host or (self.listen or "").rpartition(":")[0]

    def of(self, instance: int) -> ExportConfig:
        """The settings of one of several engines, which is named by its number, too.

        Its port is as far above the one that is set, or any if that is 0.

        Raises
        ------
        ConfigError
            There is no such port.
        """
        host, _, port = (self.listen or "").rpartition(":")
        own = int(port) + instance if int(port or 0) else 0
        if own > PORT_MAX:
            hint = f"expected a port of at most {PORT_MAX - instance}"
            what = f"engine {instance} would listen at {own}"
            raise ConfigError(what, path="export.listen", hint=hint)
        if not host:
            return self
        name = f"{self.name}-dp{instance}" if self.name and instance else self.name
        return msgspec.structs.replace(self, listen=f"{host}:{own}", name=name)


class LimitsConfig(Settings, frozen=True, kw_only=True):
    """What requests may ask for their blocks; what is above is clipped, counted and said."""

    priority: Priority = PRIORITY_MAX
    """The highest priority."""
    pin_s: Duration | None = msgspec.field(name="pin", default=None)
    """The longest time for which a priority above the default lasts; None sets no limit."""
    raised: Portion = Portion(percent=50)
    """How much of each level blocks above the default priority may have, all together."""
    raised_tenant: Portion = Portion(percent=25)
    """How much of each level those of one cache salt may have."""

    @property
    def of_requests(self) -> Limits:
        """Those that hold for what a request asks."""
        return Limits(self.priority, math.inf if self.pin_s is None else self.pin_s)


class QuotaConfig(Settings, frozen=True, kw_only=True):
    """How much of a level each cache salt may have; blocks without a salt have no quota."""

    tenant: Portion | None = None
    """Of one cache salt; None sets no limit."""


class Sections(Settings, frozen=True, kw_only=True):
    """The sections of a file, but for its list of tiers."""

    model: ModelConfig = ModelConfig()
    block: BlockConfig = BlockConfig()
    gpu: GpuConfig = GpuConfig()
    arena: ArenaConfig = ArenaConfig()
    fetch: FetchConfig = FetchConfig()
    events: EventsConfig = EventsConfig()
    control: ControlConfig = ControlConfig()
    export: ExportConfig = ExportConfig()
    limits: LimitsConfig = LimitsConfig()
    quota: QuotaConfig = QuotaConfig()


class BreakerConfig(Settings, frozen=True, kw_only=True):
    """When a failing tier is left alone."""

    failures: Positive = 3
    """Failures in a row after which it is."""
    retry_s: Duration = msgspec.field(name="retry", default=Duration(5))
    """Until the first trial; doubled after each trial that fails."""
    retry_max_s: Duration = msgspec.field(name="retry_max", default=Duration(60))

    def __post_init__(self) -> None:
        if self.retry_s > self.retry_max_s:
            hint = f"expected at least breaker.retry, {self.retry_s}"
            raise ConfigError(str(self.retry_max_s), path="retry_max", hint=hint)


class Chosen(Settings, frozen=True, kw_only=True, dict=True):
    """Settings of a tier or a codec, which has some of its own beside those that all have."""

    make: ClassVar[Any]
    """The class that they are for; its ``Options`` has its own."""

    @classmethod
    def of(cls, make: Any, path: str = "", /, **types: tuple[Any, Any]) -> type[Self]:
        """The same for one class; ``types`` are types and defaults of fields that depend on it.

        The class is named at ``path``.

        Raises
        ------
        ConfigError
            The class has a setting by the name of one that all have.
        """
        own = msgspec.structs.fields(make.Options) if getattr(make, "Options", None) else ()
        common = {field.encode_name for field in msgspec.structs.fields(cls)}
        for name in common.intersection(one.encode_name for one in own):
            what = f"{make.__name__} has a setting {name!r} of its own, and all have one"
            raise ConfigError(what, path=path, hint="give it another name in its Options")
        field: Any = msgspec.field
        fields: list[Any] = [(name, *what) for name, what in types.items()]
        for one in own:
            default = {"default": one.default, "default_factory": one.default_factory}
            fields.append((f"own_{one.name}", one.type, field(name=one.encode_name, **default)))
        made = msgspec.defstruct(
            cls.__name__, fields, bases=(cls,), namespace={"make": make}, kw_only=True
        )
        return cast("type[Self]", made)

    def __post_init__(self) -> None:
        _ = self.options  # which are checked as they are made

    @cached_property
    def options(self) -> Any:
        """Its own settings, as its class takes them; None if it has none."""
        wanted = getattr(self.make, "Options", None)
        if wanted is None:
            return None
        names = [field.name for field in msgspec.structs.fields(wanted)]
        return wanted(**{name: getattr(self, f"own_{name}") for name in names})

    def _made(self) -> Any:
        return self.make() if self.options is None else self.make(self.options)


class CodecConfig(Chosen, frozen=True, kw_only=True):
    """A codec of a level, and what is set of it."""

    EXPECTED: ClassVar = "a name, or keys with values"
    make: ClassVar[type[Codec]]
    name: str

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

    def make_codec(self) -> Codec:
        """A new codec, not yet opened."""
        codec: Codec = self._made()
        return codec


class LossyCodecConfig(CodecConfig, frozen=True, kw_only=True):
    """A codec that changes what the engine reads."""

    allow_lossy: bool | tuple[Kind, ...] = False
    """The kinds of layers whose blocks it may change; True for all but those of full attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.allow_lossy:
            what = f"{self.make.name!r} changes the numbers that the engine reads"
            hint = (
                f"if that is meant, write {{name: {self.make.name}, allow_lossy: true}}, or [full]"
            )
            raise ConfigError(what, hint=hint)

    @property
    def allowed(self) -> frozenset[str]:
        """The kinds of layers whose blocks it may change."""
        some = self.allow_lossy
        return frozenset(some if isinstance(some, tuple) else ("window", "local", "state"))

    def make_codec(self) -> Codec:
        codec = super().make_codec()
        codec.allowed = self.allowed
        return codec

    def _with(self, write: Callable[[str, object], str]) -> str:
        return f"{super()._with(write)} for {', '.join(sorted(self.allowed))}"


CHECKSUM = CodecConfig.of(ChecksumCodec)(name=ChecksumCodec.name)


class TierSettings(Settings, frozen=True, kw_only=True):
    """What every level has, the host level too."""

    name: Name = ""
    """By default its type."""
    type: str
    min_priority: Priority = PRIORITY_DEFAULT
    min_hits: Count = 0
    ttl_s: Duration | None = msgspec.field(name="ttl", default=None)
    policy: str = "prioritized-lru"

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.type)
        registry.load("policies", self.policy, path="policy")

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

    quota: QuotaConfig = QuotaConfig()


ABANDON_S = Duration(1)


class LevelConfig(TierSettings, Chosen, frozen=True, kw_only=True):
    """A level below host."""

    make: ClassVar[type[Tier]]
    capacity_bytes: Size = msgspec.field(name="capacity")
    when: When = "evict"
    codecs: tuple[CodecConfig, ...] = ()
    required: bool = False
    """Whether the engine does not start without it; else the level is left out until it opens."""
    timeout_s: Duration = msgspec.field(name="timeout", default=Duration(5))
    queue: Share = Share(percent=25)
    """Blocks that may wait to be written; each keeps an arena slot busy."""
    breaker: BreakerConfig = BreakerConfig()
    isolate: bool | None = None
    """Whether the tier runs in a process of its own; by default, if its class ``isolates``."""
    abandon_s: Duration = msgspec.field(name="abandon", default=ABANDON_S)
    """How long a call that is given up may take to end before that process is killed."""

    def __post_init__(self) -> None:
        TierSettings.__post_init__(self)
        Chosen.__post_init__(self)
        if not self.queue:
            raise ConfigError(str(self.queue), path="queue", hint="expected more than 0")
        if self.when == "never" and not self.make.shared:
            hint = "expected evict or commit: nobody else writes to this tier"
            raise ConfigError("never", path="when", hint=hint)
        require_chain([codec.make for codec in self.codecs])
        if self.isolate is None:
            msgspec.structs.force_setattr(self, "isolate", self._isolates)
        if self._isolates and not self.isolate:
            hint = "leave it out: its library can neither be cancelled nor trusted to live"
            raise ConfigError("false", path="isolate", hint=hint)
        if self.abandon_s != ABANDON_S and not self.isolate:
            hint = "it is for a tier in a process of its own: isolate: true"
            raise ConfigError(str(self.abandon_s), path="abandon", hint=hint)

    @property
    def _isolates(self) -> bool:
        """Whether the tier never runs in the engine's process."""
        return getattr(self.make, "isolates", False)

    @property
    def rule(self) -> OffloadRule:
        return OffloadRule(self.min_priority, self.when, self.min_hits, self.ttl_s)

    @property
    def outlives(self) -> bool:
        """Whether what is written there outlives the engine."""
        return bool(self.make.durable or self.make.shared)

    @property
    def unchecked(self) -> bool:
        """Whether blocks that its medium damages are served."""
        return not any(codec.make.checks for codec in self.codecs)

    def make_tier(self) -> Tier:
        """A new tier for this level, not yet opened."""
        if self.isolate:
            return IsolatedTier(self.make, self.options, abandon_s=self.abandon_s)
        tier: Tier = self._made()
        return tier

    def make_codecs(self) -> tuple[Codec, ...]:
        """New codecs for this level, not yet opened, in the order in which they are applied."""
        return tuple(codec.make_codec() for codec in self.codecs)

    def scratch_blocks(self, layout: Layout) -> int:
        """How many slots beside the arena's own the codecs encode into."""
        return scratch_blocks(self.make_codecs(), layout.slot_bytes)

    def block_bytes(self, layout: Layout) -> int:
        """What one block takes of the capacity: its slot, and what the tier adds."""
        return layout.slot_bytes + self.make.overhead_bytes

    @property
    def engines(self) -> int:
        """How many engines a capacity is divided among; a tier's option, where it has it."""
        return getattr(self.options, "engines", 1)

    def capacity_blocks(self, layout: Layout) -> int:
        """How many blocks of one engine fit."""
        return self.capacity_bytes // self.engines // self.block_bytes(layout)


_WHY_LAST = "a checksum covers what crosses the edge: it comes last"
_WHY_BEFORE = {
    Stage.REDUCE: "it has to see the numbers as the engine wrote them: it comes first",
    Stage.COMPRESS: "what is encrypted does not shrink: compression comes before",
}


def require_chain(codecs: list[type[Codec]]) -> None:
    """Raise ConfigError unless the order of these codecs makes sense."""
    if len(codecs) > STEPS_MAX:
        raise ConfigError(f"{len(codecs)} codecs", path="codecs", hint=f"at most {STEPS_MAX}")
    for i, make in enumerate(codecs):
        where = f"codecs[{i}]"
        if make in codecs[:i]:
            raise ConfigError(f"{make.name!r} twice", path=where, hint="name it once")
        later = next((codec for codec in codecs[:i] if codec.stage > make.stage), None)
        if later is not None:
            hint = _WHY_LAST if later.stage == Stage.CHECK else _WHY_BEFORE[make.stage]
            raise ConfigError(f"{make.name!r} stands after {later.name!r}", path=where, hint=hint)
