"""Sizes, durations and shares, as they are written and as they are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvladder.units import Duration, Share, Size


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("8 GiB", 8 << 30),
        ("4GB", 4_000_000_000),
        ("512 MiB", 512 << 20),
        (" 1.5 TiB ", 3 << 39),
        ("2tb", 2 * 10**12),
        ("7 KIB", 7 << 10),
        ("100 B", 100),
        ("4096", 4096),
        (4096, 4096),
        (Size(100), 100),
        (1234567, 1234567),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_exact(written, size):
    assert Size.parse(written) == size


@pytest.mark.parametrize(
    "written",
    ["", "GiB", "-1", "-1 GiB", "0", 0, -5, "0.4 B", 1.5, True, None, "1e400 GB", "9" * 30],
)
def test_invalid_sizes_are_refused(written):
    with pytest.raises(ValueError, match=r"size|unit"):
        Size.parse(written)


@pytest.mark.parametrize("written", [8, "8", 4095, " 4095 "])
def test_a_small_size_needs_a_unit(written):
    number = str(written).strip()
    with pytest.raises(ValueError, match=f"did you mean '{number} GiB' or '{number} MiB'"):
        Size.parse(written)
    assert Size.parse(f"{number} B") == int(number)


@pytest.mark.parametrize(
    ("written", "nearest"), [("8 GiBs", "GiB"), ("8 Gb", "GB"), ("8 MiiB", "MiB")]
)
def test_an_unknown_unit_names_the_nearest(written, nearest):
    with pytest.raises(ValueError, match=rf"unknown unit .* did you mean {nearest}\?"):
        Size.parse(written)


@given(st.integers(1, (1 << 63) - 1))
def test_a_shown_size_parses_to_the_same_size(size):
    assert Size.parse(str(Size(size))) == size


@given(st.integers(1, (1 << 62) - 1))
def test_a_size_is_rounded_up_by_a_hundredth_at_most(size):
    assert size <= Size.parse(Size(size).above()) <= size * 1.01 + 1


def test_a_size_is_shown_short_and_rounded():
    assert [str(Size.parse(text)) for text in ("8 GiB", "4 GB", "1536 MiB", "1000001 B")] == [
        "8 GiB",
        "4 GB",
        "1.5 GiB",
        "1000001 B",
    ]
    assert Size(20_590_669_824).above() == "19.18 GiB"
    assert [Size(size).above() for size in (1 << 30, 1025, 5)] == ["1 GiB", "1.01 KiB", "5 B"]
    assert Size(2_000_000_000_000).about() == "1.819 TiB"
    assert [Size(size).about() for size in (1, 1023, 1024, 1 << 62)] == [
        "1 B",
        "1023 B",
        "1 KiB",
        "4096 PiB",
    ]


@pytest.mark.parametrize(
    ("written", "seconds", "shown"),
    [
        ("50 ms", 0.05, "50 ms"),
        ("2s", 2, "2 s"),
        ("90 s", 90, "90 s"),
        ("10 m", 600, "10 m"),
        ("1 h", 3600, "1 h"),
        ("1 d", 86400, "1 d"),
        ("2 minutes", 120, "2 m"),
        ("100 us", 1e-4, "0.0001 s"),
    ],
)
def test_a_duration_is_parsed_and_shown(written, seconds, shown):
    duration = Duration.parse(written)
    assert duration == pytest.approx(seconds)
    assert str(duration) == shown


@pytest.mark.parametrize(
    "written", ["5", 5, 0.5, "0 s", "-1 s", "s", "", True, None, "9" * 400 + " d"]
)
def test_invalid_durations_are_refused(written):
    with pytest.raises(ValueError, match="duration with a unit"):
        Duration.parse(written)


def test_an_unknown_unit_of_time_is_named():
    with pytest.raises(ValueError, match="unknown unit 'w': expected one of us, ms, s, m, h, d"):
        Duration.parse("2 w")


@pytest.mark.parametrize(
    ("written", "blocks", "shown"),
    [("5 %", 10, "5 %"), ("0.1%", 1, "0.1 %"), (12, 12, "12 blocks"), ("12", 12, "12 blocks")],
)
def test_a_share_is_parsed_and_gives_a_number_of_blocks(written, blocks, shown):
    share = Share.parse(written)
    assert share.of(200) == blocks
    assert str(share) == shown
    assert share


def test_a_share_has_bounds():
    assert Share.parse(500).of(200) == 200
    assert Share.parse("100 %").of(200) == 200
    assert Share.parse("1 %").of(0) == 0
    assert not Share.parse(0)
    assert not Share.parse("0 %")
    assert Share.parse("0 %").of(200) == 0


@pytest.mark.parametrize("written", ["101 %", "-1 %", -1, "x", "5 MiB", 1.5, True, None])
def test_invalid_shares_are_refused(written):
    with pytest.raises(ValueError, match="percentage"):
        Share.parse(written)
