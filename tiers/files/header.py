"""The page in front of each stored block: its label, then the place and order of its put.

Place and order are for finding blocks after the index log is lost. They have a check of their own,
which also covers the label's check. Reading a block needs the label alone.
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
"""The bytes that the second check covers: the label's own check, place and sequence number."""


class Header(NamedTuple):
    """The content of an undamaged page about the block behind it."""

    told: LabelFields
    place: int
    sequence: int
    """Sequence number, higher than that of any block that was put before."""


def write_header(page: memoryview, label: Buffer, place: int, sequence: int) -> None:
    """Write a header to the beginning of a page; the rest of the page stays unchanged."""
    page[:LABEL_BYTES] = label
    _PUT.pack_into(page, LABEL_BYTES, place, sequence)
    _CHECK.pack_into(page, _CHECK_AT, xxh3_64_intdigest(page[_CHECKED]))


def read_header(page: memoryview) -> Header | None:
    """Return the header in a page; None if it is damaged or of another version."""
    found = told(page[:LABEL_BYTES])
    if found is None or _CHECK.unpack_from(page, _CHECK_AT) != (xxh3_64_intdigest(page[_CHECKED]),):
        return None
    return Header(found, *_PUT.unpack_from(page, LABEL_BYTES))
