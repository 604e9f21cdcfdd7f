"""The page in front of each stored block: its label and, behind that, where and when it was put.

What stands behind the label has a check of its own, bound to this label's: it is for finding blocks
whose index log is lost. Who reads a block looks at the label alone.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvladder.layout import PAGE_BYTES
from kvladder.tiers.label import LABEL_BYTES, Buffer, LabelFields, told

HEADER_BYTES = PAGE_BYTES
_PUT = Struct("<QQ")
_CHECK = Struct("<Q")
_CHECK_AT = LABEL_BYTES + _PUT.size
_CHECKED = slice(LABEL_BYTES - _CHECK.size, _CHECK_AT)
"""The label's own check, and what stands behind it."""


class Header(NamedTuple):
    """What a whole page says of the block behind it."""

    told: LabelFields
    place: int
    sequence: int
    """Higher than that of any block that was put before."""


def write_header(page: memoryview, label: Buffer, place: int, sequence: int) -> None:
    """Fill a page, which stays as it is behind that."""
    page[:LABEL_BYTES] = label
    _PUT.pack_into(page, LABEL_BYTES, place, sequence)
    _CHECK.pack_into(page, _CHECK_AT, xxh3_64_intdigest(page[_CHECKED]))


def read_header(page: memoryview) -> Header | None:
    """What a page says; None if it is damaged or of another version."""
    found = told(page[:LABEL_BYTES])
    if found is None or _CHECK.unpack_from(page, _CHECK_AT) != (xxh3_64_intdigest(page[_CHECKED]),):
        return None
    return Header(found, *_PUT.unpack_from(page, LABEL_BYTES))
