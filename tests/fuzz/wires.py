"""Fuzz targets of what comes over connections: replies of Redis, HTTP, calls, events, hints."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import cache
from socket import AF_INET
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec

from kvladder.children import messages as pipes
from kvladder.control.answers import _PURGE  # pyright: ignore[reportPrivateUsage]
from kvladder.control.guard import Guard
from kvladder.control.http import (
    HttpConnection,
    HttpReader,
    HttpRequest,
    HttpResponse,
    as_json,
    refusal,
)
from kvladder.errors import ConfigError, TierError
from kvladder.hints import protocol as hints
from kvladder.publishing.wire import END, AllBlocksCleared, Batch, BlockRemoved, BlockStored
from kvladder.routing.feed import Feed
from kvladder.routing.index import Index
from kvladder.tiers.redis import resp
from kvladder.tiers.redis.resp import Command, Wire, encode
from kvladder.tiers.redis.resp import Target as Place
from tests.fuzz.target import Input, Target, explained, framed, patched

T = TypeVar("T")


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop that all inputs share."""
    return _runner().run(work)


def close() -> None:
    """Close what all inputs share."""
    if _runner.cache_info().currsize:
        _runner().close()
        _runner.cache_clear()


# ---- replies of Redis


class _Transport:
    """The other side of a wire; the wire writes, and it keeps nothing."""

    def __init__(self) -> None:
        self.closing = False

    def set_write_buffer_limits(self, **_: int) -> None:
        pass

    def get_extra_info(self, _: str) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def write(self, _: object) -> None:
        pass


SMALL = {"LARGE_BYTES": 64, "LINE_BYTES": 16, "SCRATCH_BYTES": 512, "VALUE_MAX": 4096}


def replies(data: bytes) -> None:
    """Give replies to some commands, whole and in pieces: both ways lead to the same.

    Only a broken connection is an error, and no byte comes beside the target of its command.
    """
    given = Input(data)
    sizes = [given.number(200) for _ in range(given.number(4))]
    pieces = [1 + given.number(64) for _ in range(3)]
    with patched(resp, **SMALL):
        at_once = run(_exchanged(given.rest, [1 << 30], sizes))
        assert run(_exchanged(given.rest, pieces, sizes)) == at_once


async def _exchanged(
    stream: bytes, pieces: Sequence[int], sizes: Sequence[int]
) -> tuple[object, list[bytes]]:
    """Return the replies, or that the exchange failed, and what the targets hold then."""
    wire, transport = Wire(), _Transport()
    wire.connection_made(transport)
    around = [bytearray(b"\xaa" * (size + 16)) for size in sizes]
    commands = [Command(b"", encode(b"ECHO"))]
    for size, memory in zip(sizes, around, strict=True):
        view = memoryview(memory)[8 : 8 + size]
        commands.append(Command(b"", encode(b"GETRANGE"), Place(view[:20], view[20:])))
    task = asyncio.create_task(wire.exchange(commands))
    await asyncio.sleep(0)
    at = turn = 0
    while at < len(stream) and not transport.closing and not task.done():
        buffer = wire.get_buffer(-1)
        assert len(buffer) > 0
        count = min(len(buffer), len(stream) - at, pieces[turn % len(pieces)])
        buffer[:count] = stream[at : at + count]
        wire.buffer_updated(count)
        at, turn = at + count, turn + 1
        await asyncio.sleep(0)
    if not task.done():
        wire.connection_lost(None)
    try:
        found: object = [repr(reply) for reply in await task]
    except ConnectionError:
        found = "broken"
    for memory in around:
        assert memory[:8] == memory[-8:] == b"\xaa" * 8, "bytes beside a target"
    wire.close()
    return found, [bytes(memory) for memory in around] if found != "broken" else []


def _replies() -> Iterable[bytes]:
    mark = b"$10\r\nkvladder-0\r\n"
    yield bytes([2, 100, 0, 1, 2, 3]) + b"+OK\r\n$5\r\nhello\r\n$-1\r\n" + mark
    yield (
        bytes([1, 150, 9, 9, 9]) + b"*2\r\n:1\r\n$2\r\nab\r\n$150\r\n" + b"x" * 150 + b"\r\n" + mark
    )
    yield bytes([1, 10, 9, 9, 9]) + b"%1\r\n+a\r\n*1\r\n_\r\n$40\r\n" + b"x" * 40 + b"\r\n" + mark
    yield bytes([0, 1, 1, 1]) + b"-ERR no\r\n" + mark


