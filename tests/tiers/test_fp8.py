"""The lossy codec: the error of decoded numbers, and the layouts that it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvladder.errors import ConfigError
from kvladder.layout import Layout
from kvladder.testing.codecs import SUBJECT, CodecTests, MakeCodec
from kvladder.tiers.codecs.fp8 import Fp8Codec

ROW = 64
DTYPES = {
    "bfloat16": (torch.bfloat16, 2.0**-9, 2.0**-134),
    "float16": (torch.float16, 2.0**-12, 2.0**-25),
    "float32": (torch.float32, 2.0**-24, 2.0**-150),
}
"""The type of each element, half a step relative to a number, and half of its smallest step."""


def layout_of(element: str, rows: int = 16) -> Layout:
    size = rows * ROW * DTYPES[element][0].itemsize
    return Layout(block_tokens=16, block_bytes=size, element=element, row_elements=ROW)


def near(found: bytes, block: bytes, element: str) -> bool:
    """Return whether each number is within the codec's tolerance."""
    dtype, half, smallest = DTYPES[element]
    x = torch.frombuffer(bytearray(block), dtype=dtype).double().view(-1, ROW)
    y = torch.frombuffer(bytearray(found), dtype=dtype).double().view(-1, ROW)
    if not torch.isfinite(x).all():
        return found == block
    largest = x.abs().amax(1, keepdim=True)
    exact = x.abs() / 16 + largest / 2**18 + 2.0**-136
    return bool(((y - x).abs() <= exact + half * (x.abs() + exact) + smallest).all())


class Fp8Tests(CodecTests):
    element = "bfloat16"

    @pytest.fixture
    def make(self) -> MakeCodec:
        return Fp8Codec

    @pytest.fixture
    def layout(self) -> Layout:
        return layout_of(self.element)

    def close_enough(self, found: bytes, block: bytes) -> bool:
        return near(found, block, self.element)


class TestBfloat16(Fp8Tests):
    pass


class TestFloat16(Fp8Tests):
    element = "float16"


class TestFloat32(Fp8Tests):
    element = "float32"


def trip(element: str, block: bytes) -> bytes | None:
    codec = Fp8Codec()
    codec.open(layout_of(element, len(block) // ROW // DTYPES[element][0].itemsize), b"space")
    done = codec.encode(memoryview(bytearray(block)), memoryview(bytearray(len(block))), SUBJECT)
    if done is None:
        return None
    stored, params = done
    rows = len(block) // ROW // DTYPES[element][0].itemsize
    assert len(stored) == rows * (ROW + 4)
    found = codec.decode(stored, params, memoryview(bytearray(len(block))), SUBJECT)
    return None if found is None else bytes(found)


@given(st.sampled_from(sorted(DTYPES)), st.binary(min_size=8, max_size=64), st.integers(0, 9))
def test_any_bits_round_trip_within_the_tolerance(element: str, part: bytes, seed: int):
    """Numbers of all magnitudes, subnormal ones too, next to each other."""
    size = 4 * ROW * DTYPES[element][0].itemsize
    block = ((part + bytes([seed])) * size)[:size]
    found = trip(element, block)
    if found is not None:
        assert near(found, block, element)
    else:
        numbers = torch.frombuffer(bytearray(block), dtype=DTYPES[element][0])
        assert not torch.isfinite(numbers).all()


@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.floats(-60000, 60000, width=16), min_size=ROW, max_size=ROW),
)
def test_any_mixture_of_numbers_round_trips_within_the_tolerance(element: str, row: list[float]):
    block = bytes(torch.tensor(row, dtype=DTYPES[element][0]).view(torch.uint8).numpy())
    found = trip(element, block)
    assert found is not None
    assert near(found, block, element)


@pytest.mark.parametrize("element", sorted(DTYPES))
def test_the_largest_and_smallest_numbers_round_trip_within_the_tolerance(element: str):
    dtype = DTYPES[element][0]
    info = torch.finfo(dtype)
    for number in (info.max, -info.max, info.tiny, info.smallest_normal, 448.0, 0.0):
        block = bytes(torch.full([ROW], number, dtype=dtype).view(torch.uint8).numpy())
        found = trip(element, block)
        assert found is not None
        assert near(found, block, element)


def test_zeros_and_powers_of_two_come_back_as_they_were():
    row = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 448.0, 0.5] * (ROW // 8)
    block = bytes(torch.tensor(row, dtype=torch.bfloat16).view(torch.uint8).numpy())
    assert trip("bfloat16", block) == block


def test_storing_a_decoded_block_again_loses_no_more():
    block = bytes(torch.randn(16 * ROW, dtype=torch.float32).bfloat16().view(torch.uint8).numpy())
    once = trip("bfloat16", block)
    assert once is not None
    twice = trip("bfloat16", once)
    assert twice is not None
    assert near(twice, block, "bfloat16")


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(16, 4096), "elements of unknown type"),
        (Layout(16, 4096, {}, "uint8", 64), "cannot encode uint8 (expected one of: bfloat16"),
        (Layout(16, 4096, {}, "bfloat16"), "the engine does not report its rows"),
        (
            Layout(16, 4096, {}, "bfloat16", 4),
            "8 or more elements for each token and head (leave fp8 out: the rows have 4)",
        ),
        (
            Layout(16, 4100, {}, "bfloat16", 64),
            "4100 bytes cannot be divided into rows of 64 bfloat16",
        ),
    ],
)
def test_fp8_refuses_unsuitable_layouts(layout: Layout, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        Fp8Codec().open(layout, b"space")
