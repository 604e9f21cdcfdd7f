"""What is stored beside a block, and the checksum as a codec."""

from __future__ import annotations

import hashlib

import pytest

from kvladder.keys import BlockKey, Namespace
from kvladder.tiers.base import Item, Outcome
from kvladder.tiers.files.header import HEADER_BYTES, BlockHeader

SPACE = Namespace(hashlib.sha256(b"space").digest())
ITEM = Item(BlockKey(hashlib.sha256(b"key").digest()), 7, priority=80, floor=35)
PAYLOAD = bytes(range(256)) * 20


def header(
    space: Namespace = SPACE, size: int = len(PAYLOAD), *, verify: bool = True
) -> BlockHeader:
    return BlockHeader(space, size, verify=verify)


@pytest.fixture
def page() -> memoryview:
    page = memoryview(bytearray(HEADER_BYTES))
    header().write(page, ITEM, 1, memoryview(PAYLOAD))
    return page


def check(page: memoryview, reader: BlockHeader, item: Item = ITEM) -> Outcome:
    return reader.check(page, item, memoryview(bytearray(PAYLOAD)))


def test_a_whole_block_is_good(page: memoryview) -> None:
    assert check(page, header()) is Outcome.GOOD


def test_where_it_lies_does_not_matter(page: memoryview) -> None:
    """The key names the bytes: a block that was written to another place is no other block."""
    assert check(page, header(), ITEM._replace(place=8)) is Outcome.GOOD


def test_another_key_is_stale(page: memoryview) -> None:
    other = ITEM._replace(key=BlockKey(hashlib.sha256(b"other").digest()))
    assert check(page, header(), other) is Outcome.STALE


def test_another_namespace_or_length_is_not_believed(page: memoryview) -> None:
    other = Namespace(hashlib.sha256(b"other").digest())
    assert check(page, header(space=other)) is Outcome.CORRUPT
    assert check(page, header(size=len(PAYLOAD) - 1)) is Outcome.CORRUPT


def test_a_page_of_zeros_is_not_believed() -> None:
    assert check(memoryview(bytearray(HEADER_BYTES)), header()) is Outcome.CORRUPT


def test_a_block_without_a_checksum_is_stale(page: memoryview) -> None:
    assert check(page, header(verify=False)) is Outcome.GOOD
    header(verify=False).write(page, ITEM, 1, memoryview(PAYLOAD))
    assert check(page, header()) is Outcome.STALE


def test_a_note_and_a_length_are_stored_beside_the_bytes(page: memoryview) -> None:
    coded = ITEM._replace(length=100, note=bytearray(b"how"))
    header().write(page, coded, 1, memoryview(PAYLOAD))
    asked = ITEM._replace(note=bytearray(b"something else"))
    damaged = memoryview(bytearray(PAYLOAD))
    damaged[100] ^= 1  # what follows is not the block's
    assert header().check(page, asked, damaged) is Outcome.GOOD
    assert asked.note == b"how"
    damaged[99] ^= 1
    assert header().check(page, asked, damaged) is Outcome.CORRUPT
    assert check(page, header()) is Outcome.STALE, "nobody would decode it"
