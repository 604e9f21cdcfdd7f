"""A client of an exporter with valid keys that breaks every rule, in a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, Self

from kvladder.arena import Arena, Slot
from kvladder.errors import TierError
from kvladder.export.sealed import TAIL
from kvladder.keys import BlockKey, Namespace
from kvladder.runtime import BlockingPool
from kvladder.tiers.label import LABEL_BYTES, NO_FACTS, Labels
from kvladder.tiers.nixl import messages as m
from kvladder.tiers.nixl.control import Dialler
from kvladder.tiers.nixl.curve import KeyRing
from kvladder.tiers.nixl.line import Client, Connection
from kvladder.tiers.nixl.plane import Area, NixlPlane, load
from tests.kit.puppet import Puppet, heard, line
from tests.patience import PATIENCE_S

SLOTS, SLOT_BYTES = 16, 68 << 10
BLOCK_BYTES = 60_000
SPACE = hashlib.sha256(b"rogue").digest()


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


def payload(key: bytes) -> bytes:
    """Return the content of an honest block."""
    return (hashlib.sha512(key).digest() * (BLOCK_BYTES // 64 + 1))[:BLOCK_BYTES]


class Rogue:
    """A process that executes the methods of ``Inside`` by name; a context manager."""

    def __init__(self, folder: Path, address: str, keys: str, space: bytes = SPACE) -> None:
        arguments = [address, keys, space.hex()]
        self._puppet = Puppet("tests.kit.rogue", arguments, folder / "rogue.log")

    @property
    def pid(self) -> int:
        return self._puppet.process.pid

    def __call__(self, call: str, *arguments: Any) -> Any:
        return self._puppet(call, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._puppet.kill()


class Wide(NixlPlane):
    """Writes whole slots where honest clients write blocks."""

    def join(self, metadata: bytes, area: Area, block_bytes: int) -> None:
        super().join(metadata, area, min(area.slot_bytes, SLOT_BYTES))


class Inside:
    """The misdeeds of such a process. Slots are those of the far end, numbers those of blocks."""

    def __init__(self, address: str, keys: str, space: str) -> None:
        self._space = Namespace(bytes.fromhex(space))
        self._arena = Arena.create(SLOTS, SLOT_BYTES)
        self._pool = BlockingPool(2, "rogue")
        plane = partial(Wide, self._arena, "tcp", "lo")
        client = Client(self._space, BLOCK_BYTES, partial(self._pool.run, plane), PATIENCE_S)
        self._make = lambda: Connection(client, Dialler(address, KeyRing(keys, print)))
        self._labels = Labels(self._space, BLOCK_BYTES, verify=True)
        self._here = self._make()

    async def open(self) -> str:
        """Connect, again if need be; why not, or nothing."""
        self._here.close()
        self._here = self._make()
        try:
            await self._here.open()
        except TierError as error:
            self._here.close()
            return str(error)
        return ""

    def _fill(self, slot: int, data: bytes) -> None:
        self._arena.view(Slot(slot))[: len(data)] = data

    async def put(self, numbers: list[int], poison: bytes = b"") -> list[bool | None]:
        """Put blocks, with other bytes than they have if there is a poison."""
        return await self.put_as([key_of(number) for number in numbers], poison)

    async def put_as(self, keys: list[bytes], poison: bytes = b"") -> list[bool | None]:
        """The same of blocks with these keys, with labels that are right for their bytes."""
        for slot, key in enumerate(keys):
            self._fill(slot, poison * BLOCK_BYTES or payload(key))

        async def label(wanted: Any) -> list[bytes]:
            blocks = [self._arena.view(Slot(n))[:BLOCK_BYTES] for n in wanted]
            return [
                self._labels.pack(BlockKey(keys[n]), block)
                for n, block in zip(wanted, blocks, strict=True)
            ]

        slots, lengths = [*range(len(keys))], [BLOCK_BYTES] * len(keys)
        return await self._here.put(keys, slots, lengths, [NO_FACTS] * len(keys), label)

    async def get(self, numbers: list[int]) -> list[str]:
        """Return "right", "wrong", "refused" by its label, or "missing" for each block."""
        keys, found = [key_of(number) for number in numbers], list[str]()
        got = await self._here.get(keys, [*range(len(keys))])
        for slot, (key, length) in enumerate(zip(keys, got.lengths, strict=True)):
            label = got.labels[slot * LABEL_BYTES : (slot + 1) * LABEL_BYTES]
            stored = self._arena.view(Slot(slot))[:BLOCK_BYTES]
            if not length:
                found.append("missing")
            elif self._labels.check(key, label, stored)[0]:
                found.append("refused")
            else:
                found.append("right" if stored == payload(key) else "wrong")
        return found

    async def offer(self, numbers: list[int]) -> tuple[int, list[int]]:
        """Ask for slots; return the operation and the granted slots."""
        keys, op = b"".join(map(key_of, numbers)), self._here._number()
        count = len(numbers)
        offer = m.Offer(op, keys, [BLOCK_BYTES] * count, [NO_FACTS] * count)
        return op, (await self._here._asked(offer, m.Grant)).slots

    async def commit(self, op: int, numbers: list[int]) -> list[int]:
        """Commit these blocks as written."""
        labels = [self._labels.pack(key, payload(key)) for key in map(key_of, numbers)]
        message = m.Commit(op, m.labels_packed(labels))
        return [*(await self._here._asked(message, m.Stored)).stored]

    async def abort(self, op: int) -> None:
        await self._here._asked(m.Abort(self._here._number(), op), m.Done)

    async def slots(self) -> int:
        """Return the number of slots of the far end."""
        return self._here._far_slots

    async def alive(self) -> bool:
        return not self._here.broken.done()

    async def scribble(self, slots: list[int], byte: bytes) -> str:
        """Write to slots of any owner; return the result."""
        self._fill(0, byte * BLOCK_BYTES)
        return await self._write(slots)

    async def forge(self, number: int, byte: bytes) -> str:
        """Write a block with other bytes, and a server's data after it, to all slots."""
        data, room = byte * BLOCK_BYTES, 64 << 10
        self._fill(0, data + bytes(room - BLOCK_BYTES))
        label = self._labels.pack(key_of(number), data)
        TAIL.pack_into(self._arena.view(Slot(0)), room, BLOCK_BYTES, label)
        return await self._write([*range(self._here._far_slots)], room + TAIL.size)

    async def _write(self, slots: list[int], length: int = BLOCK_BYTES) -> str:
        for slot in slots:
            try:
                async with asyncio.timeout(5.0):
                    await asyncio.shield(self._here._pump.write([0], [slot], [length]))
            except (TierError, TimeoutError) as error:
                return f"{type(error).__name__}: {error}"
        return ""


async def _serve() -> None:
    reader = asyncio.StreamReader(limit=1 << 24)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    inside = Inside(*sys.argv[1:])
    print(line(await inside.open()), flush=True)
    while said := await reader.readline():
        call, *arguments = heard(said)
        try:
            answer = await getattr(inside, call)(*arguments)
        except TierError as error:
            answer = f"TierError: {error}"
        print(line(answer), flush=True)


def main() -> None:
    """Execute commands until the other end of stdin is closed."""
    load()
    asyncio.run(_serve())
    os._exit(0)  # not by the end of the interpreter: threads of the library may hang
