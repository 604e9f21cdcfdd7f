"""Cache servers, ``kvladder serve``, with their clients' tier, over the simulated network.

Both ends are the real ones, from the tier and its lines to the exporter, its sessions and the
server's cache. Below them, a message pipe replaces the sockets of ZeroMQ, and ``Plane`` an agent of
NIXL. Neither library lets a simulated loop drive it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from random import Random
from typing import Any

from kvladder.arena import Arena, Slot
from kvladder.errors import TierError
from kvladder.export.exporter import Exporter
from kvladder.export.sealed import TAIL, server_layout
from kvladder.export.server import ServerOffers
from kvladder.testing.sim import inline_blocking
from kvladder.testing.stacks import LAYOUT, LevelSpec, SimCache
from kvladder.tiers.context import TierContext
from kvladder.tiers.nixl.line import Client, Line
from kvladder.tiers.nixl.messages import BATCH_MAX
from kvladder.tiers.nixl.plane import Area, area_of, made
from kvladder.tiers.nixl.plane import Plane as FarPlane
from kvladder.tiers.nixl.tier import NixlOptions, NixlTier
from tests.kit.fabric import late_thread
from tests.sim.fleet.loop import HERE, FleetLoop, Process
from tests.sim.fleet.net import End, Net

PORT = 9400
USER_TIMEOUT_S = 5.0
"""Seconds after which the data plane reports a write that does not arrive."""


def nap() -> None:
    """Let the loop run in place of a sleep in simulated time."""


# ---- the data plane


class Planes:
    """All agents of the data plane, by their metadata."""

    def __init__(self, loop: FleetLoop, net: Net) -> None:
        self.loop = loop
        self.net = net
        self.every: dict[bytes, Plane] = {}
        self._numbers = count()

    async def make(self, arena: Arena) -> FarPlane:
        """Make an agent for the running process, in a thread."""
        return await made(partial(late_thread, 0.05), partial(self._make, arena))

    def _make(self, arena: Arena) -> Plane:
        process = HERE.get()
        assert process is not None
        plane = Plane(self, b"agent %d" % next(self._numbers), process, arena)
        self.every[plane.metadata] = plane
        return plane

    def of(self, process: Process) -> list[Plane]:
        """Return the agents of a process."""
        return [plane for plane in self.every.values() if plane.process is process]

    def gone(self, process: Process) -> None:
        """End the agents of a dead process: none of their writes arrives any more."""
        for plane in self.of(process):
            plane.is_alive = False
            self.every.pop(plane.metadata, None)


class Plane:
    """An agent whose writes arrive at any time, perhaps twice, until either end is destroyed.

    A write has ended once both have arrived, as on every connected transport: its slots may then be
    used again, so whatever comes later would be another block's bytes.
    """

    def __init__(self, planes: Planes, name: bytes, process: Process, arena: Arena) -> None:
        self.metadata = name
        self.area = area_of(arena)
        self.process = process
        self.arena = arena
        self.is_alive = True
        self._planes = planes
        self._far: Plane
        self._is_broken = False

    def join(self, metadata: bytes, area: Area, block_bytes: int) -> None:
        far = self._planes.every.get(metadata)
        if far is None:
            raise TierError("NIXL: no such agent")
        assert area == far.area
        assert block_bytes <= area.slot_bytes
        self._far = far

    def write(self, own: Sequence[int], far: Sequence[int], lengths: Sequence[int]) -> Posted:
        self._require()
        posted = Posted(self, self._far, [*zip(own, far, lengths, strict=True)])
        posted.later()
        if self._planes.net.random.random() < self._planes.net.repeats:
            self._planes.net.counts["repeated"] += 1
            posted.later()
        return posted

    def _require(self) -> None:
        assert self.is_alive or not self.process.is_alive, "it is used after its end"
        if self._is_broken or not self.is_alive or not self._far.is_alive:
            raise TierError("NIXL: disconnected")

    def ended(self, posted: object) -> bool:
        assert isinstance(posted, Posted)
        if posted.has_landed:
            return True
        self._require()
        if self._planes.loop.time() > posted.posted_s + USER_TIMEOUT_S:
            self._is_broken = True
            raise TierError("NIXL: timed out")
        return False

    def progress(self) -> bool:
        self._require()
        return False

    def destroy(self) -> None:
        assert self.is_alive or not self.process.is_alive, "it is destroyed twice"
        self.is_alive = False
        self._planes.every.pop(self.metadata, None)


class Posted:
    """A write in flight."""

    def __init__(self, near: Plane, far: Plane, rows: list[tuple[int, int, int]]) -> None:
        self.near = near
        self.far = far
        self.rows = rows
        self.posted_s = near._planes.loop.time()
        self._coming = 0

    @property
    def has_landed(self) -> bool:
        """True once no copy of it is on its way any more."""
        return not self._coming

    def later(self) -> None:
        """Let it arrive after the network's time, once more if it was called before."""
        self._coming += 1
        net = self.near._planes.net
        wait_s = net.latency_s(self.near.process.machine, self.far.process.machine)
        net._later(wait_s, self.land)

    def land(self) -> None:
        """The bytes arrive, unless an agent has ended; later, while the network is cut."""
        near, far, net = self.near, self.far, self.near._planes.net
        if not (near.is_alive and far.is_alive):
            return
        stopped = near.process.is_stopped or far.process.is_stopped
        if stopped or net.is_blocked(near.process.machine, far.process.machine):
            net._later(0.1, self.land)
            return
        for own, there, length in self.rows:
            target = far.arena.view(Slot(there))[:length]
            target[:] = near.arena.view(Slot(own))[:length]
        self._coming -= 1
        far.process.turns += 1


