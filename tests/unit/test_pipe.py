"""Calls between the two ends of a pipe, both of them in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, NamedTuple, Protocol

import msgspec
import pytest

from kvladder.children.interface import Interface
from kvladder.children.messages import Call, Cancel, Done, Failed, frame
from kvladder.children.pipe import Pipe, PipeState
from kvladder.errors import ConfigError, KvladderError, TierError, TierFull, Unavailable
from kvladder.tiers import PermissionDenied
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.real


class Pair(NamedTuple):
    left: int
    right: str


class Record(msgspec.Struct, array_like=True, frozen=True):
    pairs: list[Pair]
    note: bytes | None = None


class Calls(Protocol):
    async def double(self, number: int) -> int: ...

    async def turn(self, record: Record, keys: Sequence[bytes]) -> Record | None: ...

    async def wait(self, name: str) -> str: ...

    async def give(self, what: str) -> int: ...

    async def fail(self, what: str) -> None: ...

    async def nothing(self) -> None: ...

    async def begin(self, number: int) -> None: ...

    def note(self, number: int) -> None: ...


class Other(Protocol):
    async def unknown(self) -> None: ...


class More(Calls, Other, Protocol):
    def unheard(self, text: str) -> None: ...


OTHER = Interface(Other)  # type: ignore[type-abstract]
CALLS = Interface(Calls, one_way=["begin"])  # type: ignore[type-abstract]
MORE = Interface(More, one_way=["begin"])  # type: ignore[type-abstract]


class Silent(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("even this fails")


ERRORS: dict[str, BaseException] = {
    "config": ConfigError("wrong", path="a.b", hint="expected c"),
    "unavailable": Unavailable("down", path="a.b", hint="start it"),
    "full": TierFull("no room", temporary=False),
    "denied": PermissionDenied("read only"),
    "tier": TierError("later"),
    "name": TierError("no file \udcff"),
    "value": ValueError("7"),
    "exit": SystemExit(3),
    "cancelled": asyncio.CancelledError(),
    "silent": Silent(),
}


class Target:
    """Answers calls, and records them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.let_go = asyncio.Event()
        self.obeys = True  # a cancelled call ends at once

    async def double(self, number: int) -> int:
        self.events.append(f"double {number}")
        return 2 * number

    async def turn(self, record: Record, keys: Sequence[bytes]) -> Record | None:
        if record.note is None:
            return None
        return Record([Pair(len(keys), pair.right) for pair in record.pairs], record.note)

    async def wait(self, name: str) -> str:
        self.events.append(f"begin {name}")
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.events.append(f"cancel {name}")
            while not self.obeys and not self.let_go.is_set():
                with suppress(asyncio.CancelledError):
                    await self.let_go.wait()
            raise
        finally:
            self.events.append(f"end {name}")
        return name

    async def give(self, what: str) -> int:
        results: dict[str, Any] = {
            "text": "7", "object": object(), "large": 1 << 70, "bytes": bytes(1000), "right": 7
        }  # fmt: skip
        value: int = results[what]
        return value

    async def fail(self, what: str) -> None:
        raise ERRORS[what]

    async def nothing(self) -> None:
        return None

    async def begin(self, number: int) -> None:
        self.events.append(f"start {number}")
        if number < 0:
            raise ValueError(f"it is {number}")
        await self.let_go.wait()

    def note(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"it is {number}")
        self.events.append(f"note {number}")


class Ends(NamedTuple):
    near: Pipe
    far: Pipe
    calls: Calls
    """The interface to call the far end."""
    back: Calls
    """The far end's interface to call the near one."""
    target: Target
    """The far end's methods."""
    near_target: Target
    near_writer: asyncio.StreamWriter
    far_writer: asyncio.StreamWriter


