"""Blocks to have a tier move, and how long that takes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvladder.arena import Arena
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.base import NO_PLACE
from kvladder.tiers.label import Labels, Read, Ref, Write


def key(number: int) -> BlockKey:
    """The key of a block."""
    return BlockKey(hashlib.sha256(b"bench %d" % number).digest())


class Blocks:
    """Blocks of random bytes in an arena, and what a level has a tier do with them."""

    def __init__(self, layout: Layout, count: int) -> None:
        self.size = layout.block_bytes
        self.arena = Arena.create(count, layout.slot_bytes)
        self.slots = self.arena.lease(count) or []
        for slot in self.slots:
            data = hashlib.shake_128(b"%d" % slot).digest(4096) * (self.size // 4096)
            self.arena.view(slot)[:] = data
        self.views = [self.arena.view(slot) for slot in self.slots]
        self.refs = [Ref(key(slot), slot) for slot in self.slots]
        self._labels = Labels(layout.namespace(), self.size, verify=True)

    def writes(self) -> list[Write]:
        """All of them, to be stored."""
        every = zip(self.refs, self.slots, self.views, strict=True)
        return [Write(self._labels, *one) for one in every]

    def alike(self, numbers: Iterable[int]) -> list[Write]:
        """The bytes of the first one under other keys."""
        refs = (Ref(key(number), NO_PLACE) for number in numbers)
        return [Write(self._labels, ref, self.slots[0], self.views[0]) for ref in refs]

    def reads(self) -> list[Read]:
        """All of them, to be fetched."""
        every = zip(self.refs, self.slots, self.views, strict=True)
        return [Read(self._labels, *one) for one in every]

    def close(self) -> None:
        """Give the memory back."""
        self.arena.release(self.slots)
        self.arena.close()


async def timed(work: Callable[[], Awaitable[Sequence[bool | None] | int | None]]) -> float:
    """Seconds that a call takes, all of whose answers are True."""
    began = time.perf_counter()
    answers = await work()
    took = time.perf_counter() - began
    assert isinstance(answers, int) or all(answers or ())
    return took


def timed_raw(work: Callable[[], None]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
