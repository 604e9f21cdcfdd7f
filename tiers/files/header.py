"""The page in front of each stored block: what it is, whose, and how to tell that it is whole."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from kvladder.keys import SALT_BYTES, BlockKey, Namespace
from kvladder.layout import PAGE_BYTES
from kvladder.tiers.base import NOTE_BYTES, Item, Outcome
from kvladder.tiers.codecs.base import TAG_BYTES

HEADER_BYTES = PAGE_BYTES
MAGIC = b"kvblock\0"
VERSION = 3

_FIELDS = Struct(f"<8sHB3xHQ32s32sQBBB5xd{SALT_BYTES}sQ{TAG_BYTES}s{NOTE_BYTES}s")
_UNCHECKED, _XXH3 = range(2)
_CHECK = Struct("<Q")


class Told(NamedTuple):
    """What a whole header says of the block behind it."""

    key: BlockKey
    length: int
    place: int
    priority: int
    floor: int
    terms: int
    expires_wall_s: float
    """Infinite if it does not."""
    salt: bytes
    """Zeros without one."""
    sequence: int
    digest: bytes = b""
    """What ``digest_of`` gives of the bytes that were stored; empty if they have no checksum."""


def digest_of(pieces: Iterable[memoryview]) -> bytes:
    """The checksum of a block's stored bytes."""
    state = xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


class BlockHeader:
    """Writes and checks the pages of one namespace.

    Parameters
    ----------
    space:
        The namespace: the fingerprint of the layout, among others.
    block_bytes:
        Length of a whole block.
    verify:
        Whether stored bytes get a checksum and are compared with it; else all are read unchecked.
    """

    def __init__(self, space: Namespace, block_bytes: int, *, verify: bool) -> None:
        self._space = space
        self._size = block_bytes
        self._verify = verify

    def write(self, page: memoryview, item: Item, sequence: int, slot: memoryview) -> None:
        """Describe the bytes of ``item``, which begin ``slot``, in ``page``: zero elsewhere."""
        payload, note = slot[: item.length or self._size], item.note or b""
        _FIELDS.pack_into(
            page,
            0,
            MAGIC,
            VERSION,
            _XXH3 if self._verify else _UNCHECKED,
            len(note),
            len(payload),
            item.key,
            self._space,
            item.place,
            item.priority,
            item.floor,
            item.terms,
            inf if item.expires_wall_s is None else item.expires_wall_s,
            item.salt,
            sequence,
            xxh3_128_digest(payload) if self._verify else b"",
            note,
        )
        _CHECK.pack_into(page, _FIELDS.size, xxh3_64_intdigest(page[: _FIELDS.size]))

    def told(self, page: memoryview) -> Told | None:
        """What a page says; None if it is not whole or of another namespace."""
        found = _FIELDS.unpack_from(page)
        (check,) = _CHECK.unpack_from(page, _FIELDS.size)
        ours = (found[0], found[1], found[6]) == (MAGIC, VERSION, self._space)
        if not ours or xxh3_64_intdigest(page[: _FIELDS.size]) != check or found[4] > self._size:
            return None
        _, _, checked, _, length, key, _, *rest, digest, _ = found
        told = Told(BlockKey(key), length, *rest)
        return told._replace(digest=digest) if checked == _XXH3 else told

    def check(self, page: memoryview, item: Item, slot: memoryview) -> Outcome:
        """Whether ``page`` and the beginning of ``slot`` are the block of ``item``, whole.

        If so, the item's note is what was stored as such.
        """
        (check,) = _CHECK.unpack_from(page, _FIELDS.size)
        if xxh3_64_intdigest(page[: _FIELDS.size]) != check:
            return Outcome.CORRUPT
        found = _FIELDS.unpack_from(page)
        magic, version, checked, noted, length, key, space, *_, tag, note = found
        if (magic, version, space) != (MAGIC, VERSION, self._space):
            return Outcome.CORRUPT
        if length > self._size or (length < self._size and not noted):
            return Outcome.CORRUPT
        if key != item.key or (noted and item.note is None):
            return Outcome.STALE
        if self._verify:
            if checked != _XXH3:
                return Outcome.STALE
            if xxh3_128_digest(slot[:length]) != tag:
                return Outcome.CORRUPT
        if item.note is not None:
            item.note[:] = note[:noted]
        return Outcome.GOOD
