"""Fuzz targets of the NIXL tier: messages of both ends, an exporter's session, the roster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache

import msgspec

from kvladder.errors import TierError
from kvladder.export.session import Session
from kvladder.keys import KEY_BYTES
from kvladder.tiers.label import LABEL_BYTES, Facts, Labels
from kvladder.tiers.nixl import messages as m
from kvladder.tiers.nixl import roster
from kvladder.tiers.nixl.plane import Area
from tests.fuzz.stored import SPACE, key_of
from tests.fuzz.target import Input, Target, explained, framed
from tests.fuzz.wires import run
from tests.kit.fabric import FakeOffers, nap

BLOCK, SLOTS = 4096, 16
KEYS = b"".join(map(key_of, range(2)))


# ---- messages


def message(data: bytes) -> None:
    """Decode a frame of either end; a valid one is the same after it was sent again."""
    for decode in (m.request, m.reply):
        try:
            found = decode(data)
        except m.WireError as error:
            explained(error)
            continue
        again = decode(m.frame(found))
        assert m.frame(again) == m.frame(found)
        with suppress(m.WireError):
            _contents(found)


def _contents(found: m.Request | m.Reply) -> None:
    """Read what is packed in a message; raises WireError."""
    match found:
        case m.Lookup() | m.Remove():
            assert b"".join(m.keys_in(found.keys)) == found.keys
        case m.Get():
            assert len(m.keys_in(found.keys, len(found.slots))) == len(found.slots)
        case m.Offer():
            for facts in m.facts_in(found.facts):
                assert len(facts.salt) in {0, 8}
        case m.Commit():
            labels = m.labels_in(found.labels, len(found.labels) // LABEL_BYTES)
            assert len(labels) <= m.BATCH_MAX
        case m.Hello() | m.Welcome():
            area = m.area_in(found.area, BLOCK)
            assert area.slot_bytes >= BLOCK
        case _:
            pass


def _messages() -> list[m.Message]:
    facts = Facts(80, 35, 1.8e9, b"saltsalt", 3)
    label = Labels(SPACE, BLOCK, verify=True).pack(key_of(0), bytes(BLOCK))
    return [
        m.Ping(1),
        m.Hello(2, SPACE, BLOCK, b"agent", (4096, BLOCK, SLOTS)),
        m.Lookup(3, KEYS),
        m.Offer(4, KEYS, [BLOCK, BLOCK], [facts, Facts()]),
        m.Commit(4, label + bytes(LABEL_BYTES)),
        m.Get(5, KEYS, [0, 1]),
        m.Abort(6, 5),
        m.Remove(7, KEYS[:KEY_BYTES]),
        m.Purge(8, None),
        m.Purge(9, b"saltsalt"),
        m.Bye(10),
        m.Pong(1, known=True),
        m.Welcome(2, b"agent", (4096, BLOCK, SLOTS), writable=True),
        m.Found(3, b"\0\1"),
        m.Got(5, [BLOCK, 0], label + bytes(LABEL_BYTES)),
        m.Grant(4, [0, m.HAVE]),
        m.Stored(4, b"\1\0"),
        m.Done(7, 1),
        m.Failed(8, "why", final=True),
        m.Gone(0, "why"),
    ]


# ---- a session


class _Plane:
    """A data plane on which each write is over at once, and no byte moves."""

    metadata = b"agent"
    area = Area(4096, BLOCK, SLOTS)

    def join(self, metadata: bytes, area: Area, block_bytes: int) -> None:
        """Do nothing."""

    def write(self, own: Sequence[int], far: Sequence[int], lengths: Sequence[int]) -> object:
        assert all(0 <= slot < SLOTS for slot in far)
        assert all(0 < length <= BLOCK for length in lengths)
        assert len(own) == len(far) == len(lengths)
        return object()

    def ended(self, posted: object) -> bool:
        return True

    def progress(self) -> bool:
        return False

    def destroy(self) -> None:
        """Do nothing."""


@cache
def _offers() -> FakeOffers:
    return FakeOffers(SLOTS, BLOCK)


def close() -> None:
    """Close what all inputs share."""
    if _offers.cache_info().currsize:
        _offers().arena.close()
        _offers.cache_clear()


def session(data: bytes) -> None:
    """Send an exporter's session any messages: it answers each once, and keeps no slot."""
    given = Input(data)
    run(_served(given, writable=bool(given.number(2))))


async def _served(given: Input, *, writable: bool) -> None:
    offers, answers, failures = _offers(), list[m.Reply](), list[TierError]()
    await offers.hello(1, SPACE, BLOCK, "a client")
    one = Session(
        1,
        offers,
        _Plane(),
        far=_Plane.area,
        block_bytes=BLOCK,
        writable=writable,
        send=answers.append,
        failed=failures.append,
        nap=nap,
    )
    asked = 0
    for number, frame in enumerate(given.frames()):
        try:
            one.take(m.request(frame))
            asked += 1
        except m.WireError as error:
            explained(error)
        for _ in range(number % 3):
            await asyncio.sleep(0)
    for _ in range(60):
        await asyncio.sleep(0)
    one.mute()
    one.fence()
    await one.close()
    offers.forget({*offers.blocks})
    offers.check()
    assert not failures
    assert len(answers) <= asked
    assert len({(type(each), each.op) for each in answers}) <= asked
    for each in answers:
        assert m.reply(m.frame(each)) == each


def _sessions() -> Iterable[bytes]:
    requests = [m.frame(one) for one in _messages()[:11]]
    yield b"\1" + framed(*requests)
    yield b"\0" + framed(*requests)
    for number in range(2, 9):
        yield b"\1" + framed(*requests[number : number + 2])


# ---- the roster


def entry(data: bytes) -> None:
    """Decode a far end's announcement, as the roster does: one that is invalid is ignored."""
    given = Input(data)
    name = given.part(given.number(64))
    found = roster.entries({name: given.rest})
    assert found.keys() <= {name.decode("utf-8", "replace")}
    for one in found.values():
        assert roster.entries({name: msgspec.json.encode(one)}) == found


def _entries() -> Iterable[bytes]:
    one = roster.Entry(
        address="127.0.0.1:5555",
        run="boot:1:2",
        writable=True,
        block_bytes=BLOCK,
        namespace=SPACE.hex(),
        until_s=1.8e9,
    )
    return (b"\4host" + msgspec.json.encode(one),)


TARGETS = {
    "nixl": Target(
        "a message of the NIXL tier, of either end",
        message,
        lambda: [m.frame(one) for one in _messages()],
        (b"\xa3Get", b"\xa5Offer", b"\xa6Commit", b"\x91" * 8, b"\xc0", b"\xff" * 4, b"\xdd"),
    ),
    "session": Target("what a client sends to an exporter's session", session, _sessions, (KEYS,)),
    "roster": Target(
        "a far end's announcement in a Redis",
        entry,
        _entries,
        (b'"address"', b'"run"', b"[" * 16, b"{", b"null", b"1e999"),
    ),
}