@asynccontextmanager
async def piped(**options: Any) -> AsyncIterator[Ends]:
    """Both ends; the options are the near one's."""
    one, two = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=one)
    far_reader, far_writer = await asyncio.open_unix_connection(sock=two)
    near = Pipe(reader, writer, "the far end", **options)
    far = Pipe(far_reader, far_writer, "the near end")
    target, near_target = Target(), Target()
    near.answer(CALLS, near_target)
    far.answer(CALLS, target)
    try:
        async with asyncio.timeout(PATIENCE_S):
            calls, back = near.stub(CALLS), far.stub(CALLS)
            yield Ends(near, far, calls, back, target, near_target, writer, far_writer)
    finally:
        target.let_go.set()
        near_target.let_go.set()
        await near.aclose()
        await far.aclose()


async def seen(events: list[str], event: str) -> None:
    while event not in events:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def works(ends: Ends) -> None:
    """Both ends still call each other."""
    assert (ends.near.state, ends.far.state) == (PipeState.OPEN, PipeState.OPEN)
    assert await ends.calls.double(3) == 6
    assert await ends.back.double(4) == 8


async def ended(pipe: Pipe, calls: Calls, why: str) -> None:
    """A pipe is closed, and calls raise at once."""
    assert pipe.state is PipeState.CLOSED
    for _ in range(2):
        calling: Any = calls.double(3)
        with pytest.raises(TierError, match=why):
            calling.send(None)
        calling.close()
    calls.note(1)
    await calls.begin(2)


# ---- messages


async def test_arguments_and_results_keep_their_types() -> None:
    async with piped() as ends:
        record = Record([Pair(1, "a"), Pair(2, "b")], b"\0\xff")
        assert await ends.calls.turn(record, (b"x", b"y")) == Record(
            [Pair(2, "a"), Pair(2, "b")], b"\0\xff"
        )
        assert await ends.calls.turn(keys=[], record=Record([])) is None
        await ends.calls.nothing()
        await works(ends)


async def test_calls_begin_in_their_order_and_end_in_any() -> None:
    async with piped() as ends:
        waiting = asyncio.ensure_future(ends.calls.wait("a"))
        await seen(ends.target.events, "begin a")
        ends.calls.note(1)
        await ends.calls.begin(2)
        ends.calls.note(3)
        assert await ends.calls.double(4) == 8
        assert ends.target.events == ["begin a", "note 1", "start 2", "note 3", "double 4"]
        assert not waiting.done()
        ends.target.let_go.set()
        assert await waiting == "a"


# ---- a fault costs its call


async def test_an_unknown_method_fails_its_call_alone() -> None:
    async with piped() as ends:
        more = ends.near.stub(MORE)
        with pytest.raises(TierError, match="the other process has no method unknown") as raised:
            await more.unknown()
        assert not raised.value.temporary
        more.unheard("dropped")
        await works(ends)


NESTED: Any = []
for _ in range(5000):
    NESTED = [NESTED]


@pytest.mark.parametrize("wrong", ["7", None, 1.5, [7]])
async def test_a_wrong_argument_fails_its_call_alone(wrong: Any) -> None:
    async with piped() as ends:
        with pytest.raises(TierError, match="ValidationError"):
            await ends.calls.double(wrong)
        await works(ends)


@pytest.mark.parametrize("wrong", [object(), 1 << 70, "\udcff", NESTED])
async def test_an_argument_that_cannot_be_encoded_fails_its_call_alone(wrong: Any) -> None:
    async with piped() as ends:
        with pytest.raises(TypeError):
            await ends.calls.double(wrong)
        with pytest.raises(TypeError):
            ends.calls.note(wrong)
        await works(ends)


async def test_calls_outside_the_interface_are_refused_by_type_checkers_and_at_run_time() -> None:
    async with piped() as ends:
        with pytest.raises(TierError):
            await ends.calls.double("7")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await ends.calls.double()  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            await ends.calls.double(1, 2)  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            await ends.calls.double(numbers=1)  # type: ignore[call-arg]
        with pytest.raises(AttributeError):
            await ends.calls.treble(1)  # type: ignore[attr-defined]
        with pytest.raises(AttributeError):
            ends.near.answer(OTHER, Target())  # type: ignore[misc]
        text: str = await ends.calls.double(1)  # type: ignore[assignment]
        assert text == 2
        await works(ends)


