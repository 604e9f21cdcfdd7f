"""The reader of replies, with replies in any pieces and any number of commands sent ahead."""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvladder.tiers.redis import resp
from kvladder.tiers.redis.resp import (
    Command,
    CommandForm,
    ReplyError,
    Target,
    Wire,
    encode,
    encode_around,
)

STEP, LARGE, HEAD = 600, 256, 20
ASK = Command(b"", encode(b"GETRANGE"))
KINDS = st.one_of(
    st.integers(0, 1200),  # the length of a value
    st.sampled_from(["+OK", ":7", ":-1", "_", "$-1", "-OOM no room"]),
)


class Server:
    """The other end of a wire: replies to the commands that were written, in pieces."""

    def __init__(self, wire, replies):
        self._wire = wire
        self._replies = replies
        self._written = bytearray()
        self._given = 0
        self.strays = {}
        """The unrequested bytes before the reply of this number."""
        self.closing = False
        wire.connection_made(self)

    def set_protocol(self, protocol):
        assert protocol is self._wire

    def set_write_buffer_limits(self, *, high, low):
        assert high > low

    def get_extra_info(self, name):
        """Return None: there is neither a socket nor TLS."""

    def is_closing(self):
        return self.closing

    def abort(self):
        self.closing = True

    def write(self, data):
        self._written += data

    @property
    def asked(self):
        """Return how many commands have been written."""
        return self._written.count(b"GETRANGE")

    @property
    def _said(self):
        """Return all pending replies, the echo last."""
        replies = [self.strays.get(n, b"") + text for n, text in enumerate(self._replies)]
        marks = re.findall(rb"ECHO\r\n(\$\d+\r\n[^\r]+\r\n)", self._written)
        return b"".join(replies[: self.asked] + marks) + self.strays.get(-1, b"") * len(marks)

    def deliver(self, count):
        """Deliver at most this number of bytes; return False if there are none."""
        ready = self._said[self._given :][:count]
        while ready:
            buffer = self._wire.get_buffer(-1)
            assert len(buffer) > 0
            taken = min(len(buffer), len(ready))
            buffer[:taken] = ready[:taken]
            self._wire.buffer_updated(taken)
            self._given += taken
            ready, count = ready[taken:], count - taken
            if not ready:
                return True
        return False


def spelled(kind, number):
    """Return a reply as bytes, and its value."""
    if isinstance(kind, str):
        known = {"+OK": b"OK", ":7": 7, ":-1": -1}
        return kind.encode() + b"\r\n", known.get(kind)
    data = bytes([number % 251]) * kind
    return b"$%d\r\n%b\r\n" % (kind, data), data


