"""All that lies on a server: the names of a namespace's blocks, and what their headers tell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from kvladder.tiers.redisnodes import Command, Entrance
from kvladder.tiers.redisservers import Outcome
from kvladder.tiers.redisvalue import HEADER_BYTES, salt_and_length
from kvladder.tiers.resp import Target, encode

STEP_KEYS = 1000
"""How many keys a step looks at; in between the server serves others."""
Run = Callable[[Sequence[Command]], Awaitable[Sequence[Outcome]]]


async def scan(entrance: Entrance, connection: Any, prefix: bytes) -> AsyncIterator[list[bytes]]:
    """The keys of a namespace's blocks and of their parts, step by step, some steps empty.

    ``connection`` is one of redis-py's.
    """
    cursor: int | bytes = -1
    while int(cursor):
        step = (max(0, int(cursor)), "MATCH", prefix + b"{*", "COUNT", STEP_KEYS)
        cursor, names = await entrance.reply(connection, "SCAN", *step)
        yield names


async def heads(names: Sequence[bytes], run: Run) -> dict[bytes, tuple[bytes, int]]:
    """Of those keys under which a header of ours lies: its salt, and the bytes it describes."""
    if not names:
        return {}
    read = [memoryview(bytearray(HEADER_BYTES)) for _ in names]
    await run(
        [
            Command(name, encode(b"GETRANGE", name, 0, HEADER_BYTES - 1), Target(head, head[:0]))
            for name, head in zip(names, read, strict=True)
        ]
    )
    told = zip(names, map(salt_and_length, read), strict=True)
    return {name: own for name, own in told if own is not None}