# ---- HTTP


class _Writer:
    """What a connection answers."""

    def __init__(self) -> None:
        self.said = bytearray()

    def write(self, data: bytes) -> None:
        self.said += data

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return True

    async def drain(self) -> None:
        pass

    def get_extra_info(self, _name: str) -> Any:
        return SimpleNamespace(family=AF_INET, getpeername=lambda: ("127.0.0.1", 1))


BODY_MAX = 4096


def http(data: bytes) -> None:
    """Send requests, and have the guard look at each: each gets an answer, or the end."""
    given = Input(data)
    is_set = given.number(2)
    guard = Guard(lambda: ["token"] if is_set else [], ["name"])
    asked: list[HttpRequest] = []

    async def answer(request: HttpRequest) -> HttpResponse:
        assert len(request.body) <= BODY_MAX
        asked.append(request)
        if (refused := guard.refusal(request)) is not None:
            return refused
        try:
            wanted = _PURGE.decode(request.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return refusal(400, str(error))
        assert wanted.kind == wanted.told()["kind"]
        assert len(wanted.named_keys) == len(wanted.keys or ())
        return as_json(wanted.told())

    async def converse() -> bytes:
        reader, writer = HttpReader(), _Writer()
        reader.feed_data(given.rest)
        reader.feed_eof()
        with suppress(OSError, TimeoutError):
            connection = HttpConnection(reader, writer)  # type: ignore[arg-type]
            await connection.converse(answer, lambda _: BODY_MAX)
        return bytes(writer.said)

    said = run(converse())
    assert not said or said.startswith(b"HTTP/1.1 ")
    begun = re.findall(rb"^HTTP/1\.1 \d", said, re.MULTILINE)  # an error quotes what it refuses
    assert len(begun) <= 2 * len(asked) + 1


def _requests() -> Iterable[bytes]:
    body = b'{"salt": "a", "wait_s": 1}'
    head = b"POST /purge HTTP/1.1\r\nHost: name\r\nContent-Type: application/json\r\n"
    token = b"Authorization: Bearer token\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    yield b"\1GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:80\r\nOrigin: http://127.0.0.1:80\r\n\r\n"
    yield b"\1" + head + token + length + body
    yield (
        b"\1" + head + token + b"Transfer-Encoding: chunked\r\n\r\n1a\r\n" + body + b"\r\n0\r\n\r\n"
    )
    yield b"\0HEAD / HTTP/1.0\r\nHost: [::1]:9\r\nSec-Fetch-Site: cross-site\r\n\r\n"
    yield b"\0" + head + b"Expect: 100-continue\r\n" + length + body


# ---- the pipe


def pipe(data: bytes) -> None:
    """Take frames from a pipe: each message is the same after it was sent again."""

    async def taken() -> list[pipes.AnyMessage]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found: list[pipes.AnyMessage] = []
        try:
            while True:
                found.append(await pipes.take(reader))
        except (OSError, ValueError):  # as documented
            return found

    for message in run(taken()):
        framed_again = pipes.frame(message)
        assert int.from_bytes(framed_again[:4], "little") == len(framed_again) - 4
        if isinstance(message, pipes.Failed):
            assert isinstance(message.error, TierError | ConfigError)


def _frames() -> Iterable[bytes]:
    raw = msgspec.Raw(b"\x91\xa1x")
    yield pipes.frame(pipes.Call(1, "get", raw)) + pipes.frame(pipes.Cancel(1))
    yield pipes.frame(pipes.Done(1, raw))
    for error in (ConfigError("a", path="b", hint="c"), TierError("d"), KeyError("e")):
        yield pipes.frame(pipes.Failed.of(2, error))


# ---- events of engines


def events(data: bytes) -> None:
    """Give a feed messages and replies: none ends it, and the index stays consistent."""
    given = Input(data)
    index = Index(blocks_max=40)
    feed = Feed(index, "a", "tcp://127.0.0.1:1")
    other = Feed(index, "b", "tcp://127.0.0.1:1")
    for number, frame in enumerate(given.frames()):
        is_end, found, payload = feed._frames([b"", frame[:8], frame[8:]])
        assert is_end == (frame[:8] == END)
        feed._sent_s(payload)
        run(feed._take(number if found is None else found, payload))
        other._apply(number, frame)
        matches = index.match([1, 2, 3, 4], salt="s")
        assert all(0 < match.tokens <= 4 for match in matches)
    index.check()
    for engine in ("a", "b"):
        index.forget(engine)
    assert index.rows == 0


def _events() -> Iterable[bytes]:
    pack = msgspec.msgpack.encode
    salts = [("s",), None]
    stored = BlockStored([b"a" * 32, 7], None, [1, 2, 3, 4], 2, None, "GPU", None, None, salts)
    after = BlockStored([b"c"], 7, [5, 6], 2, None, "CPU", "lora", "nvme")
    batches = [
        Batch(1.0, [stored]),
        Batch(2.0, [after, BlockRemoved([b"a" * 32], "GPU")]),
        Batch(3.0, [AllBlocksCleared()]),
    ]
    yield framed(*(n.to_bytes(8) + pack(one) for n, one in enumerate(batches)))
    yield framed(*map(pack, batches))
    kinds = {"block_hashes": [1], "kv_cache_spec_kind": "window", "group_idx": 1}
    yield framed(pack([1.0, [{"type": "BlockStored", **kinds}]]), END + b"x")


# ---- hints


def hint(data: bytes) -> None:
    """Read an envelope of hints; a valid one asks for the same after it was sent again."""
    found = _read(data)
    if found is None:
        with suppress(ValueError, RecursionError):
            _read(json.loads(data))
        return
    again = _read(msgspec.json.encode(found))
    assert again is not None
    assert again.message_id == found.message_id
    assert [*map(_order, again.actions)] == [*map(_order, found.actions)]
    assert len(found.message_id) <= hints.ID_MAX
    with suppress(hints.RefusedHint):
        assert hints.content_of(found.actions) == hints.content_of(found.actions)
    for action in found.actions:
        with suppress(hints.RefusedHint):
            order = hints.order_of(action)
            assert len(order.tokens or ()) <= hints.TOKENS_MAX
            assert len(order.keys or ()) <= hints.KEYS_MAX


def _order(action: hints.Action) -> tuple[str, object]:
    """Return the id of an action, and its order, or why there is none."""
    try:
        return action.action_id, hints.order_of(action)
    except hints.RefusedHint as error:
        return action.action_id, str(error)


def _read(given: object) -> hints.Envelope | None:
    try:
        return hints.read(given)
    except hints.RefusedHint as error:
        explained(error)
        return None


def _envelopes() -> Iterable[bytes]:
    payloads: dict[str, dict[str, Any]] = {
        "pin": {"ttl_s": 3.5, "tokens": [1, 2, 3]},
        "retain": {"priority": 80, "session": "s"},
        "prefetch": {"budget_blocks": 3, "keys": ["ab" * 32], "salt": "x"},
        "demote": {"to": "nvme"},
        "share": {},
    }
    actions = [
        {"action_id": str(n), "action_type": verb, "action_version": "1", "payload": payload}
        for n, (verb, payload) in enumerate(payloads.items())
    ]
    whole = {"protocol_version": "0.1", "message_id": "m", "actions": actions}
    yield json.dumps(whole).encode()
    for action in actions:
        yield json.dumps({**whole, "actions": [action]}).encode()


TARGETS = {
    "resp": Target(
        "replies of a Redis server, and how they arrive",
        replies,
        _replies,
        (b"\r\n", b"$-1\r\n", b"*-1\r\n", b"*2\r\n", b"%1\r\n", b"_\r\n", b"$10\r\nkvladder-0\r\n",
         b"$99999999999\r\n", b"$5\r\nhello\r\n", b":1\r\n", b"~1\r\n", b"=4\r\n"),
    ),
    "http": Target(
        "requests to the control socket or the port",
        http,
        _requests,
        (b"\r\n", b"Host: name\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n",
         b"Origin: ", b"Authorization: Bearer token\r\n", b'"tokens"', b'"keys"', b"{", b"["),
    ),
    "pipe": Target("calls between processes", pipe, _frames, (b"\xa4Call", b"\xa6Failed", b"\x93")),
    "events": Target(
        "events of an engine for a router",
        events,
        _events,
        (END, b"block_hashes", b"token_ids", b"parent_block_hash", b"extra_keys", b"\x91" * 4,
         b"BlockStored", b"BlockRemoved", b"AllBlocksCleared", b"\xcb\x7f\xf8" + bytes(6)),
    ),
    "hints": Target(
        "an envelope of hints",
        hint,
        _envelopes,
        (b'"payload"', b'"tokens"', b'"keys"', b'"session"', b'"salt"', b"null", b"1e999", b"[[",
         b"\\ud800", b"18446744073709551616"),
    ),
}  # fmt: skip
