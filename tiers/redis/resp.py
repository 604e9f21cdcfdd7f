"""A connection that speaks RESP and reads values straight into their target buffers."""

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
"""Longer values are received straight into their targets. Shorter ones are received many at once
and then copied."""
LINE_BYTES = 4 << 10
"""Bytes received at a time before a large value: its length line, and hardly more."""
READY_BYTES = 512 << 10
"""Bytes of commands that are prepared before they are written."""
STEP_BYTES = 1 << 20
"""Bytes of values that are requested in one step. A server first copies all requested values; for
more than fits its CPU caches, that costs more than a wait between steps."""
PIECE_BYTES = 128 << 10
"""Bytes given to the event loop at a time when the socket is full, since the loop copies them."""
JOIN_BYTES = 128 << 10
"""Parts shorter than this are joined where a socket cannot take several parts at once: a copy
costs less than a system call."""
BUFFERS_MAX = 1024
"""Most parts that one system call takes."""

VALUE_MAX = 64 << 20
"""Longest value that is accepted without a target."""

_NOTHING = memoryview(b"")
_INTEGER, _VALUE, _TEXT, _SIMPLE, _ERROR, _NULL, _MAP = b":$=+-_%"
_ARRAYS = b"*~%"


class ReplyError(Exception):
    """An error reply of the server; ``code`` is its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


Reply = int | bytes | None | ReplyError | list["Reply"]
"""A reply. For a value read into a target, it is the value's full length in bytes, even if the
target is shorter. A map is a list of its keys, each followed by its value."""


class Target(NamedTuple):
    """Buffers of the caller for a value: its beginning goes to ``head``, the rest to ``body``."""

    head: memoryview
    body: memoryview
    whole: Callable[[int], object] | None = None
    """Callback with the value's length, run once it is complete and likely still in a CPU cache."""


class Command(NamedTuple):
    """One command, which has one reply."""

    key: bytes
    parts: bytes | Callable[[], Iterable[Part]]
    """Bytes to send, or a function that makes them; a resend calls it again."""
    target: Target | None = None


def encode(*arguments: bytes | int) -> bytes:
    """Return a complete command."""
    return b"*%d\r\n" % len(arguments) + _spelled(arguments)


def encode_around(
    *before: bytes | int, length: int, after: Sequence[bytes | int] = ()
) -> tuple[bytes, bytes]:
    """Return the bytes before and after a large argument, which is then sent without a copy.

    ``length`` is the argument's length in bytes.
    """
    count = len(before) + 1 + len(after)
    head = b"*%d\r\n%b$%d\r\n" % (count, _spelled(before), length)
    return head, b"\r\n" + _spelled(after)


class CommandForm:
    """A command that is sent for many keys: ``name KEY after``, where only the key differs."""

    def __init__(self, name: bytes, *after: bytes | int) -> None:
        self._before = b"*%d\r\n%b" % (2 + len(after), _spelled([name]))
        self._after = _spelled(after)

    def encode(self, key: bytes) -> bytes:
        """Return the complete command for this key."""
        return b"%b$%d\r\n%b\r\n%b" % (self._before, len(key), key, self._after)


def _spelled(arguments: Sequence[bytes | int]) -> bytes:
    """Return the arguments as bytes, each after its length."""
    text = b""
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else b"%d" % argument
        text += b"$%d\r\n%b\r\n" % (len(data), data)
    return text


def _number(text: bytes) -> int:
    """Return a reply's number; the syntax is stricter than that of ``int``."""
    if not text.removeprefix(b"-").isdigit():
        raise ValueError("expected a number")
    return int(text)


def _joined(parts: Sequence[Part]) -> Sequence[Part]:
    """Return the same bytes, with the short parts at the beginning joined into one."""
    count = next((i for i, part in enumerate(parts) if len(part) >= JOIN_BYTES), len(parts))
    return [b"".join(parts[:count]), *parts[count:]] if count else parts


