"""The engines' hint protocol as data: envelopes, actions, the payloads of five verbs, outcomes.

The envelope is that of vLLM 0.33 (``vllm/v1/kv_hints/protocol.py``, RFC vllm-project/vllm#53421)
and SGLang 0.5.23 (``sglang/srt/managers/kv_hints.py``). Both leave payloads to the cache that acts
on them. The payloads here are kvladder's, version 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    get_args,
)

import msgspec

from kvladder.keys import KEY_BYTES

Outcome = Literal["accepted", "clipped", "deferred", "rejected", "missing"]
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
Verb = Literal["pin", "retain", "prefetch", "demote", "share"]
VERBS: Final[tuple[Verb, ...]] = get_args(Verb)
VERSIONS: Final = ("0.1", "1", "1.0")
"""Versions of the envelope, and of actions, that are understood."""

ACTIONS_MAX = 64
"""Largest number of actions in an envelope; the rest is rejected."""
ID_MAX = 256
"""Largest number of characters of an id, a session or a salt."""
TOKENS_MAX = 1 << 20
KEYS_MAX = 1 << 16
TTL_MAX_S = 10 * 366 * 86400.0


class HintAction(msgspec.Struct, frozen=True):
    """One action of an envelope; ``payload`` is read by its type and version."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] = {}


class HintsEnvelope(msgspec.Struct, frozen=True):
    """Actions that are sent together. Its id makes it safe to send again."""

    protocol_version: str
    message_id: str
    actions: list[HintAction] = []


class Action(Protocol):
    """An action as it was sent, or one whose payload was read with its envelope."""

    @property
    def action_id(self) -> str: ...
    @property
    def action_type(self) -> str: ...


class Envelope(Protocol):
    """An envelope whose actions are read, or are to be read one by one."""

    @property
    def protocol_version(self) -> str: ...
    @property
    def message_id(self) -> str: ...
    @property
    def actions(self) -> Sequence[Action]: ...


class PartialEnvelope(NamedTuple):
    """Some of the actions of an envelope."""

    protocol_version: str
    message_id: str
    actions: Sequence[Action]


class ActionResult(NamedTuple):
    """What became of one action."""

    action_id: str
    outcome: Outcome
    why: str = ""
    """Reason for any outcome but ``accepted``; what was done instead if it was clipped."""
    blocks: int = 0
    """Number of blocks that the action was done for, or that it began to bring."""


Identifier: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=ID_MAX)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=TTL_MAX_S)]
Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=100)]
HexKey: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
Tokens: TypeAlias = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], msgspec.Meta(max_length=TOKENS_MAX)
]
Keys: TypeAlias = Annotated[list[HexKey], msgspec.Meta(max_length=KEYS_MAX)]


class Scope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The blocks that an action is about; without any field, those of its own request."""

    tokens: Tokens | None = None
    """Tokens of a prefix, from its start."""
    keys: Keys | None = None
    """Keys of blocks in hexadecimal; of a prefix in its order if ``prefetch`` names them."""
    session: Identifier | None = None
    """Session whose last finished request had the blocks."""
    salt: Annotated[str, msgspec.Meta(max_length=ID_MAX)] | None = None
    """The cache salt that is bound into the keys; by default that of the request."""

    def __post_init__(self) -> None:
        if self.tokens is None and (self.keys is None or self.session is None):
            return  # quick: it is asked for each action
        named = [name for name in ("tokens", "keys", "session") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"{named[0]} and {named[1]} are both given: expected one of them")


class RetainHint(Scope, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give blocks a priority, for a time or for good."""

    priority: Priority
    ttl_s: Seconds | None = None


