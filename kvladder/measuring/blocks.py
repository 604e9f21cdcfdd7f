"""Makes blocks for measurements, with the requests that a level makes for them."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvladder.arena import Arena, Slot
from kvladder.keys import BlockKey
from kvladder.layout import Layout
from kvladder.tiers.base import NO_PLACE
from kvladder.tiers.label import Labels, Read, Ref, Write

KIB, MIB = 1 << 10, 1 << 20


def told(size: int, batch: int) -> str:
    """Return a batch in words."""
    unit = f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"
    return f"{batch} of {unit} at once"


def key(number: int) -> BlockKey:
    """Return the key of a block."""
    return BlockKey(hashlib.sha256(b"bench %d" % number).digest())


def numbers(size: int) -> np.ndarray:
    """Return ``size`` bytes of normally distributed numbers as bfloat16, as KV resembles them."""
    drawn = np.random.default_rng(1).standard_normal(-(-size // 2), np.float32)
    halves = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    return halves.view(np.uint8)[:size]


class Blocks:
    """Blocks in an arena, with the requests that a level makes for them.

    Parameters
    ----------
    scratch:
        Further slots, for codecs.
    """

    def __init__(self, layout: Layout, count: int, *, scratch: int = 0) -> None:
        self.layout = layout
        self.size = layout.block_bytes
        self.arena = Arena.create(count + scratch, layout.slot_bytes)
        self.slots: Sequence[Slot] = self.arena.lease(count) or []
        self.scratch: Sequence[Slot] = (self.arena.lease(scratch) or []) if scratch else []
        data = numbers(self.size)
        for slot in self.slots:
            self.arena.view(slot)[: self.size] = np.roll(data, slot * 4099).data
        self.views = [self.arena.view(slot) for slot in self.slots]
        self.refs = [Ref(key(slot), slot) for slot in self.slots]
        self._labels = Labels(layout.namespace(), self.size, verify=True)

    def writes(self) -> list[Write]:
        """Return requests to store all blocks."""
        every = zip(self.refs, self.slots, self.views, strict=True)
        return [Write(self._labels, *ref, slot, view) for ref, slot, view in every]

    def alike(self, numbers: Iterable[int]) -> list[Write]:
        """Return requests to store the first block's bytes under other keys."""
        refs = (Ref(key(number), NO_PLACE) for number in numbers)
        return [Write(self._labels, *ref, self.slots[0], self.views[0]) for ref in refs]

    def reads(self) -> list[Read]:
        """Return requests to fetch all blocks."""
        every = zip(self.refs, self.slots, self.views, strict=True)
        return [Read(self._labels, *ref, slot, view) for ref, slot, view in every]

    def close(self) -> None:
        """Free the memory."""
        self.views.clear()
        self.arena.release([*self.slots, *self.scratch])
        self.arena.close()


def timed_raw(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copied(blocks: Blocks, count: int | None = None) -> Callable[[], None]:
    """Return a function that copies the first ``count`` blocks to other memory, in one thread."""
    target = ctypes.create_string_buffer(blocks.size)

    def copy() -> None:
        for slot in blocks.slots[:count]:
            source = blocks.arena.address + slot * blocks.arena.slot_bytes
            ctypes.memmove(target, source, blocks.size)

    return copy
