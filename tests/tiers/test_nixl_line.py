"""Connections to far ends over a fabric that delays, hangs, breaks, and sends lies."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvladder.arena import Arena
from kvladder.errors import TierError
from kvladder.keys import BlockKey, Namespace
from kvladder.testing.cancel import cancel_at
from kvladder.testing.sim import sim_run
from kvladder.tiers.label import Facts, Labels
from kvladder.tiers.nixl import messages as m

pytest.importorskip("zmq")

from kvladder.export.bounds import HELD_S
from kvladder.tiers.nixl.curve import ALL, Rights
from kvladder.tiers.nixl.line import Line
from kvladder.tiers.nixl.pump import NAPS
from tests.kit.fabric import Fabric, FakePlane

SIZE = 6000
SPACE = Namespace(bytes(range(32)))
POISON = 0xA5


class Near:
    """A client with an arena, and blocks to move."""

    def __init__(self, fabric, *, timeout_s=None):
        self.fabric = fabric
        self.arena = Arena.create(16, 8192)
        self.slots = self.arena.lease(16) or []
        self.said: list[str] = []
        client = fabric.client(self.arena, block_bytes=SIZE, timeout_s=timeout_s)
        self.line = Line("far", client, fabric.dial, self.said.append)
        self.labels = Labels(SPACE, SIZE, verify=True)

    @staticmethod
    def key(number):
        return BlockKey(hashlib.sha256(b"%d" % number).digest())

    def data(self, number):
        return hashlib.shake_128(self.key(number)).digest(SIZE)

    async def put(self, *numbers):
        for n in numbers:
            self.arena.view(self.slots[n])[:SIZE] = self.data(n)

        async def label(wanted):
            await asyncio.sleep(0.0005)
            return [
                self.labels.pack(
                    self.key(numbers[w]), self.arena.view(self.slots[numbers[w]])[:SIZE]
                )
                for w in wanted
            ]

        sizes, facts = [SIZE] * len(numbers), [Facts()] * len(numbers)
        keys = [self.key(n) for n in numbers]
        return await self.line.here.put(keys, [*numbers], sizes, facts, label)

    async def get(self, *numbers):
        """Return which blocks arrived, all with the right bytes."""
        self.poison()
        got = await self.line.here.get([self.key(n) for n in numbers], [*numbers])
        for n, length in zip(numbers, got.lengths, strict=True):
            assert length in {0, SIZE}
            if length:
                assert bytes(self.arena.view(self.slots[n])[:SIZE]) == self.data(n)
        return [bool(length) for length in got.lengths]

    async def have(self, *numbers):
        return [*await self.line.here.lookup([self.key(n) for n in numbers])]

    def poison(self):
        for slot in self.slots:
            self.arena.view(slot)[:] = bytes([POISON]) * 8192

    def is_untouched(self):
        return all({*self.arena.view(slot)} == {POISON} for slot in self.slots)

    async def aclose(self):
        await self.line.aclose()
        self.arena.release(self.slots)
        self.arena.close()


@asynccontextmanager
async def pair(**more):
    fabric = Fabric()
    near = Near(fabric, **more)
    try:
        yield near, fabric
    finally:
        await near.aclose()
        await fabric.aclose()
        assert not any(plane.is_alive for plane in fabric.planes)


async def until(is_so):
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_blocks_are_stored_and_read_back():
    async with pair() as (near, fabric):
        assert await near.line.tried()
        assert await near.put(0, 1) == [True, True]
        assert await near.put(1, 2) == [True, True]
        assert await near.have(0, 3, 2) == [1, 0, 1]
        assert await near.get(0, 3, 2) == [True, False, True]
        await near.line.here.remove([near.key(0)])
        assert await near.have(0, 1) == [0, 1]
        assert await near.line.here.purge(None) == 2
        assert fabric.exporter.gauges()["messages_refused"] == 0


async def test_a_client_that_may_only_read_changes_nothing_even_if_it_lies(monkeypatch):
    async with pair() as (near, fabric):
        await near.line.tried()
        await near.put(0)
        take, rights = fabric.exporter.take, Rights(read=frozenset([SPACE]), write=frozenset())

        def limited(client, data):
            take(client, data, rights if client == b"client 1" else ALL)

        monkeypatch.setattr(fabric.exporter, "take", limited)
        reader = Near(fabric)
        await reader.line.tried()
        assert not reader.line.here.writable
        reader.line.here.writable = True  # it ignores what it was told
        assert await reader.put(1) == [False]
        await reader.line.here.remove([reader.key(0)])
        assert await reader.line.here.purge(None) == 0
        with pytest.raises(TierError, match="may not list"):
            await anext(reader.line.here.survey(None))
        assert await reader.get(0, 1) == [True, False]
        assert await near.have(0, 1) == [1, 0]
        await reader.aclose()


async def test_a_commit_may_come_as_soon_as_the_grant_is_sent():
    async with pair() as (near, fabric):
        await near.line.tried()

        def at_once(data):
            message = m.reply(data)
            if isinstance(message, m.Grant):
                fabric.exporter.take(b"client 0", m.frame(m.Commit(message.op, bytes(576))))
            return [data]

        fabric.to_near = at_once
        fabric.to_far = lambda data: [] if isinstance(m.request(data), m.Commit) else [data]
        with pytest.raises(TierError, match="no answer"):
            await near.put(0)
        assert fabric.exporter.gauges()["messages_refused"] == 0


@pytest.mark.real  # in the order of the calls
async def test_granted_blocks_are_in_flight_before_their_labels_are_made():
    async with pair() as (near, fabric):
        await near.line.tried()
        (plane,) = [plane for plane in fabric.planes if plane.arena is near.arena]
        posted: list[int] = []

        async def label(wanted):
            posted.append(len(plane.posted))
            return [b""] * len(wanted)

        def put(number):
            here, key = near.line.here, near.key(number)
            return here.put([key], [number], [SIZE], [Facts()], label)

        await asyncio.gather(put(0), put(1))
        assert posted[0], "the first one is not put off by the other one"


async def test_the_client_does_not_poll_while_a_put_is_checked():
    async with pair() as (near, fabric):
        await near.line.tried()
        (plane,) = [plane for plane in fabric.planes if plane.arena is near.arena]
        polls, progress = count(), plane.progress
        plane.progress = lambda: bool(next(polls)) and progress()
        fabric.offers.delay_s = 0.4
        assert await near.put(0, 1) == [True, True]
        assert next(polls) < NAPS + 100, "while it is written, and not for each millisecond after"


@pytest.mark.parametrize("call", ["get", "put"])
async def test_a_hanging_transfer_ends_with_the_fence_and_writes_nothing(call):
    async with pair(timeout_s=2.0) as (near, fabric):
        await near.line.tried()
        await near.put(0, 1)
        fabric.hangs = True
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(TierError, match="no answer within 1 s"):
            await (near.get(0, 1) if call == "get" else near.put(2, 3))
        assert asyncio.get_running_loop().time() - began_s < 1.6
        near.poison()
        for plane in fabric.planes:
            for write in plane.posted:
                write.land()
        await asyncio.sleep(0.5)
        assert near.is_untouched()
        fabric.hangs = False
        await until(lambda: near.line.is_up)
        assert near.line.breaks == 1
        assert await near.get(0, 1, 2) == [True, True, False]


@pytest.mark.parametrize("call", ["get", "put", "have"])
async def test_a_call_may_be_cancelled_at_any_time(call):
    async with pair() as (near, fabric):
        await near.line.tried()
        await near.put(0, 1)
        fabric.offers.delay_s = 0.01
        for suspension in count(1):
            await near.line.here.remove([near.key(2)])
            reached = await cancel_at(
                getattr(near, call)(*((2,) if call == "put" else (0, 1))), suspension
            )
            near.poison()
            await asyncio.sleep(0.1)
            assert near.is_untouched()
            fabric.offers.check()
            if not reached:
                break
        assert near.line.breaks == 0, "nothing hung, so there was no need of the fence"


async def test_a_silent_far_end_is_dropped_and_found_again():
    async with pair() as (near, fabric):
        await near.line.tried()
        await near.put(0)
        fabric.is_cut = True
        await until(lambda: not near.line.is_up)
        with pytest.raises(TierError, match="far: it does not answer heartbeats"):
            await near.have(0)
        await asyncio.sleep(10)
        assert fabric.exporter.gauges()["clients_lost"] == 1, "it has given up the client as well"
        fabric.is_cut = False
        await until(lambda: near.line.is_up)
        assert await near.get(0) == [True]


async def test_slots_of_a_lost_client_become_free_after_its_agent_is_destroyed():
    async with pair() as (near, fabric):
        await near.line.tried()
        fabric.hangs = True
        putting = asyncio.create_task(near.put(0, 1, 2))
        await until(lambda: fabric.offers.grants)
        held = fabric.offers.arena.slots - fabric.offers.arena.free
        assert held == 3
        fabric.is_cut = True
        (server,) = [plane for plane in fabric.planes if plane.arena is fabric.offers.arena]
        while fabric.offers.grants:
            assert server.is_alive
            await asyncio.sleep(0.01)
        assert not server.is_alive
        fabric.offers.check()
        with pytest.raises(TierError):
            await putting


@pytest.mark.slow
@pytest.mark.parametrize("call", ["get", "put"])
async def test_a_client_that_holds_slots_too_long_is_disconnected(call):
    async with pair() as (near, fabric):
        await near.line.tried()
        await near.put(0)
        here = near.line.here
        if call == "put":
            offer = m.Offer(here._number(), near.key(1), [SIZE], [Facts()])
            assert (await here._asked(offer, m.Grant)).slots[0] >= 0
        else:
            fabric.hangs = True
            here._send(m.Get(here._number(), near.key(0), [0]))
        await asyncio.sleep(HELD_S - 2)
        assert near.line.breaks == 0
        assert fabric.offers.grants if call == "put" else fabric.offers.pins
        await asyncio.sleep(4)
        assert near.line.breaks == 1
        assert "held slots for too long" in near.said[0]
        fabric.hangs = False
        fabric.offers.check()
        await until(lambda: near.line.is_up)
        assert await near.get(0) == [True]


async def test_several_lost_clients_delay_others_no_longer_than_one(monkeypatch):
    takes_s = 0.1
    loop: Any = asyncio.get_running_loop()
    async with pair() as (near, fabric):
        await near.line.tried()
        others = [Near(fabric) for _ in range(8)]
        for other in others:
            await other.line.tried()
        destroy, times = FakePlane.destroy, [loop.time()]

        def destroyed(plane):
            if plane in far:
                loop._now += takes_s
            destroy(plane)

        async def ticking():
            while fabric.exporter._leaving:
                await asyncio.sleep(0.01)
                times.append(loop.time())

        far = [plane for plane in fabric.planes if plane.arena is fabric.offers.arena]
        with monkeypatch.context() as patch:
            patch.setattr(FakePlane, "destroy", destroyed)
            for ident in [*fabric.controls][1:]:
                fabric.exporter._drop(ident, "the client was silent for too long")
            await ticking()
        assert sum(plane.is_alive for plane in far) == 1
        assert max(two - one for one, two in pairwise(times)) < 2 * takes_s
        for other in others:
            await other.aclose()


async def test_a_data_plane_that_fails_ends_the_session_at_both_ends():
    async with pair() as (near, fabric):
        await near.line.tried()
        await near.put(0)
        fabric.is_broken = True
        with pytest.raises(TierError):
            await near.get(0)
        await asyncio.sleep(1)
        fabric.is_broken = False
        await until(lambda: near.line.is_up)
        assert await near.get(0) == [True]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("get", lambda op: m.Got(op, [], b"")),
        ("get", lambda op: m.Got(op, [SIZE], b"")),
        ("get", lambda op: m.Found(op, b"\1")),
        ("put", lambda op: m.Grant(op, [])),
        ("put", lambda op: m.Grant(op, [128])),
        ("put", lambda op: m.Grant(op, [1 << 30])),
        ("have", lambda op: m.Found(op, b"\1\1")),
    ],
)
async def test_invalid_answers_break_the_connection(asked, answer):
    async with pair() as (near, fabric):
        await near.line.tried()
        kinds = {"get": m.Get, "put": m.Offer, "have": m.Lookup}

        def lie(data):
            message = m.request(data)
            if isinstance(message, kinds[asked]):
                fabric.later(fabric._arrive, b"client 0", m.frame(answer(message.op)))
                return []
            return [data]

        fabric.to_far = lie
        with pytest.raises(TierError, match="protocol"):
            await getattr(near, asked)(0)
        await asyncio.sleep(0.1)
        assert near.line.breaks == 1
        assert "protocol" in near.said[0]


@pytest.mark.parametrize(
    ("mangle", "why"),
    [
        (lambda data: [b"\2" + data[1:]], "uses version 2 of"),
        (lambda data: [b"HTTP/1.1 400"], "uses version 72 of"),
        (lambda data: [data[:-1]], "does not keep to the protocol"),
        (lambda data: [b""], "uses no version"),
    ],
)
async def test_a_far_end_of_another_protocol_is_named(mangle, why):
    async with pair() as (near, fabric):
        fabric.to_near = mangle
        assert not await near.line.tried()
        assert why in str(near.line.error)
        assert not near.line.error.temporary


async def test_blocks_that_do_not_fit_into_a_slot_there_are_refused():
    fabric = Fabric()
    fabric.offers.block_bytes_max = SIZE - 1
    near = Near(fabric)
    assert not await near.line.tried()
    assert "blocks of 6000 bytes: a slot of the cache holds at most 5999" in str(near.line.error)
    assert not near.line.error.temporary
    await near.aclose()
    await fabric.aclose()


# ---- fuzz

KEYS = st.lists(st.integers(0, 5), max_size=4).map(
    lambda numbers: b"".join(Near.key(n) for n in numbers)
) | st.binary(max_size=70)
OPS = st.integers(0, 40) | st.integers(0, (1 << 62) - 1)
ROWS = st.tuples(
    st.integers(0, 100),
    st.integers(0, 100),
    st.none() | st.floats(),
    st.binary(max_size=8),
    st.integers(0, 7),
)
SLOTS = st.lists(st.integers(-2, 20) | st.integers(0, (1 << 31) - 1), max_size=4)
LABELS = st.integers(0, 3).map(lambda n: bytes(n * 576)) | st.binary(max_size=600)
LENGTHS = st.lists(st.integers(0, 10**5), max_size=4)
NOISE = st.binary(max_size=33)
REQUESTS = st.one_of(
    st.builds(m.Ping, OPS),
    st.builds(m.Lookup, OPS, KEYS),
    st.builds(m.Get, OPS, KEYS, SLOTS),
    st.builds(
        m.Offer, OPS, KEYS, st.lists(st.integers(0, 10**5), max_size=4), st.lists(ROWS, max_size=4)
    ),
    st.builds(m.Commit, OPS, LABELS),
    st.builds(m.Abort, OPS, OPS),
    st.builds(m.Remove, OPS, KEYS),
    st.builds(m.Purge, OPS, st.none() | st.binary(max_size=9)),
    st.builds(m.Survey, OPS, st.none() | st.binary(max_size=9), OPS),
    st.builds(
        m.Hello,
        OPS,
        st.binary(max_size=33),
        st.integers(-1, 10**6),
        st.binary(max_size=9),
        st.tuples(OPS, OPS, OPS),
    ),
    st.builds(m.Bye, OPS),
)
REPLIES = st.one_of(
    st.builds(m.Pong, OPS, st.booleans()),
    st.builds(m.Found, OPS, st.binary(max_size=4)),
    st.builds(m.Got, OPS, st.lists(st.integers(0, 10**5), max_size=3), LABELS),
    st.builds(m.Grant, OPS, SLOTS),
    st.builds(m.Stored, OPS, st.binary(max_size=4)),
    st.builds(m.Done, OPS, OPS),
    st.builds(m.Failed, OPS, st.text(max_size=9), st.booleans()),
    st.builds(m.Gone, OPS, st.text(max_size=9)),
)


def frames(kinds):
    """Frames that are whole, cut, changed, or noise."""
    whole = kinds.map(m.frame)
    cut = st.builds(lambda data, n: data[: n % (len(data) + 1)], whole, st.integers(0, 999))
    changed = st.builds(
        lambda data, at, byte: data[: at % len(data)] + bytes([byte]) + data[at % len(data) + 1 :],
        whole,
        st.integers(0, 999),
        st.integers(0, 255),
    )
    return st.lists(
        whole | cut | changed | st.binary(max_size=50) | whole.map(lambda data: data * 2),
        max_size=25,
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(frames(REQUESTS), st.booleans())
def test_no_client_harms_a_far_end(data, waits):
    async def fuzzed():
        async with pair() as (near, fabric):
            await near.line.tried()
            await near.put(0, 1)
            blocks, view = fabric.offers.blocks, fabric.offers.arena.view
            stored = {name: bytes(view(slot)) for name, (slot, *_) in blocks.items()}
            rogue = Near(fabric)
            await rogue.line.tried()
            for frame in data:
                fabric.exporter.take(b"client 1", frame)
                if waits:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(1)
            for name, (slot, *_) in blocks.items():
                assert stored.get(name) in {None, bytes(view(slot))}
            await near.put(2, 3)
            assert await near.get(2, 3) == [True, True]
            assert near.line.breaks == 0
            await rogue.aclose()

    sim_run(fuzzed())


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(frames(REPLIES))
def test_no_far_end_harms_a_client(data):
    async def fuzzed():
        async with pair(timeout_s=2.0) as (near, fabric):
            await near.line.tried()
            await near.put(0, 1)
            tasks = [asyncio.create_task(near.put(2, 3)), asyncio.create_task(near.have(0, 9))]
            for frame in data:
                await asyncio.sleep(0.0003)
                fabric._arrive(b"client 0", frame)
            await asyncio.wait(tasks)
            for task in tasks:
                assert task.exception() is None or isinstance(task.exception(), TierError)
            await until(lambda: near.line.is_up)
            await near.put(4)
            assert await near.get(4) == [True]

    sim_run(fuzzed())


async def test_impossible_contents_of_messages_are_refused():
    async with pair() as (near, fabric):
        await near.line.tried()
        await near.put(0, 1)
        here, keys = near.line.here, near.key(0) + near.key(1)
        endless = Facts()._replace(expires_wall_s=float("nan"))
        for message, kind, why in (
            (partial(m.Get, keys=keys, slots=[3, 3]), m.Got, "named twice"),
            (partial(m.Get, keys=keys, slots=[3, 999]), m.Got, "does not have"),
            (partial(m.Lookup, keys=near.key(0) * 2), m.Found, "duplicate keys"),
            (
                partial(m.Offer, keys=near.key(2), lengths=[SIZE], facts=[endless]),
                m.Grant,
                "expiry",
            ),
        ):
            with pytest.raises(TierError, match=why):
                await here._asked(message(here._number()), kind)
        assert fabric.exporter.gauges()["messages_refused"] == 4
        assert await near.get(0, 1) == [True, True]
    for area in ((4096, SIZE - 1, 16), (4096, SIZE, 0), (4096, 1 << 40, 16)):
        with pytest.raises(m.WireError, match="cannot hold blocks"):
            m.area_in(area, SIZE)


@pytest.mark.parametrize("decode", [m.request, m.reply])
def test_a_message_that_is_nested_too_deeply_is_refused(decode):
    for whole in (m.frame(m.Ping(1)), m.frame(m.Pong(1, known=True))):
        many = whole[:1] + bytes([whole[1] + 1]) + whole[2:]  # one element more
        with pytest.raises(m.WireError):
            decode(many + b"\x91" * 100_000 + b"\xc0")


@given(frames(REQUESTS | REPLIES))
def test_the_decoder_takes_or_refuses_anything(data):
    for frame in data:
        for decode in (m.request, m.reply):
            with suppress(m.WireError):
                assert m.frame(decode(m.frame(decode(frame)))) == m.frame(decode(frame))
