"""The engines' hint protocol as data: envelopes, actions, the payloads of five verbs, outcomes.

The envelope is that of vLLM 0.33 (``vllm/v1/kv_hints/protocol.py``, RFC vllm-project/vllm#53421)
and SGLang 0.5.23 (``sglang/srt/managers/kv_hints.py``). Both leave payloads to the cache that acts
on them. The payloads here are kvladder's, version 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, get_args

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


class RefusedHint(ValueError):
    """An envelope or an action that cannot be done as it is, and why."""


def read(envelope: object) -> HintsEnvelope:
    """Return an envelope from an engine's object, a mapping, or JSON text.

    Raises
    ------
    RefusedHint
        It is no envelope; says which field is wrong.
    """
    try:
        if isinstance(envelope, str | bytes | bytearray):
            found = msgspec.json.decode(envelope, type=HintsEnvelope)
        else:
            found = msgspec.convert(envelope, HintsEnvelope, from_attributes=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedHint(f"not an envelope of hints: {error}") from error
    if not 0 < len(found.message_id) <= ID_MAX:
        raise RefusedHint(
            f"message_id has {len(found.message_id)} characters: expected 1 to {ID_MAX}"
        )
    return found


def content_of(actions: Sequence[HintAction]) -> int:
    """Return a hash of actions with their payloads, to tell whether a message is a repeated one.

    Raises
    ------
    RefusedHint
        A payload has values that JSON cannot have.
    """
    try:
        return hash(msgspec.msgpack.encode(actions))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RefusedHint(f"not an envelope of hints: {error}") from error


def order_of(action: HintAction) -> Order:
    """Return the payload of an action, checked.

    Raises
    ------
    RefusedHint
        Its type or version is unknown, or its payload is wrong; says what was expected.
    """
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
