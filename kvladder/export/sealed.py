"""A client's block in a slot of a cache server: its bytes, then their length and its label."""

from __future__ import annotations

from struct import Struct
from typing import Final

from kvladder.arena import Arena, Slot
from kvladder.export.offers import Pinned
from kvladder.layout import Layout
from kvladder.tiers.label import LABEL_BYTES, told

TAIL: Final = Struct(f"<Q{LABEL_BYTES}s")
"""End of a server's block: the length of the client's block, and its label."""


def server_layout(block_bytes: int) -> Layout:
    """Return the layout of a server with clients' blocks of up to ``block_bytes`` bytes."""
    fields = {"kvladder.serve": "1"}
    return Layout(block_tokens=1, block_bytes=block_bytes + TAIL.size, fields=fields)


class SealedBlocks:
    """Reads and seals blocks of clients in the slots of an arena; threads may do it at once.

    Parameters
    ----------
    block_bytes_max:
        Largest block of a client. Each slot has room for its tail behind that.
    """

    def __init__(self, arena: Arena, block_bytes_max: int) -> None:
        self._arena = arena
        self._block_bytes_max = block_bytes_max

    def read(self, slot: Slot) -> Pinned:
        """Return a block as its client stored it."""
        length, label = TAIL.unpack_from(self._arena.view(slot), self._block_bytes_max)
        return Pinned(slot, length, label)

    def seal(self, slot: Slot, label: bytes, wanted: tuple[bytes, bytes, int]) -> bool:
        """Write a label behind its block, if the slot holds what the label says and was granted.

        Return whether it does. ``wanted`` are the key, namespace and length that were granted. The
        bytes themselves are not checked if the client's level makes no checksums.
        """
        said, view, (*_, length) = told(label), self._arena.view(slot), wanted
        if said is None or (said.key, said.namespace, said.length) != wanted:
            return False
        if said.checksum and not said.is_of([view[:length]]):
            return False
        # A former block's bytes would be stored with this one, and survive their own purge.
        view[length : self._block_bytes_max] = bytes(self._block_bytes_max - length)
        TAIL.pack_into(view, self._block_bytes_max, length, label)
        return True
