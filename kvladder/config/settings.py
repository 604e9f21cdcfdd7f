"""All settings with their defaults: one frozen struct per section of a configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import msgspec

from kvladder.config import registry
from kvladder.config.forget import ForgetConfig
from kvladder.config.http import HttpConfig, port_of
from kvladder.config.otel import OtelConfig
from kvladder.config.shadow import ShadowConfig
from kvladder.errors import ConfigError
from kvladder.layout import Kind, Layout
from kvladder.policy.eviction import (
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    EvictionPolicy,
)
from kvladder.policy.offload import Admit, OffloadRule, When
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
    """The model's identity, which keeps its blocks apart from other models' blocks."""

    fingerprint: str = "auto"
    """``auto`` makes the engine's adapter digest the weights; other text is used as it is."""

    def __post_init__(self) -> None:
        if not self.fingerprint.strip():  # from an empty variable: it identifies no weights
            hint = "expected auto, or text that changes whenever the weights change"
            raise ConfigError(repr(self.fingerprint), path="fingerprint", hint=hint)


class BlockConfig(Settings, frozen=True, kw_only=True):
    """Properties of a block."""

    tokens: Positive | Literal["auto"] = "auto"
    """Tokens per block; ``auto`` takes the engine's."""
    size_bytes: Size | None = msgspec.field(name="size", default=None)
    """Largest stored block of a server. ``block: SIZE`` is short for it."""
    salt: str = ""
    """The deployment's secret; deployments with different salts share no blocks."""


class GpuConfig(Settings, frozen=True, kw_only=True):
    """The device's block pools, for engines without pools of their own."""

    memory_bytes: Size | None = msgspec.field(name="memory", default=None)
    """Memory of all pools; None takes a fraction of the free memory."""
    fraction: Fraction = 0.9
    """Fraction of the device memory that weights, other caches and a forward pass leave free."""
    max_tokens: Positive | None = None
    """Largest number of tokens in the pools, if ``memory`` is not set."""
    shares: tuple[Part, ...] = ()
    """Proportions of the memory that the groups get; by default, each gets what it needs."""
    dtype: Literal[
        "auto", "bfloat16", "float16", "float32", "fp8", "float8_e4m3fn", "float8_e5m2"
    ] = "auto"
    """Type of keys and values in the pools; ``auto`` is the model's."""
    windows: tuple[Count, ...] = ()
    """Tokens that each layer sees, repeated over the layers; 0 is the model's own window."""
    reuse: bool = True
    """True if blocks are kept for later requests."""
    partial: Literal["auto", "off", "take", "copy"] = "auto"
    """Use of a cached block if a prompt shares only its beginning."""
    rebalance: bool = False
    """True if unused memory moves between a model's pools."""
    events: Count = 0
    """Largest number of the pools' events kept until a caller takes them."""

    def __post_init__(self) -> None:
        if not self.reuse and self.partial in ("take", "copy"):
            hint = "expected auto or off, because gpu.reuse is false"
            raise ConfigError(self.partial, path="partial", hint=hint)


class ArenaConfig(Settings, frozen=True, kw_only=True):
    """The host slots that every byte below the GPU passes through."""

    size_bytes: Size | None = msgspec.field(name="size", default=None)
    """Size of all slots. None is for the device's pools alone, without tiers."""
    reserve: Share = Share(percent=5)
    """Slots kept free or clean in the background, so that a save finds room at once."""


class FetchConfig(Settings, frozen=True, kw_only=True):
    """Promotion of blocks from below the host level."""

    deadline_s: Duration = msgspec.field(name="deadline", default=Duration(2))
    """Time after which the engine gets only the blocks that have arrived."""
    budget: Share = Share(percent=50)
    """Share of the arena's slots that may be in flight upwards at once."""
    when: Literal["faster", "always"] = "faster"
    """``faster`` fetches a block only if that takes less time than computing it. The engine has to
    report its computing time for this."""

    def __post_init__(self) -> None:
        if not self.budget:
            raise ConfigError(str(self.budget), path="budget", hint="expected more than 0")


