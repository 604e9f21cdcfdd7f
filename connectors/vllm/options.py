"""Settings from users: the connector's own at engine start, and parameters of each request."""

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
    """The connector's own settings; all other settings belong to the stack."""

    load: Literal["async", "sync", "layers"] = "async"
    """The time when blocks are loaded.

    ``async``: between the engine's steps. ``sync``: before the step that reads them. ``layers``:
    while that step computes its layers, if computing takes at least as long as copying.
    """
    save_decode: bool = True
    """True if blocks of generated tokens are also saved."""
    on_reset: Literal["forget", "keep"] = "forget"
    """The action for blocks that no other engine has, when vLLM resets the connector's cache."""
    map_priority: Count = 0
    """Points of kvladder's priority for one step of vLLM's priority; 0 ignores vLLM's."""


def parse(extra: Mapping[str, Any]) -> tuple[VllmOptions, StackConfig]:
    """Read and check the connector's settings and the stack.

    Raises
    ------
    ConfigError
        A key is unknown (the error names the nearest one), a value is wrong, no stack is given,
        or the stack publishes events itself.
    """
    options, config = parse_extra(extra, VllmOptions, WHERE)
    if config.events.publish is not None:
        hint = "vLLM publishes KV events itself: use --kv-events-config"
        raise ConfigError(config.events.publish, path="events.publish", hint=hint)
    return options, config


REQUEST = "kv_transfer_params.kvladder"
SECONDS_MAX = 1e9
TEXT_MAX = 400
"""Maximum length of a warning in characters, since it quotes text from clients."""

PREFETCH_MAX = 16
"""Maximum number of sessions in one request's ``prefetch``."""

SessionName = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=200, description="a name, 1 to 200 characters"),
]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=SECONDS_MAX, description="seconds, more than 0")]


class Tiers(Settings, frozen=True, kw_only=True):
    """Names of the levels that a request loads from and stores to; None stands for all levels."""

    load: tuple[str, ...] | None = None
    store: tuple[str, ...] | None = None


class _Range(Settings, frozen=True, kw_only=True):
    start: Count
    end: Count | None
    priority: Priority
    duration_s: Seconds | None


class RequestPolicy(Settings, frozen=True, kw_only=True, dict=True):
    """The parameters of a request that decide how its blocks are handled."""

    priority: Priority | None = None
    decode_priority: Priority | None = None
    decode_duration_s: Seconds | None = None
    retention: tuple[tuple[Any, ...], ...] = ()
    """Ranges ``[start, end or null, priority, duration in seconds or null]``.

    ``start`` and ``end`` count tokens of the prompt.
    """
    ttl_s: Seconds | None = None
    session: SessionName | None = None
    pin_s: Seconds | None = None
    """Seconds during which its blocks have the highest priority."""
    end_session: bool = False
    """True if this is the session's last request."""
    prefetch: tuple[SessionName, ...] = ()
    """Sessions that will soon send their next request."""
    tiers: Tiers = Tiers()
    report: bool = False
    """True if its answer says where its prompt came from, and why the rest was computed."""
    save: bool | None = None
    """True if its blocks are saved. None saves them, unless the engine is a consumer."""
    save_decode: bool | None = None
    """True if blocks of its generated tokens are saved. None uses the connector's setting."""

    def __post_init__(self) -> None:
        if self.end_session and self.session is None:
            raise ConfigError(
                "missing", path="session", hint="end_session needs the session's name"
            )
        for name in ("priority", "decode_priority", "decode_duration_s", "retention"):
            if self.pin_s is not None and getattr(self, name) not in (None, ()):
                hint = "leave one of the two out: pin_s sets the highest priority"
                raise ConfigError("cannot be combined with pin_s", path=name, hint=hint)
        if len(self.prefetch) > PREFETCH_MAX:
            what = f"{len(self.prefetch)} sessions"
            raise ConfigError(what, path="prefetch", hint=f"expected at most {PREFETCH_MAX}")
        _ = self.retained  # building it checks the values

    @cached_property
    def retained(self) -> Retention | None:
        """The priorities of its blocks; None if the request gives no priority.

        Without any, new blocks get the default, and cached blocks keep theirs.
        """
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
        """Return priority and its duration in seconds for each of some consecutive blocks.

        None if the request gives no priority.
        """
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
        Points of kvladder's priority for one step of vLLM's priority; 0 ignores vLLM's.
    notices:
        Reports wrong parameters at most once a minute, since a client may send them with each
        request.
    """

    def __init__(self, config: StackConfig, *, map_priority: int, notices: Notices) -> None:
        self._levels = [config.host.name, *(level.name for level in config.levels)]
        self._map = map_priority
        self._notices = notices
        self._plain: dict[int | None, RequestPolicy] = {}
        """Policies of requests without parameters, by vLLM's priority mapped to ours."""

    def of(self, request: Any) -> RequestPolicy:
        """Return the policy of a vLLM request.

        If its parameters are wrong, report that, and return the policy without them. No parameter
        makes this method raise.
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
        """Return the policy that the request would have without parameters."""
        return self._plain[self._mapped(getattr(request, "priority", 0))]

    def refuse(
        self, request: Any, error: ConfigError, what: str = "its kvladder parameters are"
    ) -> None:
        """Report that a request's parameters are wrong, and which of them are ignored."""
        text = f"request {request.request_id}: {error}: {what} ignored"
        printable = "".join(c if c.isprintable() else "?" for c in text)
        self._notices.say("parameters", printable[:TEXT_MAX])

    def _mapped(self, priority: int) -> int | None:
        """Return vLLM's priority (lower is first) as kvladder's; None if it is ignored."""
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
    """Raise ConfigError if a value has keys or numbers that JSON cannot have."""
    if is_mapping(raw):
        keyed: dict[Any, object] = raw  # keys of any type
        for key, value in keyed.items():
            if not isinstance(key, str):
                raise ConfigError(shown(path, key), path=path, hint="expected keys that are text")
            _require_text_keys(value, f"{path}.{key}")
    elif isinstance(raw, float) and not isfinite(raw):
        raise ConfigError(repr(raw), path=path, hint="expected a number")
