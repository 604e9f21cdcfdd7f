"""Prices of memory, disks and devices, as ``kvladder plan`` and the live shadow take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MONTH_S: Final = 365.25 / 12 * 86400
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in one currency; None where none is given."""

    memory: float | None = None
    """Of a GiB of memory for a month."""
    disk: float | None = None
    """Of a GiB of disk for a month."""
    gpu: float | None = None
    """Of an hour of the device that computes prompts."""

    @property
    def whole(self) -> bool | None:
        """True if all are given, else None."""
        return None if None in (self.memory, self.disk, self.gpu) else True
