"""The page in front of a block: its label, and the data to find it without an index log."""

from __future__ import annotations

import hashlib

import pytest

from kvladder.keys import BlockKey, Namespace
from kvladder.tiers.files.header import HEADER_BYTES, Header, read_header, write_header
from kvladder.tiers.label import LABEL_BYTES, Facts, Labels, told

SPACE = Namespace(hashlib.sha256(b"space").digest())
KEY = BlockKey(hashlib.sha256(b"key").digest())
PAYLOAD = bytes(range(256)) * 20
FACTS = Facts(priority=80, floor=35, terms=5)
LABEL = Labels(SPACE, len(PAYLOAD), verify=True).pack(KEY, PAYLOAD, FACTS)
USED = LABEL_BYTES + 24


@pytest.fixture
def page() -> memoryview:
    page = memoryview(bytearray(HEADER_BYTES))
    write_header(page, LABEL, 7, 1 << 40)
    return page


def test_an_intact_page_gives_the_label_the_place_and_the_number(page: memoryview) -> None:
    found = told(LABEL)
    assert found is not None
    assert read_header(page) == Header(found, 7, 1 << 40)
    assert (found.key, found.facts) == (KEY, FACTS)
    assert page[:LABEL_BYTES] == LABEL
    assert not any(page[USED:])


def test_a_page_with_any_byte_flipped_gives_no_header(page: memoryview) -> None:
    whole = read_header(page)
    for byte in range(USED):
        page[byte] ^= 0x10
        assert read_header(page) is None, byte
        page[byte] ^= 0x10
    assert read_header(page) == whole is not None


def test_a_page_with_the_label_of_another_write_gives_no_header(page: memoryview) -> None:
    """A torn write leaves such a page."""
    other = Labels(SPACE, len(PAYLOAD), verify=True).pack(KEY, PAYLOAD, FACTS._replace(terms=1))
    page[:LABEL_BYTES] = other
    assert told(page[:LABEL_BYTES]) is not None
    assert read_header(page) is None


def test_a_page_of_zeros_gives_no_header() -> None:
    assert read_header(memoryview(bytearray(HEADER_BYTES))) is None