class EventsConfig(Settings, frozen=True, kw_only=True):
    """Events in memory and over ZeroMQ."""

    max: Count = 10_000
    """Largest number of events kept until a caller takes them; 0 keeps none."""
    publish: str | None = None
    """ZeroMQ address at which events are published; without one no port is open."""
    replay: str | None = None
    """Address at which batches are sent again to subscribers that missed some."""
    topic: str = ""
    """Topic of the messages."""
    buffer: Positive = 10_000
    """Largest number of batches kept to be sent again."""

    def __post_init__(self) -> None:
        if self.replay is not None and self.publish is None:
            raise ConfigError(self.replay, path="replay", hint="set events.publish, too")
        if self.publish is not None and not self.max:
            hint = "expected 1 or more, because events are published"
            raise ConfigError("0", path="max", hint=hint)


class ControlConfig(Settings, frozen=True, kw_only=True):
    """The control socket of a running cache. ``control: PATH`` is short for it."""

    path: str | None = None
    """Path of the Unix-domain socket; without one there is no control socket."""

    def __post_init__(self) -> None:
        if self.path is not None and (not Path(self.path).name or "\0" in self.path):
            hint = "expected the name of a socket, or leave it out"
            raise ConfigError(repr(self.path), path="path", hint=hint)


class RecordConfig(Settings, frozen=True, kw_only=True):
    """Recording of what requests ask, as a trace. ``record: PATH`` is short for it."""

    path: str | None = None
    """File of the trace; without one nothing is recorded."""
    size_bytes: Size = msgspec.field(name="size", default=Size(64 << 20))
    """Largest size of a file; a full file is renamed to ``PATH.1``, and that to ``PATH.2`` ..."""
    files: Positive = 8
    """Largest number of files; the oldest is removed."""

    def __post_init__(self) -> None:
        if self.path is not None and (not Path(self.path).name or "\0" in self.path):
            hint = "expected the name of a file, or leave it out"
            raise ConfigError(repr(self.path), path="path", hint=hint)
        if self.path is None and (self.size_bytes != Size(64 << 20) or self.files != 8):
            raise ConfigError("missing", path="path", hint="expected the name of a file")

    def of(self, instance: int) -> Path:
        """Return the file of one of several engines; ``path`` is set."""
        assert self.path is not None
        path = Path(self.path)
        return path.with_name(f"{path.stem}-dp{instance}{path.suffix}") if instance else path


WILDCARDS = {"0.0.0.0", "*", "[::]"}  # noqa: S104 - what is refused as an address of clients


class ExportConfig(Settings, frozen=True, kw_only=True):
    """Export of this cache's blocks to other caches, over NIXL."""

    listen: Address | None = None
    """Host and port for clients; further engines of one configuration take the next ports."""
    keys: str = ""
    """File with this end's keys, as ``kvladder serve --new-keys`` makes it."""
    transports: str = "tcp"
    """Transports in UCX's names: ``tcp``, or ``rc,tcp`` with RDMA."""
    interfaces: Annotated[str, msgspec.Meta(min_length=1)] = "all"
    """Network devices in UCX's names; ``all`` takes those of UCX_NET_DEVICES, if it is set."""
    roster: str = ""
    """URL of a Redis where the cache announces itself to clients without configured addresses."""
    host: str = ""
    """Host at which clients reach it; by default that of ``listen``."""
    name: Annotated[
        str,
        msgspec.Meta(
            pattern=rf"\A({NAME})?\Z", description="letters, digits, - _ . and :, at most 200"
        ),
    ] = ""
    """Name in the roster, the same if the address changes; by default the address."""

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
            hint = "set export.roster too, or leave it out"
            raise ConfigError("has no effect without export.roster", path=named[0], hint=hint)

    @property
    def at(self) -> str:
        """Host at which clients reach it."""
        return self.host or (self.listen or "").rpartition(":")[0]

    def of(self, instance: int) -> ExportConfig:
        """Return the settings of one of several engines; its number is part of its name, too.

        Its port is the configured one plus ``instance``; port 0 stays any free port.

        Raises
        ------
        ConfigError
            That port does not exist.
        """
        host, _, port = (self.listen or "").rpartition(":")
        own = port_of(int(port or 0), instance, "export.listen")
        if not host:
            return self
        name = f"{self.name}-dp{instance}" if self.name and instance else self.name
        return msgspec.structs.replace(self, listen=f"{host}:{own}", name=name)


