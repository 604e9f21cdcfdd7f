"""What users say: of the connector when an engine starts, and of its blocks with a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import Annotated, Any, Literal

import msgspec

from kvladder.config.settings import Count, Priority
from kvladder.config.stack import StackConfig
from kvladder.connectors.extra import ExtraOptions, parse_extra
from kvladder.errors import ConfigError
from kvladder.notices import Notices
from kvladder.policy.eviction import PRIORITY_DEFAULT, PRIORITY_MAX
from kvladder.policy.retention import Retention, RetentionRange
from kvladder.schema import Settings, convert, is_mapping, keys_of, nearest, shown

WHERE = "kv_connector_extra_config"


class VllmOptions(ExtraOptions, frozen=True, kw_only=True):
    """The connector's own settings; all others are those of a stack."""

    load: Literal["async", "sync", "layers"] = "async"
    """Whether blocks come in between the engine's steps, or before the step that reads them.

    ``layers``: while its layers are computed, where that takes as long as copying them.
    """
    save_decode: bool = True
    """Whether blocks of generated tokens are saved, too."""
    on_reset: Literal["forget", "keep"] = "forget"
    """What becomes of blocks that no other engine has when vLLM resets the connector's cache."""
    map_priority: Count = 0
    """Points of our priority that one step of vLLM's is worth; 0 leaves vLLM's out."""


def parse(extra: Mapping[str, Any]) -> tuple[VllmOptions, StackConfig]:
    """Read and check everything.

    Raises
    ------
    ConfigError
        A key is unknown (the nearest is named), a value is wrong, or there is no stack.
    """
    options, config = parse_extra(extra, VllmOptions, WHERE)
    if config.events.publish is not None:
        hint = "vLLM publishes KV events itself: use --kv-events-config"
        raise ConfigError(config.events.publish, path="events.publish", hint=hint)
    return options, config


REQUEST = "kv_transfer_params.kvladder"
SECONDS_MAX = 1e9
TEXT_MAX = 400
"""Characters of a warning: what is wrong comes from outside."""

PREFETCH_MAX = 16
"""Sessions that one request may name."""

SessionName = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=200, description="a name, 1 to 200 characters"),
]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX, description="seconds, more than 0")]


class Tiers(Settings, frozen=True, kw_only=True):
    """Levels by name; None stands for all of them."""

    load: tuple[str, ...] | None = None
    store: tuple[str, ...] | None = None


class _Range(Settings, frozen=True, kw_only=True):
    start: Count
    end: Count | None
    priority: Priority
    duration_s: Seconds | None


class RequestPolicy(Settings, frozen=True, kw_only=True, dict=True):
    """What a request says, and so what is done to its blocks."""

    priority: Priority | None = None
    decode_priority: Priority | None = None
    decode_duration_s: Seconds | None = None
    retention: tuple[tuple[Any, ...], ...] = ()
    """``[start, end or null, priority, duration in seconds or null]``, in tokens of the prompt."""
    ttl_s: Seconds | None = None
    session: SessionName | None = None
    pin_s: Seconds | None = None
    """For so long its blocks are worth more than any others."""
    end_session: bool = False
    """Whether this is the session's last request."""
    prefetch: tuple[SessionName, ...] = ()
    """Sessions whose next request is about to come."""
    tiers: Tiers = Tiers()
    save: bool | None = None
    """None saves, unless the engine is a consumer."""
    save_decode: bool | None = None
    """None takes the connector's setting."""

    def __post_init__(self) -> None:
        if self.end_session and self.session is None:
            raise ConfigError("missing", path="session", hint="end_session needs its name")
        for name in ("priority", "decode_priority", "decode_duration_s", "retention"):
            if self.pin_s is not None and getattr(self, name) not in (None, ()):
                hint = "leave one of the two out: a pin is a priority for a while"
                raise ConfigError("stands beside pin_s", path=name, hint=hint)
        if len(self.prefetch) > PREFETCH_MAX:
            what = f"{len(self.prefetch)} sessions"
            raise ConfigError(what, path="prefetch", hint=f"expected {PREFETCH_MAX} at most")
        _ = self.retained  # which is checked as it is made

    @cached_property
    def retained(self) -> Retention | None:
        """None if nothing was said: new blocks get the default, cached ones keep theirs."""
        if self.pin_s is not None:
            pinned = RetentionRange(0, None, PRIORITY_MAX, self.pin_s)
            return Retention((pinned,), PRIORITY_MAX, self.pin_s)
        said = (self.priority, self.decode_priority, self.decode_duration_s, self.retention or None)
        if all(one is None for one in said):
            return None
        default = PRIORITY_DEFAULT if self.priority is None else self.priority
        decode = default if self.decode_priority is None else self.decode_priority
        ranges = tuple(_range(one, f"retention[{i}]") for i, one in enumerate(self.retention))
        try:
            return Retention(ranges, decode, self.decode_duration_s, default)
        except ValueError as error:
            raise ConfigError(str(error), path="retention") from error

    def priorities(
        self, first_block: int, blocks: int, *, block_tokens: int, prompt_tokens: int
    ) -> list[tuple[int, float | None]] | None:
        """Priority and its duration in seconds of consecutive blocks; None: nothing was said."""
        if self.retained is None:
            return None
        wanted = range(first_block, first_block + blocks)
        return self.retained.of_blocks(
            wanted, block_tokens=block_tokens, prompt_tokens=prompt_tokens
        )