def _after(parts: Sequence[Part], count: int) -> Sequence[Part]:
    """Return the rest of ``parts`` after the first ``count`` bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[number + 1 :]]
        count -= len(part)
    return []


class Wire(asyncio.BufferedProtocol):
    """A connection for one exchange at a time: sends commands and reads one reply for each.

    If an exchange is cut short, by cancellation or a broken connection, the wire closes. From then
    on nothing touches a target.

    Each exchange ends with a command that returns its mark, a text used only once. A missing or
    additional reply would shift all later ones. So the replies count only if the mark is in its
    place. An unexpected reply closes the wire.

    Parameters
    ----------
    mark:
        The command that returns the mark. A server that can read but not save refuses PING;
        Sentinels do not know ECHO.
    """

    def __init__(self, *, mark: bytes = b"ECHO") -> None:
        self._mark_by = CommandForm(mark)
        self._buffer = bytearray(SCRATCH_BYTES)
        self._scratch = memoryview(self._buffer)
        self._start = self._end = 0
        self._targets: list[Target | None] = []
        self._replies: list[Reply] = []
        self._fills: list[memoryview] = []
        self._is_large = False
        """True if the value that goes to ``_fills`` may be large."""
        self._skip = 0
        """Bytes of a value that follow those for ``_fills`` and are discarded."""
        self._ended: Callable[[], object] | None = None
        self._arrays: list[tuple[list[Reply], int]] = []
        """Incomplete arrays, each nested in the one before, with their full lengths."""
        self._is_direct = False
        """True if the next bytes are received straight into a target."""
        self._done: asyncio.Future[list[Reply]] | None = None
        self._marks = count()
        self._mark = b""
        """Expected last reply of this exchange."""
        self._echo = bytearray()
        """Last reply received, to be compared with the mark."""
        self._turn: asyncio.Future[None] | None = None
        self._turn_at = 0
        self._resumed: asyncio.Future[None] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._socket: socket.socket | None = None  # set without TLS: bytes can go straight to it
        self.told: dict[str, str] = {}
        """Server information from the login, and the ``id`` of this connection there."""
        self.unfinished_write = False
        """True if the wire was closed while the server may still have had commands to carry out."""

    @property
    def closed(self) -> bool:
        """True if no more exchanges are possible."""
        return self._transport is None or self._transport.is_closing()

    async def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Send the commands and return the reply to each; values go into their targets.

        Raises
        ------
        ConnectionError
            The connection broke, the server does not speak RESP, or replies were lost or added.
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
                done.exception()  # mark it as retrieved, or asyncio would report it
            self._done = self._turn = None
            self._targets, self._replies = [], []

    async def _send_all(self, commands: Sequence[Command]) -> None:
        """Send the commands, requesting values in steps, then the command for the mark."""
        ready: list[Part] = []
        size = wanted = first = 0
        for number, (_, parts, target) in enumerate(commands):
            # a step is full: send it, and begin the next when the step before has arrived
            if wanted >= STEP_BYTES:
                if first:
                    await self._send(ready)
                    ready, size = [], 0
                    await self._begun(first + 1)
                first, wanted = number, 0
            if target is not None:
                wanted += len(target.head) + len(target.body)
            # commands are prepared while the server works on earlier ones; the last part is sent
            # in one piece with the mark
            for part in (parts,) if isinstance(parts, bytes) else parts():
                ready.append(part)
                size += len(part)
                if size >= READY_BYTES:
                    await self._send(ready)
                    ready, size = [], 0
        await self._send([*ready, self._mark_by.encode(self._mark)])

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
            if parts:  # the transport sends it once the socket takes more
                first = memoryview(parts[0])[:PIECE_BYTES]
                self._transport.write(first)
                parts = _after(parts, len(first))

    def close(self) -> None:
        """Close at once, so that nothing touches a target from now on; may be repeated."""
        self._targets, self._fills, self._ended, self._arrays = [], [], None, []
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def cut(self) -> None:
        """Close at once; an exchange in flight fails."""
        self._break(ConnectionAbortedError("the connection was closed"))

    # ---- called by the transport

    def connection_made(self, transport: Any) -> None:
        """Read and write through ``transport`` from now on."""
        self._transport = transport
        transport.set_write_buffer_limits(high=1, low=0)  # with 0, TLS would not resume
        if transport.get_extra_info("sslcontext") is None:
            self._socket = transport.get_extra_info("socket")

    def pause_writing(self) -> None:
        """Make writers wait: the socket takes no more."""
        self._resumed = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Let writers continue: the transport's buffer is empty."""
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the wire and fail everything that is being awaited."""
        self._break(exc if isinstance(exc, OSError) else self._lost("connection lost"))

    def _lost(self, what: str) -> ConnectionResetError:
        """Return an error that includes the server's first error reply, if there is one."""
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
        """Return the buffer for the next bytes: a large value's target, else the scratch."""
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
        """Take in ``nbytes`` bytes that have arrived, and finish the exchange if complete."""
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
            self._break(ConnectionResetError("it sent a reply without a command"))

    def _filled(self, count: int) -> None:
        left = self._fills[0][count:]
        if left:
            self._fills[0] = left
        else:
            del self._fills[0]

    def _value_read(self) -> bool:
        """Move the received bytes of a value into its target; return whether it is complete."""
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
        """Read the next line of a reply; return False if it is incomplete."""
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
        """Add a complete reply, or the next element of the innermost array."""
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
        # elements of an array have no target
        target = None if self._arrays else self._targets[len(self._replies)]
        self._skip, self._is_large = 2, target is not None and len(target.body) > LARGE_BYTES
        if target is None:
            if length > VALUE_MAX:
                raise ValueError("a value that no command asked for")
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