class LimitsConfig(Settings, frozen=True, kw_only=True):
    """Limits on raised blocks, and on requests' priorities: excess is clipped, counted, logged."""

    priority: Priority = PRIORITY_MAX
    """Highest priority."""
    pin_s: Duration | None = msgspec.field(name="pin", default=None)
    """Longest time for which a priority above the default lasts; None sets no limit."""
    raised: Portion = Portion(percent=50)
    """Part of each level that all blocks above the default priority together may take."""
    raised_tenant: Portion = Portion(percent=25)
    """Part of each level that such blocks of one cache salt may take."""

    @property
    def of_requests(self) -> Limits:
        """The limits on what one request may ask for."""
        return Limits(self.priority, math.inf if self.pin_s is None else self.pin_s)


class QuotaConfig(Settings, frozen=True, kw_only=True):
    """Part of a level that each cache salt may take; blocks without a salt have no quota."""

    tenant: Portion | None = None
    """Quota of one cache salt; None sets no limit."""


class Sections(Settings, frozen=True, kw_only=True):
    """The sections of a file, except its list of tiers."""

    model: ModelConfig = ModelConfig()
    block: BlockConfig = BlockConfig()
    gpu: GpuConfig = GpuConfig()
    arena: ArenaConfig = ArenaConfig()
    fetch: FetchConfig = FetchConfig()
    events: EventsConfig = EventsConfig()
    control: ControlConfig = ControlConfig()
    http: HttpConfig = HttpConfig()
    forget: ForgetConfig = ForgetConfig()
    export: ExportConfig = ExportConfig()
    record: RecordConfig = RecordConfig()
    shadow: ShadowConfig = ShadowConfig()
    otel: OtelConfig = OtelConfig()
    limits: LimitsConfig = LimitsConfig()
    quota: QuotaConfig = QuotaConfig()


class BreakerConfig(Settings, frozen=True, kw_only=True):
    """The circuit breaker of a failing tier: when calls stop, and when they are retried."""

    failures: Positive = 3
    """Consecutive failures after which calls stop."""
    retry_s: Duration = msgspec.field(name="retry", default=Duration(5))
    """Time until the first trial call; doubled after each trial that fails."""
    retry_max_s: Duration = msgspec.field(name="retry_max", default=Duration(60))
    """Longest time between two trial calls."""

    def __post_init__(self) -> None:
        if self.retry_s > self.retry_max_s:
            hint = f"expected at least breaker.retry, {self.retry_s}"
            raise ConfigError(str(self.retry_max_s), path="retry_max", hint=hint)


