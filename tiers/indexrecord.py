"""The records of an index log: 64 bytes that say which block was put where, or removed."""

from __future__ import annotations

from struct import Struct

from kvladder.keys import KEY_BYTES, SALT_BYTES, BlockKey
from kvladder.tiers.base import NO_SLOT, Item

RECORD_BYTES = 64
"""A power of two, so that no record straddles a sector: a torn write tears none."""
LOW_BITS = 17
"""Below the sequence: numbers are in the order of their sequences, whatever stands there."""
PUT = 1
REMOVE = 2
NEVER_S = (1 << 32) - 1
"""When a block expires that does not; else whole seconds since the epoch."""

# check; number: sequence, terms (3 bits), floor (7), priority (7); expires; place, of a removal its
# complement; salt; key
_RECORD = Struct(f"<QQIi8s{KEY_BYTES}s")
_TAG = Struct("<I28x")
_NO_SALT = bytes(SALT_BYTES)

assert _RECORD.size == RECORD_BYTES


def tag_of(key: BlockKey) -> int:
    """Four bytes of a key, never 0: enough to tell which of two blocks is at a place."""
    tag: int = _TAG.unpack(key)[0]
    return tag or 1


def items_of(records: memoryview) -> list[Item]:
    """The blocks that PUT records tell of."""
    return [
        Item(
            BlockKey(key),
            place,
            NO_SLOT,
            number & 127,
            number >> 7 & 127,
            None if end_s == NEVER_S else end_s,
            b"" if salt == _NO_SALT else salt,
            number >> 14 & 7,
        )
        for _, number, end_s, place, salt, key in _RECORD.iter_unpack(records)
    ]


def record(kind: int, sequence: int, item: Item) -> bytes:
    """What tells that ``item`` was put or removed, without the 8 bytes of its check."""
    end_s = NEVER_S
    if item.expires_wall_s is not None:  # rounded down: a block may go early, not late
        end_s = max(0, min(int(item.expires_wall_s), NEVER_S - 1))
    low = item.terms << 14 | item.floor << 7 | item.priority
    place = item.place if kind == PUT else ~item.place
    packed = _RECORD.pack(0, sequence << LOW_BITS | low, end_s, place, item.salt, item.key)
    return packed[8:]