# ---- the control channel


class Dialled(asyncio.Protocol):
    """A client's message pipe to a server; once broken, it is not made again."""

    def __init__(
        self,
        net: Net,
        machine: str,
        take: Callable[[bytes], None],
        broke: Callable[[TierError], None],
    ) -> None:
        self._net = net
        self._take = take
        self._broke = broke
        self._waiting: deque[bytes] = deque(maxlen=1024)
        self._end: End | None = None
        self._is_open = True
        self._task = asyncio.get_running_loop().create_task(self._dial(machine))

    async def _dial(self, machine: str) -> None:
        try:
            await self._net.connect(lambda: self, machine, PORT, whole=True)
        except OSError:
            self._broke(TierError("no process listens there"))

    def connection_made(self, transport: Any) -> None:
        if not self._is_open:
            transport.abort()
            return
        self._end = transport
        while self._waiting:
            transport.write(self._waiting.popleft())

    def data_received(self, data: bytes) -> None:
        if self._is_open:
            self._take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_open:
            self._broke(TierError("the connection was closed"))

    def send(self, data: bytes) -> None:
        """Send a frame; a frame that cannot be sent now is lost."""
        if self._end is None:
            self._waiting.append(data)
        else:
            self._end.write(data)

    def close(self) -> None:
        """Close the pipe; may be repeated."""
        if self._is_open:
            self._is_open = False
            self._task.cancel()
            if self._end is not None:
                self._end.abort()


