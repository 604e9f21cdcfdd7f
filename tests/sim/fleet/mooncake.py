"""A Mooncake Store without its library, whose calls block in threads of C++.

The tier is the real one, down to the addresses that it gives the library. ``Library`` replaces
``mooncake.store``: a master that knows where objects lie, and nodes that hold them.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kvladder.errors import TierError
from kvladder.tiers.mooncake import tier as module
from kvladder.tiers.mooncake.tier import (
    LEASE_OVER,
    NO_ROOM,
    NOT_READY,
    NOT_THERE,
    OK,
    THERE_ALREADY,
    MooncakeOptions,
    MooncakeTier,
)
from tests.sim.fleet.loop import FleetLoop

NODES = 2
AWAY = -1000
"""Code of a call that the master or a node does not answer."""


class Objects:
    """The master's names and the nodes' objects."""

    def __init__(self, loop: FleetLoop, random: Random) -> None:
        self.loop = loop
        self.random = random
        self.held: dict[str, tuple[int, bytes]] = {}
        self.unfinished: set[str] = set()
        """Names whose put never ended, as their writer died."""
        self.is_away = False
        """True while the master does not answer."""
        self.is_full = False
        self.hanging = False
        """True while calls do not return."""
        self.half = False
        """True while puts end half-way."""
        self._moved: asyncio.Event = asyncio.Event()

    def lose(self, node: int) -> int:
        """A node dies with its objects; return how many."""
        gone = [name for name, (at, _) in self.held.items() if at == node]
        for name in gone:
            del self.held[name]
        return len(gone)

    def heal(self) -> None:
        """Answer every call again."""
        self.is_away = self.is_full = self.hanging = self.half = False
        self.unfinished.clear()
        self._moved.set()

    async def thread(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Run a blocking call as a thread does: late, and not at all while it hangs."""
        await asyncio.sleep(self.random.expovariate(1 / 0.002))
        while self.hanging:
            self._moved.clear()
            await self._moved.wait()
        return function(*arguments)


def _at(where: Sequence[int], sizes: Sequence[int]) -> bytes:
    return b"".join(map(ctypes.string_at, where, sizes))


class Library:
    """A client of the store: ``MooncakeDistributedStore``, as far as the tier uses it."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def setup(self, *_: Any) -> int:
        """Reach the master."""
        return AWAY if self._objects.is_away else OK

    def register_buffer(self, _address: int, _size: int) -> int:
        """Do nothing: all memory can be used."""
        return OK

    def _read(self, name: str) -> bytes | int:
        if self._objects.is_away:
            return AWAY
        if name in self._objects.unfinished:
            return NOT_READY
        found = self._objects.held.get(name)
        return NOT_THERE if found is None else found[1]

    def batch_get_into_multi_buffers(
        self, names: list[str], where: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Read objects whose exact sizes are known."""
        return [*map(self._get, names, where, sizes)]

    def _get(self, name: str, where: list[int], sizes: list[int]) -> int:
        data = self._read(name)
        if isinstance(data, int):
            return data
        if len(data) != sum(sizes):
            return -600
        for address, size in zip(where, sizes, strict=True):
            ctypes.memmove(address, data[:size], size)
            data = data[size:]
        return LEASE_OVER if self._objects.random.random() < 0.01 else sum(sizes)

    def get_size(self, name: str) -> int:
        """Return the size of an object, or an error."""
        data = self._read(name)
        return data if isinstance(data, int) else len(data)

    def get_into_ranges(
        self, at: list[int], names: list[list[str]], each: Any, _starts: Any, sizes: Any
    ) -> list[list[list[int]]]:
        """Read the beginnings of objects."""
        rows: list[list[int]] = []
        for name, (offset,), size in zip(names[0], each[0], sizes[0], strict=True):
            data = self._read(name)
            if not isinstance(data, int) and len(data) >= size[0]:
                ctypes.memmove(at[0] + offset, data[: size[0]], size[0])
            rows.append([data if isinstance(data, int) else size[0]])
        return [rows]

    def batch_put_from_multi_buffers(
        self, names: list[str], where: list[list[int]], sizes: list[list[int]], _config: Any
    ) -> list[int]:
        """Store objects that are not there yet."""
        return [
            self._put(name, _at(at, size), anew=False)
            for name, at, size in zip(names, where, sizes, strict=True)
        ]

    def upsert_parts(self, name: str, *parts: bytes) -> int:
        """Store an object, in place of another one."""
        return self._put(name, b"".join(bytes(part) for part in parts), anew=True)

    def _put(self, name: str, data: bytes, *, anew: bool) -> int:
        objects = self._objects
        if objects.is_away:
            return AWAY
        if objects.is_full:
            return NO_ROOM
        if name in objects.unfinished or (name in objects.held and not anew):
            return THERE_ALREADY
        if objects.half and objects.random.random() < 0.5:
            objects.unfinished.add(name)
            return AWAY
        objects.held[name] = objects.random.randrange(NODES), data
        return OK

    def batch_remove(self, names: list[str], _force: bool) -> list[int]:
        """Remove objects."""
        if self._objects.is_away:
            return [AWAY] * len(names)
        return [OK if self._gone(name) else NOT_THERE for name in names]

    def _gone(self, name: str) -> bool:
        self._objects.unfinished.discard(name)
        return self._objects.held.pop(name, None) is not None

    def batch_is_exist(self, names: list[str]) -> list[int]:
        """Return 1 for each object that is there."""
        if self._objects.is_away:
            return [AWAY] * len(names)
        return [int(name in self._objects.held) for name in names]

    def remove_by_regex(self, pattern: str, _force: bool) -> int:
        """Remove all objects with matching names."""
        if self._objects.is_away:
            return AWAY
        return sum(self._gone(n) for n in [*self._objects.held] if re.match(pattern, n))


class SimMooncakeTier(MooncakeTier):
    """The Mooncake tier without a process of its own: only the library below it is replaced."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(MooncakeOptions(master="mooncake:50051", admin="mooncake:9003"))
        self._objects = objects

    def _open(self) -> None:
        library = SimpleNamespace(
            MooncakeDistributedStore=lambda: Library(self._objects),
            ReplicateConfig=SimpleNamespace,
            SoftPinAction=SimpleNamespace(ENABLE=1),
        )
        with (
            mock.patch.object(module, "_library", return_value=library),
            mock.patch.object(module, "_free_port", return_value=1),
        ):
            super()._open()

    def _list(self) -> list[str]:
        if self._objects.is_away:
            raise TierError("the master does not list the blocks")
        return sorted(self._objects.held)
