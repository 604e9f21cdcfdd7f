"""The messages of a pipe: calls, answers and cancellations, as frames of MessagePack.

A frame is 4 bytes of length, little endian, and a message. Messages contain no bytes of blocks,
since both processes map the arena.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal, Self, cast

import msgspec

from kvladder.errors import ConfigError, PermissionDenied, TierError, TierFull, Unavailable

FRAME_BYTES_MAX: Final = 256 << 20
"""Longest message, in bytes."""


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A message of either end; an answer has the number of its call."""

    number: int


class Call(Message, frozen=True):
    """A call of a method, or a notification."""

    method: str
    arguments: msgspec.Raw


class Cancel(Message, frozen=True):
    """Cancel the call with this number. The call is still answered."""


class Done(Message, frozen=True):
    """The result of a call."""

    value: msgspec.Raw

    @classmethod
    def of(cls, number: int, value: object) -> Self:
        """Return the answer with this result, to send it."""
        # only a decoder looks at the field's type: so the result is encoded once, with its message
        return cls(number, cast("msgspec.Raw", value))


class Failed(Message, frozen=True):
    """The error that a call raised."""

    kind: Literal["config", "unavailable", "full", "denied", "tier", "cancelled"]
    message: str = ""
    path: str = ""
    hint: str = ""
    temporary: bool = True

    @classmethod
    def of(cls, number: int, error: BaseException) -> Self:
        """Return the answer of a call that raised this error."""
        match error:
            case ConfigError():
                where = _text(error.path), _text(error.hint)
                return cls(number, "config", _text(error.message), *where)
            case Unavailable():
                where = _text(error.path), _text(error.hint)
                return cls(number, "unavailable", _text(error.message), *where)
            case TierFull():
                return cls(number, "full", _text(str(error)), temporary=error.temporary)
            case PermissionDenied():
                return cls(number, "denied", _text(str(error)), temporary=error.temporary)
            case TierError():
                return cls(number, "tier", _text(str(error)), temporary=error.temporary)
            case asyncio.CancelledError():
                return cls(number, "cancelled")
            case _:
                return cls(number, "tier", _text(f"the call raised {error!r}"), temporary=False)

    @property
    def error(self) -> TierError | ConfigError:
        """The error, to raise it again."""
        if self.kind == "config":
            return ConfigError(self.message, path=self.path, hint=self.hint)
        if self.kind == "unavailable":
            return Unavailable(self.message, path=self.path, hint=self.hint)
        if self.kind == "cancelled":
            return TierError("the other process cancelled the call")
        kinds: dict[str, type[TierError]] = {"full": TierFull, "denied": PermissionDenied}
        return kinds.get(self.kind, TierError)(self.message, temporary=self.temporary)


def _text(text: str) -> str:
    """Return a text that can be sent: names of files may have bytes that are no characters."""
    return text.encode("utf-8", "backslashreplace").decode()


AnyMessage = Call | Cancel | Done | Failed
encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder[AnyMessage](AnyMessage)


def frame(message: AnyMessage) -> bytes:
    """Return a message as a frame; raise TierError if it is too long."""
    body = encode(message)
    if len(body) > FRAME_BYTES_MAX:
        what = f"a message of {len(body)} bytes: expected at most {FRAME_BYTES_MAX}"
        raise TierError(what, temporary=False)
    return len(body).to_bytes(4, "little") + body


async def take(reader: asyncio.StreamReader) -> AnyMessage:
    """Read the next message.

    Raises
    ------
    OSError
        The other end is gone.
    ValueError
        The frame is broken: too long, or no message.
    """
    try:
        size = int.from_bytes(await reader.readexactly(4), "little")
        if size > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {size} bytes: expected at most {FRAME_BYTES_MAX}")
        message: Any = _decoder.decode(await reader.readexactly(size))
    except RecursionError as error:
        raise ValueError(f"a message that is nested too deeply: {error}") from error
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the other end is gone") from error
    return message  # type: ignore[no-any-return]