@pytest.mark.parametrize("what", ["text", "object", "large", "nothing there"])
async def test_a_wrong_result_fails_its_call_alone(what: str) -> None:
    async with piped() as ends:
        with pytest.raises(TierError) as raised:
            await ends.calls.give(what)
        assert not raised.value.temporary
        assert await ends.calls.give("right") == 7
        await works(ends)


async def test_a_too_long_message_fails_its_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvladder.children.messages.FRAME_BYTES_MAX", 400)
    async with piped() as ends:
        with pytest.raises(TierError, match="a message of .* bytes: expected at most 400"):
            await ends.calls.wait("long" * 100)
        with pytest.raises(TierError, match="a message of .* bytes: expected at most 400"):
            await ends.calls.give("bytes")
        await works(ends)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("config", ConfigError, "a.b: wrong (expected c)"),
        ("unavailable", Unavailable, "down (start it)"),
        ("full", TierFull, "no room"),
        ("denied", PermissionDenied, "read only"),
        ("tier", TierError, "later"),
        ("name", TierError, r"no file \udcff"),
        ("value", TierError, "the call raised ValueError('7')"),
        ("exit", TierError, "the call raised SystemExit(3)"),
        ("cancelled", TierError, "the other process cancelled the call"),
        ("silent", TierError, "the call raised RuntimeError"),
    ],
)
async def test_an_error_of_a_method_is_raised_by_its_call(
    what: str, kind: type[KvladderError], text: str
) -> None:
    async with piped() as ends:
        with pytest.raises(KvladderError) as raised:
            await ends.calls.fail(what)
        assert type(raised.value) is kind
        assert str(raised.value) == text
        for name in ("path", "hint"):
            assert getattr(raised.value, name, None) == getattr(ERRORS[what], name, None)
        assert getattr(raised.value, "temporary", None) == getattr(
            ERRORS[what], "temporary", None if what == "config" else what == "cancelled"
        )
        await works(ends)


async def test_errors_without_a_waiting_caller_are_reported_to_the_loop() -> None:
    faults = list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, told: faults.append(str(told["exception"])))
    wrong: Any = "7"
    async with piped() as ends:
        ends.calls.note(-1)
        await ends.calls.begin(-2)
        ends.calls.note(wrong)
        await ends.calls.begin(wrong)
        await works(ends)
        assert len(faults) == 4
        assert {"it is -1", "it is -2"} < {*faults}
        assert sum("Expected `int`, got `str`" in fault for fault in faults) == 2


# ---- calls that are cancelled


async def test_a_cancelled_call_ends_once_the_other_end_has_ended_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, timers = list[int](), list[asyncio.TimerHandle]()
    loop, late_s = asyncio.get_running_loop(), PATIENCE_S + 1
    call_later = loop.call_later

    def noted(delay_s: float, *arguments: Any, **named: Any) -> asyncio.TimerHandle:
        handle = call_later(delay_s, *arguments, **named)
        if delay_s == late_s:
            timers.append(handle)
        return handle

    monkeypatch.setattr(loop, "call_later", noted)
    async with piped(late=lambda: late.append(1), late_s=late_s) as ends:
        ends.target.obeys = False
        waiting = asyncio.ensure_future(ends.calls.wait("a"))
        await seen(ends.target.events, "begin a")
        for _ in range(3):
            waiting.cancel()
            await works(ends)
        assert ends.target.events.count("cancel a") == 1
        assert not waiting.done()
        ends.target.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert "end a" in ends.target.events
        assert not late
        assert [timer.cancelled() for timer in timers] == [True]
        await works(ends)


