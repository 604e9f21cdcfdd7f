"""A network between simulated machines: it delays, loses, repeats, cuts and partitions.

Connections are streams, as those of TCP: bytes come late and in pieces, but in order, or the
connection breaks. A lost packet is sent again, so it delays all that follow. Messages, such as
those of ZeroMQ, travel over such a connection whole.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter, deque
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any

from tests.sim.fleet.loop import HERE, FleetLoop, Process

RESEND_S = 0.2
"""Seconds until a lost packet is sent again."""
GIVE_UP_S = 15.0
"""Seconds after which a connection breaks whose packets do not arrive."""
QUIET = object()


class FakeSocket:
    """Stands for the socket of a transport, for code that sets options."""

    def setsockopt(self, *_: object) -> None:
        """Do nothing."""


class End(asyncio.Transport):
    """One end of a connection; the transport of a protocol.

    ``whole`` keeps each write in one piece.
    """

    def __init__(self, net: Net, process: Process | None, machine: str, *, whole: bool) -> None:
        super().__init__()
        self.net = net
        self.process = process
        self.machine = machine
        self.whole = whole
        self.other: End
        self.protocol: Any = None
        self.is_open = True
        self.held: list[tuple[float, Callable[..., object], tuple[Any, ...]]] = []
        """Packets that a cut network holds up: when they were sent, and their arrival."""
        self._came: deque[bytes] = deque()
        """Bytes that have arrived, and that the process has not taken."""
        self._last_s = 0.0
        """Time at which the last packet of this end arrives."""

    # ---- the interface of a transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": FakeSocket(), "sslcontext": QUIET}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return not self.is_open

    def write(self, data: Any) -> None:
        if not self.is_open or (self.process is not None and not self.process.is_alive):
            return
        left = bytes(data)
        while left:
            size = len(left)
            if not self.whole and size > 1 and self.net.random.random() < 0.1:
                size = self.net.random.randrange(1, size)
            piece, left = left[:size], left[size:]
            self._last_s = self.net.travel(self, self._last_s, self.other.arrive, piece)

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self.is_open:
            self.break_here(None)
            self._last_s = self.net.travel(self, self._last_s, self.other.hung_up)

    # ---- called by the network

    def break_here(self, error: OSError | None) -> None:
        """Close this end, and tell its protocol."""
        if self.is_open:
            self.is_open = False
            self.net.ends.pop(self, None)
            if self.process is not None:
                self.process.post(self.protocol.connection_lost, error)

    def hung_up(self) -> None:
        """The other end has closed."""
        self.break_here(ConnectionResetError(errno.ECONNRESET, "the connection was reset"))

    def arrive(self, data: bytes) -> None:
        """Take bytes for the protocol; they wait while the process is stopped."""
        if self.is_open and self.process is not None:
            self._came.append(data)
            self.process.post(self._take)

    def _take(self) -> None:
        """Give the protocol the next bytes; callbacks of equal time run in any order."""
        data = self._came.popleft()
        if not self.is_open:
            return
        if not isinstance(self.protocol, asyncio.BufferedProtocol):
            self.protocol.data_received(data)
            return
        while data and self.is_open:
            buffer: Any = self.protocol.get_buffer(-1)
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            self.protocol.buffer_updated(size)


class Net:
    """All connections, and the faults of the network.

    ``counts`` are the packets that met each fault.
    """

    def __init__(self, loop: FleetLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.ports: dict[tuple[str, int], tuple[Process, Callable[[End], Any]]] = {}
        self.ends: dict[End, None] = {}
        self.counts: Counter[str] = Counter()
        self._blocked: Counter[tuple[str, str]] = Counter()
        """Directions in which nothing arrives, between two machines."""
        self.heal()

    def heal(self) -> None:
        """Let everything arrive, and soon."""
        self._blocked.clear()
        self.late_s: dict[str, float] = {}
        """Mean additional delay of packets, by machine."""
        self.loss: dict[str, float] = {}
        """Share of lost packets, by machine."""
        self.repeats = 0.0
        """Share of messages that arrive twice, where the protocol above allows it."""

    def block(self, source: str, target: str) -> None:
        """Let nothing from ``source`` arrive at ``target``."""
        self._blocked[source, target] += 1

    def is_blocked(self, source: str, target: str) -> bool:
        """Return whether packets in this direction do not arrive now."""
        return self._blocked[source, target] > 0

    def latency_s(self, *machines: str) -> float:
        """Return the time that a packet takes, its repetitions included."""
        took_s = 0.0002 + self.random.expovariate(1 / 0.0003)
        for machine in machines:
            if mean_s := self.late_s.get(machine):
                took_s += self.random.expovariate(1 / mean_s)
                self.counts["late"] += 1
            while self.random.random() < self.loss.get(machine, 0.0):
                took_s += RESEND_S
                self.counts["lost"] += 1
        return took_s

    def travel(self, end: End, after_s: float, arrive: Callable[..., object], *data: Any) -> float:
        """Carry a packet of ``end``; return when it arrives, later than the one before."""
        source, target = end.machine, end.other.machine
        now_s = self.loop.time()
        at_s = max(after_s + 1e-6, now_s + self.latency_s(source, target))
        self._later(at_s - now_s, self._carry, end, now_s, arrive, data)
        return at_s

    def _later(self, wait_s: float, call: Callable[..., object], *data: Any) -> None:
        """Call in the network's own context: a stopped process does not hold its packets up."""
        self.loop.call_later(wait_s, call, *data, context=Context())

    def _carry(self, end: End, sent_s: float, arrive: Callable[..., object], data: Any) -> None:
        """Deliver a packet, or try again later while the network is cut."""
        if not self.is_blocked(end.machine, end.other.machine) and not end.held:
            arrive(*data)
        elif self.loop.time() < sent_s + GIVE_UP_S:
            self.counts["held"] += 1
            end.held.append((sent_s, arrive, data))
            if len(end.held) == 1:
                self._later(RESEND_S, self._again, end)
        else:
            self._time_out(end)

    def _again(self, end: End) -> None:
        if self.is_blocked(end.machine, end.other.machine):
            if self.loop.time() >= end.held[0][0] + GIVE_UP_S:
                end.held.clear()
                self._time_out(end)
            else:
                self._later(RESEND_S, self._again, end)
            return
        held = [*end.held]
        end.held.clear()
        for _, arrive, data in held:
            arrive(*data)

    def _time_out(self, end: End) -> None:
        error = TimeoutError(errno.ETIMEDOUT, "the connection timed out")
        end.break_here(error)
        end.other.break_here(error)

    # ---- connections

    def listen(self, process: Process, port: int, make: Callable[[End], Any]) -> None:
        """Accept connections to a port of a process's machine; ``make`` returns a protocol."""
        self.ports[process.machine, port] = process, make

    async def connect(
        self, make: Callable[[], Any], host: str, port: int, *, whole: bool = False
    ) -> tuple[End, Any]:
        """Connect the running process to a port; raise OSError as the system's call would."""
        process = HERE.get()
        assert process is not None
        begun_s = self.loop.time()
        await asyncio.sleep(self.latency_s(process.machine, host))
        while self.is_blocked(process.machine, host) or self.is_blocked(host, process.machine):
            if self.loop.time() > begun_s + GIVE_UP_S or not process.is_alive:
                raise TimeoutError(errno.ETIMEDOUT, "the connection timed out")
            await asyncio.sleep(RESEND_S)
        if not process.is_alive or (host, port) not in self.ports:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"no process listens at {host}:{port}")
        server, accept = self.ports[host, port]
        near = End(self, process, process.machine, whole=whole)
        far = End(self, server, host, whole=whole)
        near.other, far.other = far, near
        near.protocol, far.protocol = make(), accept(far)
        self.ends |= dict.fromkeys((near, far))
        near.protocol.connection_made(near)
        server.post(far.protocol.connection_made, far)
        return near, near.protocol

    def cut(self, machine: str) -> int:
        """Break every connection of a machine; return how many there were."""
        mine = [end for end in self.ends if end.machine == machine]
        for end in mine:
            end.hung_up()
            end.other.hung_up()
        return len(mine)

    def gone(self, process: Process) -> None:
        """Break a dead process's connections, and close its ports."""
        self.ports = {at: one for at, one in self.ports.items() if one[0] is not process}
        for end in [end for end in self.ends if end.process is process]:
            self.ends.pop(end, None)
            end.is_open = False
            if end.other.is_open:
                self.travel(end, 0.0, end.other.hung_up)