class _Peer(asyncio.Protocol):
    """A server's end of a client's pipe."""

    def __init__(self, server: Server, end: End) -> None:
        self.server = server
        self.end = end
        self.name = b"client %d" % next(server.names)
        server.peers[self.name] = self

    def data_received(self, data: bytes) -> None:
        self.server.exporter.take(self.name, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.peers.pop(self.name, None)


class SimNixlTier(NixlTier):
    """The NIXL tier over the simulated network: only what it connects with is replaced."""

    def __init__(self, planes: Planes, machines: Sequence[str]) -> None:
        addresses = tuple(f"{machine}:{PORT}" for machine in machines)
        super().__init__(NixlOptions(servers=addresses, keys="unused"))
        self._planes = planes

    async def open(self, context: TierContext) -> None:
        self.context = context
        self.batch_max = max(1, min(BATCH_MAX, context.capacity_blocks))
        plane = partial(self._planes.make, context.arena)
        space, size = context.namespace, context.layout.block_bytes
        client = Client(space, size, plane, context.timeout_s, nap)
        for address in self.options.servers:
            dial = partial(Dialled, self._planes.net, address.partition(":")[0])
            self._servers.append(Line(address, client, dial, context.say))
        try:
            await self._reached()
        except BaseException:
            await self.aclose()
            raise


class Server:
    """A cache server on a machine: its process while it runs, and its cache."""

    def __init__(self, planes: Planes, machine: str, random: Random, *, slots: int) -> None:
        self.planes = planes
        self.machine = machine
        self.slots = slots
        self.names = count()
        self.peers: dict[bytes, _Peer] = {}
        self.process: Process | None = None
        self.cache: SimCache
        self.exporter: Exporter
        self.offers: ServerOffers
        self._random = random
        self._checked: tuple[Process, int, int] | None = None

    def check(self, forbidding: int, check_stored: Callable[[str, bytes], None]) -> None:
        """Check everything that must hold in this process, if anything has changed."""
        if self.process is None or self._checked == (self.process, self.process.turns, forbidding):
            return
        cache = self.cache
        cache.manager.check()
        for key in cache.stack.host.index:
            place: Any = cache.stack.host.index.place(key)
            view = cache.arena.view(place)
            length, label = TAIL.unpack_from(view, LAYOUT.block_bytes)
            check_stored(self.machine, label + bytes(view[:length]))
        self._checked = self.process, self.process.turns, forbidding

    async def _open(self) -> None:
        specs: list[LevelSpec] = []
        layout = server_layout(LAYOUT.block_bytes)
        self.cache = await SimCache.open(*specs, slots=self.slots, layout=layout)
        self.offers = ServerOffers(self.cache.manager, inline_blocking)
        plane = partial(self.planes.make, self.cache.arena)
        self.exporter = Exporter(self.offers, plane, self._send, nap=nap)
        self._running = asyncio.create_task(self.exporter.run(), name="exporter")

    def _send(self, client: bytes, data: bytes) -> None:
        if (peer := self.peers.get(client)) is not None:
            peer.end.write(data)

    def start(self) -> None:
        """Start the server with an empty cache."""
        if self.process is None:
            loop = self.planes.loop
            self.process = Process(self.machine, loop)
            loop.run_until_complete(self.process.run(loop.create_task, self._open()))
            self.planes.net.listen(self.process, PORT, partial(_Peer, self))

    def kill(self) -> None:
        """End the process at once."""
        if self.process is None:
            return
        process, self.process = self.process, None
        self.planes.net.gone(process)
        self.planes.gone(process)
        self.cache.stack.shared.unreleased.close(0, 0)
        process.die()
        release(self.cache.arena)
        self.peers.clear()

    def close(self) -> None:
        """End the server in order; assert that no client holds anything any more."""
        if self.process is None:
            return
        loop, process = self.planes.loop, self.process
        assert not self.peers, "a client's connection outlasts it"
        loop.run_until_complete(process.run(loop.create_task, self._aclose()))
        left = [task.get_name() for task in process.tasks]
        assert not left, f"{self.machine} leaves tasks behind: {sorted(left)}"
        assert not process.timers, f"{self.machine} leaves timers behind: {process.timers}"
        assert not self.planes.of(process), f"{self.machine} leaves agents behind"
        self.planes.net.gone(process)
        process.is_alive = False
        process.is_over = True
        self.process = None

    async def _aclose(self) -> None:
        await self.exporter.aclose()
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
        await self.offers.all_gone()
        counts = self.offers.counts()
        assert not counts["pinned"], "a client's pins outlast it"
        assert not counts["granted"], "a client's grants outlast it"
        await self.cache.aclose()


def release(arena: Arena) -> None:
    """Give back the memory of a process that died: its claims go with it."""
    for slot in map(Slot, range(arena.slots)):
        arena.release([slot] * arena.claims(slot))
    arena.close()