async def test_a_call_can_be_cancelled_at_any_moment() -> None:
    async with piped() as ends:
        ends.target.let_go.set()
        for turns in range(12):
            calling = asyncio.ensure_future(ends.calls.double(turns))
            for _ in range(turns):
                await asyncio.sleep(0)
            calling.cancel()
            with suppress(asyncio.CancelledError):
                assert await calling == 2 * turns
            assert not ends.near._calls
        ends.near_writer.write(frame(Call(900, "double", msgspec.Raw(b"\x91\x07"))))
        ends.near_writer.write(frame(Cancel(900)))
        ends.near_writer.write(frame(Cancel(901)))
        await works(ends)


async def test_a_call_that_ends_late_is_reported_once() -> None:
    late = asyncio.Event()
    async with piped(late=late.set, late_s=0.01) as ends:
        ends.target.obeys = False
        waiting = asyncio.ensure_future(ends.calls.wait("a"))
        await seen(ends.target.events, "begin a")
        waiting.cancel()
        await late.wait()
        assert not waiting.done()
        ends.far_writer.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await ends.near.join() == ""


# ---- the end


async def test_an_end_stops_incoming_calls_then_the_child_then_outgoing_calls() -> None:
    order, child = list[str](), asyncio.Event()

    async def died(fault: str) -> str:
        order.append(f"ended {fault!r} {ends.near_target.events[-1]}")
        await child.wait()
        return "it has ended: SIGKILL"

    async with piped(ended=died) as ends:
        ends.near_target.obeys = False
        calling = asyncio.ensure_future(ends.calls.wait("a"))
        called = asyncio.ensure_future(ends.back.wait("b"))
        await seen(ends.target.events, "begin a")
        await seen(ends.near_target.events, "begin b")
        ends.far_writer.close()
        await seen(ends.near_target.events, "cancel b")
        assert not order
        await ended(ends.near, ends.calls, "the far end is gone")
        ends.near_target.let_go.set()
        await seen(order, "ended '' end b")
        assert order == ["ended '' end b"]
        await ended(ends.near, ends.calls, "the far end is gone")
        assert not calling.done(), "the child may still touch what the call gave it"
        child.set()
        with pytest.raises(TierError, match="it has ended: SIGKILL"):
            await calling
        assert await ends.near.join() == ""
        await ended(ends.near, ends.calls, "it has ended: SIGKILL")
        with pytest.raises(TierError, match="the near end is gone"):
            await called
        await ended(ends.far, ends.back, "the near end is gone")


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


