"""The protocol between an isolated tier and its child: frames of msgpack over a socket pair.

A frame is 4 bytes of length, little endian, and a message. Messages contain no bytes of blocks,
since both sides map the arena.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from kvladder.tiers.label import Coding, Facts, ReadResult, RecoveredBlock, Ref

FRAME_BYTES_MAX = 256 << 20
UNHEARD = b"\xff" * 8
"""Stands, in answers about spare blocks, for every salt without a put so far."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message of either side; an answer has the number of its request."""

    number: int = 0


# ---- requests to the child


class Start(Message):
    """Construct the tier, without opening it."""

    pickled: bytes = b""
    """The tier's class and options."""


class Open(Message):
    """Map the arena and open the tier."""

    arena: tuple[int, int, int] = (0, 0, 0)
    """Descriptor, number of slots, bytes of a slot."""
    pickled: bytes = b""
    """Layout, namespace, capacity, timeout, ``required`` and fields of the context."""


class Examine(Message):
    """Call ``Tier.examine``."""

    capacity_bytes: int = 0


class Get(Message):
    """Call ``Tier.get``; ``Got`` answers it."""

    verify: bool = True
    reads: list[tuple[Ref, int]] = []
    """Each block with its slot."""


class Put(Message):
    """Call ``Tier.put``."""

    verify: bool = True
    writes: list[tuple[Ref, int, Facts, Coding | None, bool]] = []
    """Each block with its slot, its facts, its coding, and whether it replaces another block."""


class Ask(Message):
    """Call ``Tier.contains`` or ``Tier.remove``."""

    call: Literal["contains", "remove"] = "contains"
    blocks: list[Ref] = []


class Purge(Message):
    """Call ``Tier.purge``."""

    salt: bytes | None = None


class Erase(Message):
    """Call ``Tier.erase``."""

    salt: bytes | None = None
    start: int = 0


class Spare(Message):
    """Call ``Tier.spare`` for some salts."""

    salts: list[bytes] = []


class Recover(Message):
    """Return the next batch of ``Tier.recover``, or begin ``anew``; ``Recovered`` answers it."""

    anew: bool = True


class Close(Message):
    """Call ``Tier.aclose``."""


class Cancel(Message):
    """Cancel the call with this number. The call is still answered."""


Request = (
    Start | Open | Examine | Get | Put | Ask | Purge | Erase | Spare | Recover | Close | Cancel
)


# ---- answers of the child


class Done(Message):
    """The result of a call, as plain data."""

    value: Any = None
    spare: dict[bytes, float] = {}
    """``Tier.spare`` of the salts in a ``Spare``, or of a put's salts after it; after ``Open``, of
    ``UNHEARD``."""
    gauges: dict[str, int] = {}


class Got(Message):
    """The result of ``Tier.get``, and of its reads."""

    results: Any = None
    found: list[ReadResult | None] = []
    """For each read, what ``Read.came`` reported and ``Read.check`` found; None without either."""
    gauges: dict[str, int] = {}


class Recovered(Message):
    """A batch of recovered blocks; None after the last batch."""

    kept: list[RecoveredBlock] | None = None


class Failed(Message):
    """The error that a call raised."""

    kind: Literal["config", "unavailable", "full", "tier", "cancelled"] = "tier"
    message: str = ""
    path: str = ""
    hint: str = ""
    temporary: bool = True


class Progressed(Message):
    """The progress of a purge."""

    done: int = 0
    total: int = 0


class Said(Message):
    """A message of ``TierContext.say``, or a warning of ``Tier.examine``."""

    text: str = ""


Reply = Done | Got | Recovered | Failed | Progressed | Said

_encoder = msgspec.msgpack.Encoder()
requests = msgspec.msgpack.Decoder[Request](Request)
replies = msgspec.msgpack.Decoder[Reply](Reply)


def frame(message: Message) -> bytes:
    """Return a message as a frame to send.

    Raises
    ------
    TypeError
        The message holds something other than plain data.
    """
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


async def take(reader: asyncio.StreamReader) -> bytes:
    """Read the next frame and return its message, still encoded.

    Raises
    ------
    ConnectionError
        The other side is gone.
    ValueError
        The frame is longer than ``FRAME_BYTES_MAX``.
    """
    try:
        size = int.from_bytes(await reader.readexactly(4), "little")
        if size > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {size} bytes, at most {FRAME_BYTES_MAX} are allowed")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the other side is gone") from error
