"""A network of far ends without NIXL and ZeroMQ: bytes and messages arrive late, or never.

The data plane behaves as NIXL was observed to do: a posted transfer may land at any time, until one
of the two agents is destroyed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from kvladder.arena import Arena, Slot
from kvladder.errors import TierError
from kvladder.export.exporter import Exporter
from kvladder.export.offers import HAVE, REFUSED, Pinned, Surveyed
from kvladder.keys import Namespace
from kvladder.testing.sim import inline_blocking
from kvladder.tiers.label import Facts, told
from kvladder.tiers.nixl.line import Client
from kvladder.tiers.nixl.plane import Area, Plane, area_of, made

Mangle = Callable[[bytes], Sequence[bytes]]


def nap() -> None:
    """Let the loop run in place of a sleep in simulated time."""


async def late_thread(seconds: float, function: Callable[..., Any], /, *arguments: Any) -> Any:
    """Run a blocking call as a slow thread does: it ends even if no caller waits for it."""

    async def running() -> Any:
        await asyncio.sleep(seconds)
        return function(*arguments)

    return await inline_blocking(running)


class FakePlane:
    """An agent that copies from arena to arena after a while."""

    def __init__(self, fabric: Fabric, arena: Arena) -> None:
        self.metadata = b"agent %d" % len(fabric.planes)
        self.area = area_of(arena)
        self.arena = arena
        self.is_alive = True
        self.posted: list[FakeWrite] = []
        self._fabric = fabric
        self._far: FakePlane
        fabric.planes.append(self)

    def join(self, metadata: bytes, area: Area, block_bytes: int) -> None:
        found = [plane for plane in self._fabric.planes if plane.metadata == metadata]
        if not found:
            raise TierError("NIXL: no such agent")
        (self._far,) = found
        assert area == self._far.area
        assert block_bytes <= area.slot_bytes

    def write(self, own: Sequence[int], far: Sequence[int], lengths: Sequence[int]) -> FakeWrite:
        assert self.is_alive
        if self._fabric.is_broken:
            raise TierError("NIXL: disconnected")
        posted = FakeWrite(self, self._far, [*zip(own, far, lengths, strict=True)])
        self.posted.append(posted)
        if not self._fabric.hangs:
            asyncio.get_running_loop().call_later(self._fabric.delay_s, posted.land)
        return posted

    def ended(self, posted: object) -> bool:
        assert self.is_alive
        assert isinstance(posted, FakeWrite)
        return posted.has_landed

    def progress(self) -> bool:
        assert self.is_alive, "it is used after its end"
        if self._fabric.is_broken:
            raise TierError("NIXL: disconnected")
        return False

    def destroy(self) -> None:
        assert self.is_alive, "it is destroyed twice"
        self.is_alive = False


@dataclass
class FakeWrite:
    """A write in flight."""

    near: FakePlane
    far: FakePlane
    rows: list[tuple[int, int, int]]
    has_landed: bool = False

    def land(self) -> None:
        """The bytes arrive, unless an agent has ended."""
        if self.near.is_alive and self.far.is_alive and not self.has_landed:
            for own, far, length in self.rows:
                source = self.near.arena.view(Slot(own))[:length]
                self.far.arena.view(Slot(far))[:length] = source
            self.has_landed = True


class FakeOffers:
    """A cache that keeps the blocks put into it; claims of sessions are on its arena."""

    def __init__(self, slots: int = 128, slot_bytes: int = 64 << 10) -> None:
        self.arena = Arena.create(slots, slot_bytes)
        self.block_bytes_max = slot_bytes
        self.writable = True
        self.blocks: dict[bytes, tuple[Slot, int, bytes]] = {}
        self.spaces: dict[int, bytes] = {}
        self.pins: dict[tuple[int, int], list[Slot]] = {}
        self.grants: dict[tuple[int, int], dict[int, tuple[bytes, Slot, int]]] = {}
        self.surveys: dict[tuple[int, int], list[bytes]] = {}
        self.delay_s = 0.0

    async def _late(self) -> None:
        await asyncio.sleep(self.delay_s)

    async def hello(self, session: int, namespace: bytes, block_bytes: int, client: str) -> str:
        await self._late()
        self.spaces[session] = namespace
        return ""

    def _name(self, session: int, key: bytes) -> bytes:
        assert len(key) == 32
        return self.spaces[session] + key

    async def have(self, session: int, keys: Sequence[bytes]) -> bytes:
        await self._late()
        return bytes(self._name(session, key) in self.blocks for key in keys)

    async def pin(self, session: int, op: int, keys: Sequence[bytes]) -> list[Pinned | None]:
        assert (session, op) not in self.pins
        found = [self.blocks.get(self._name(session, key)) for key in keys]
        slots = self.pins[session, op] = [one[0] for one in found if one]
        self.arena.share(slots)
        await self._late()
        return [Pinned(*one) if one else None for one in found]

    async def release(self, session: int, op: int) -> None:
        self.arena.release(self.pins.pop((session, op), []))

    async def grant(
        self,
        session: int,
        op: int,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        facts: Sequence[Facts],
    ) -> list[int]:
        assert (session, op) not in self.grants
        mine = self.grants[session, op] = {}
        await self._late()
        answers: list[int] = []
        for n, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            if self._name(session, key) in self.blocks:
                answers.append(HAVE)
            elif slots := self.arena.lease(1):
                mine[n] = key, slots[0], length
                answers.append(slots[0])
            else:
                answers.append(REFUSED)
        return answers

    async def commit(self, session: int, op: int, labels: Sequence[bytes]) -> list[bool]:
        await self._late()
        done = [False] * len(labels)
        for n, (key, slot, length) in self.grants.pop((session, op)).items():
            said, view = told(labels[n]), self.arena.view(slot)
            name = self._name(session, key)
            good = said and (said.key, said.length) == (key, length)
            if good and said and said.checksum:
                good = said.is_of([view[:length]])
            if good and name not in self.blocks:
                self.blocks[name] = slot, length, labels[n]
                done[n] = True
            else:
                self.arena.release([slot])
        return done

    async def abort(self, session: int, op: int) -> None:
        held = self.grants.pop((session, op), {})
        self.arena.release([slot for _, slot, _ in held.values()])

    async def remove(self, session: int, keys: Sequence[bytes]) -> None:
        await self._late()
        self.forget({self._name(session, key) for key in keys})

    def forget(self, names: set[bytes]) -> int:
        """Forget those of the blocks that are stored."""
        gone = [self.blocks.pop(name)[0] for name in names if name in self.blocks]
        self.arena.release(gone)
        return len(gone)

    async def purge(self, session: int, salt: bytes | None) -> int:
        space, chosen = self.spaces[session], set[bytes]()
        for name, (_, _, label) in self.blocks.items():
            said = told(label)
            if name.startswith(space) and (not salt or not said or said.facts.salt == salt):
                chosen.add(name)
        return self.forget(chosen)

    async def survey(self, session: int, of: int, salt: bytes | None) -> Surveyed:
        await self._late()
        listed = self.surveys.setdefault((session, of), [*self._listed(session, salt)])
        part, self.surveys[session, of] = listed[:2], listed[2:]
        return Surveyed(part, more=bool(listed[2:]))

    def _listed(self, session: int, salt: bytes | None) -> Iterator[bytes]:
        space = self.spaces[session]
        for name, (_, _, label) in self.blocks.items():
            said = told(label)
            if name.startswith(space) and said and salt in {None, said.facts.salt}:
                yield name[len(space) :]

    async def gone(self, session: int) -> None:
        for held in [op for number, op in self.pins if number == session]:
            await self.release(session, held)
        for held in [op for number, op in self.grants if number == session]:
            await self.abort(session, held)
        self.spaces.pop(session, None)

    def check(self) -> None:
        """Assert that only stored blocks hold slots."""
        assert not self.pins
        assert not self.grants
        assert self.arena.free == self.arena.slots - len(self.blocks)
        self.arena.check()


@dataclass
class FakeControl:
    """A client's end of a control connection."""

    fabric: Fabric
    ident: bytes
    take: Callable[[bytes], None]
    broke: Callable[[TierError], None]
    is_open: bool = True

    def send(self, data: bytes) -> None:
        """Send frames to the far end one after the other, each after the test's change."""
        if self.is_open and not self.fabric.is_cut:
            for piece in self.fabric.to_far(data):
                self.fabric.later(self.fabric.exporter.take, self.ident, piece)

    def close(self) -> None:
        """Stop sending and receiving."""
        self.is_open = False
        self.fabric.controls.pop(self.ident, None)