BROKEN: dict[str, tuple[bytes, str]] = {
    "too long": (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
    "no message": (framed(b"what"), ""),
    "empty": (framed(b""), ""),
    "another": (framed(msgspec.msgpack.encode(["Said", 1])), ""),
    "part": (framed(msgspec.msgpack.encode(["Call", 1])), ""),
    "wrong type": (framed(msgspec.msgpack.encode(["Cancel", "1"])), ""),
    "no text": (framed(b"\x94\xa4Call\x01\xa1\xff\x90"), ""),
    "more": (framed(frame(Cancel(1))[4:] + b"\0"), ""),
    "deep": (framed(b"\x94\xa4Call\x01\xa1x" + b"\x91" * 100_000 + b"\xc0"), "too deeply"),
    "twice": (frame(Call(9, "wait", msgspec.Raw(b"\x91\xa1x"))) * 2, "two calls have the number 9"),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_a_broken_frame_ends_both_ends(what: str) -> None:
    told = list[str]()

    async def died(fault: str) -> str:
        told.append(fault)
        return ""

    sent, why = BROKEN[what]
    async with piped(ended=died) as ends:
        calling = asyncio.ensure_future(ends.calls.wait("a"))
        called = asyncio.ensure_future(ends.back.wait("b"))
        await seen(ends.target.events, "begin a")
        ends.far_writer.write(sent)
        fault = await ends.near.join()
        assert fault.startswith("it broke the protocol: ")
        assert why in fault
        assert told == [fault]
        with pytest.raises(TierError, match="the far end is gone"):
            await calling
        with pytest.raises(TierError, match="the near end is gone"):
            await called
        assert await ends.far.join() == ""
        await ended(ends.near, ends.calls, "the far end is gone")
        await ended(ends.far, ends.back, "the near end is gone")


@pytest.mark.parametrize("left", [0, 1, 3, 4, 5, 12])
async def test_an_end_within_a_frame_is_an_end(left: int) -> None:
    async with piped() as ends:
        ends.far_writer.write(frame(Done(1, msgspec.Raw(b"\x07")))[:left])
        ends.far_writer.close()
        assert await ends.near.join() == ""
        await ended(ends.near, ends.calls, "the far end is gone")


async def test_answers_to_calls_that_are_over_change_nothing() -> None:
    async with piped() as ends:
        ends.far_writer.write(frame(Done(76, msgspec.Raw(b"\x07"))))
        ends.far_writer.write(frame(Failed(77, "tier", "late")))
        await works(ends)


def test_no_bytes_hang_a_pipe() -> None:
    """Frames with some bytes changed: each is answered, dropped, or ends both ends."""

    async def sent(data: bytes) -> None:
        async with piped() as ends:
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            ends.target.let_go.set()
            ends.near_writer.write(data)
            ends.near_writer.close()
            await ends.far.join()
            await ended(ends.far, ends.back, "the near end is gone")
            with suppress(TierError):
                await ends.calls.double(1)
            await ends.near.join()

    random = Random(7)
    good = b"".join(
        frame(Call(number, name, msgspec.Raw(b"\x91\xa1x")))
        for number, name in enumerate(("wait", "note", "begin", "double", "none"))
    )
    for _ in range(100):
        data = bytearray(good)
        for _ in range(random.randrange(4)):
            data[random.randrange(len(data))] = random.randrange(256)
        asyncio.run(sent(bytes(data)))


async def test_a_pipe_that_is_closed_ends_both_ends() -> None:
    async with piped() as ends:
        calling = asyncio.ensure_future(ends.calls.wait("a"))
        called = asyncio.ensure_future(ends.back.wait("b"))
        await seen(ends.target.events, "begin a")
        await ends.near.aclose()
        await ends.near.aclose()
        await ended(ends.near, ends.calls, "the far end is gone")
        with pytest.raises(TierError):
            await calling
        with pytest.raises(TierError):
            await called
        assert "cancel a" in ends.target.events


async def test_a_pipe_can_be_closed_before_it_has_read_anything() -> None:
    async with piped() as ends:
        ends.near._reading.cancel()  # which never runs then
        with pytest.raises(TierError, match="the far end is gone"):
            await ends.calls.double(1)
        await ended(ends.near, ends.calls, "the far end is gone")


# ---- interfaces


def methods() -> dict[str, Callable[..., Any]]:
    async def untyped(self, one) -> None: ...

    async def no_result(self, one: int): ...

    async def default(self, one: int = 1) -> None: ...

    async def named(self, *, one: int) -> None: ...

    async def many(self, *one: int) -> None: ...

    def answers(self) -> int: ...  # type: ignore[empty-body]

    return {one.__name__: one for one in (untyped, no_result, default, named, many, answers)}


@pytest.mark.parametrize("name", methods())
def test_an_interface_has_types_that_can_be_sent_and_no_defaults(name: str) -> None:
    with pytest.raises(TypeError):
        Interface(type("Wrong", (), {name: methods()[name]}))


def test_a_one_way_method_is_one_of_the_interface_and_has_no_result() -> None:
    with pytest.raises(TypeError, match="Calls has no method missing"):
        Interface(Calls, one_way=["missing"])  # type: ignore[type-abstract]
    with pytest.raises(TypeError, match="double: expected"):
        Interface(Calls, one_way=["double"])  # type: ignore[type-abstract]


async def test_a_method_is_answered_by_one_object() -> None:
    async with piped() as ends:
        with pytest.raises(ValueError, match="two interfaces of one pipe have a method double"):
            ends.far.answer(CALLS, Target())
