"""Calls from an exporter's process to the cache's, over a socket pair within this one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvladder.arena import Arena, Slot
from kvladder.children.pipe import Pipe, PipeState
from kvladder.errors import TierError
from kvladder.export.link import LISTENER, OFFERS, FarOffers, Serve
from kvladder.export.offers import LOOKUP_MAX, Pinned, Surveyed
from kvladder.tiers.label import Facts
from tests.export.clients import keys_of
from tests.kit.memory import writable_slots

pytestmark = pytest.mark.real
FACTS = Facts(70, 60, 123.5, b"8 bytes.", 3)


class Recording:
    """Answers like a cache, and records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.began, self.goes_on = asyncio.Event(), asyncio.Event()
        self.cancelled = 0
        self.arena = Arena.create(8, 4096)
        self.mapped = Arena.attach(self.arena.handle, writable=False)
        """The arena as the exporter's process maps it."""
        self.open: list[tuple[str, list[int]]] = []
        """Each call, with the slots that were writable at that time."""

    def close(self) -> None:
        self.mapped.close()
        self.arena.close()

    def said(self, text: str) -> None:
        self.calls.append((text,))

    def counted(self, counts: dict[str, int | dict[str, int]]) -> None:
        self.calls.append((counts,))

    async def hello(self, session: int, namespace: bytes, block_bytes: int, client: str) -> str:
        return f"{namespace!r} {block_bytes} {client}"

    async def remove(self, session: int, keys: list[bytes]) -> None:
        self.calls.append((session, keys))

    async def purge(self, session: int, salt: bytes | None) -> int:
        raise AttributeError("a fault of the cache")

    async def survey(self, session: int, of: int, salt: bytes | None) -> Surveyed:
        self.calls.append((session, of, salt))
        return Surveyed(keys_of(3), more=True)

    async def have(self, session: int, keys: list[bytes]) -> bytes:
        self.calls.append((session, keys))
        return bytes(len(keys))

    async def pin(self, session: int, op: int, keys: list[bytes]) -> list[Pinned | None]:
        self.calls.append((session, op, keys))
        self.began.set()
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [Pinned(Slot(3), 10, b"label"), None]

    async def release(self, session: int, op: int) -> None:
        self.calls.append((session, op))
        await self.goes_on.wait()

    async def grant(self, *arguments: Any) -> list[int]:
        self.calls.append(arguments)
        return [5, -1]

    async def commit(self, session: int, op: int, labels: list[bytes]) -> list[bool]:
        self.open.append(("commit", writable_slots(self.mapped)))
        raise TierError("not now", temporary=False)

    async def abort(self, session: int, op: int) -> None:
        self.open.append(("abort", writable_slots(self.mapped)))

    async def gone(self, session: int) -> None:
        self.open.append(("gone", writable_slots(self.mapped)))
        self.calls.append((session,))


@asynccontextmanager
async def linked(near: Recording) -> AsyncIterator[tuple[FarOffers, Pipe, Pipe]]:
    """The exporter's end, its pipe, and that of the cache."""
    one, two = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=one)
    far_reader, far_writer = await asyncio.open_unix_connection(sock=two)
    offers: Any = near
    serving = Pipe(reader, writer, "the exporter's process")
    serving.answer(OFFERS, offers)
    serving.answer(LISTENER, near)
    calling = Pipe(far_reader, far_writer, "the cache's process")
    try:
        yield (
            FarOffers(near.mapped, Serve(block_bytes_max=9, writable=True), calling),
            calling,
            serving,
        )
    finally:
        await calling.aclose()
        await serving.aclose()
        near.close()


async def test_calls_and_answers_keep_their_types() -> None:
    near = Recording()
    near.goes_on.set()
    async with linked(near) as (far, _, _):
        assert far.writable
        assert far.block_bytes_max == 9
        many = keys_of(*range(LOOKUP_MAX))
        assert await far.have(1, many) == bytes(LOOKUP_MAX)
        assert await far.pin(1, 2, keys_of(1, 2)) == [Pinned(Slot(3), 10, b"label"), None]
        assert await far.grant(1, 3, keys_of(1, 2), [4, 5], [FACTS, Facts()]) == [5, -1]
        assert await far.hello(1, b"space", 7, "mine") == "b'space' 7 mine"
        await far.remove(1, keys_of(1))
        assert await far.survey(1, 4, None) == Surveyed(keys_of(3), more=True)
        await far.gone(1)
        wanted = (1, 3, keys_of(1, 2), [4, 5], [FACTS, Facts()])
        later = [(1, keys_of(1)), (1, 4, None), (1,)]
        assert near.calls == [(1, many), (1, 2, keys_of(1, 2)), wanted, *later]


