"""The other process of bench_nixl: one end of a bare data plane and of a bare socket."""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

from xxhash import xxh3_128_digest

from kvladder.arena import Arena, Slot
from kvladder.tiers.nixl.plane import Area, NixlPlane
from kvladder.tiers.nixl.pump import doze


def moved(plane: NixlPlane, is_over: Callable[[], bool]) -> None:
    """Make progress on transfers until ``is_over`` returns True."""
    while not is_over():
        if not plane.progress():
            doze()


def written(plane: NixlPlane, count: int, size: int) -> None:
    """Write a number of blocks to the other end."""
    posted = plane.write(range(count), range(count), [size] * count)
    moved(plane, lambda: plane.ended(posted))


def summed(views: Iterable[memoryview]) -> None:
    """Read blocks once, as making checksums does."""
    for view in views:
        xxh3_128_digest(view)


def told(end: socket.socket, value: object) -> None:
    """Send a small message."""
    data = pickle.dumps(value)
    end.sendall(len(data).to_bytes(4, "little") + data)


def heard(end: socket.socket) -> Any:
    """Receive a small message."""
    size = int.from_bytes(end.recv(4, socket.MSG_WAITALL), "little")
    return pickle.loads(end.recv(size, socket.MSG_WAITALL))


def received(end: socket.socket, view: memoryview) -> None:
    """Receive bytes until the view is full."""
    while view:
        view = view[end.recv_into(view) :]


def main() -> None:
    """Obey: b"g", b"p" by the socket, b"G", b"P" by NIXL, b"C" checks, b"E" waits."""
    count, size = map(int, sys.argv[1:])
    arena = Arena.create(count, size)
    memory = memoryview(bytearray(count * size))
    plane = NixlPlane(arena, "tcp", "lo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        end, _ = server.accept()
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    told(end, (plane.metadata, tuple(plane.area)))
    metadata, area = heard(end)
    plane.join(metadata, Area(*area), size)
    while call := end.recv(1):
        number = int.from_bytes(end.recv(4, socket.MSG_WAITALL), "little")
        if call == b"g":
            end.sendall(memory[: number * size])
        elif call == b"p":
            received(end, memory[: number * size])
            end.sendall(b"k")
        elif call == b"G":
            written(plane, number, size)
            end.sendall(b"k")
        elif call in {b"C", b"E"}:
            if call == b"C":
                summed([arena.view(Slot(slot)) for slot in range(number)])
            end.sendall(b"k")
        else:
            moved(plane, lambda: bool(select.select([end], [], [], 0)[0]))
    os._exit(0)


if __name__ == "__main__":
    main()
