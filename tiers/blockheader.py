"""The page in front of each stored block: what it is, whose, and how to tell that it is whole."""

from __future__ import annotations

from enum import IntEnum
from math import inf
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvladder.keys import Namespace
from kvladder.layout import PAGE_BYTES
from kvladder.tiers.base import Item
from kvladder.tiers.codecs import TAG_BYTES, Codec

HEADER_BYTES = PAGE_BYTES
MAGIC = b"kvblock\0"
VERSION = 1

_FIELDS = Struct(f"<8sHB5xQ32s32sQBB6xdQ{TAG_BYTES}s")
_CHECK = Struct("<Q")


class Outcome(IntEnum):
    """What reading one block came to."""

    GOOD = 0
    STALE = 1
    """Something else is stored there: another block, one without a checksum, or nothing."""
    CORRUPT = 2
    """What is stored there is damaged."""
    FAILED = 3
    """It could not be read."""


class BlockHeader:
    """Writes and checks the pages of one namespace.

    Parameters
    ----------
    space:
        The namespace: the fingerprint of the layout, among others.
    block_bytes:
        Length of a payload.
    codec:
        What makes and checks the tag; None stores blocks without a checksum and reads all of them
        unchecked.
    """

    def __init__(self, space: Namespace, block_bytes: int, codec: Codec | None) -> None:
        self._space = space
        self._length = block_bytes
        self._codec = codec

    def write(self, page: memoryview, item: Item, sequence: int, payload: memoryview) -> None:
        """Describe ``payload``, the bytes of ``item``, in ``page``, which is zero elsewhere."""
        tag = b"" if self._codec is None else self._codec.encode(payload)[1]
        _FIELDS.pack_into(
            page,
            0,
            MAGIC,
            VERSION,
            0 if self._codec is None else self._codec.id,
            self._length,
            item.key,
            self._space,
            item.place,
            item.priority,
            item.floor,
            inf if item.expires_wall_s is None else item.expires_wall_s,
            sequence,
            tag,
        )
        _CHECK.pack_into(page, _FIELDS.size, xxh3_64_intdigest(page[: _FIELDS.size]))

    def check(self, page: memoryview, item: Item, payload: memoryview) -> Outcome:
        """Whether ``page`` and ``payload`` are the block of ``item``, whole."""
        (check,) = _CHECK.unpack_from(page, _FIELDS.size)
        if xxh3_64_intdigest(page[: _FIELDS.size]) != check:
            return Outcome.CORRUPT
        magic, version, codec, length, key, space, _, _, _, _, _, tag = _FIELDS.unpack_from(page)
        if (magic, version, length, space) != (MAGIC, VERSION, self._length, self._space):
            return Outcome.CORRUPT
        if key != item.key:
            return Outcome.STALE
        if self._codec is None:
            return Outcome.GOOD
        if codec != self._codec.id:
            return Outcome.STALE
        if not self._codec.decode(payload, tag, payload):
            return Outcome.CORRUPT
        return Outcome.GOOD