class Chosen(Settings, frozen=True, kw_only=True, dict=True):
    """Settings of a tier or a codec: those common to all, and those of its own class."""

    make: ClassVar[Any]
    """The class that they are for; its own settings are its ``Options``."""

    @classmethod
    def of(cls, make: Any, path: str = "", /, **types: tuple[Any, Any]) -> type[Self]:
        """Return this class with the settings of ``make``, which is named at ``path``.

        ``types`` are types and defaults of fields that depend on ``make``.

        Raises
        ------
        ConfigError
            The class has a setting with the name of a common one.
        """
        own = msgspec.structs.fields(make.Options) if getattr(make, "Options", None) else ()
        common = {field.encode_name for field in msgspec.structs.fields(cls)}
        for name in common.intersection(one.encode_name for one in own):
            what = f"{make.__name__} defines a setting {name!r}, which kvladder already defines"
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
        _ = self.options  # accessed to check them

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
    """A codec of a level, and its settings."""

    EXPECTED: ClassVar = "a name, or keys with values"
    make: ClassVar[type[Codec]]
    name: str

    def __str__(self) -> str:
        """Return text for people, without secrets."""
        return self._with(lambda key, value: str(cleared(key, value)))

    @property
    def identity(self) -> str:
        """All settings that affect its output, as text with secrets."""
        return self._with(lambda _, value: str(value))

    def _with(self, write: Callable[[str, object], str]) -> str:
        if self.options is None:
            return self.name
        values = msgspec.structs.asdict(self.options).items()
        return f"{self.name} ({', '.join(f'{key} {write(key, value)}' for key, value in values)})"

    def make_codec(self) -> Codec:
        """Return a new codec, not opened yet."""
        codec: Codec = self._made()
        return codec