async def test_the_cache_receives_texts_and_counts() -> None:
    near = Recording()
    async with linked(near) as (far, calling, _):
        far.say("new clients do not find this end")
        calling.stub(LISTENER).counted({"clients": 1})
        await far.have(1, [])
        assert near.calls == [("new clients do not find this end",), ({"clients": 1},), (1, [])]


async def test_errors_of_the_cache_are_raised_in_the_child() -> None:
    async with linked(Recording()) as (far, _, serving):
        with pytest.raises(TierError, match="not now") as raised:
            await far.commit(1, 2, [])
        assert not raised.value.temporary
        with pytest.raises(TierError, match="AttributeError"):
            await far.purge(1, None)
        assert serving.state is PipeState.OPEN


class Slots(Recording):
    """Grants the slots given as lengths."""

    async def grant(self, *arguments: Any) -> list[int]:
        lengths: list[int] = arguments[3]
        assert not {*lengths}.intersection(writable_slots(self.mapped))
        return lengths


async def test_slots_are_writable_only_while_they_are_granted() -> None:
    near = Slots()
    async with linked(near) as (far, _, _):

        async def grant(session: int, op: int, *slots: int) -> None:
            await far.grant(session, op, keys_of(*slots), slots, [FACTS] * len(slots))

        assert writable_slots(near.mapped) == []
        await grant(1, 2, 5, -1, 0)
        await grant(1, 3, 1)
        await grant(2, 4, 6, 7)
        assert writable_slots(near.mapped) == [0, 1, 5, 6, 7]
        with pytest.raises(TierError):
            await far.commit(1, 2, [])
        await far.abort(2, 4)
        await far.abort(2, 4)
        await grant(2, 5, 2)
        await far.gone(1)
        await far.gone(2)
        assert near.open == [
            ("commit", [1, 6, 7]), ("abort", [1]), ("abort", [1]), ("gone", [2]), ("gone", [])
        ]  # fmt: skip


async def test_failing_to_open_a_grant_fails_the_call_and_to_close_it_ends_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near = Slots()

    def refuses(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    async with linked(near) as (far, _, _):
        with monkeypatch.context() as patch:
            patch.setattr(near.mapped, "allow_writes", refuses)
            with pytest.raises(TierError, match="cannot make slots writable: Cannot allocate"):
                await far.grant(1, 2, keys_of(1), [1], [FACTS])
        await far.abort(1, 2)
        await far.grant(1, 3, keys_of(1), [1], [FACTS])
        with monkeypatch.context() as patch:
            patch.setattr(near.mapped, "forbid_writes", refuses)
            with pytest.raises(SystemExit, match="cannot make slots read-only again"):
                await far.commit(1, 3, [])


async def test_a_release_returns_at_once_and_stays_before_later_calls() -> None:
    near = Recording()
    async with linked(near) as (far, _, serving):
        async with asyncio.timeout(5):
            await far.release(1, 2)
        assert await far.have(1, keys_of(1)) == b"\0"
        assert near.calls == [(1, 2), (1, keys_of(1))]
        near.goes_on.set()
        assert await far.grant(1, 3, keys_of(1), [4], [FACTS]) == [5, -1]
        assert serving.state is PipeState.OPEN


async def test_a_cancelled_call_ends_once_the_cache_has_ended_it() -> None:
    near = Recording()
    async with linked(near) as (far, _, _):
        pinning = asyncio.ensure_future(far.pin(1, 2, keys_of(1)))
        await near.began.wait()
        pinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pinning
        assert near.cancelled == 1
        assert await far.have(1, keys_of(1)) == b"\0"


async def test_losing_one_end_ends_the_calls_in_flight_at_both() -> None:
    near = Recording()
    async with linked(near) as (far, calling, serving):
        pinning = asyncio.ensure_future(far.pin(1, 2, keys_of(1)))
        await near.began.wait()
        await calling.aclose()
        await serving.join()
        assert near.cancelled == 1
        with pytest.raises(TierError, match="the cache's process is gone"):
            await pinning
        with pytest.raises(TierError, match="the cache's process is gone"):
            await far.have(1, keys_of(1))
