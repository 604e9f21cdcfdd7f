"""Layout: sizes, and the namespace that they and the model give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.errors import ConfigError
from kvladder.layout import PAGE_BYTES, Layout, align


@given(size=st.integers(0, 2**50), to=st.sampled_from([1, 3, 4096, 2 << 20]))
def test_align_is_the_smallest_multiple_that_is_no_less(size: int, to: int) -> None:
    assert align(size, to) % to == 0
    assert 0 <= align(size, to) - size < to


@pytest.mark.parametrize(("size", "slot"), [(1, 4096), (4096, 4096), (4097, 8192)])
def test_a_slot_is_whole_pages(size: int, slot: int) -> None:
    assert Layout(block_tokens=16, block_bytes=size).slot_bytes == slot
    assert slot % PAGE_BYTES == 0


def test_every_difference_gives_another_namespace() -> None:
    layouts = [
        Layout(16, 4096),
        Layout(32, 4096),
        Layout(16, 8192),
        Layout(16, 4096, {"dtype": "fp8"}),
        Layout(16, 4096, {"dtype": "bf16"}),
        Layout(16, 4096, {"dtype": "fp8", "ranks": "2"}),
    ]
    spaces = [layout.namespace() for layout in layouts]
    spaces += [layouts[0].namespace(salt="a"), layouts[0].namespace(salt="b")]
    assert len(set(spaces)) == len(spaces)


def test_a_namespace_does_not_depend_on_the_order_of_the_fields() -> None:
    fields = {"dtype": "fp8", "ranks": "2", "model": "m"}
    other = dict(reversed(fields.items()))
    assert Layout(16, 4096, fields).namespace() == Layout(16, 4096, other).namespace()


def test_a_field_cannot_take_the_place_of_a_size() -> None:
    assert Layout(16, 4096, {"block.tokens": "32"}).namespace() == Layout(16, 4096).namespace()


@pytest.mark.parametrize(("tokens", "size"), [(0, 4096), (-1, 4096), (16, 0), (16, -4096)])
def test_sizes_below_one_are_refused(tokens: int, size: int) -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        Layout(tokens, size)
