"""A block as a server keeps it: a short header, then the payload, under a key of its own."""

from __future__ import annotations

from struct import Struct

from xxhash import xxh3_64_intdigest

from kvladder.keys import BlockKey, Namespace
from kvladder.tiers.base import Item
from kvladder.tiers.codecs import TAG_BYTES, Codec

MAGIC = b"kvlb"
VERSION = 1
PREFIX = b"kvladder:"
SPACE_DIGITS = 32

_FIELDS = Struct(f"<4sBBHQ32s32sBB8s{TAG_BYTES}s")
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
        Length of a payload.
    codec:
        What makes and checks the tag; None stores blocks without a checksum and reads all of them
        unchecked.
    """

    def __init__(self, space: Namespace, block_bytes: int, codec: Codec | None) -> None:
        self._space = space
        self._length = block_bytes
        self._codec = codec

    def write(self, item: Item, payload: memoryview, parts: int) -> bytes:
        """The header of a value whose bytes after it are ``payload``, in so many parts."""
        codec = self._codec
        tag = b"" if codec is None else codec.encode(payload)[1]
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            0 if codec is None else codec.id,
            parts,
            len(payload),
            item.key,
            self._space,
            item.priority,
            item.floor,
            b"",
            tag,
        )
        return fields + _CHECK.pack(xxh3_64_intdigest(fields))

    def check(self, head: memoryview, item: Item, payload: memoryview, parts: int) -> bool:
        """Whether a header and the bytes after it are the block of ``item``, whole."""
        (check,) = _CHECK.unpack_from(head, _FIELDS.size)
        if xxh3_64_intdigest(head[: _FIELDS.size]) != check:
            return False
        found = _FIELDS.unpack_from(head)
        magic, version, codec, stored_parts, length, key, space, _, _, _, tag = found
        if (magic, version, stored_parts) != (MAGIC, VERSION, parts):
            return False
        if (length, key, space) != (self._length, item.key, self._space):
            return False
        if self._codec is None:
            return True
        return codec == self._codec.id and self._codec.decode(payload, tag, payload)
