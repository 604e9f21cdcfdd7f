"""Registers an arena's memory with a device while the engine runs, piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import lcm

from kvladder.arena import Arena
from kvladder.gpu.copy.device import Device
from kvladder.layout import PAGE_BYTES
from kvladder.mapping import HUGE_PAGE_BYTES
from kvladder.units import Size

logger = logging.getLogger("kvladder")

PIECE_BYTES = 1 << 30
"""Approximate bytes registered by one call: drivers limit it, and its locks delay other calls."""
LINES = 4
"""Number of log lines that report the progress, the last of them with the result."""
ENTRY_BYTES = 8
"""Device memory for the address of one page of registered memory."""
SPARE_BYTES = 64 << 20
"""Device memory that the registration leaves free."""


def piece_slots(arena: Arena, piece_bytes: int = PIECE_BYTES) -> int:
    """Return how many slots one call registers; a copy's run of bytes must not cross two pieces.

    A piece has at most ``piece_bytes``, unless a single slot has more.
    """
    unit = lcm(arena.slot_bytes, HUGE_PAGE_BYTES)  # no huge page may be in two pieces
    if unit > piece_bytes:
        unit = arena.slot_bytes
    return max(1, piece_bytes // unit) * unit // arena.slot_bytes


def table_bytes(size: int, huge_share: float = 0.0) -> int:
    """Return the most device memory that page tables for ``size`` bytes of registered memory take.

    This is arithmetic, not measured: an entry for each page. ``huge_share`` is the share of the
    memory in huge pages.
    """
    huge = int(size * huge_share) // HUGE_PAGE_BYTES
    small = -(-(size - huge * HUGE_PAGE_BYTES) // PAGE_BYTES)
    return ENTRY_BYTES * (huge + small)


class Registration:
    """Registers pieces of whole slots in the background; the arena hands out slots when ready.

    If the device refuses a piece, or has too little memory for its page tables, the rest of the
    slots is never handed out. One log line gives the result and describes how copies are made.

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
        self.ready = 0
        """Number of leading slots that are registered; copies must not touch others."""
        self.over = False
        """True once no further slot will be registered."""
        self._closed = False
        arena.admit(self, 0)
        self._join = device.background(self._steps())

    def _steps(self) -> Iterator[None]:
        """Register one piece at each step."""
        total, told, why = self._arena.slots, 1, ""
        begun_s = self._device.now()
        try:
            self._device.bind()
        except RuntimeError as error:
            why = repr(error)
        while self.ready < total and not (why or self._closed):
            end = min(self.ready + self._piece, total)
            why = self._register(self.ready, end)
            if why:
                break
            self.ready = end
            self._arena.admit(self, end)
            if told <= end * LINES // total < LINES:
                told = end * LINES // total + 1
                seconds = self._device.now() - begun_s
                share = end * 100 // total
                logger.info("registering the arena: %d %% after %.1f s", share, seconds)
            yield
        if self.ready and not self._closed:  # last: a compiler takes seconds, and saves need slots
            self._device.prepare()
        self.over = True
        if not self._closed:
            self._report(self._device.now() - begun_s, why)

    def _register(self, first: int, end: int) -> str:
        """Register slots ``first`` to ``end``; return "" or the reason why they cannot be."""
        address = self._arena.address + first * self._arena.slot_bytes
        size = (end - first) * self._arena.slot_bytes
        try:
            free = self._device.free_bytes()
            takes = table_bytes(size, self._arena.huge_share)
            if free < takes + SPARE_BYTES:
                found = f"{Size(free).brief()} of device memory are free"
                return f"{found}, page tables for the next slots take up to {Size(takes).brief()}"
            refused = self._device.register(address, size)
        except RuntimeError as error:
            refused = repr(error)
        if not refused:
            self._registered.append(address)
        return refused

    def _report(self, seconds: float, why: str) -> None:
        """Log how copies are made, and how much of the arena they reach."""
        arena = self._arena
        size, total = self.ready * arena.slot_bytes, arena.slots * arena.slot_bytes
        tables = table_bytes(size, arena.huge_share)
        told = (
            f"copies on {self._device.describe()}; {Size(size).brief()} of {Size(total).brief()}"
            f" of the arena registered in {seconds:.1f} s, with page tables of up to"
            f" {Size(tables).brief()} of device memory; {arena.huge_share:.0%} in huge pages"
        )
        if not why:
            logger.info("%s", told)
            return
        hint = "make arena.size smaller, or raise the limit of locked memory (ulimit -l)"
        unused = arena.slots - self.ready
        logger.warning("%s; %d slots stay unused: %s; %s", told, unused, why, hint)

    def close(self) -> None:
        """Stop, and undo all registrations. No copy may be in flight. May be called again."""
        self._closed = True
        self._join()
        self.ready = 0
        while self._registered:
            self._device.unregister(self._registered.pop())
        self._arena.admit(self, self._arena.slots)
