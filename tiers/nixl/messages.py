"""What two ends say to each other beside the data: one frame a message, a byte and msgpack.

The byte is the version, so that ends of any two versions understand that they do not understand
each other. What comes from the other end is bounded before anybody looks at it, keys and labels
are packed into one piece of bytes, and every operation has a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Annotated, Any, cast

import msgspec

from kvladder.keys import KEY_BYTES, SALT_BYTES
from kvladder.policy.eviction import PRIORITY_MAX
from kvladder.tiers.label import LABEL_BYTES, Facts
from kvladder.tiers.nixl.plane import Area

VERSION = 1
FRAME_BYTES_MAX = 1 << 20
BATCH_MAX = 64
"""Blocks of a get or a put."""
LOOKUP_MAX = 16384
"""Keys of a lookup or a removal."""
REFUSED = -1
"""Instead of a slot: the block is not wanted, or there is no room for it."""
HAVE = -2
"""Instead of a slot: the block is there."""
LATER = -3
"""Instead of a slot: it may be offered again once what was granted is committed."""
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
"""Facts."""


class WireError(ValueError):
    """What came is no message of this version, or says what cannot be."""


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """One of either end; answers have the number of what they answer."""

    op: Int


# ---- from the client


class Ping(Message, frozen=True):
    """Whether anybody is there; answered by ``Pong``, with or without a session."""


class Hello(Message, frozen=True):
    """Begin a session; answered by ``Welcome``."""

    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    block_bytes: Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)]
    area: tuple[Int, Int, Int]
    """Address, slot bytes, slots."""


class Lookup(Message, frozen=True):
    """Which of these are there; answered by ``Found``."""

    keys: Keys


class Get(Message, frozen=True):
    """Write these blocks into those slots of the client's; answered by ``Got``."""

    keys: Keys
    slots: Slots


class Offer(Message, frozen=True):
    """Which of these blocks may be written, and where; answered by ``Grant``."""

    keys: Keys
    lengths: Lengths
    facts: Annotated[list[Row], msgspec.Meta(max_length=BATCH_MAX)]


class Commit(Message, frozen=True):
    """What was granted to the offer of this number is written; answered by ``Stored``."""

    labels: Labels
    """Of the whole offer; zeros for a block that was granted no slot."""


class Abort(Message, frozen=True):
    """Give up another operation; answered by ``Done`` when that touches no slot any more."""

    of: Int


class Remove(Message, frozen=True):
    """Forget these; answered by ``Done``."""

    keys: Keys


class Purge(Message, frozen=True):
    """Forget all of this client's namespace, or of one salt in it; answered by ``Done``."""

    salt: Salt | None


class Bye(Message, frozen=True):
    """The session is over; not answered."""


Request = Ping | Hello | Lookup | Get | Offer | Commit | Abort | Remove | Purge | Bye


# ---- from the far end


class Pong(Message, frozen=True):
    """It is there."""

    known: bool
    """Whether there is a session."""


class Welcome(Message, frozen=True):
    """The session has begun."""

    metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)]
    area: tuple[Int, Int, Int]
    writable: bool


class Found(Message, frozen=True):
    """A byte for each key, 1 if it is there."""

    have: Annotated[bytes, msgspec.Meta(max_length=LOOKUP_MAX)]


class Got(Message, frozen=True):
    """Those of a length above 0 are in their slots."""

    lengths: Lengths
    labels: Labels


class Grant(Message, frozen=True):
    """Slots to write to; REFUSED, HAVE, or LATER."""

    slots: Slots


class Stored(Message, frozen=True):
    """A byte for each block of the offer, 1 if it can be got from now on."""

    stored: Annotated[bytes, msgspec.Meta(max_length=BATCH_MAX)]


class Done(Message, frozen=True):
    """It is done, to so many blocks."""

    count: Int = 0


class Failed(Message, frozen=True):
    """It is not done and never will be."""

    why: Annotated[str, msgspec.Meta(max_length=WHY_MAX)]
    final: bool = False
    """Whether the same would be answered again."""


class Gone(Message, frozen=True):
    """There is no session any more."""

    why: Annotated[str, msgspec.Meta(max_length=WHY_MAX)]


Reply = Pong | Welcome | Found | Got | Grant | Stored | Done | Failed | Gone

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder[Request](Request)
_replies = msgspec.msgpack.Decoder[Reply](Reply)
_FIRST = bytes([VERSION])


def frame(message: Message) -> bytes:
    """A message as it is sent."""
    return _FIRST + _encoder.encode(message)


def request(data: bytes) -> Request:
    """What a client sent; raises WireError."""
    return cast("Request", _decoded(data, _requests))


def reply(data: bytes) -> Reply:
    """What a far end sent; raises WireError."""
    return cast("Reply", _decoded(data, _replies))


def _decoded(data: bytes, decoder: Any) -> Any:
    if data[:1] != _FIRST:
        said = f"version {data[0]}" if data else "nothing"
        raise WireError(f"it speaks {said} of the protocol, and this end version {VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"it does not keep to the protocol: {error}") from error


def keys_in(packed: bytes, count: int | None = None) -> list[bytes]:
    """Keys out of one piece, so many, no one twice; raises WireError."""
    keys = _parts(packed, KEY_BYTES)
    if len({*keys}) != len(keys) or count not in {None, len(keys)}:
        raise WireError("keys that are too few, too many, or there twice")
    return keys


def labels_in(packed: bytes, count: int) -> list[bytes]:
    """As many labels out of one piece; those that are all zeros are empty. Raises WireError."""
    labels = _parts(packed, LABEL_BYTES)
    if len(labels) != count:
        raise WireError(f"{len(labels)} labels for {count} blocks")
    return [label if any(label[:8]) else b"" for label in labels]


def labels_packed(labels: Iterable[bytes]) -> bytes:
    """Labels in one piece; those that are empty become zeros."""
    return b"".join(label or bytes(LABEL_BYTES) for label in labels)


def _parts(packed: bytes, size: int) -> list[bytes]:
    if len(packed) % size:
        raise WireError(f"{len(packed)} bytes are no multiple of {size}")
    return [packed[at : at + size] for at in range(0, len(packed), size)]


def facts_in(rows: Sequence[Row]) -> list[Facts]:
    """What an offer says of its blocks; raises WireError."""
    facts = [Facts(*row) for row in rows]
    for one in facts:
        if len(one.salt) not in {0, SALT_BYTES} or not isfinite(one.expires_wall_s or 0.0):
            raise WireError("a salt or an end that cannot be")
    return facts


def area_in(told: tuple[int, int, int], block_bytes: int) -> Area:
    """Slots that blocks of this length fit into; raises WireError."""
    area = Area(*told)
    if not 0 < area.slots < 1 << 31 or not block_bytes <= area.slot_bytes < 1 << 40:
        what = f"{area.slots} slots of {area.slot_bytes} bytes"
        raise WireError(f"{what} cannot hold blocks of {block_bytes} bytes")
    return area
