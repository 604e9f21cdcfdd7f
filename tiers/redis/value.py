"""A block as a server keeps it: a short header, then the payload, under a key of its own."""

from __future__ import annotations

from struct import Struct

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvladder.keys import BlockKey, Namespace
from kvladder.tiers.base import NOTE_BYTES, Item
from kvladder.tiers.codecs.base import TAG_BYTES

MAGIC = b"kvlb"
VERSION = 1
PREFIX = b"kvladder:"
SPACE_DIGITS = 32

_FIELDS = Struct(f"<4sBBHQ32s32sBB8s{TAG_BYTES}s{NOTE_BYTES}s")
_UNCHECKED, _XXH3 = range(2)
_CHECK = Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size


def space_prefix(space: Namespace) -> bytes:
    """What the keys of a namespace begin with."""
    return PREFIX + space.hex()[:SPACE_DIGITS].encode() + b":"


def block_name(prefix: bytes, key: BlockKey) -> bytes:
    """Under which key a block is kept; its hash tag is the block, so a cluster spreads a prefix."""
    return prefix + b"{" + key.hex().encode() + b"}"


def part_name(name: bytes, part: int) -> bytes:
    """The key of a part of a block that is too large for one value; part 0 holds the header."""
    return name + b":%d" % part if part else name


class ValueHeader:
    """Writes and checks the headers of one namespace.

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

    def write(self, item: Item, payload: memoryview) -> bytes:
        """The header of a block whose stored bytes are ``payload``."""
        note = item.note or b""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            _XXH3 if self._verify else _UNCHECKED,
            len(note),
            len(payload),
            item.key,
            self._space,
            item.priority,
            item.floor,
            item.salt,
            xxh3_128_digest(payload) if self._verify else b"",
            note,
        )
        return fields + _CHECK.pack(xxh3_64_intdigest(fields))

    def check(self, head: memoryview, item: Item, payload: memoryview) -> bool:
        """Whether a header and the bytes after it are the block of ``item``, whole.

        If so, the item's note is what was stored as such.
        """
        (check,) = _CHECK.unpack_from(head, _FIELDS.size)
        if xxh3_64_intdigest(head[: _FIELDS.size]) != check:
            return False
        found = _FIELDS.unpack_from(head)
        magic, version, checked, noted, length, key, space, _, _, _, tag, note = found
        if (magic, version, key, space) != (MAGIC, VERSION, item.key, self._space):
            return False
        if length != len(payload) or (length < self._size and not noted):
            return False
        if noted and item.note is None:
            return False
        if self._verify and (checked != _XXH3 or xxh3_128_digest(payload) != tag):
            return False
        if item.note is not None:
            item.note[:] = note[:noted]
        return True


def salt_and_length(head: memoryview) -> tuple[bytes, int] | None:
    """The salt that a value's header names, and the length of what it describes, or None."""
    (check,) = _CHECK.unpack_from(head, _FIELDS.size)
    fields = head[: _FIELDS.size]
    if xxh3_64_intdigest(fields) != check or bytes(fields[: len(MAGIC)]) != MAGIC:
        return None
    found = _FIELDS.unpack(fields)
    salt: bytes = found[9]
    return salt.rstrip(b"\0") and salt, found[4]