class LossyCodecConfig(CodecConfig, frozen=True, kw_only=True):
    """A codec that changes the numbers that the engine reads."""

    allow_lossy: bool | tuple[Kind, ...] = False
    """Kinds of layers that it may change; True allows all kinds except full attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.allow_lossy:
            what = f"{self.make.name!r} changes the numbers that the engine reads"
            hint = (
                f"to allow it, write {{name: {self.make.name}, allow_lossy: true}}; for full"
                " attention, allow_lossy: [full]"
            )
            raise ConfigError(what, hint=hint)

    @property
    def allowed(self) -> frozenset[str]:
        """Kinds of layers that it may change."""
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
    """Settings that every level has, including the host level."""

    name: Name = ""
    """Name of the level; by default its type."""
    type: str
    """Type of the tier, or the name of a plug-in."""
    min_priority: Priority = PRIORITY_DEFAULT
    """Lowest priority that the level admits, also for the blocks before a block."""
    min_hits: Count = 0
    """Number of times that a block must have been used again before the level takes it."""
    ttl_s: Duration | None = msgspec.field(name="ttl", default=None)
    """Time for which the level keeps a block; None sets no limit."""
    policy: str = "prioritized-lru"
    """Eviction policy: ``prioritized-lru``, ``adaptive`` (which learns the order among equal
    priorities), or the name of a plug-in."""

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.type)
        registry.load("policies", self.policy, path="policy")

    @property
    def rule(self) -> OffloadRule:
        """The blocks that the level takes, and for how long."""
        return OffloadRule(self.min_priority, "evict", self.min_hits, self.ttl_s)

    def make_policy(self) -> EvictionPolicy:
        """Return a new eviction policy for this level."""
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
    """Bytes of the medium, at least those of one batch of blocks."""
    when: When = "evict"
    """``evict`` writes a block when it leaves the level above, ``commit`` as soon as it is
    complete; ``never`` only reads."""
    admit: Admit = "all"
    """``adaptive`` leaves out blocks that are unlikely to be read again, so that the medium wears
    less."""
    endurance_bytes: Size | None = msgspec.field(name="endurance", default=None)
    """Bytes that the medium may be written in its life, as its data sheet says; for statistics."""
    codecs: tuple[CodecConfig, ...] = ()
    """Codecs that blocks pass through on their way to the medium, in this order."""
    required: bool = False
    """True if no engine starts without the level; otherwise it is left out until it opens."""
    timeout_s: Duration = msgspec.field(name="timeout", default=Duration(5))
    """Time limit of one call to the tier."""
    queue: Share = Share(percent=25)
    """Blocks that may wait to be written, as a share of the arena; each occupies a slot."""
    breaker: BreakerConfig = BreakerConfig()
    isolate: bool | None = None
    """True if the tier runs in its own process; by default, if its class ``isolates``."""
    abandon_s: Duration = msgspec.field(name="abandon", default=ABANDON_S)
    """Time that an abandoned call may take to end before that process is killed."""

    def __post_init__(self) -> None:
        TierSettings.__post_init__(self)
        Chosen.__post_init__(self)
        if not self.queue:
            raise ConfigError(str(self.queue), path="queue", hint="expected more than 0")
        if self.when == "never" and not self.make.shared:
            hint = "expected evict or commit: only this cache writes to this tier"
            raise ConfigError("never", path="when", hint=hint)
        if self.admit == "adaptive" and self.when != "evict":
            hint = f"expected all, or when: evict: {self.when} writes before a block is used again"
            raise ConfigError("adaptive", path="admit", hint=hint)
        require_chain([codec.make for codec in self.codecs])
        if self.isolate is None:
            msgspec.structs.force_setattr(self, "isolate", self._isolates)
        if self._isolates and not self.isolate:
            hint = "leave it out: the tier's library may hang or crash, so it always runs isolated"
            raise ConfigError("false", path="isolate", hint=hint)
        if self.abandon_s != ABANDON_S and not self.isolate:
            hint = "set isolate: true, or leave it out: it applies to isolated tiers only"
            raise ConfigError(str(self.abandon_s), path="abandon", hint=hint)

    @property
    def _isolates(self) -> bool:
        """True if the tier never runs in the engine's process."""
        return getattr(self.make, "isolates", False)

    @property
    def rule(self) -> OffloadRule:
        return OffloadRule(self.min_priority, self.when, self.min_hits, self.ttl_s, self.admit)

    @property
    def outlives(self) -> bool:
        """True if blocks written there outlive the engine."""
        return bool(self.make.durable or self.make.shared)

    @property
    def unchecked(self) -> bool:
        """True if blocks that the medium damaged would be served."""
        return not any(codec.make.checks for codec in self.codecs)

    def make_tier(self) -> Tier:
        """Return a new tier for this level, not opened yet."""
        if self.isolate:
            return IsolatedTier(self.make, self.options, abandon_s=self.abandon_s)
        tier: Tier = self._made()
        return tier

    def make_codecs(self) -> tuple[Codec, ...]:
        """Return new codecs for this level, not opened yet, in the order of their application."""
        return tuple(codec.make_codec() for codec in self.codecs)

    def scratch_blocks(self, layout: Layout) -> int:
        """Return the number of extra slots, beside the arena's, that the codecs encode into."""
        return scratch_blocks(self.make_codecs(), layout.slot_bytes)

    def block_bytes(self, layout: Layout) -> int:
        """Return the bytes of capacity that one block takes: its slot and the tier's overhead."""
        return layout.slot_bytes + self.make.overhead_bytes

    @property
    def engines(self) -> int:
        """Number of engines that divide the capacity: an option of some tiers, else 1."""
        return getattr(self.options, "engines", 1)

    def capacity_blocks(self, layout: Layout) -> int:
        """Return how many blocks of one engine fit."""
        return self.capacity_bytes // self.engines // self.block_bytes(layout)


_WHY_LAST = "put the checksum last: it covers the bytes that the tier stores"
_WHY_BEFORE = {
    Stage.REDUCE: "put it first: it needs the numbers as the engine wrote them",
    Stage.COMPRESS: "put it before encryption: encrypted data does not shrink",
}


def require_chain(codecs: list[type[Codec]]) -> None:
    """Raise ConfigError unless the order of these codecs makes sense."""
    if len(codecs) > STEPS_MAX:
        hint = f"expected at most {STEPS_MAX}"
        raise ConfigError(f"{len(codecs)} codecs", path="codecs", hint=hint)
    for i, make in enumerate(codecs):
        where = f"codecs[{i}]"
        if make in codecs[:i]:
            raise ConfigError(f"{make.name!r} is listed twice", path=where, hint="list it once")
        later = next((codec for codec in codecs[:i] if codec.stage > make.stage), None)
        if later is not None:
            hint = _WHY_LAST if later.stage == Stage.CHECK else _WHY_BEFORE[make.stage]
            raise ConfigError(f"{make.name!r} stands after {later.name!r}", path=where, hint=hint)
