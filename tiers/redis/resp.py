"""A connection that speaks RESP and reads values straight into the buffers that want them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple

Part = bytes | memoryview
SCRATCH_BYTES = 256 << 10
LARGE_BYTES = 128 << 10
"""Values above this are received where they go; of others, many at once, and copied there."""
LINE_BYTES = 4 << 10
"""What is received at a time where a large value comes next: its length, and hardly more."""
READY_BYTES = 512 << 10
"""How much is got ready before it is written."""
STEP_BYTES = 1 << 20
"""Values are asked for in steps of so much: a server first copies all it was asked for, and memory
that is not in a cache costs it more than a wait."""
PIECE_BYTES = 128 << 10
"""What the event loop is given at a time of what a socket does not take at once: it copies that."""
JOIN_BYTES = 128 << 10
"""Where a socket cannot take several parts at once, shorter ones are sent together: a copy of them
costs less than a system call."""
BUFFERS_MAX = 1024
"""How many parts a system call takes."""

VALUE_MAX = 64 << 20
"""The longest value that is taken without a target."""

_NOTHING = memoryview(b"")
_INTEGER, _VALUE, _TEXT, _SIMPLE, _ERROR, _NULL, _MAP = b":$=+-_%"
_ARRAYS = b"*~%"


class ReplyError(Exception):
    """An error that the server replied with; ``code`` is its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


Reply = int | bytes | None | ReplyError | list["Reply"]
"""Of a value that was read into a target, its whole length in bytes, however long the target is.
A map is a list of its keys, each followed by what it has."""


class Target(NamedTuple):
    """Where a value goes: its beginning to ``head``, the rest to ``body``; owned by the caller."""

    head: memoryview
    body: memoryview
    whole: Callable[[int], object] | None = None
    """Called with the length of a value as soon as all of it is there, and likely in a cache."""


class Command(NamedTuple):
    """One command, with one reply."""

    key: bytes
    parts: bytes | Callable[[], Iterable[Part]]
    """What is sent, or what makes it, once more if it has to be sent again."""
    target: Target | None = None


def encode(*arguments: bytes | int) -> bytes:
    """A whole command."""
    return b"*%d\r\n" % len(arguments) + _spelled(arguments)


def encode_around(
    *before: bytes | int, length: int, after: Sequence[bytes | int] = ()
) -> tuple[bytes, bytes]:
    """What stands before and after an argument of ``length`` bytes that is sent from its place."""
    count = len(before) + 1 + len(after)
    head = b"*%d\r\n%b$%d\r\n" % (count, _spelled(before), length)
    return head, b"\r\n" + _spelled(after)


def _spelled(arguments: Sequence[bytes | int]) -> bytes:
    """The arguments as bytes, each after its length."""
    text = b""
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else b"%d" % argument
        text += b"$%d\r\n%b\r\n" % (len(data), data)
    return text


def _number(text: bytes) -> int:
    """What a reply says, which is stricter than Python's numbers are."""
    if not text.removeprefix(b"-").isdigit():
        raise ValueError("no number where there has to be one")
    return int(text)


def _joined(parts: Sequence[Part]) -> Sequence[Part]:
    """The same bytes, the short parts at the beginning as one."""
    count = next((i for i, part in enumerate(parts) if len(part) >= JOIN_BYTES), len(parts))
    return [b"".join(parts[:count]), *parts[count:]] if count else parts


