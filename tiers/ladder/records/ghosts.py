"""Ghosts: a bounded memory of the blocks that left the levels, and of the reason for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from kvladder.arena import Arena
from kvladder.keys import KEY_BYTES, BlockKey
from kvladder.metrics import MissCause, MissReason
from kvladder.policy.eviction import BULK_MIN
from kvladder.tiers.label import Outcome

ENTRY_BYTES: Final = 8
ENTRIES_MIN: Final = 1 << 16
ENTRIES_MAX: Final = 1 << 20
SHARE: Final = 1000
"""The table takes at most one part in this number of the arena, but for ``ENTRIES_MIN``."""
CODES_MAX: Final = 255
_CODE: Final = 0xFF

OF_VERDICT: Final[Mapping[Outcome | None, MissReason]] = {
    None: "lost",
    Outcome.GOOD: "lost",
    Outcome.CORRUPT: "damaged",
    Outcome.STALE: "foreign",
    Outcome.UNREADABLE: "unreadable",
    Outcome.EXPIRED: "expired",
}
"""Reason of a miss, by the verdict on the bytes that a tier delivered; None if it had none."""


def entries_for(arena: Arena) -> int:
    """Return the number of entries for a cache with this arena, a power of two."""
    wanted = arena.slots * arena.slot_bytes // SHARE // ENTRY_BYTES
    return max(ENTRIES_MIN, min(ENTRIES_MAX, 1 << max(1, wanted).bit_length() - 1))


class GhostTable:
    """A table with one entry of 8 bytes for a block: most of its key's first bytes, and a code.

    An entry is found by the key, and a newer block with the same entry replaces an older one. So a
    table of n entries still knows a block with probability e**(-m/n) after m others. A block that
    it does not know any more reads as never seen. The stack's lock is held around every call.

    Parameters
    ----------
    entries:
        A power of two. Memory is used once entries are written.
    """

    def __init__(self, entries: int) -> None:
        assert entries.bit_count() == 1
        self._mask = entries - 1
        self._table = np.zeros(entries, np.uint64)
        self._each = self._table.data
        self._causes: list[MissCause | None] = [None]
        self._codes: dict[MissCause, int] = {}

    def add(self, keys: Sequence[BlockKey], level: str, reason: MissReason) -> None:
        """Note that these blocks left ``level`` for ``reason``, or were not taken there."""
        code = self._code(MissCause(level, reason))
        if len(keys) < BULK_MIN:
            each, mask = self._each, self._mask
            for key in keys:
                word = int.from_bytes(key[:8], "little")
                each[word >> 8 & mask] = word & ~_CODE | code
            return
        words = np.frombuffer(b"".join(keys), "<u8")[:: KEY_BYTES // 8]
        at = (words >> np.uint64(8)) & np.uint64(self._mask)
        self._table[at] = (words & np.uint64(~_CODE & (1 << 64) - 1)) | np.uint64(code)

    def get(self, key: BlockKey) -> MissCause | None:
        """Return why the block left, or None if it is not known."""
        word = int.from_bytes(key[:8], "little")
        entry = self._each[word >> 8 & self._mask]
        return self._causes[entry & _CODE] if (entry ^ word) <= _CODE else None

    def _code(self, cause: MissCause) -> int:
        """Return the code of a cause; all causes beyond ``CODES_MAX`` lose their level."""
        code = self._codes.get(cause)
        if code is None:
            if len(self._causes) > CODES_MAX:
                return self._codes[next(one for one in self._codes if one.reason == cause.reason)]
            code = self._codes[cause] = len(self._causes)
            self._causes.append(cause)
        return code
