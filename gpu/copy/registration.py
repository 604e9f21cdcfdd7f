"""Registers an arena's memory with a device while the engine runs, piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from math import lcm

from kvladder.arena import Arena, Slot
from kvladder.gpu.copy.device import Device
from kvladder.mapping import HUGE_PAGE_BYTES

logger = logging.getLogger("kvladder")

PIECE_BYTES = 1 << 30
"""Approximate bytes per call: drivers limit it, and other threads wait for its locks."""
LINES = 4
"""Number of log lines that report the progress."""


def piece_slots(arena: Arena, piece_bytes: int = PIECE_BYTES) -> int:
    """Return how many slots make a piece, which one call registers.

    A piece takes at most ``piece_bytes``, unless one slot is larger. A copy's run of bytes must not
    span two pieces.
    """
    unit = lcm(arena.slot_bytes, HUGE_PAGE_BYTES)  # no huge page is in two pieces
    if unit > piece_bytes:
        unit = arena.slot_bytes
    return max(1, piece_bytes // unit) * unit // arena.slot_bytes


class Registration:
    """Registers pieces of whole slots in the background; a slot is handed out when it is ready.

    If the device refuses, one warning is logged. The slots are handed out nevertheless, and their
    copies are slower.

    Parameters
    ----------
    arena:
        Must stay open until this is closed.
    piece_bytes:
        See ``piece_slots``.
    """

    def __init__(self, device: Device, arena: Arena, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._arena = arena
        self._piece = piece_slots(arena, piece_bytes)
        self._registered: list[int] = []
        self._ready = 0
        """Number of slots, counted from the first, that are all registered."""
        self._refused = ""
        self._closed = False
        arena.admit(self, 0)
        self._join = device.background(self._steps())

    def _steps(self) -> Iterator[None]:
        """Register one piece per step, and admit its slots; at the end, admit all."""
        arena, total = self._arena, self._arena.slots
        begun_s, told = self._device.now(), 0
        try:
            try:
                self._device.bind()
                self._device.prepare()
            except RuntimeError as error:
                self._refuse(total * arena.slot_bytes, repr(error))
                return
            for first in range(0, total, self._piece):
                if self._closed:
                    return
                end = min(first + self._piece, total)
                self._register(first, end - first)
                if not self._refused:
                    self._ready = end
                arena.admit(self, end)
                if end * LINES // total > told:
                    told = end * LINES // total
                    seconds = self._device.now() - begun_s
                    logger.info(
                        "registering the arena: %d %% after %.1f s", end * 100 // total, seconds
                    )
                yield
        finally:
            arena.admit(self, total)

    def _register(self, first: int, slots: int) -> None:
        address = self._arena.address + first * self._arena.slot_bytes
        size = slots * self._arena.slot_bytes
        try:
            refused = self._device.register(address, size)
        except RuntimeError as error:
            refused = repr(error)
        if not refused:
            self._registered.append(address)
        elif not self._refused:
            self._refuse(size, refused)

    def _refuse(self, size: int, why: str) -> None:
        self._refused = why
        what = "%d MiB of host memory cannot be registered, copies there are slower: %s"
        logger.warning(what, size >> 20, why)

    def holds(self, slots: Sequence[Slot]) -> bool:
        """Return whether all these slots are registered; a kernel must not touch other slots."""
        return max(slots, default=0) < self._ready

    def close(self) -> None:
        """Stop and unregister all pieces. No copy may be in flight; may be called again."""
        self._closed = True
        self._join()
        while self._registered:
            self._device.unregister(self._registered.pop())