@dataclass
class Fabric:
    """A far end, and the network between it and its clients."""

    offers: FakeOffers = field(default_factory=FakeOffers)
    delay_s: float = 0.001
    hangs: bool = False
    """Whether writes stay in flight."""
    is_broken: bool = False
    """Whether the data plane has failed."""
    is_cut: bool = False
    """Whether messages are lost."""
    to_far: Mangle = lambda data: [data]
    to_near: Mangle = lambda data: [data]
    planes: list[FakePlane] = field(default_factory=list[FakePlane])
    own: list[FakePlane] = field(default_factory=list[FakePlane])
    """Those of the far end."""
    controls: dict[bytes, FakeControl] = field(default_factory=dict[bytes, FakeControl])

    def __post_init__(self) -> None:
        self._numbers = count()
        self._due: deque[Callable[[], object]] = deque()
        self.exporter = Exporter(
            self.offers, self.maker(self.offers.arena, self.own), self._to_client, nap=nap
        )
        self._running = asyncio.get_running_loop().create_task(self.exporter.run())

    def maker(self, arena: Arena, owner: list[FakePlane]) -> Callable[[], Awaitable[Plane]]:
        """Return what makes an agent over an arena, in a thread that takes half a second."""

        def make() -> FakePlane:
            owner.append(FakePlane(self, arena))
            return owner[-1]

        return partial(made, partial(late_thread, 0.5), make)

    def later(self, function: Callable[..., object], *arguments: object) -> None:
        """Deliver a call after a delay, in the order of arrival."""
        self._due.append(partial(function, *arguments))
        asyncio.get_running_loop().call_later(self.delay_s, lambda: self._due.popleft()())

    def dial(
        self, take: Callable[[bytes], None], broke: Callable[[TierError], None]
    ) -> FakeControl:
        """Connect a client."""
        ident = b"client %d" % next(self._numbers)
        control = self.controls[ident] = FakeControl(self, ident, take, broke)
        return control

    def _to_client(self, ident: bytes, data: bytes) -> None:
        control = self.controls.get(ident)
        if control is not None and not self.is_cut:
            for piece in self.to_near(data):
                self.later(self._arrive, ident, piece)

    def _arrive(self, ident: bytes, data: bytes) -> None:
        if (control := self.controls.get(ident)) is not None:
            control.take(data)

    def client(self, arena: Arena, *, block_bytes: int, timeout_s: float | None = None) -> Client:
        """Return the shared settings of a client's connections."""
        make = self.maker(arena, [])
        return Client(Namespace(bytes(range(32))), block_bytes, make, timeout_s, nap)

    async def aclose(self) -> None:
        """End it: nothing is held, and no agent is left at this end."""
        await self.exporter.aclose()
        self._running.cancel()
        await asyncio.wait({self._running})
        self.offers.check()
        assert not any(plane.is_alive for plane in self.own), "an agent is left"
        self.offers.forget({*self.offers.blocks})
        assert self.offers.arena.close()