async def turns():
    """Let all ready work run."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Every threshold so low that short values cross it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resp, "STEP_BYTES", STEP)
        patch.setattr(resp, "LARGE_BYTES", LARGE)
        patch.setattr(resp, "LINE_BYTES", 32)
        patch.setattr(resp, "READY_BYTES", 10_000)
        patch.setattr(resp, "PIECE_BYTES", 1000)
        patch.setattr(resp, "JOIN_BYTES", 500)
        patch.setattr(resp, "BUFFERS_MAX", 4)
        yield


@given(
    st.lists(st.tuples(KINDS, st.sampled_from([0, 100, 1000])), min_size=1, max_size=12),
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
)
def test_replies_in_any_pieces_give_values_of_any_size(wanted, pieces):
    asyncio.run(_exchanged(wanted, pieces))


async def _exchanged(wanted, pieces):
    wire = Wire()
    replies = [spelled(kind, number) for number, (kind, _) in enumerate(wanted)]
    server = Server(wire, [text for text, _ in replies])
    bodies = [bytearray(HEAD + size) for _, size in wanted]
    ended: list[tuple[int, int]] = []
    commands = []
    for number, body in enumerate(bodies):

        def whole(length, number=number):
            ended.append((number, length))

        view = memoryview(body)
        target = Target(view[:HEAD], view[HEAD:], whole)
        commands.append(Command(b"", encode(b"GETRANGE", b"key"), target))
    task = asyncio.create_task(wire.exchange(commands))
    for piece in cycle(pieces):
        await turns()
        if task.done():
            break
        assert server.deliver(piece), "it waits for what nobody will send"
    for number, (found, (_, value)) in enumerate(zip(task.result(), replies, strict=True)):
        fits = isinstance(value, bytes) and len(value) <= len(bodies[number])
        if isinstance(wanted[number][0], str):
            assert found == value if value is not None else found is None or _is_error(found)
            assert not any(bodies[number])
        else:
            assert found == len(value)
            assert bodies[number][: found if fits else 0] == (value if fits else b"")
            assert ((number, found) in ended) == fits
    assert len(ended) == len(set(ended))


def _is_error(found):
    return isinstance(found, ReplyError) and found.code == "OOM"


async def test_a_large_exchange_sends_its_commands_in_parts():
    wire = Wire()
    server = Server(wire, [b"$500\r\n" + b"x" * 500 + b"\r\n"] * 10)
    views = [memoryview(bytearray(500)) for _ in range(10)]
    commands = [Command(b"", encode(b"GETRANGE"), Target(view[:20], view[20:])) for view in views]
    task = asyncio.create_task(wire.exchange(commands))
    asked: list[int] = []
    while not task.done():
        await turns()
        if not asked or asked[-1] != server.asked:
            asked.append(server.asked)
        server.deliver(100)
    assert asked == [4, 6, 8, 10]
    assert all(bytes(view) == b"x" * 500 for view in views)


STRAYS = [b"+OK\r\n", b":7\r\n", b"$-1\r\n", b"$3\r\nabc\r\n", b"-ERR x\r\n", b"_\r\n"]


@given(
    st.lists(st.sampled_from([0, 20, 300, "+OK", "$-1"]), min_size=1, max_size=6),
    st.integers(0, 6),
    st.sampled_from(STRAYS),
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
)
def test_an_extra_reply_fails_the_exchange_or_closes_the_wire(kinds, place, stray, pieces):
    asyncio.run(_strayed(kinds, place, stray, pieces))


async def _strayed(kinds, place, stray, pieces):
    wire = Wire()
    replies = [spelled(kind, number) for number, kind in enumerate(kinds)]
    server = Server(wire, [text for text, _ in replies])
    place = place if place < len(kinds) else -1  # after all of them
    server.strays[place] = stray
    task = asyncio.create_task(wire.exchange([ASK] * len(kinds)))
    for piece in cycle(pieces):
        await turns()
        if not server.deliver(piece):
            break
    await turns()
    if place < 0:
        assert len(await task) == len(kinds)
    else:
        with pytest.raises(ConnectionError):
            await task
        assert wire.unfinished_write
    assert wire.closed


@pytest.mark.parametrize("stray", STRAYS)
async def test_an_unrequested_reply_closes_the_wire(stray):
    wire = Wire()
    server = Server(wire, [b"+OK\r\n"])
    task = asyncio.create_task(wire.exchange([ASK]))
    await turns()
    server.deliver(1000)
    found = await task
    server.strays[-1] = stray
    server.deliver(1000)
    assert found == [b"OK"]
    assert wire.closed


async def test_a_server_that_refuses_the_echo_is_quoted():
    wire = Wire()
    server = Server(wire, [b"+OK\r\n-NOPERM no echo for you\r\n"])
    task = asyncio.create_task(wire.exchange([ASK]))
    await turns()
    server.deliver(1000)
    with pytest.raises(ConnectionError, match="NOPERM no echo for you"):
        await task


async def test_a_reply_that_was_lost_fails_the_exchange():
    wire = Wire()
    server = Server(wire, [b"+OK\r\n", b""])
    task = asyncio.create_task(wire.exchange([ASK, ASK]))
    await turns()
    server.deliver(1000)
    await turns()
    assert not task.done(), "it waits for one more, until the deadline of the call"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert wire.closed


@pytest.mark.parametrize("reply", [b"$1_0\r\n", b":+1\r\n", b"$ 3\r\n", b"$-\r\n", b":\r\n"])
async def test_a_reply_with_an_invalid_number_is_an_error(reply):
    wire = Wire()
    server = Server(wire, [reply])
    task = asyncio.create_task(wire.exchange([ASK]))
    await turns()
    server.deliver(1000)
    with pytest.raises(ConnectionError, match="not a Redis server"):
        await task


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=30),
    st.lists(st.integers(1, 9000), min_size=1, max_size=5),
    st.booleans(),
)
@settings(deadline=None)
def test_parts_of_any_length_arrive_whole_and_in_order(lengths, pieces, in_place):
    asyncio.run(_sent(lengths, pieces, in_place))


async def _sent(lengths, pieces, in_place):
    """Over a socket that takes little, to a reader that takes less."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    wire = Wire()
    await asyncio.get_running_loop().create_connection(lambda: wire, sock=near)
    if not in_place:  # as if there were TLS in between
        wire._socket = None
    parts = [bytes([number]) * length for number, length in enumerate(lengths)]
    task = asyncio.create_task(wire.exchange([Command(b"", lambda: parts)]))
    found = bytearray()
    mark = b"kvladder-0"
    end = encode(b"ECHO", mark)
    for piece in cycle(pieces):
        if len(found) == sum(lengths) + len(end):
            break
        await turns()
        with suppress(BlockingIOError):
            found += far.recv(piece, socket.MSG_DONTWAIT)
    assert found == b"".join(parts) + end
    far.sendall(b"+OK\r\n$10\r\n" + mark + b"\r\n")
    assert await task == [b"OK"]
    wire.close()
    far.close()


def test_commands_are_encoded_as_the_protocol_requires():
    assert encode(b"SET", b"k", -1) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n-1\r\n"
    before, after = encode_around(b"SET", b"k", length=9, after=[b"PX", 70])
    assert before + b"a%d value" + after == (
        b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$9\r\na%d value\r\n$2\r\nPX\r\n$2\r\n70\r\n"
    )
    assert encode_around(b"SET", b"%d", length=0)[1] == b"\r\n"
    ask = CommandForm(b"GETRANGE", 0, 576)
    for key in (b"", b"k", b"%d", b"a" * 100):
        assert ask.encode(key) == encode(b"GETRANGE", key, 0, 576)
    assert CommandForm(b"STRLEN").encode(b"k") == encode(b"STRLEN", b"k")
