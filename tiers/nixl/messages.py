"""Messages of the control channel: each is one frame, a byte for the version and then msgpack.

The version byte comes first in every version, so that two ends always notice a mismatch. The
sizes of received messages are bounded before their content is used. Keys and labels are packed
into one piece of bytes. Every operation has a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Annotated, Any, cast

import msgspec

from kvladder.keys import KEY_BYTES, SALT_BYTES
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers import label
from kvladder.tiers.label import LABEL_BYTES, Facts
from kvladder.tiers.nixl.plane import Area

VERSION = label.VERSION
"""Version of the protocol. Labels are sent as they are, so it rises with theirs."""
FRAME_BYTES_MAX = 1 << 20
BATCH_MAX = 64
"""Most blocks of a get or a put."""
LOOKUP_MAX = 16384
"""Most keys of a lookup or a removal."""
REFUSED = -1
"""Stands for a slot: the block is not wanted, or there is no room for it."""
HAVE = -2
"""Stands for a slot: the far end already has the block."""
LATER = -3
"""Stands for a slot: offer the block again once the granted slots are committed."""
METADATA_BYTES_MAX = 64 << 10
WHY_MAX = 400

Int = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Slots = Annotated[
    list[Annotated[int, msgspec.Meta(ge=-3, lt=1 << 31)]], msgspec.Meta(max_length=BATCH_MAX)
]
Lengths = Annotated[list[Int], msgspec.Meta(max_length=BATCH_MAX)]
Keys = Annotated[bytes, msgspec.Meta(max_length=LOOKUP_MAX * KEY_BYTES)]
Labels = Annotated[bytes, msgspec.Meta(max_length=BATCH_MAX * LABEL_BYTES)]
Priority = Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)]
Salt = Annotated[bytes, msgspec.Meta(max_length=SALT_BYTES)]
Row = tuple[Priority, Priority, float | None, Salt, Annotated[int, msgspec.Meta(ge=0, le=7)]]
"""The fields of ``Facts``, in their order."""


class WireError(ValueError):
    """The received data is not a message of this version, or its content is invalid."""


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The base of all messages, of both ends."""

    op: Int
    """Number of the operation; an answer has the number of its request."""


# ---- from the client


class Ping(Message, frozen=True):
    """Check that the far end is alive; answered by ``Pong``, with or without a session."""


class Hello(Message, frozen=True):
    """Begin a session; answered by ``Welcome``."""

    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    block_bytes: Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)]
    area: tuple[Int, Int, Int]
    """Address, slot size in bytes, and number of slots."""


class Lookup(Message, frozen=True):
    """Ask which of these blocks the far end has; answered by ``Found``."""

    keys: Keys


class Get(Message, frozen=True):
    """Ask for these blocks to be written into these slots of the client; answered by ``Got``."""

    keys: Keys
    slots: Slots


class Offer(Message, frozen=True):
    """Offer blocks, and ask which may be written and to which slots; answered by ``Grant``."""

    keys: Keys
    lengths: Lengths
    facts: Annotated[list[Row], msgspec.Meta(max_length=BATCH_MAX)]


class Commit(Message, frozen=True):
    """Report that the slots granted to this operation are written; answered by ``Stored``."""

    labels: Labels
    """Labels of the whole offer; zeros for a block that was granted no slot."""


class Abort(Message, frozen=True):
    """Abort operation ``of``; answered by ``Done`` once that touches no slot any more."""

    of: Int


class Remove(Message, frozen=True):
    """Remove these blocks; answered by ``Done``."""

    keys: Keys


class Purge(Message, frozen=True):
    """Remove all blocks of the client's namespace, or of one salt; answered by ``Done``."""

    salt: Salt | None


class Survey(Message, frozen=True):
    """Ask which blocks of the client's namespace, or of one salt, are there; see ``Listed``."""

    salt: Salt | None
    of: Int = 0
    """Number of the first such message, to go on; 0 to begin."""


class Bye(Message, frozen=True):
    """End the session; not answered."""


Request = Ping | Hello | Lookup | Get | Offer | Commit | Abort | Remove | Purge | Survey | Bye


# ---- from the far end


class Pong(Message, frozen=True):
    """The far end is alive."""

    known: bool
    """True if the far end has a session with this client."""


class Welcome(Message, frozen=True):
    """The session has begun."""

    metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)]
    area: tuple[Int, Int, Int]
    writable: bool
    surveys: bool = False
    """True if it answers ``Survey``; older far ends do not."""