NO_POLICY = RequestPolicy()


def _range(raw: Sequence[Any], where: str) -> RetentionRange:
    names = [field.name for field in msgspec.structs.fields(_Range)]
    if len(raw) != len(names):
        hint = "expected [start, end or null, priority, duration_s or null]"
        raise ConfigError(f"{len(raw)} values", path=where, hint=hint)
    found = convert(dict(zip(names, raw, strict=True)), _Range, where)
    try:
        return RetentionRange(found.start, found.end, found.priority, found.duration_s)
    except ValueError as error:
        raise ConfigError(str(error), path=where) from error


class Policies:
    """Reads the parameters of requests for one stack.

    Parameters
    ----------
    map_priority:
        How many points of our priority one step of vLLM's is worth; 0 leaves it out.
    notices:
        Says what is wrong with parameters, once a minute: a client may send them with each request.
    """

    def __init__(self, config: StackConfig, *, map_priority: int, notices: Notices) -> None:
        self._levels = [config.host.name, *(level.name for level in config.levels)]
        self._map = map_priority
        self._notices = notices
        self._plain: dict[int | None, RequestPolicy] = {}
        """Of requests that say nothing, by vLLM's priority as ours."""

    def of(self, request: Any) -> RequestPolicy:
        """The policy of a vLLM request; if its parameters are wrong, a notice and none of them.

        Never raises because of what a request says.
        """
        given: object = getattr(request, "kv_transfer_params", None)
        raw: object = given.get("kvladder") if is_mapping(given) else None
        mapped = self._mapped(getattr(request, "priority", 0))
        if mapped not in self._plain:
            self._plain[mapped] = self._read(None, mapped)
        if raw is None:
            return self._plain[mapped]
        try:
            return self._read(raw, mapped)
        except ConfigError as error:
            self.refuse(request, error)
            return self._plain[mapped]

    def plain(self, request: Any) -> RequestPolicy:
        """The policy of a request that says nothing."""
        return self._plain[self._mapped(getattr(request, "priority", 0))]

    def refuse(
        self, request: Any, error: ConfigError, what: str = "its kvladder parameters are"
    ) -> None:
        """Say that the parameters of a request are wrong, and what is ignored of them."""
        text = f"request {request.request_id}: {error}: {what} ignored"
        printable = "".join(c if c.isprintable() else "?" for c in text)
        self._notices.say("parameters", printable[:TEXT_MAX])

    def _mapped(self, priority: int) -> int | None:
        """VLLM's priority, where lower goes first, as ours; None if it is left out."""
        if not self._map:
            return None
        return max(0, min(PRIORITY_MAX, PRIORITY_DEFAULT - self._map * priority))

    def _read(self, raw: object, mapped: int | None) -> RequestPolicy:
        _require_text_keys(raw, REQUEST)
        said: object = {} if raw is None else raw
        if mapped is not None and is_mapping(said) and said.get("priority") is None:
            raw = {**said, "priority": mapped}
        policy = convert(raw, RequestPolicy, REQUEST)
        for key in keys_of(Tiers):
            for i, name in enumerate(getattr(policy.tiers, key) or ()):
                if name not in self._levels:
                    where = f"{REQUEST}.tiers.{key}[{i}]"
                    raise ConfigError(repr(name), path=where, hint=nearest(name, self._levels))
        return policy


def _require_text_keys(raw: object, path: str) -> None:
    """Refuse what cannot come from JSON, before anybody looks closer."""
    if is_mapping(raw):
        keyed: dict[Any, object] = raw  # whatever its keys are
        for key, value in keyed.items():
            if not isinstance(key, str):
                raise ConfigError(shown(path, key), path=path, hint="expected keys that are text")
            _require_text_keys(value, f"{path}.{key}")
    elif isinstance(raw, float) and not isfinite(raw):
        raise ConfigError(repr(raw), path=path, hint="expected a number")
