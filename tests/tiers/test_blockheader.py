"""What is stored beside a block, and the checksum as a codec."""

from __future__ import annotations

import hashlib

import pytest
from xxhash import xxh3_128_digest

from kvladder.keys import BlockKey, Namespace
from kvladder.tiers.base import Item
from kvladder.tiers.blockheader import HEADER_BYTES, BlockHeader, Outcome
from kvladder.tiers.codecs import TAG_BYTES, ChecksumCodec, Codec

SPACE = Namespace(hashlib.sha256(b"space").digest())
ITEM = Item(BlockKey(hashlib.sha256(b"key").digest()), 7, priority=80, floor=35)
PAYLOAD = bytes(range(256)) * 20


def header(
    space: Namespace = SPACE, size: int = len(PAYLOAD), codec: Codec | None = None
) -> BlockHeader:
    return BlockHeader(space, size, codec or ChecksumCodec())


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


def test_another_codec_s_block_is_stale(page: memoryview) -> None:
    class Other(ChecksumCodec):
        id = 2

    assert check(page, header(codec=Other())) is Outcome.STALE


def test_the_checksum_leaves_the_payload_where_it_is() -> None:
    payload = memoryview(bytearray(PAYLOAD))
    stored, tag = ChecksumCodec().encode(payload)
    assert stored is payload
    assert tag == xxh3_128_digest(PAYLOAD)
    assert len(tag) == TAG_BYTES
    assert ChecksumCodec().decode(stored, tag, stored)


def test_the_checksum_decodes_into_another_place_too() -> None:
    stored, tag = ChecksumCodec().encode(memoryview(PAYLOAD))
    target = memoryview(bytearray(len(PAYLOAD)))
    assert ChecksumCodec().decode(stored, tag, target)
    assert target == PAYLOAD
    assert not ChecksumCodec().decode(stored, bytes(TAG_BYTES), target)