class PinHint(Scope, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give blocks the highest priority that the operator allows, for a time."""

    ttl_s: Seconds


class PrefetchHint(Scope, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bring a prefix up to host memory before its request comes."""

    budget_blocks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Largest number of blocks to bring; None for the whole prefix."""
    deadline_s: Seconds | None = None
    """Time after which blocks that have not come are given up; None for the configured one."""
    cancels: Identifier | None = None
    """Message whose prefetches end now, instead of beginning one."""


class DemoteHint(Scope, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Move blocks out of the levels above ``to``."""

    to: Identifier | None = None
    """Name of a level; ``out`` to forget them; None for the level below host that takes them."""


class ShareHint(Scope, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Write blocks to a tier that other engines read."""

    to: Identifier | None = None
    """Name of a level; None for the first shared one."""


Order: TypeAlias = PinHint | RetainHint | PrefetchHint | DemoteHint | ShareHint
_PAYLOADS: Final[Mapping[str, type[Order]]] = {
    "pin": PinHint,
    "retain": RetainHint,
    "prefetch": PrefetchHint,
    "demote": DemoteHint,
    "share": ShareHint,
}


Version: TypeAlias = Literal["0.1", "1", "1.0"]


class _Read(msgspec.Struct, frozen=True, tag_field="action_type"):
    """An action of a known type and version with its payload."""

    action_type: ClassVar[Verb]
    action_id: str
    action_version: Version


class _Pin(_Read, frozen=True, tag="pin"):
    action_type = "pin"
    payload: PinHint


class _Retain(_Read, frozen=True, tag="retain"):
    action_type = "retain"
    payload: RetainHint


class _Prefetch(_Read, frozen=True, tag="prefetch"):
    action_type = "prefetch"
    payload: PrefetchHint = PrefetchHint()


class _Demote(_Read, frozen=True, tag="demote"):
    action_type = "demote"
    payload: DemoteHint = DemoteHint()


class _Share(_Read, frozen=True, tag="share"):
    action_type = "share"
    payload: ShareHint = ShareHint()


_READ: Final = _Pin, _Retain, _Prefetch, _Demote, _Share


class _ReadEnvelope(msgspec.Struct, frozen=True):
    """An envelope in which every action is valid."""

    protocol_version: str
    message_id: str
    actions: list[_Pin | _Retain | _Prefetch | _Demote | _Share] = []


_decode_all: Final = msgspec.json.Decoder(_ReadEnvelope).decode
_decode_each: Final = msgspec.json.Decoder(HintsEnvelope).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class RefusedHint(ValueError):
    """An envelope or an action that cannot be done as it is, and why."""


def read(envelope: object) -> Envelope:
    """Return an envelope from an engine's object, a mapping, or JSON text.

    Mostly all actions are valid, and their payloads are read at once. Otherwise ``order_of`` reads
    them one by one.

    Raises
    ------
    RefusedHint
        It is no envelope; says which field is wrong.
    """
    try:
        found = _read_all(envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = _read_each(envelope)
    if not 0 < len(found.message_id) <= ID_MAX:
        raise RefusedHint(
            f"message_id has {len(found.message_id)} characters: expected 1 to {ID_MAX}"
        )
    return found


def _read_all(envelope: object) -> Envelope:
    if isinstance(envelope, str | bytes | bytearray):
        return _decode_all(envelope)
    if isinstance(envelope, HintsEnvelope):
        return envelope
    return msgspec.convert(envelope, _ReadEnvelope)


def _read_each(envelope: object) -> Envelope:
    try:
        if isinstance(envelope, str | bytes | bytearray):
            return _decode_each(envelope)
        return msgspec.convert(envelope, HintsEnvelope, from_attributes=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedHint(f"not an envelope of hints: {error}") from error


def content_of(actions: Sequence[Action]) -> int:
    """Return a hash of actions with their payloads, to tell whether a message is a repeated one.

    Raises
    ------
    RefusedHint
        A payload has values that JSON cannot have.
    """
    try:
        return hash(_encode(actions))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RefusedHint(f"not an envelope of hints: {error}") from error


def order_of(action: Action) -> Order:
    """Return the payload of an action, checked.

    Raises
    ------
    RefusedHint
        Its type or version is unknown, or its payload is wrong; says what was expected.
    """
    if isinstance(action, _READ):
        return action.payload
    assert isinstance(action, HintAction)
    kind = _PAYLOADS.get(action.action_type.lower())
    if kind is None:
        expected = ", ".join(VERBS)
        raise RefusedHint(f"unknown action {action.action_type[:32]!r}: expected one of {expected}")
    if action.action_version not in VERSIONS:
        version = action.action_version[:32]
        raise RefusedHint(
            f"unknown version {version!r} of {action.action_type.lower()}: expected 1"
        )
    try:
        return msgspec.convert(action.payload, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RefusedHint(str(error)) from error
