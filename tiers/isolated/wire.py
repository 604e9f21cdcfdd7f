"""What an isolated tier and its process say to each other: frames of msgpack over a socket pair.

A frame is 4 bytes of length, little endian, and a message. The bytes of blocks are in no message:
both sides map the arena.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from kvladder.tiers.label import Coding, Facts, ReadResult, RecoveredBlock, Ref

FRAME_BYTES_MAX = 256 << 20
UNHEARD = b"\xff" * 8
"""Stands for any salt of which nothing was put yet, where it is asked what it has to spare."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """One of either side; answers have the number of what they answer."""

    number: int = 0


# ---- what the process is asked


class Start(Message):
    """Make the tier, which is not opened yet."""

    pickled: bytes = b""
    """Its class and its options."""


class Open(Message):
    """Map the arena and open the tier."""

    arena: tuple[int, int, int] = (0, 0, 0)
    """Descriptor, slots, bytes of a slot."""
    pickled: bytes = b""
    """Layout, namespace, capacity and time-out of the context."""


class Examine(Message):
    """``Tier.examine``."""

    capacity_bytes: int = 0


class Get(Message):
    """``Tier.get``; answered by ``Got``."""

    verify: bool = True
    reads: list[tuple[Ref, int]] = []
    """Each block and its slot."""


class Put(Message):
    """``Tier.put``."""

    verify: bool = True
    writes: list[tuple[Ref, int, Facts, Coding | None, bool]] = []
    """Each block, its slot, its facts, what codecs did to it, and whether it replaces another."""


class Ask(Message):
    """``Tier.contains`` or ``Tier.remove``."""

    call: Literal["contains", "remove"] = "contains"
    blocks: list[Ref] = []


class Purge(Message):
    """``Tier.purge``."""

    salt: bytes | None = None


class Erase(Message):
    """``Tier.erase``."""

    salt: bytes | None = None
    start: int = 0


class Spare(Message):
    """``Tier.spare`` of some salts."""

    salts: list[bytes] = []


class Recover(Message):
    """The next batch of ``Tier.recover``, or the first one ``anew``; answered by ``Recovered``."""

    anew: bool = True


class Close(Message):
    """``Tier.aclose``."""


class Cancel(Message):
    """Cancel the call of this number; it is answered all the same."""


Request = (
    Start | Open | Examine | Get | Put | Ask | Purge | Erase | Spare | Recover | Close | Cancel
)


# ---- what it answers


class Done(Message):
    """What a call returned, as plain data."""

    value: Any = None
    spare: dict[bytes, float] = {}
    """``Tier.spare`` of the salts that were asked for, or of those of a put after it; when it is
    opened, of ``UNHEARD``."""
    gauges: dict[str, int] = {}


class Got(Message):
    """What ``get`` returned, and what came."""

    results: Any = None
    found: list[ReadResult | None] = []
    """What is in the slots."""
    gauges: dict[str, int] = {}


class Recovered(Message):
    """A batch of what was found; None after the last one."""

    kept: list[RecoveredBlock] | None = None


class Failed(Message):
    """What a call raised."""

    kind: Literal["config", "unavailable", "full", "tier", "cancelled"] = "tier"
    message: str = ""
    path: str = ""
    hint: str = ""
    temporary: bool = True


class Progressed(Message):
    """How far a purge is."""

    done: int = 0
    total: int = 0


class Said(Message):
    """``TierContext.say``, or a warning of ``Tier.examine``."""

    text: str = ""


Reply = Done | Got | Recovered | Failed | Progressed | Said

_encoder = msgspec.msgpack.Encoder()
requests = msgspec.msgpack.Decoder[Request](Request)
replies = msgspec.msgpack.Decoder[Reply](Reply)


def frame(message: Message) -> bytes:
    """A message as it is sent.

    Raises
    ------
    TypeError
        It holds what is no plain data.
    """
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


async def take(reader: asyncio.StreamReader) -> bytes:
    """The next frame.

    Raises
    ------
    ConnectionError
        The other side is gone.
    ValueError
        It is none.
    """
    try:
        size = int.from_bytes(await reader.readexactly(4), "little")
        if size > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {size} bytes, at most {FRAME_BYTES_MAX} are allowed")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the other side is gone") from error