def _after(parts: Sequence[Part], count: int) -> Sequence[Part]:
    """What of the parts comes after so many bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[number + 1 :]]
        count -= len(part)
    return []


class Wire(asyncio.BufferedProtocol):
    """One exchange at a time: commands out, as many replies in, values into their targets.

    Once an exchange was cut short, by cancellation or a broken connection, the wire is closed: then
    nothing touches a target any more.

    The last command of each exchange asks for a text that no exchange before it asked for. A reply
    too many or too few shifts all that follow it, so the replies of an exchange count only if that
    text stands where it should. A reply that nobody asked for closes the wire.

    Parameters
    ----------
    mark:
        The command that asks for it. A server that reads but cannot save refuses PING; Sentinels
        do not know ECHO.
    """

    def __init__(self, *, mark: bytes = b"ECHO") -> None:
        self._mark_by = mark
        self._buffer = bytearray(SCRATCH_BYTES)
        self._scratch = memoryview(self._buffer)
        self._start = self._end = 0
        self._targets: list[Target | None] = []
        self._replies: list[Reply] = []
        self._fills: list[memoryview] = []
        self._is_large = False
        """Whether what fills those may be a large value."""
        self._skip = 0
        """How much of a value is still to come after what fills those."""
        self._ended: Callable[[], object] | None = None
        self._arrays: list[tuple[list[Reply], int]] = []
        """Arrays of which not all has come, each within the one before, and how long they get."""
        self._is_direct = False
        """Whether what comes next is received where it goes."""
        self._done: asyncio.Future[list[Reply]] | None = None
        self._marks = count()
        self._mark = b""
        """What the last reply of this exchange has to be."""
        self._echo = bytearray()
        """What it is."""
        self._turn: asyncio.Future[None] | None = None
        self._turn_at = 0
        self._resumed: asyncio.Future[None] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._socket: socket.socket | None = None  # that takes what is written as it is
        self.told: dict[str, str] = {}
        """What the server said of itself when it let us in, our ``id`` there among it."""
        self.unfinished_write = False
        """Whether it was closed before all of an exchange was known to have been carried out."""

    @property
    def closed(self) -> bool:
        """Whether there can be no more exchanges."""
        return self._transport is None or self._transport.is_closing()

    async def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Send the commands; the reply to each, values in their targets.

        Raises
        ------
        ConnectionError
            The connection broke, what came is not RESP, or replies were lost or added.
        """
        assert self._done is None
        if self.closed:
            raise ConnectionResetError("the connection is closed")
        done: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self._mark = b"kvladder-%d" % next(self._marks)
        self._echo = bytearray(len(self._mark))
        self._targets = [c.target for c in commands]
        self._targets.append(Target(memoryview(self._echo), _NOTHING))
        self._replies, self._done = [], done
        try:
            await self._send_all(commands)
            return (await done)[:-1]
        except BaseException:
            self.close()
            self.unfinished_write = True
            raise
        finally:
            if done.done() and not done.cancelled():
                done.exception()  # seen: asyncio must not report it as lost
            self._done = self._turn = None
            self._targets, self._replies = [], []

    async def _send_all(self, commands: Sequence[Command]) -> None:
        """Send the commands, values being asked for in steps, and what asks for the mark."""
        ready: list[Part] = []
        size = wanted = first = 0
        for number, (_, parts, target) in enumerate(commands):
            # a step is full: what it holds waits until those of the step before are all here
            if wanted >= STEP_BYTES:
                if first:
                    await self._send(ready)
                    ready, size = [], 0
                    await self._begun(first + 1)
                first, wanted = number, 0
            if target is not None:
                wanted += len(target.head) + len(target.body)
            # it gets ready while the server works on what it has; what ends the last value goes
            # with the mark, in one piece
            for part in (parts,) if isinstance(parts, bytes) else parts():
                ready.append(part)
                size += len(part)
                if size >= READY_BYTES:
                    await self._send(ready)
                    ready, size = [], 0
        await self._send([*ready, encode(self._mark_by, self._mark)])

    async def _begun(self, count: int) -> None:
        if len(self._replies) < count:
            self._turn, self._turn_at = asyncio.get_running_loop().create_future(), count
            await self._turn

    async def _send(self, parts: Sequence[Part]) -> None:
        while parts:
            if self._resumed is not None:
                await self._resumed
            if self._transport is None:
                raise ConnectionResetError("the connection is closed")
            if self._socket is None or self._transport.get_write_buffer_size():
                parts = _joined(parts)
            else:
                with suppress(BlockingIOError):
                    parts = _after(parts, os.writev(self._socket.fileno(), parts[:BUFFERS_MAX]))
            if parts:  # the event loop waits until the socket takes more
                first = memoryview(parts[0])[:PIECE_BYTES]
                self._transport.write(first)
                parts = _after(parts, len(first))

    def close(self) -> None:
        """Close at once; targets are not touched any more. May be called again."""
        self._targets, self._fills, self._ended, self._arrays = [], [], None, []
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def cut(self) -> None:
        """Close at once; an exchange under way fails."""
        self._break(ConnectionAbortedError("the connection was closed"))

    # ---- called by the transport

    def connection_made(self, transport: Any) -> None:
        """Read and write through it from now on."""
        self._transport = transport
        transport.set_write_buffer_limits(high=1, low=0)  # with 0, TLS would not resume
        if transport.get_extra_info("sslcontext") is None:
            self._socket = transport.get_extra_info("socket")

    def pause_writing(self) -> None:
        """The socket takes no more."""
        self._resumed = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """What was written has left."""
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits for something gets the error."""
        self._break(exc if isinstance(exc, OSError) else self._lost("connection lost"))

    def _lost(self, what: str) -> ConnectionResetError:
        """An error that also says what the server refused, if it did."""
        refused = next((f": {r}" for r in self._replies if isinstance(r, ReplyError)), "")
        return ConnectionResetError(what + refused)

    def _break(self, error: OSError) -> None:
        self.close()
        for future in (self._done, self._turn, self._resumed):
            if future is not None and not future.done():
                future.set_exception(error)
        if self._resumed is not None:
            self._resumed.exception()
            self._resumed = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: into a large value that is being read, else into the scratch."""
        del sizehint
        if self._fills and self._is_large:
            self._is_direct = True
            return self._fills[0]
        self._is_direct = False
        left = self._end - self._start
        if not left:
            self._start = self._end = 0
        elif self._end == SCRATCH_BYTES:
            self._scratch[:left] = bytes(self._scratch[self._start : self._end])
            self._start, self._end = 0, left
        number = len(self._replies)
        target = self._targets[number] if number < len(self._targets) else None
        may_be_large = target is not None and len(target.body) > LARGE_BYTES
        return self._scratch[
            self._end : self._end + (LINE_BYTES if may_be_large else SCRATCH_BYTES)
        ]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        if self._is_direct:
            self._filled(nbytes)
        else:
            self._end += nbytes
        try:
            while not self._skip or self._value_read():
                if len(self._replies) >= len(self._targets) or not self._read_line():
                    break
        except ValueError as error:
            self._break(ConnectionResetError(f"not a Redis server: {error}"))
            return
        if self._turn is not None and len(self._replies) >= self._turn_at:
            if not self._turn.done():
                self._turn.set_result(None)
            self._turn = None
        if self._skip or len(self._replies) < len(self._targets):
            return
        if bytes(self._echo) != self._mark:
            self._break(self._lost("its replies do not match the commands"))
            return
        if self._done is not None and not self._done.done():
            self._done.set_result(self._replies)
        if self._start < self._end:
            self._break(ConnectionResetError("it replied to what nobody asked"))

    def _filled(self, count: int) -> None:
        left = self._fills[0][count:]
        if left:
            self._fills[0] = left
        else:
            del self._fills[0]

    def _value_read(self) -> bool:
        """Move what has come of a value to where it goes; whether nothing of one is outstanding."""
        while self._fills and self._start < self._end:
            count = min(self._end - self._start, len(self._fills[0]))
            self._fills[0][:count] = self._scratch[self._start : self._start + count]
            self._start += count
            self._filled(count)
        if self._fills:
            return False
        if self._skip:
            count = min(self._end - self._start, self._skip)
            self._start += count
            self._skip -= count
            if self._skip:
                return False
        if self._ended is not None:
            ended, self._ended = self._ended, None
            ended()
        return True

    def _read_line(self) -> bool:
        """Take in the next line of a reply; False if it is not all there yet."""
        end = self._buffer.find(b"\r\n", self._start, self._end)
        if end < 0:
            if self._end - self._start >= SCRATCH_BYTES:
                raise ValueError("a line without an end")
            return False
        kind, rest = self._buffer[self._start], bytes(self._scratch[self._start + 1 : end])
        self._start = end + 2
        if kind == _INTEGER:
            self._take(_number(rest))
        elif kind in (_VALUE, _TEXT):
            self._begin_value(_number(rest))
        elif kind == _SIMPLE:
            self._take(rest)
        elif kind == _ERROR:
            self._take(ReplyError(rest.decode(errors="replace")))
        elif kind == _NULL:
            self._take(None)
        elif kind in _ARRAYS:
            self._begin_array(_number(rest) * (2 if kind == _MAP else 1))
        else:
            raise ValueError(f"a reply of type {chr(kind)!r}")
        return True

    def _take(self, reply: Reply) -> None:
        """A whole reply has come, or the next part of an array."""
        while self._arrays:
            array, wanted = self._arrays[-1]
            array.append(reply)
            if len(array) < wanted:
                return
            reply, _ = self._arrays.pop()
        self._replies.append(reply)

    def _begin_array(self, length: int) -> None:
        if length > 0:
            self._arrays.append(([], length))
        else:
            self._take([] if length == 0 else None)

    def _begin_value(self, length: int) -> None:
        if length < 0:
            self._take(None)
            return
        # what is in an array has no target
        target = None if self._arrays else self._targets[len(self._replies)]
        self._skip, self._is_large = 2, target is not None and len(target.body) > LARGE_BYTES
        if target is None:
            if length > VALUE_MAX:
                raise ValueError("a value that nobody asked for")
            value = bytearray(length)
            self._fills = [memoryview(value)] if value else []
            self._ended = lambda: self._take(bytes(value))
            return
        self._replies.append(length)
        if length > len(target.head) + len(target.body):
            self._skip += length
            return
        head = target.head[:length]
        self._fills = [view for view in (head, target.body[: length - len(head)]) if view]
        if target.whole is not None:
            self._ended = partial(target.whole, length)