class Found(Message, frozen=True):
    """A byte for each key of a lookup: 1 if the far end has the block, else 0."""

    have: Annotated[bytes, msgspec.Meta(max_length=LOOKUP_MAX)]


class Got(Message, frozen=True):
    """The blocks with a length above 0 have been written into their slots."""

    lengths: Lengths
    labels: Labels


class Grant(Message, frozen=True):
    """For each offered block, a slot to write to, or REFUSED, HAVE or LATER."""

    slots: Slots


class Stored(Message, frozen=True):
    """A byte for each block of the offer: 1 if it can be got from now on, else 0."""

    stored: Annotated[bytes, msgspec.Meta(max_length=BATCH_MAX)]


class Done(Message, frozen=True):
    """The request was carried out, for ``count`` blocks."""

    count: Int = 0


class Listed(Message, frozen=True):
    """Some of the blocks that are there; ask again with the first number for the others."""

    keys: Annotated[bytes, msgspec.Meta(max_length=BATCH_MAX * KEY_BYTES)]
    more: bool


class Failed(Message, frozen=True):
    """The request failed, and has no effect later either."""

    why: Annotated[str, msgspec.Meta(max_length=WHY_MAX)]
    final: bool = False
    """True if a retry would fail again."""


class Gone(Message, frozen=True):
    """The session has ended."""

    why: Annotated[str, msgspec.Meta(max_length=WHY_MAX)]


Reply = Pong | Welcome | Found | Got | Grant | Stored | Done | Listed | Failed | Gone

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder[Request](Request)
_replies = msgspec.msgpack.Decoder[Reply](Reply)
_FIRST = bytes([VERSION])


def frame(message: Message) -> bytes:
    """Return the frame of a message."""
    return _FIRST + _encoder.encode(message)


def request(data: bytes) -> Request:
    """Decode a client's frame; raise WireError if it is invalid."""
    return cast("Request", _decoded(data, _requests))


def reply(data: bytes) -> Reply:
    """Decode a far end's frame; raise WireError if it is invalid."""
    return cast("Reply", _decoded(data, _replies))


def _decoded(data: bytes, decoder: Any) -> Any:
    if data[:1] != _FIRST:
        said = f"version {data[0]}" if data else "no version"
        raise WireError(f"it uses {said} of the protocol, but this end uses version {VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"it does not keep to the protocol: {error}") from error


def keys_in(packed: bytes, count: int | None = None) -> list[bytes]:
    """Return the keys packed in one piece; raise WireError on a wrong count or a duplicate."""
    keys = _parts(packed, KEY_BYTES)
    if len({*keys}) != len(keys) or count not in {None, len(keys)}:
        raise WireError("too few, too many or duplicate keys")
    return keys


def labels_in(packed: bytes, count: int) -> list[bytes]:
    """Return the labels packed in one piece; raise WireError on a wrong count.

    A label that begins with zeros stands for none, and is returned as empty bytes.
    """
    labels = _parts(packed, LABEL_BYTES)
    if len(labels) != count:
        raise WireError(f"{len(labels)} labels for {count} blocks")
    return [label if any(label[:8]) else b"" for label in labels]


def labels_packed(labels: Iterable[bytes]) -> bytes:
    """Pack labels into one piece; empty labels become zeros."""
    return b"".join(label or bytes(LABEL_BYTES) for label in labels)


def _parts(packed: bytes, size: int) -> list[bytes]:
    if len(packed) % size:
        raise WireError(f"expected a multiple of {size} bytes, found {len(packed)}")
    return [packed[at : at + size] for at in range(0, len(packed), size)]


def facts_in(rows: Sequence[Row]) -> list[Facts]:
    """Return the facts of an offer's blocks; raise WireError if they are invalid."""
    facts = [Facts(*row) for row in rows]
    for one in facts:
        if len(one.salt) not in {0, SALT_BYTES} or not isfinite(one.expires_wall_s or 0.0):
            raise WireError("an invalid salt or expiry time")
    return facts


def area_in(told: tuple[int, int, int], block_bytes: int) -> Area:
    """Return the other end's slots; raise WireError unless blocks of this length fit."""
    area = Area(*told)
    if not 0 < area.slots < 1 << 31 or not block_bytes <= area.slot_bytes < 1 << 40:
        what = f"{area.slots} slots of {area.slot_bytes} bytes"
        raise WireError(f"{what} cannot hold blocks of {block_bytes} bytes")
    return area
