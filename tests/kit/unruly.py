"""A tier that misbehaves on order in any process: a file has the orders."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvladder.errors import ConfigError, TierError, TierFull
from kvladder.schema import Settings
from kvladder.tiers.context import Progress, TierContext
from kvladder.tiers.label import Read, RecoveredBlock, Ref, Write
from kvladder.tiers.memory import MemoryTier

LATE = 0x5C
"""The byte that an unstoppable thread writes into a slot."""


class UnrulyOptions(Settings, frozen=True, kw_only=True):
    """The options of the tier: the path of its orders."""

    path: str


class UnrulyTier(MemoryTier):
    """Follows the file at ``path`` in each call that moves bytes, while the file has orders."""

    Options = UnrulyOptions
    block_bytes_min = 1
    probe_max = 7

    def __init__(self, options: UnrulyOptions) -> None:
        super().__init__()
        self._path = Path(options.path)

    async def open(self, context: TierContext) -> None:
        await super().open(context)
        if self._order() == "refuse":
            raise ConfigError("not today", path="path", hint="expected another day")
        if self._order() == "absent":
            raise TierError("nobody is there")
        context.say("it is open")

    async def examine(
        self, capacity_bytes: int, warn: Callable[[str], object]
    ) -> Mapping[str, str]:
        await self._obey()
        warn("it may be late")
        return {"capacity": str(capacity_bytes)}

    def _order(self) -> str:
        return self._path.read_text() if self._path.exists() else ""

    async def _obey(self, views: Sequence[memoryview] = ()) -> None:
        order = self._order()
        if order:
            self._path.with_suffix(".begun").touch()
        match order:
            case "hang":
                await asyncio.sleep(3600)
            case "deaf":  # does not end when it is cancelled
                while True:
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(3600)
            case "block":  # holds the loop
                threading.Event().wait()
            case "late":  # a library's thread continues
                threading.Thread(target=self._scribble, args=(views,), daemon=True).start()
                threading.Event().wait()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "crash":
                ctypes.string_at(0)
            case "exit":
                os._exit(3)
            case "full":
                raise TierFull("no room")
            case "wrong":
                raise ValueError("not a TierError")
            case "leave":
                raise SystemExit
            case _:
                pass

    def _scribble(self, views: Sequence[memoryview]) -> None:
        while True:
            for view in views:
                view[:64] = bytes([LATE]) * 64

    async def get(self, reads: Sequence[Read]) -> Sequence[bool]:
        await self._obey([read.view for read in reads])
        return await super().get(reads)

    async def put(self, writes: Sequence[Write]) -> Sequence[bool]:
        await self._obey([write.view for write in writes])
        if self._order() == "numbers":
            await super().put(writes)
            return 7  # type: ignore[return-value]
        return await super().put(writes)

    async def contains(self, blocks: Sequence[Ref]) -> Sequence[bool]:
        await self._obey()
        return await super().contains(blocks)

    def spare(self, salt: bytes) -> float:
        order, _, room = self._order().partition(" ")
        if not salt:
            return super().spare(salt)
        return float(room) if order == "room" else 3.0

    async def recover(self) -> AsyncIterator[Sequence[RecoveredBlock]]:
        held = [RecoveredBlock(key, place) for place, key in enumerate(self._blocks)]
        for start in range(0, len(held), 2):
            yield held[start : start + 2]

    async def purge(self, salt: bytes | None, progress: Progress) -> int:
        del salt
        for done in range(3):
            progress(done, 3)
        count = len(self._blocks)
        self._blocks.clear()
        return count
